"""Loaders: their batches, the ids of those, and whether the two belong together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from gradkeep._arguments import whole_numbers
from gradkeep.capturing._batches import batch_size
from gradkeep.capturing._columns import parse_columns
from gradkeep.capturing._order import LoaderOrder, batches_within, filled_batches, order_of
from gradkeep.capturing._sequences import documents_of, may_pack, sequence_checks, unpacking_for
from gradkeep.errors import CaptureError

if TYPE_CHECKING:
    from torch import nn

    from gradkeep._preview import Preview
    from gradkeep.capturing._columns import ColumnChoice
    from gradkeep.capturing._readiness import Mode
    from gradkeep.capturing._sequences import SequenceChecks, Unpacking
    from gradkeep.capturing.tasks._tasks import Task

Ids = Sequence[int] | np.ndarray[Any, Any] | torch.Tensor | str | int | Callable[[Any], Any]
"""Ids of all samples in order, the key or place of the ids in a batch, or a function of it."""


@dataclass(frozen=True, slots=True, eq=False)
class Batches:
    """All batches of a loader with their ids; can be gone through again and again."""

    loader: Iterable[Any]
    ids: str | int | Callable[[Any], Any] | None
    """Where the ids are in a batch, if they are."""
    listed: np.ndarray[Any, np.dtype[np.int64]] | None
    """The ids of all samples in order, if they were given."""
    num_rows: int | None
    """The number of samples, if the loader knows it."""
    first: Any
    """The first batch, without its ids."""
    order: LoaderOrder | None
    """What every pass is held against; None where ids come with the batches."""
    unpacking: Unpacking | None = None
    """How packed batches are taken apart; None: a pack is one sample."""
    checks: SequenceChecks | None = None
    """What is refused by row before a model sees it."""
    columns: ColumnChoice | None = None
    """What is kept of every row beside what the model is given."""

    def __iter__(self) -> Iterator[tuple[np.ndarray[Any, np.dtype[np.int64]], Any]]:
        """Ids and batches; the first ones are compared with earlier looks before any is given."""
        at = 0
        delivered = filled_batches(self.loader) if self.order is None else self.order.proved()
        for at, own, part in self._rows(delivered, 0):
            yield own, part
            at += len(own)
        if self.columns is not None:
            self.columns.check_all_used(at)

    def between(
        self, start: int, stop: int
    ) -> Iterator[tuple[int, np.ndarray[Any, np.dtype[np.int64]], Any]]:
        """The place, ids and contents of every batch with a row from `start` to `stop`.

        The batches are those of a whole pass. What comes before is not read, where the loader allows.
        """
        at, delivered = (
            batches_within(self.loader, start, stop)
            if self.unpacking is None
            else (0, filled_batches(self.loader))
        )
        for place, own, part in self._rows(delivered, at):
            if place >= stop:
                return
            if place + len(own) > start:
                yield place, own, part

    def _rows(
        self, delivered: Iterable[Any], at: int
    ) -> Iterator[tuple[int, np.ndarray[Any, np.dtype[np.int64]], Any]]:
        """Place, ids and contents of what is delivered from the sample `at` on."""
        for given in delivered:
            batch, ids = _taken_apart(given, self.ids)
            parts = [batch] if self.unpacking is None else self.unpacking.parts(batch)
            sizes = [batch_size(part) for part in parts]
            count = sum(sizes)
            if ids is not None:
                own = checked_ids(ids)
            elif self.listed is not None:
                own = self.listed[at : at + count]
            else:
                own = np.arange(at, at + count)
            if len(own) != count:
                raise CaptureError(
                    "every sample needs an id",
                    found=f"{len(own)} ids for {count} samples",
                    fix="give ids=, one for each sample of the loader, in its order; of packed "
                    "batches, one for each document",
                )
            start = 0
            for part, size in zip(parts, sizes, strict=True):
                if self.checks is not None:
                    self.checks.check(own[start : start + size], part)
                if self.columns is not None:
                    part = self.columns.split(part, at=at + start, rows=size)
                yield at + start, own[start : start + size], part
                start += size
            at += count


def checked_ids(ids: Any) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Ids as int64 `[B]`; an error for what is not whole, which would be cut to another row's id."""
    given = ids.detach().cpu().numpy() if isinstance(ids, torch.Tensor) else ids
    if isinstance(given, np.ndarray):
        given = given.reshape(-1)
    return whole_numbers("ids", given, error=CaptureError)


