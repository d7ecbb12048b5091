"""Training-data attribution and memory-bounded training for PyTorch.

Capture gradients
    capture             Run a model over a data set and store per-sample gradients.
    recording           Record the gradients of a training loop.
    plan, layers        Predict the cost of a capture; list the layers of a model.
    Classification, Regression, LanguageModeling, Task, completions
                        What to differentiate; subclass Task for your own loss.
    Weights, read_adam  Checkpoints with learning rates; Adam's state.
    Keep, Preview       Bytes per row; images and texts for the web UI.

Attribute
    attribute           Score training rows for queries, from a store.
    attribute_once      The same without a store.
    attribute_tokens    Scores of single tokens.
    methods             List the methods; register_method adds one.
    suspects            Rank rows by suspicion of a wrong label.
    groups, show, combine, Scores, text_similarity
                        Work with scores.

Use stored gradients
    open, Store         Open a store.
    gradients, query    Products, top-k search, sums and norms.
    project, Projection Random projections.

Subpackages
    evaluate            Test scores against retraining.
    datamodels          Studies of models trained on subsets, and their fits.
    remat               Rematerialization: memory_budget, recorder, simulator.
    store, query, farm, data, integrations, compat, errors

Names are imported on first use: `import gradkeep` itself loads nothing else.

Example:
    >>> import gradkeep as gk, torch, tempfile
    >>> model, rows = torch.nn.Linear(4, 3), [(torch.randn(6, 4), torch.arange(6) % 3)]
    >>> store = gk.open(tempfile.mkdtemp())
    >>> for split in ("train", "test"):
    ...     _ = gk.capture(store, model, rows, task=gk.Classification(), split=split)
    >>> gk.attribute(store).shape
    (6, 6)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gradkeep._public import lazy_names

if TYPE_CHECKING:
    from gradkeep import datamodels, errors, evaluate, query, remat, store
    from gradkeep._preview import Preview
    from gradkeep.attribution._attribute import attribute
    from gradkeep.attribution._attribute_once import attribute_once
    from gradkeep.attribution._question import Method, Scorer
    from gradkeep.attribution._registry import methods, register_method
    from gradkeep.attribution._scores import Scores, combine
    from gradkeep.attribution._show import show
    from gradkeep.attribution._suspects import suspects
    from gradkeep.attribution._text_similarity import text_similarity
    from gradkeep.attribution._tokens import attribute_tokens
    from gradkeep.capturing._capture import capture
    from gradkeep.capturing._first_batch import Keep
    from gradkeep.capturing._plan import plan
    from gradkeep.capturing._recording import recording
    from gradkeep.capturing._report import Captured, CaptureWarning, layers
    from gradkeep.capturing._weights import Weights, read_adam
    from gradkeep.capturing.rules._layers import LayerGradients
    from gradkeep.capturing.rules._rules import LayerRule, register_layer_rule
    from gradkeep.capturing.tasks._language import LanguageModeling, completions
    from gradkeep.capturing.tasks._tasks import Classification, Measured, Regression, Task
    from gradkeep.curvature._project import project
    from gradkeep.curvature._sketches import Projection
    from gradkeep.errors import GradkeepError
    from gradkeep.evaluate._groups import groups
    from gradkeep.query import gradients
    from gradkeep.remat import memory_budget
    from gradkeep.store import Store, open

__version__ = "0.1.0"

_SUBPACKAGES = "compat data datamodels errors evaluate farm integrations query remat store"
_NAMES_OF_MODULES = {
    "_preview": "Preview",
    "attribution._attribute": "attribute",
    "attribution._attribute_once": "attribute_once",
    "attribution._question": "Method Scorer",
    "attribution._registry": "methods register_method",
    "attribution._scores": "Scores combine",
    "attribution._show": "show",
    "attribution._suspects": "suspects",
    "attribution._text_similarity": "text_similarity",
    "attribution._tokens": "attribute_tokens",
    "capturing._capture": "capture",
    "capturing._first_batch": "Keep",
    "capturing._plan": "plan",
    "capturing._recording": "recording",
    "capturing._report": "CaptureWarning Captured layers",
    "capturing._weights": "Weights read_adam",
    "capturing.rules._layers": "LayerGradients",
    "capturing.rules._rules": "LayerRule register_layer_rule",
    "capturing.tasks._language": "LanguageModeling completions",
    "capturing.tasks._tasks": "Classification Measured Regression Task",
    "curvature._project": "project",
    "curvature._sketches": "Projection",
    "errors": "GradkeepError",
    "evaluate._groups": "groups",
    "query": "gradients",
    "remat": "memory_budget",
    "store": "Store open",
}

__all__ = [
    "CaptureWarning",
    "Captured",
    "Classification",
    "GradkeepError",
    "Keep",
    "LanguageModeling",
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
        {name: f"gradkeep.{name}" for name in _SUBPACKAGES.split()}
        | {n: f"gradkeep.{m}" for m, names in _NAMES_OF_MODULES.items() for n in names.split()},
    )


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
