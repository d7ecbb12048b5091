"""The results of a saver that somebody wrote: arrays in `current_store`, and released methods."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from gradkeep.compat.trak._abstract_saver import MissingTargetsError
from gradkeep.compat.trak._features import features_of
from gradkeep.errors import AttributionError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from gradkeep.compat.trak._abstract_saver import Ids, Mask
    from gradkeep.compat.trak._features import Ridge
    from gradkeep.curvature._feature_solvers import StreamedRows


class SaverArrays:
    """A saver used as the released `TRAKer` uses one, whichever base class it has.

    Rows are assigned as tensors of the saver's precision, weights after gradients, flags last: a
    process that is killed leaves rows that are done, or that are done again.
    """

    def __init__(self, saver: Any, dtype: torch.dtype, rows: int) -> None:
        self._saver, self._dtype, self._count = saver, dtype, rows

    def refresh(self) -> None:
        """A saver looks at its folder when it is made."""

    def open_model(self, model_id: int, *, weights: str, overwrite: bool = False) -> None:
        """Make a model id the current one: new, or as it was left."""
        if self._saver.model_ids.get(model_id) is None:
            self._saver.register_model_id(model_id, overwrite)
        else:
            self._saver.load_current_store(model_id)
            # A process may have been killed between the last flag and the document that tells.
            if not self._saver.model_ids[model_id]["is_featurized"] and self.done().all():
                self._saver.serialize_current_model_id_metadata()

    def done(self) -> Mask:
        """Which training rows of the current model id are there `[n]`."""
        flags = np.asarray(self._array("is_featurized")).reshape(-1)
        return np.asarray(flags == 1, np.bool_)

    def put(self, ids: Ids, grads: Tensor, weights: Tensor) -> None:
        """Keep projected gradients and weights of training rows, then flag them."""
        self._array("grads")[ids] = self._narrow(grads)
        self._array("out_to_loss")[ids] = self._narrow(weights.reshape(-1, 1))
        self._array("is_featurized")[ids] = 1
        self._saver.serialize_current_model_id_metadata()

    def train(self, model_id: int) -> StreamedRows:
        """The projected gradients of the training rows."""
        self._saver.load_current_store(model_id)
        return _Held(self._array("grads"))

    def train_weights(self, model_id: int) -> Any:
        """The weights of the training rows `[n]`."""
        self._saver.load_current_store(model_id)
        return np.asarray(self._array("out_to_loss"), np.float32).reshape(-1)

    def finalize(
        self, model_id: int, ridge: Ridge, features: Iterator[tuple[Ids, Tensor]] | None
    ) -> None:
        """Write the features, then record that the model id is finalized."""
        found = features_of(self.train(model_id), ridge) if features is None else features
        held = self._array("features")
        for ids, part in found:
            held[ids] = self._narrow(part)
        self._saver.model_ids[model_id]["is_finalized"] = 1
        self._saver.serialize_current_model_id_metadata()

    def is_finalized(self, model_id: int) -> bool:
        """Whether a model id is finalized."""
        return bool(self._saver.model_ids[model_id]["is_finalized"])

    def finalized(self, model_id: int) -> StreamedRows | None:
        """The features of a model id; None if it is not finalized."""
        if not self.is_finalized(model_id):
            return None
        self._saver.load_current_store(model_id)
        return _Held(self._array("features"))

    def del_grads(self, model_id: int) -> None:
        """Delete the gradients of the training rows."""
        # The released base class asks for `target`, the class derived from it takes none.
        taken = inspect.signature(self._saver.del_grads).parameters
        self._saver.del_grads(model_id, **({"target": False} if "target" in taken else {}))

    def open_experiment(
        self, exp_name: str, num_targets: int, model_id: int, *, weights: str
    ) -> None:
        """Make an experiment the current one."""
        self._saver.init_experiment(exp_name, num_targets, model_id)

    def targets_done(self) -> Mask:
        """None: there are no flags of targets, and those of before may be others' targets."""
        count = int(self._saver.experiments[self._saver.current_experiment_name]["num_targets"])
        return np.zeros(count, np.bool_)

    def put_targets(self, ids: Ids, grads: Tensor) -> None:
        """Keep projected gradients of targets."""
        self._array(f"{self._saver.current_experiment_name}_grads")[ids] = self._narrow(grads)

    def targets(self, exp_name: str, model_id: int) -> StreamedRows:
        """The projected gradients of all targets; an error that names those that are missing."""
        count = int(self._saver.experiments[exp_name]["num_targets"])
        try:
            self._saver.load_current_store(model_id, exp_name, count)
            held = self._saver.current_store.get(f"{exp_name}_grads")
        except OSError:
            held = None
        if held is None:
            raise MissingTargetsError(exp_name, model_id, list(range(count)))
        zeros = np.flatnonzero(~np.asarray(held).any(1))
        if len(zeros):
            self._saver.logger.warning(
                "the gradients of %d targets of %s are all zero at model id %d: were they scored?",
                len(zeros),
                exp_name,
                model_id,
            )
        return _Held(held)

    def put_scores(self, exp_name: str, made: Any) -> Any:
        """Compute the scores `[n, m]`, then assign and commit them; gives them to read."""
        count = int(self._saver.experiments[exp_name]["num_targets"])
        values = np.zeros((self._count, count), np.float32)
        made(values)
        # The current model id is one that was scored: the last whose weights were read.
        self._saver.load_current_store(self._saver.current_model_id, exp_name, count)
        scores = self._array(f"{exp_name}_scores")
        scores[:] = values
        self._saver.save_scores(exp_name)
        return scores

    def _array(self, name: str) -> Any:
        found = self._saver.current_store.get(name)
        if found is None:
            raise AttributionError(
                f"{type(self._saver).__name__}.current_store has no {name!r}",
                found=", ".join(k for k, v in self._saver.current_store.items() if v is not None)
                or "nothing",
                fix="load_current_store and init_experiment must fill it with an array that can "
                "be assigned to",
            )
        return found

    def _narrow(self, values: Tensor) -> Tensor:
        """The values as the saver keeps them; an error if they do not fit."""
        found = values.detach().cpu().to(self._dtype)
        if not bool(found.isfinite().all()):
            raise AttributionError(
                "values are too large for half precision, in which this saver keeps them",
                found=f"{float(values.abs().max()):g}",
                expected=f"at most {torch.finfo(self._dtype).max:g}",
                fix="pass use_half_precision=False",
            )
        return found


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
