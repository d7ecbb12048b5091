"""Capturing per-sample gradients: layer types, hooks, replay, the recorder for running loops."""

from gradkeep.capturing._captured import Captured, CaptureWarning, KeptLayer
from gradkeep.capturing._classification import Classification
from gradkeep.capturing._language import LanguageModelling
from gradkeep.capturing._planned import Planned, PlannedLayer, plan
from gradkeep.capturing._recording import Recording, recording
from gradkeep.capturing._regression import Regression
from gradkeep.capturing._replay import capture
from gradkeep.capturing._table import Layers, ListedLayer, layers
from gradkeep.capturing._task import Measured, Task
from gradkeep.capturing._weights import Weights

__all__ = [
    "CaptureWarning",
    "Captured",
    "Classification",
    "KeptLayer",
    "LanguageModelling",
    "Layers",
    "ListedLayer",
    "Measured",
    "Planned",
    "PlannedLayer",
    "Recording",
    "Regression",
    "Task",
    "Weights",
    "capture",
    "layers",
    "plan",
    "recording",
]
