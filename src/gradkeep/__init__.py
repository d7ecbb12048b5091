"""gradkeep keeps what training leaves behind and answers questions about it.

Names are loaded when they are first used: `import gradkeep` itself is free.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gradkeep._public import lazy_names

if TYPE_CHECKING:
    from gradkeep import (
        attribution,
        capturing,
        data,
        datamodels,
        errors,
        evaluate,
        factors,
        farm,
        query,
        remat,
        store,
    )
    from gradkeep._preview import Preview
    from gradkeep.attribution import (
        CheckpointView,
        Method,
        Projection,
        Scorer,
        Scores,
        TokenScores,
        attribute,
        attribute_once,
        attribute_tokens,
        combine,
        methods,
        project,
        register_method,
        show,
        suspects,
        text_similarity,
    )
    from gradkeep.capturing import (
        Captured,
        CaptureWarning,
        Classification,
        Keep,
        LanguageModelling,
        LayerGradients,
        LayerRule,
        Measured,
        Regression,
        Task,
        Weights,
        capture,
        completions,
        layers,
        plan,
        recording,
        register_layer_rule,
    )
    from gradkeep.errors import GradkeepError
    from gradkeep.evaluate import groups
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

_ROOMS = (
    *("attribution", "capturing", "data", "datamodels", "errors", "evaluate", "factors"),
    *("farm", "query", "remat", "store"),
)
_NAMES = {
    "_preview": ("Preview",),
    "attribution": (
        *("CheckpointView", "Method", "Projection", "Scorer", "Scores", "TokenScores"),
        *("attribute", "attribute_once", "attribute_tokens", "combine", "methods"),
        *("project", "register_method", "show", "suspects", "text_similarity"),
    ),
    "capturing": (
        *("CaptureWarning", "Captured", "Classification", "Keep", "LanguageModelling"),
        "LayerGradients",
        *("LayerRule", "Measured", "Regression", "Task", "Weights", "capture", "completions"),
        *("layers", "plan", "recording", "register_layer_rule"),
    ),
    "errors": ("GradkeepError",),
    "evaluate": ("groups",),
    "query": ("gradients",),
    "remat": ("memory_budget",),
    "store": (
        *("Array", "CaptureKey", "Checkpoint", "Layer", "Ragged", "Run", "Schema", "ScoresKey"),
        *("Store", "open"),
    ),
}

__all__ = [
    "Array",
    "CaptureKey",
    "CaptureWarning",
    "Captured",
    "Checkpoint",
    "CheckpointView",
    "Classification",
    "GradkeepError",
    "Keep",
    "LanguageModelling",
    "Layer",
    "LayerGradients",
    "LayerRule",
    "Measured",
    "Method",
    "Preview",
    "Projection",
    "Ragged",
    "Regression",
    "Run",
    "Schema",
    "Scorer",
    "Scores",
    "ScoresKey",
    "Store",
    "Task",
    "TokenScores",
    "Weights",
    "attribute",
    "attribute_once",
    "attribute_tokens",
    "attribution",
    "capture",
    "capturing",
    "combine",
    "completions",
    "data",
    "datamodels",
    "errors",
    "evaluate",
    "factors",
    "farm",
    "gradients",
    "groups",
    "layers",
    "memory_budget",
    "methods",
    "open",
    "plan",
    "project",
    "query",
    "recording",
    "register_layer_rule",
    "register_method",
    "remat",
    "show",
    "store",
    "suspects",
    "text_similarity",
]

if not TYPE_CHECKING:  # a type checker would take every name for one that may exist
    __getattr__ = lazy_names(
        __name__,
        {room: f"gradkeep.{room}" for room in _ROOMS}
        | {name: f"gradkeep.{room}" for room, names in _NAMES.items() for name in names},
    )


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
