"""`current_store`: arrays that can be read and assigned to durably."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, MutableMapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from gradkeep.compat.trak._features import Ridge, iter_features
from gradkeep.compat.trak._rows import RowLog
from gradkeep.errors import AttributionError

if TYPE_CHECKING:
    from pathlib import Path

    from gradkeep.compat.trak._store_saver import MmapSaver

    Ids = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True, slots=True, eq=False)
class CellSource:
    """Source of an array's values, and target of assignments to it."""

    shape: tuple[int, int]
    version: object
    """Changes when values were put or assigned."""
    fill: Callable[[Any], None]
    """Write the values into an array of NaN, or of zeros for integers."""
    assign: Callable[[Ids, Any], None]
    """Store rows durably, or raise."""
    dtype: type = np.float32


class AssignedArray(np.memmap[Any, Any]):
    """A memory-mapped array of a saver: `array[rows] = values` is durable when it returns.

    Any other modification, by a view, `fill` or `out=`, raises, because it would be lost.
    Rows that were never written are NaN. An assignment costs one file in the store, so assign
    batches, not single rows.
    """

    _cells: Any = None
    _assign: Callable[[Ids, Any], None] | None = None

    @classmethod
    def of(cls, source: CellSource, folder: Path) -> AssignedArray:
        """Build the array of a source, in an unnamed file in a folder."""
        with tempfile.TemporaryFile(dir=folder) as file:
            array: Any = np.memmap.__new__(cls, file, source.dtype, "w+", shape=source.shape)
        array._cells = np.asarray(array)
        array._cells[:] = np.nan if array.dtype.kind == "f" else 0
        source.fill(array._cells)
        array._assign = source.assign
        array.setflags(write=False)
        typed: AssignedArray = array
        return typed

    def __array_finalize__(self, obj: Any) -> None:
        super().__array_finalize__(obj)
        self._cells = self._assign = None

    def __getitem__(self, index: Any) -> Any:
        """Return a read-only view or a copy, as numpy does."""
        return np.asarray(self)[index]

    def __setitem__(self, index: Any, value: Any) -> None:
        """Assign as to any array, and store the changed rows."""
        if self._assign is None:
            super().__setitem__(index, value)
            return
        if isinstance(value, torch.Tensor):
            value = value.detach().cpu()
            value = (value.float() if value.is_floating_point() else value).numpy()
        if isinstance(index, torch.Tensor):
            index = index.cpu().numpy()
        numbers = np.broadcast_to(np.arange(self.shape[0])[:, None], self.shape)
        rows = np.unique(numbers[index])
        before = self._cells[rows]
        self._cells[index] = value
        try:
            if len(rows):
                self._assign(rows, self._cells[rows])
        except BaseException:
            self._cells[rows] = before
            raise


class CurrentArrays(MutableMapping[str, Any]):
    """Arrays of the current model id and experiment under their released names.

    `current_store["grads"][rows] = values` writes through. Other names can be added; they
    stay in this process.
    """

    def __init__(self, saver: MmapSaver) -> None:
        self._saver = saver
        self._arrays: dict[tuple[object, str], tuple[object, AssignedArray]] = {}
        self._own: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name in self._own:
            return self._own[name]
        if name not in self:
            raise KeyError(name)
        source = find_source(self._saver, name)
        if source is None:
            return None
        key = (self._saver.current_model_id, name)
        # Drop arrays of other models: each may be as large as all gradients of a model.
        self._arrays = {known: array for known, array in self._arrays.items() if known[0] == key[0]}
        known = self._arrays.get(key)
        if known is None or known[0] != source.version:
            array = AssignedArray.of(source, self._saver.save_dir)
            self._arrays[key] = known = (source.version, array)
        return known[1]

    def __setitem__(self, name: str, value: Any) -> None:
        if name not in self._names():
            self._own[name] = value
            return
        array = self[name]
        if array is None or np.shape(value) != array.shape:
            raise AttributionError(
                f"current_store[{name!r}] is in the store and cannot be replaced",
                code="compat.array_replaced",
                found=f"{type(value).__name__} of shape {np.shape(value)}",
                expected="no model id is loaded" if array is None else f"shape {array.shape}",
                fix=f"Assign to its rows: current_store[{name!r}][rows] = values.",
            )
        array[:] = value

    def __delitem__(self, name: str) -> None:
        if name in self._names():
            raise AttributionError(
                f"current_store[{name!r}] is in the store and cannot be deleted",
                code="compat.array_deleted",
                fix="Use del_grads to delete gradients.",
            )
        del self._own[name]

    def __contains__(self, name: object) -> bool:
        return name in self._own or name in self._names()

    def __iter__(self) -> Iterator[str]:
        yield from self._names()
        yield from self._own

    def __len__(self) -> int:
        return len(list(iter(self)))

    def seen(self, model_id: int, name: str, before: object, after: object) -> None:
        """Update the version of a cached array that already has the change."""
        known = self._arrays.get((model_id, name))
        if known is not None and known[0] == before:
            self._arrays[model_id, name] = (after, known[1])

    def _names(self) -> list[str]:
        names = ["grads", "out_to_loss", "features", "is_featurized"]
        if self._saver.current_model_id is None:
            return names[:3]
        for name in self._saver.experiments:
            names += [f"{name}_grads", f"{name}_scores"]
        return names


