"""What a saver must do, and what follows from it for savers of the released package's form."""

from __future__ import annotations

import logging
import operator
import re
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from gradkeep.compat.trak._features import features_of
from gradkeep.errors import AttributionError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch import Tensor

    from gradkeep.attribution import StreamedRows
    from gradkeep.compat.trak._features import Ridge

    Ids = np.ndarray[Any, np.dtype[np.int64]]
    Mask = np.ndarray[Any, np.dtype[np.bool_]]


class AbstractSaver(ABC):
    """What keeps results; subclass it to keep them elsewhere.

    A subclass that was written for the released package fills `current_store` with arrays that
    can be assigned to; the methods below the abstract ones do the rest with them.
    """

    def __init__(
        self,
        save_dir: str | Path,
        metadata: Mapping[str, Any],
        load_from_save_dir: bool,
        logging_level: int,
        use_half_precision: bool,
    ) -> None:
        self.metadata = dict(metadata)
        self.save_dir = Path(save_dir).resolve()
        self.load_from_save_dir = load_from_save_dir
        self.use_half_precision = use_half_precision
        self.logger = logging.getLogger("STORE")
        self.logger.setLevel(logging_level)
        self.model_ids: dict[int, dict[str, int]] = {}
        self.experiments: dict[str, dict[str, Any]] = {}
        self.current_model_id: int | None = None
        self.current_experiment_name: str | None = None
        self.current_store: Any = {"grads": None, "out_to_loss": None, "features": None}
        self.save_dir.mkdir(parents=True, exist_ok=True)

    @abstractmethod
    def register_model_id(self, model_id: int, _allow_featurizing_already_registered: bool) -> None:
        """Make room for a new model id."""

    @abstractmethod
    def serialize_current_model_id_metadata(self, already_exists: bool = True) -> None:
        """Commit what is known about the current model id."""

    @abstractmethod
    def init_store(self, model_id: int) -> None:
        """Make the arrays of a model id."""

    @abstractmethod
    def init_experiment(self, exp_name: str, num_targets: int, model_id: int) -> None:
        """Make or open the arrays of an experiment at a model id."""

    @abstractmethod
    def load_current_store(
        self,
        model_id: int,
        exp_name: str | None = None,
        exp_num_targets: int | None = -1,
        mode: str = "r+",
    ) -> None:
        """Make a model id, and an experiment, the current ones."""

    @abstractmethod
    def save_scores(self, exp_name: str) -> None:
        """Commit the scores of an experiment."""

    @abstractmethod
    def del_grads(self, model_id: int, target: bool = False) -> None:
        """Delete the gradients of a model id."""

    def open_model(self, model_id: int, *, weights: str, overwrite: bool = False) -> None:
        """Make a model id the current one: new, or as it was left."""
        if model_id in self.model_ids:
            self.load_current_store(model_id)
        else:
            self.register_model_id(model_id, overwrite)

    def done(self) -> Mask:
        """Which training rows of the current model id are there `[n]`."""
        flags: Ids = np.asarray(self.current_store["is_featurized"], np.int64).reshape(-1)
        return np.asarray(flags == 1, np.bool_)

    def put(self, ids: Ids, grads: Tensor, weights: Tensor) -> None:
        """Keep projected gradients and weights of training rows, then flag them."""
        self.current_store["grads"][ids] = grads.cpu().numpy()
        self.current_store["out_to_loss"][ids] = weights.cpu().numpy().reshape(-1, 1)
        self.current_store["is_featurized"][ids] = 1
        self.serialize_current_model_id_metadata()

    def train(self, model_id: int) -> StreamedRows:
        """The projected gradients of the training rows."""
        self.load_current_store(model_id)
        return _Held(self.current_store["grads"])

    def train_weights(self, model_id: int) -> Any:
        """The weights of the training rows `[n]`."""
        self.load_current_store(model_id)
        return np.asarray(self.current_store["out_to_loss"], np.float32).reshape(-1)

    def finalize(
        self, model_id: int, ridge: Ridge, features: Iterator[tuple[Ids, Tensor]] | None
    ) -> None:
        """Record that a model id is finalized, with its features where they are to be kept."""
        self.load_current_store(model_id)
        found = features_of(self.train(model_id), ridge) if features is None else features
        for ids, part in found:
            self.current_store["features"][ids] = part.cpu().numpy()
        self.model_ids[model_id]["is_finalized"] = 1
        self.serialize_current_model_id_metadata()

    def is_finalized(self, model_id: int) -> bool:
        """Whether a model id is finalized."""
        return bool(self.model_ids[model_id]["is_finalized"])

    def finalized(self, model_id: int) -> Ridge | StreamedRows | None:
        """With which ridge a model id was finalized, or its features; None if it is not."""
        if not self.model_ids[model_id]["is_finalized"]:
            return None
        self.load_current_store(model_id)
        return _Held(self.current_store["features"])

    def open_experiment(
        self, exp_name: str, num_targets: int, model_id: int, *, weights: str
    ) -> None:
        """Make an experiment the current one."""
        self.init_experiment(exp_name, num_targets, model_id)

    def put_targets(self, ids: Ids, grads: Tensor) -> None:
        """Keep projected gradients of targets."""
        self.current_store[f"{self.current_experiment_name}_grads"][ids] = grads.cpu().numpy()

    def targets_done(self) -> Mask:
        """Which targets of the current experiment and model id are there `[m]`."""
        held = self.current_store[f"{self.current_experiment_name}_grads"]
        return np.asarray(np.asarray(held).any(1), np.bool_)

    def targets(self, exp_name: str, model_id: int) -> StreamedRows:
        """The projected gradients of all targets; an error that names those that are missing."""
        count = self.experiments[exp_name]["num_targets"]
        self.load_current_store(model_id, exp_name, count)
        held = self.current_store[f"{exp_name}_grads"]
        if held is None:
            raise MissingTargets(exp_name, model_id, list(range(count)))
        return _Held(held)

    def put_scores(self, exp_name: str, made: Any) -> Any:
        """Fill and commit the scores `[n, m]` with what `made` writes; gives them to read."""
        scores = self.current_store[f"{exp_name}_scores"]
        values = np.zeros(scores.shape, np.float32)
        made(values)
        scores[:] = values
        self.save_scores(exp_name)
        return scores


@dataclass(frozen=True, slots=True, eq=False)
class _Held:
    """Gradients in an array."""

    values: Any

    @property
    def count(self) -> int:
        return len(self.values)

    @property
    def dim(self) -> int:
        return int(self.values.shape[1])

    def read(self, ids: Ids) -> Tensor:
        """The gradients `[len(ids), k]`."""
        return torch.from_numpy(np.array(self.values[ids], np.float32))


_EXPERIMENT = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._+=@-]{0,59}")


class ModelIDException(Exception):
    """A model id that is unknown, taken, not complete or not finalized."""


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
