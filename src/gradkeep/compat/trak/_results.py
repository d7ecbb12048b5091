"""What `TRAKer` asks of whatever keeps its results."""

from __future__ import annotations

import operator
import re
from typing import TYPE_CHECKING, Any, Protocol

from gradkeep.errors import AttributionError

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy as np
    from torch import Tensor

    from gradkeep.compat.trak._features import Ridge
    from gradkeep.curvature._feature_solvers import StreamedRows

    Ids = np.ndarray[Any, np.dtype[np.int64]]
    Mask = np.ndarray[Any, np.dtype[np.bool_]]


class Results(Protocol):
    """Rows of model ids and experiments, kept in a store or in the arrays of a saver."""

    def refresh(self) -> None:
        """See what other processes have done."""

    def open_model(self, model_id: int, *, weights: str, overwrite: bool = False) -> None:
        """Make a model id the current one: new, or as it was left."""

    def done(self) -> Mask:
        """Which training rows of the current model id are there `[n]`."""

    def put(self, ids: Ids, grads: Tensor, weights: Tensor) -> None:
        """Keep projected gradients and weights of training rows."""

    def train(self, model_id: int) -> StreamedRows:
        """The projected gradients of the training rows."""

    def train_weights(self, model_id: int) -> Any:
        """The weights of the training rows `[n]`."""

    def finalize(
        self, model_id: int, ridge: Ridge, features: Iterator[tuple[Ids, Tensor]] | None
    ) -> None:
        """Record that a model id is finalized, with its features where they are to be kept."""

    def is_finalized(self, model_id: int) -> bool:
        """Whether a model id is finalized."""

    def finalized(self, model_id: int) -> Ridge | StreamedRows | None:
        """With which ridge a model id was finalized, or its features; None if it is not."""

    def del_grads(self, model_id: int) -> None:
        """Delete the gradients of the training rows."""

    def open_experiment(
        self, exp_name: str, num_targets: int, model_id: int, *, weights: str
    ) -> None:
        """Make an experiment the current one."""

    def targets_done(self) -> Mask:
        """Which targets of the current experiment and model id are there `[m]`."""

    def put_targets(self, ids: Ids, grads: Tensor) -> None:
        """Keep projected gradients of targets."""

    def targets(self, exp_name: str, model_id: int) -> StreamedRows:
        """The projected gradients of all targets; an error that names those that are missing."""

    def put_scores(self, exp_name: str, made: Any) -> Any:
        """Fill and commit the scores `[n, m]` with what `made` writes; gives them to read."""


class MissingTargets(AttributionError):
    """Targets of an experiment that were never scored at a model id."""

    def __init__(self, exp_name: str, model_id: int, missing: list[int]) -> None:
        some = ", ".join(map(str, missing[:8])) + (" ..." if len(missing) > 8 else "")
        super().__init__(
            f"{len(missing)} targets of experiment {exp_name!r} were not scored at model id "
            f"{model_id}",
            found=f"no gradients of targets {some}",
            fix="score them, or pass allow_skip=True to leave this model id out",
        )


_EXPERIMENT = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._+=@-]{0,59}")


def checked_experiment(exp_name: str) -> str:
    """The name, if it can be one."""
    if not isinstance(exp_name, str) or not _EXPERIMENT.fullmatch(exp_name):
        raise ValueError(
            f"{exp_name!r} cannot name an experiment: use 1 to 60 letters, digits or _ . + = @ -, "
            "not beginning with a dot or sign"
        )
    return exp_name


def checked_model_id(model_id: Any) -> int:
    """The id as a whole number."""
    try:
        return operator.index(model_id)
    except TypeError:
        raise TypeError(f"a model id must be a whole number, not {model_id!r}") from None