def batches_of(
    loader: Iterable[Any],
    ids: Ids | None,
    *,
    unpacking: Unpacking | None = None,
    checks: SequenceChecks | None = None,
    columns: ColumnChoice | None = None,
) -> Batches:
    """The batches of a loader, once it is clear that ids and contents belong together.

    Ids by position, or from a list, need the same order in every pass: see `order_of`. Packed
    batches are taken apart, so that rows and ids are those of documents.
    """
    is_loader = isinstance(loader, Iterable) and not isinstance(
        loader, str | bytes | Mapping | torch.Tensor
    )
    if not is_loader or isinstance(loader, Iterator):
        raise CaptureError(
            "a loader that can be gone through only once" if is_loader else "this is no loader",
            found=type(loader).__name__,
            fix="pass the DataLoader itself, or a list of batches",
        )
    is_inside = ids is None or isinstance(ids, str) or type(ids) is int or callable(ids)
    inside: Any = ids if is_inside else None
    listed = None if is_inside else checked_ids(ids)
    order = order_of(loader, by_position=ids is None) if inside is None else None
    rows = order.rows if order is not None else _length(loader)
    _check_nothing_dropped(loader)
    first = order.first if order is not None else next(filled_batches(loader), None)
    if unpacking is not None and isinstance(loader, list | tuple):
        rows = sum(len(documents_of(batch) or ()) or batch_size(batch) for batch in loader)
    elif unpacking is not None and may_pack(first):
        rows = None  # it is not known without reading the data set
    if listed is not None:
        if rows is not None and len(listed) != rows:
            raise CaptureError(
                "every sample needs one id", found=f"{len(listed)} ids for {rows} samples"
            )
        rows = len(listed)
    if first is None:
        raise CaptureError(
            "the loader gave no batch with a sample", fix="check that the data set is not empty"
        )
    whole, own = _taken_apart(first, inside)
    first = whole if unpacking is None else unpacking.parts(whole)[0]
    if checks is not None:
        size = batch_size(first)
        given = listed if own is None else checked_ids(own)
        checks.check(np.arange(size) if given is None else given[:size], first)
    if unpacking is not None:
        unpacking = unpacking.settled(whole)
        first = unpacking.parts(whole)[0]
    if columns is not None:
        if columns.by_order and inside is not None:
            raise CaptureError(
                "columns by order, but rows by the ids that batches bring",
                found=", ".join(columns.by_order),
                fix="have the collate function pass them on, and name them: columns=['text']",
            )
        first = columns.split(first, at=0, rows=batch_size(first))
    return Batches(loader, inside, listed, rows, first, order, unpacking, checks, columns)


def _length(loader: Iterable[Any]) -> int | None:
    """The number of samples of a loader whose order does not matter."""
    if isinstance(loader, list | tuple):
        return sum(batch_size(batch) for batch in loader)
    if not isinstance(loader, DataLoader) or loader.batch_size is None:
        return None  # batches of unknown sizes
    try:
        return len(loader.sampler)  # type: ignore[arg-type]
    except TypeError:
        return None


def _check_nothing_dropped(loader: Iterable[Any]) -> None:
    if not isinstance(loader, DataLoader):
        return
    made = loader.batch_sampler if loader.batch_sampler is not None else loader
    size = getattr(made, "batch_size", None)
    try:
        rows = len(made.sampler)  # type: ignore[arg-type, union-attr]
    except (AttributeError, TypeError):
        return
    if getattr(made, "drop_last", False) and rows % (size or 1):
        raise CaptureError(
            "the loader drops its last samples",
            found=f"drop_last=True with {rows} samples in batches of {size}",
            fix="use drop_last=False",
        )


def _taken_apart(given: Any, ids: Any) -> tuple[Any, Any]:
    """The batch without its ids, and the ids if they are in it."""
    if callable(ids):
        return given, ids(given)
    if ids is None:
        return given, None
    try:
        found = given[ids]
    except (KeyError, IndexError, TypeError) as error:
        raise CaptureError(f"no ids at {ids!r} in the batch", found=type(given).__name__) from error
    if isinstance(given, Mapping):
        return {key: value for key, value in given.items() if key != ids}, found
    at = range(len(given))[int(ids)]
    return tuple(item for place, item in enumerate(given) if place != at), found


def task_batches(
    loader: Iterable[Any],
    model: nn.Module,
    task: Task,
    mode: Mode | None,
    *,
    ids: Ids | None = None,
    columns: Any = None,
    preview: Preview | None = None,
) -> Batches:
    """The batches of a loader as a task takes them: packs taken apart, tokens and labels checked."""
    return batches_of(
        loader,
        ids,
        unpacking=unpacking_for(model, task, mode),
        checks=sequence_checks(model, task),
        columns=parse_columns(columns, preview),
    )
