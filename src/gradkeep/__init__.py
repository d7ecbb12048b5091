"""gradkeep keeps what training leaves behind and answers questions about it.

Names are loaded when they are first used: `import gradkeep` itself is free.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gradkeep.attribution import (
        Projection,
        Scores,
        attribute,
        combine,
        methods,
        project,
        suspects,
    )
    from gradkeep.capturing import (
        Captured,
        CaptureWarning,
        Classification,
        LanguageModelling,
        Measured,
        Regression,
        Task,
        Weights,
        capture,
        layers,
        plan,
        recording,
    )
    from gradkeep.errors import GradkeepError
    from gradkeep.query import gradients
    from gradkeep.remat import memory_budget
    from gradkeep.store import (
        Array,
        CaptureKey,
        Checkpoint,
        Layer,
        Ragged,
        Run,
        Schema,
        ScoresKey,
        Store,
        open,
    )

__version__ = "0.1.0"

__all__ = [
    "Array",
    "CaptureKey",
    "CaptureWarning",
    "Captured",
    "Checkpoint",
    "Classification",
    "GradkeepError",
    "LanguageModelling",
    "Layer",
    "Measured",
    "Projection",
    "Ragged",
    "Regression",
    "Run",
    "Schema",
    "Scores",
    "ScoresKey",
    "Store",
    "Task",
    "Weights",
    "attribute",
    "capture",
    "combine",
    "data",
    "datamodels",
    "farm",
    "gradients",
    "layers",
    "memory_budget",
    "methods",
    "open",
    "plan",
    "project",
    "query",
    "recording",
    "remat",
    "store",
    "suspects",
]

_ROOMS = ("data", "datamodels", "farm", "query", "remat", "store")
_CAPTURE = (
    *("CaptureWarning", "Captured", "Classification", "LanguageModelling", "Measured"),
    *("Regression", "Task", "Weights", "capture", "layers", "plan", "recording"),
)
_ATTRIBUTE = ("Projection", "Scores", "attribute", "combine", "methods", "project", "suspects")
_HOMES = {
    **dict.fromkeys(__all__, "gradkeep.store"),
    **dict.fromkeys(_CAPTURE, "gradkeep.capturing"),
    **dict.fromkeys(_ATTRIBUTE, "gradkeep.attribution"),
    "GradkeepError": "gradkeep.errors",
    "gradients": "gradkeep.query",
    "memory_budget": "gradkeep.remat",
}


def __getattr__(name: str) -> Any:
    if name in _ROOMS:
        return importlib.import_module(f"gradkeep.{name}")
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'gradkeep' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
