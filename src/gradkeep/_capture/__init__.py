"""Capturing per-sample gradients: layer types, hooks, replay, the recorder for running loops."""

from gradkeep._capture._captured import Captured, CaptureWarning, KeptLayer
from gradkeep._capture._classification import Classification
from gradkeep._capture._language import LanguageModelling
from gradkeep._capture._planned import Planned, PlannedLayer, plan
from gradkeep._capture._recording import Recording, recording
from gradkeep._capture._regression import Regression
from gradkeep._capture._replay import capture
from gradkeep._capture._table import Layers, ListedLayer, layers
from gradkeep._capture._task import Measured, Task
from gradkeep._capture._weights import Weights

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
