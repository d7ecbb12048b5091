"""`current_store`: arrays that can be read like any, and assigned to without losing anything."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, MutableMapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from gradkeep.compat.trak._features import Ridge, features_of
from gradkeep.compat.trak._rows import RowLog
from gradkeep.errors import AttributionError

if TYPE_CHECKING:
    from pathlib import Path

    from gradkeep.compat.trak._store_saver import MmapSaver

    Ids = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True, slots=True, eq=False)
class CellSource:
    """Where the values of an array are, and where assignments to it go."""

    shape: tuple[int, int]
    version: object
    """What is another when values were put or assigned since."""
    fill: Callable[[Any], None]
    """Write what is there into an array of NaN, or of zeros if it has whole numbers."""
    assign: Callable[[Ids, Any], None]
    """Keep these rows, durably, or raise."""
    dtype: type = np.float32


class AssignedArray(np.memmap[Any, Any]):
    """An array of a saver, mapped: `array[rows] = values` is durable when it returns.

    What would change it in any other way, a view, `fill`, `out=`, raises: it would be lost.
    Rows that were never written are NaN. An assignment costs one file in the store, so assign
    batches, not single rows.
    """

    _cells: Any = None
    _assign: Callable[[Ids, Any], None] | None = None

    @classmethod
    def of(cls, source: CellSource, folder: Path) -> AssignedArray:
        """The array of a source, in a file without a name in this folder."""
        with tempfile.TemporaryFile(dir=folder) as file:
            found: Any = np.memmap.__new__(cls, file, source.dtype, "w+", shape=source.shape)
        found._cells = np.asarray(found)
        found._cells[:] = np.nan if found.dtype.kind == "f" else 0
        source.fill(found._cells)
        found._assign = source.assign
        found.setflags(write=False)
        made: AssignedArray = found
        return made

    def __array_finalize__(self, obj: Any) -> None:
        super().__array_finalize__(obj)
        self._cells = self._assign = None

    def __getitem__(self, index: Any) -> Any:
        """A view that cannot be assigned to, or a copy, as numpy has it; a plain array."""
        return np.asarray(self)[index]

    def __setitem__(self, index: Any, value: Any) -> None:
        """Assign as to any array, and keep the rows that are touched."""
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
    """The arrays of the current model id and experiment under their released names.

    `current_store["grads"][rows] = values` writes through. Names of one's own can be added; they
    stay in this process.
    """

    def __init__(self, saver: MmapSaver) -> None:
        self._saver = saver
        self._made: dict[tuple[object, str], tuple[object, AssignedArray]] = {}
        self._own: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name in self._own:
            return self._own[name]
        if name not in self:
            raise KeyError(name)
        source = source_of(self._saver, name)
        if source is None:
            return None
        key = (self._saver.current_model_id, name)
        # Those of other models are let go of: each may be as large as all gradients of one.
        self._made = {known: made for known, made in self._made.items() if known[0] == key[0]}
        known = self._made.get(key)
        if known is None or known[0] != source.version:
            made = AssignedArray.of(source, self._saver.save_dir)
            self._made[key] = known = (source.version, made)
        return known[1]

    def __setitem__(self, name: str, value: Any) -> None:
        if name not in self._names():
            self._own[name] = value
            return
        array = self[name]
        if array is None or np.shape(value) != array.shape:
            raise AttributionError(
                f"current_store[{name!r}] is kept in the store and cannot be replaced",
                found=f"{type(value).__name__} of shape {np.shape(value)}",
                expected="no model id is loaded" if array is None else f"shape {array.shape}",
                fix=f"assign to its rows: current_store[{name!r}][rows] = values",
            )
        array[:] = value

    def __delitem__(self, name: str) -> None:
        if name in self._names():
            raise AttributionError(
                f"current_store[{name!r}] is kept in the store", fix="del_grads deletes gradients"
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
        """What changed the version of an array is in it already: it need not be made again."""
        known = self._made.get((model_id, name))
        if known is not None and known[0] == before:
            self._made[model_id, name] = (after, known[1])

    def _names(self) -> list[str]:
        found = ["grads", "out_to_loss", "features", "is_featurized"]
        if self._saver.current_model_id is None:
            return found[:3]
        for name in self._saver.experiments:
            found += [f"{name}_grads", f"{name}_scores"]
        return found


def source_of(saver: MmapSaver, name: str) -> CellSource | None:
    """Where an array of the current model id is; None if it was deleted or never begun."""
    model_id = saver.current_model_id
    if model_id is None:
        return None
    model = saver.sets.model(model_id)
    model.refresh()
    match name:
        case "grads":
            deleted = saver.finalized(model_id) and not model.there.any()
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
    """The gradients in a log; `below` fills in what lies under them, and `of` is its version."""

    def fill(cells: Any) -> None:
        if below is not None:
            below(cells)
        there = np.flatnonzero(log.there)
        cells[there] = log.read(there).numpy()

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
    deleted = isinstance(final, RowLog) and not model.there.any()
    weight = final.weight if deleted and isinstance(final, RowLog) else model.weight

    def fill(cells: Any) -> None:
        cells[:, 0] = weight

    def assign(ids: Ids, values: Any) -> None:
        if deleted:
            raise AttributionError(
                "the gradients of this model id were deleted: its weights cannot be changed",
                fix="register_model_id(ID, True) begins it anew",
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
                f"model id {saver.current_model_id} is finalized: its rows stay featurized",
                fix=f"register_model_id({saver.current_model_id}, True) begins it anew",
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
            for ids, part in features_of(saver.train(model_id), final):
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
