"""Capturing per-sample gradients: layer rules, tasks, replay, the recorder for running loops."""

from gradkeep.capturing._adam import AdamState, read_adam
from gradkeep.capturing._batches import batch_size, digests, rows_of, to_device
from gradkeep.capturing._calls import LayerCall
from gradkeep.capturing._capture import capture, task_batches
from gradkeep.capturing._first_batch import CaptureSettings, PreparedCapture, prepare_capture
from gradkeep.capturing._footprint import rows_at_once
from gradkeep.capturing._loader import Batches
from gradkeep.capturing._mode import Mode, in_mode
from gradkeep.capturing._plan import CapturePlan, PlannedLayer, plan
from gradkeep.capturing._readiness import ready
from gradkeep.capturing._recording import GradientRecording, recording
from gradkeep.capturing._report import (
    Captured,
    CaptureWarning,
    KeptLayer,
    LayerTable,
    ListedLayer,
    layers,
)
from gradkeep.capturing._scale import PlaceCosts, ScalePlan, WorkerCosts
from gradkeep.capturing._steadiness import buffers_kept, is_steady
from gradkeep.capturing._token_replay import ReplayedTokens, replay_tokens
from gradkeep.capturing._tracer import Traced, Tracer
from gradkeep.capturing._weights import Weights, fingerprint_weights, load_weights, put_weights
from gradkeep.capturing.coordinates._keep import Keep
from gradkeep.capturing.coordinates._moments import MomentsSoon, measure_moments
from gradkeep.capturing.rules._gradients import LayerGradients, SampleAxis, by_sample
from gradkeep.capturing.rules._rules import (
    LayerRule,
    layer_rules,
    register_layer_rule,
    unregister_layer_rule,
)
from gradkeep.capturing.rules._units import LayerUnit
from gradkeep.capturing.tasks._completions import completions
from gradkeep.capturing.tasks._language import LanguageModelling
from gradkeep.capturing.tasks._supervised import Classification, Regression
from gradkeep.capturing.tasks._task import Measured, Task

__all__ = [
    "AdamState",
    "Batches",
    "CapturePlan",
    "CaptureSettings",
    "CaptureWarning",
    "Captured",
    "Classification",
    "GradientRecording",
    "Keep",
    "KeptLayer",
    "LanguageModelling",
    "LayerCall",
    "LayerGradients",
    "LayerRule",
    "LayerTable",
    "LayerUnit",
    "ListedLayer",
    "Measured",
    "Mode",
    "MomentsSoon",
    "PlaceCosts",
    "PlannedLayer",
    "PreparedCapture",
    "Regression",
    "ReplayedTokens",
    "SampleAxis",
    "ScalePlan",
    "Task",
    "Traced",
    "Tracer",
    "Weights",
    "WorkerCosts",
    "batch_size",
    "buffers_kept",
    "by_sample",
    "capture",
    "completions",
    "digests",
    "fingerprint_weights",
    "in_mode",
    "is_steady",
    "layer_rules",
    "layers",
    "load_weights",
    "measure_moments",
    "plan",
    "prepare_capture",
    "put_weights",
    "read_adam",
    "ready",
    "recording",
    "register_layer_rule",
    "replay_tokens",
    "rows_at_once",
    "rows_of",
    "task_batches",
    "to_device",
    "unregister_layer_rule",
]