def find_source(saver: MmapSaver, name: str) -> CellSource | None:
    """Return the source of an array of the current model id; None if it was deleted or never created."""
    model_id = saver.current_model_id
    if model_id is None:
        return None
    model = saver.sets.model(model_id)
    model.refresh()
    match name:
        case "grads":
            deleted = saver.finalized(model_id) and not model.written.any()
            return None if deleted else _gradients(saver, name, model)
        case "out_to_loss":
            return _weights(saver, model)
        case "is_featurized":
            return _flags(saver, model)
        case "features":
            return _features(saver, model)
    exp_name, _, kind = name.rpartition("_")
    if kind == "scores":
        return _scores(saver, exp_name)
    if not saver.sets.has_targets(exp_name, model_id):
        return None
    count = int(saver.experiments[exp_name]["num_targets"])
    return _gradients(saver, name, saver.sets.targets(exp_name, model_id, count))


def _gradients(
    saver: MmapSaver,
    name: str,
    log: RowLog,
    below: Callable[[Any], None] | None = None,
    of: Any = 0,
) -> CellSource:
    """Build a source from a log; `below` fills in the values under it, and `of` is their version."""

    def fill(cells: Any) -> None:
        if below is not None:
            below(cells)
        written = np.flatnonzero(log.written)
        cells[written] = log.read(written).numpy()

    def version() -> object:
        return of, log.versions["grads"]

    model_id = saver.current_model_id

    def assign(ids: Ids, values: Any) -> None:
        before, count = version(), log.versions["grads"]
        log.assign(ids, values)
        if log.versions["grads"] == count + 1:  # else other processes assigned too
            saver.current_store.seen(model_id, name, before, version())

    return CellSource((log.count, log.dim), version(), fill, assign)


def _weights(saver: MmapSaver, model: RowLog) -> CellSource:
    final = saver.finalized(saver.current_model_id or 0)
    deleted = isinstance(final, RowLog) and not model.written.any()
    weight = final.weight if deleted and isinstance(final, RowLog) else model.weight

    def fill(cells: Any) -> None:
        cells[:, 0] = weight

    def assign(ids: Ids, values: Any) -> None:
        if deleted:
            raise AttributionError(
                "the gradients of this model id were deleted, so its weights cannot be changed",
                code="compat.gradients_deleted",
                fix="Call register_model_id(ID, True) to start it again.",
            )
        model.assign(ids, values, column="weight")

    version = (deleted, model.versions["weight"])
    return CellSource((model.count, 1), version, fill, assign)


def _flags(saver: MmapSaver, model: RowLog) -> CellSource:
    final = saver.finalized(saver.current_model_id or 0) is not None

    def fill(cells: Any) -> None:
        cells[:, 0] = saver.done()

    def assign(ids: Ids, values: Any) -> None:
        if final:
            raise AttributionError(
                f"model id {saver.current_model_id} is finalized, so its rows stay featurized",
                code="compat.finalized",
                fix=f"Call register_model_id({saver.current_model_id}, True) to start it again.",
            )
        model.flag(ids, values)

    version = (model.versions["flag"], final)
    return CellSource((model.count, 1), version, fill, assign, np.int32)


def _features(saver: MmapSaver, model: RowLog) -> CellSource:
    model_id = saver.current_model_id or 0
    final, assigned = saver.finalized(model_id), saver.sets.assigned_features(model_id)
    assigned.refresh()

    def below(cells: Any) -> None:
        if isinstance(final, Ridge):
            for ids, part in iter_features(saver.train(model_id), final):
                cells[ids] = part.numpy()
        elif final is not None:
            cells[:] = final.read(np.arange(final.count)).numpy()

    of = (len(saver.sets.finals(model_id).done()), model.versions["grads"])
    return _gradients(saver, "features", assigned, below, of)


def _scores(saver: MmapSaver, exp_name: str) -> CellSource:
    targets = int(saver.experiments[exp_name]["num_targets"])
    files, assigned = saver.score_files, saver.score_files.assigned(exp_name, targets)
    assigned.refresh()
    number = files.finalized(exp_name)

    def below(cells: Any) -> None:
        if number:
            cells[:] = files.read(exp_name)

    return _gradients(saver, f"{exp_name}_scores", assigned, below, number)
