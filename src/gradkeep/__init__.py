"""Training-data attribution and memory-bounded training for PyTorch.

Names are imported when they are first used: `import gradkeep` itself loads nothing else.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gradkeep._public import lazy_names

if TYPE_CHECKING:
    from gradkeep import datamodels, errors, evaluate, query, remat, store
    from gradkeep._preview import Preview
    from gradkeep.attribution._attribute import attribute
    from gradkeep.attribution._combine import combine
    from gradkeep.attribution._method import Method, Scorer
    from gradkeep.attribution._once import attribute_once
    from gradkeep.attribution._registry import methods, register_method
    from gradkeep.attribution._scores import Scores
    from gradkeep.attribution._shown_scores import show
    from gradkeep.attribution._suspects import suspects
    from gradkeep.attribution._text_similarity import text_similarity
    from gradkeep.attribution._tokens import attribute_tokens
    from gradkeep.attribution.projections._project import project
    from gradkeep.attribution.projections._projection import Projection
    from gradkeep.capturing._adam import read_adam
    from gradkeep.capturing._capture import capture
    from gradkeep.capturing._plan import plan
    from gradkeep.capturing._recording import recording
    from gradkeep.capturing._report import Captured, CaptureWarning, layers
    from gradkeep.capturing._weights import Weights
    from gradkeep.capturing.coordinates._keep import Keep
    from gradkeep.capturing.rules._gradients import LayerGradients
    from gradkeep.capturing.rules._rules import LayerRule, register_layer_rule
    from gradkeep.capturing.tasks._completions import completions
    from gradkeep.capturing.tasks._language import LanguageModelling
    from gradkeep.capturing.tasks._supervised import Classification, Regression
    from gradkeep.capturing.tasks._task import Measured, Task
    from gradkeep.errors import GradkeepError
    from gradkeep.evaluate import groups
    from gradkeep.query import gradients
    from gradkeep.remat import memory_budget
    from gradkeep.store import Store, open

__version__ = "0.1.0"

_SUBPACKAGES = (
    "compat",
    "data",
    "datamodels",
    "errors",
    "evaluate",
    "farm",
    "integrations",
    "query",
    "remat",
    "store",
)
_MODULES = {
    "gradkeep._preview": ("Preview",),
    "gradkeep.attribution._attribute": ("attribute",),
    "gradkeep.attribution._combine": ("combine",),
    "gradkeep.attribution._method": (
        "Method",
        "Scorer",
    ),
    "gradkeep.attribution._once": ("attribute_once",),
    "gradkeep.attribution._registry": (
        "methods",
        "register_method",
    ),
    "gradkeep.attribution._scores": ("Scores",),
    "gradkeep.attribution._shown_scores": ("show",),
    "gradkeep.attribution._suspects": ("suspects",),
    "gradkeep.attribution._text_similarity": ("text_similarity",),
    "gradkeep.attribution._tokens": ("attribute_tokens",),
    "gradkeep.attribution.projections._project": ("project",),
    "gradkeep.attribution.projections._projection": ("Projection",),
    "gradkeep.capturing._adam": ("read_adam",),
    "gradkeep.capturing._capture": ("capture",),
    "gradkeep.capturing._plan": ("plan",),
    "gradkeep.capturing._recording": ("recording",),
    "gradkeep.capturing._report": (
        "CaptureWarning",
        "Captured",
        "layers",
    ),
    "gradkeep.capturing._weights": ("Weights",),
    "gradkeep.capturing.coordinates._keep": ("Keep",),
    "gradkeep.capturing.rules._gradients": ("LayerGradients",),
    "gradkeep.capturing.rules._rules": (
        "LayerRule",
        "register_layer_rule",
    ),
    "gradkeep.capturing.tasks._completions": ("completions",),
    "gradkeep.capturing.tasks._language": ("LanguageModelling",),
    "gradkeep.capturing.tasks._supervised": (
        "Classification",
        "Regression",
    ),
    "gradkeep.capturing.tasks._task": (
        "Measured",
        "Task",
    ),
    "gradkeep.errors": ("GradkeepError",),
    "gradkeep.evaluate": ("groups",),
    "gradkeep.query": ("gradients",),
    "gradkeep.remat": ("memory_budget",),
    "gradkeep.store": (
        "Store",
        "open",
    ),
}

__all__ = [
    "CaptureWarning",
    "Captured",
    "Classification",
    "GradkeepError",
    "Keep",
    "LanguageModelling",
    "LayerGradients",
    "LayerRule",
    "Measured",
    "Method",
    "Preview",
    "Projection",
    "Regression",
    "Scorer",
    "Scores",
    "Store",
    "Task",
    "Weights",
    "attribute",
    "attribute_once",
    "attribute_tokens",
    "capture",
    "combine",
    "completions",
    "datamodels",
    "errors",
    "evaluate",
    "gradients",
    "groups",
    "layers",
    "memory_budget",
    "methods",
    "open",
    "plan",
    "project",
    "query",
    "read_adam",
    "recording",
    "register_layer_rule",
    "register_method",
    "remat",
    "show",
    "store",
    "suspects",
    "text_similarity",
]

if not TYPE_CHECKING:  # a type checker would accept any name
    __getattr__ = lazy_names(
        __name__,
        {name: f"gradkeep.{name}" for name in _SUBPACKAGES}
        | {name: module for module, names in _MODULES.items() for name in names},
    )


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
