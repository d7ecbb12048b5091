"""Results of a user-defined saver: arrays in `current_store`, and the released methods."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from gradkeep.compat.trak._abstract_saver import MissingTargetsError
from gradkeep.compat.trak._features import iter_features
from gradkeep.errors import AttributionError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from gradkeep.compat.trak._abstract_saver import Ids, Mask
    from gradkeep.compat.trak._features import Ridge
    from gradkeep.curvature._cholesky import StreamedRows


class SaverArrays:
    """Use a saver as the released `TRAKer` does, whatever its base class.

    Rows are assigned as tensors of the saver's precision, weights after gradients, flags last: a
    killed process leaves rows that are done, or that will be done again.
    """

    def __init__(self, saver: Any, dtype: torch.dtype, rows: int) -> None:
        self._saver, self._dtype, self._count = saver, dtype, rows

    def refresh(self) -> None:
        """Do nothing: a saver reads its folder when it is created."""

    def open_model(self, model_id: int, *, weights: str, overwrite: bool = False) -> None:
        """Make a model id the current one, new or existing."""
        if self._saver.model_ids.get(model_id) is None:
            self._saver.register_model_id(model_id, overwrite)
        else:
            self._saver.load_current_store(model_id)
            # A process may have been killed between the last flag and the document.
            if not self._saver.model_ids[model_id]["is_featurized"] and self.done().all():
                self._saver.serialize_current_model_id_metadata()

    def done(self) -> Mask:
        """Return which training rows of the current model id are done `[n]`."""
        flags = np.asarray(self._array("is_featurized")).reshape(-1)
        return np.asarray(flags == 1, np.bool_)

    def put(self, ids: Ids, grads: Tensor, weights: Tensor) -> None:
        """Store projected gradients and weights of training rows, then flag them."""
        self._array("grads")[ids] = self._narrow(grads)
        self._array("out_to_loss")[ids] = self._narrow(weights.reshape(-1, 1))
        self._array("is_featurized")[ids] = 1
        self._saver.serialize_current_model_id_metadata()

    def train(self, model_id: int) -> StreamedRows:
        """Return the projected gradients of the training rows."""
        self._saver.load_current_store(model_id)
        return _ArrayRows(self._array("grads"))

    def train_weights(self, model_id: int) -> Any:
        """Return the weights of the training rows `[n]`."""
        self._saver.load_current_store(model_id)
        return np.asarray(self._array("out_to_loss"), np.float32).reshape(-1)

    def finalize(
        self, model_id: int, ridge: Ridge, features: Iterator[tuple[Ids, Tensor]] | None
    ) -> None:
        """Write the features, then record that the model id is finalized."""
        blocks = iter_features(self.train(model_id), ridge) if features is None else features
        held = self._array("features")
        for ids, part in blocks:
            held[ids] = self._narrow(part)
        self._saver.model_ids[model_id]["is_finalized"] = 1
        self._saver.serialize_current_model_id_metadata()

    def is_finalized(self, model_id: int) -> bool:
        """Return True if a model id is finalized."""
        return bool(self._saver.model_ids[model_id]["is_finalized"])

    def finalized(self, model_id: int) -> StreamedRows | None:
        """Return the features of a model id; None if it is not finalized."""
        if not self.is_finalized(model_id):
            return None
        self._saver.load_current_store(model_id)
        return _ArrayRows(self._array("features"))

    def del_grads(self, model_id: int) -> None:
        """Delete the gradients of the training rows."""
        # The released base class asks for `target`, the class derived from it takes none.
        parameters = inspect.signature(self._saver.del_grads).parameters
        self._saver.del_grads(model_id, **({"target": False} if "target" in parameters else {}))

    def open_experiment(
        self, exp_name: str, num_targets: int, model_id: int, *, weights: str
    ) -> None:
        """Make an experiment the current one."""
        self._saver.init_experiment(exp_name, num_targets, model_id)

    def targets_done(self) -> Mask:
        """Return all False: targets have no flags, and existing ones may be of another batch."""
        count = int(self._saver.experiments[self._saver.current_experiment_name]["num_targets"])
        return np.zeros(count, np.bool_)

    def put_targets(self, ids: Ids, grads: Tensor) -> None:
        """Store projected gradients of targets."""
        self._array(f"{self._saver.current_experiment_name}_grads")[ids] = self._narrow(grads)

    def targets(self, exp_name: str, model_id: int) -> StreamedRows:
        """Return the projected gradients of all targets; raise `MissingTargetsError` if there are none."""
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
        return _ArrayRows(held)

    def put_scores(self, exp_name: str, compute: Any) -> Any:
        """Compute, assign and commit the scores `[n, m]`, and return them."""
        count = int(self._saver.experiments[exp_name]["num_targets"])
        values = np.zeros((self._count, count), np.float32)
        compute(values)
        # The current model id is one that was scored: the last whose weights were read.
        self._saver.load_current_store(self._saver.current_model_id, exp_name, count)
        scores = self._array(f"{exp_name}_scores")
        scores[:] = values
        self._saver.save_scores(exp_name)
        return scores

    def _array(self, name: str) -> Any:
        array = self._saver.current_store.get(name)
        if array is None:
            raise AttributionError(
                f"{type(self._saver).__name__}.current_store has no {name!r}",
                code="compat.no_array",
                found=", ".join(k for k, v in self._saver.current_store.items() if v is not None)
                or "nothing",
                fix="Fill it with a writable array in load_current_store and init_experiment.",
            )
        return array

    def _narrow(self, values: Tensor) -> Tensor:
        """Convert values to the saver's precision; raise if they overflow."""
        narrow = values.detach().cpu().to(self._dtype)
        if not bool(narrow.isfinite().all()):
            raise AttributionError(
                "values are too large for the half precision of this saver",
                code="compat.half_precision",
                found=f"{float(values.abs().max()):g}",
                expected=f"at most {torch.finfo(self._dtype).max:g}",
                fix="Pass use_half_precision=False.",
            )
        return narrow


@dataclass(frozen=True, slots=True, eq=False)
class _ArrayRows:
    """Rows of gradients in an array."""

    values: Any

    @property
    def count(self) -> int:
        return len(self.values)

    @property
    def dim(self) -> int:
        return int(self.values.shape[1])

    def read(self, ids: Ids) -> Tensor:
        """Read the gradients `[len(ids), k]`."""
        return torch.from_numpy(np.array(self.values[ids], np.float32))
