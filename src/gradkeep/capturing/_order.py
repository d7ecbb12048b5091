"""Whether a loader goes through its samples in one order, found out from what it delivers.

A row's id is its place, so a loader must deliver the same row at the same place in every pass. Four
things are held against each other: what the sampler says, twice and to its end; what it says of every
batch as that is delivered; what the loader delivers at first, in every pass; and what the data set
itself holds at these places, in batches from the first to the last.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset

from gradkeep.capturing._batches import batch_size, chosen_rows, digests, leaves
from gradkeep.capturing._fingerprints import named
from gradkeep.capturing._reading import (
    collates_by_row,
    filled_batches,
    is_sequential,
    said_places,
    shuffled,
)
from gradkeep.errors import CaptureError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

_LOOKED_AT = 2
"""Batches at the beginning of which every pass must be the same."""
_COMPARED, _FEW = 8, 4
"""Batches, from the first to the last, that are compared with the data set's own contents: fewer of
many, where the sampler has more to contradict itself in."""
_BATCHES, _ROWS = 16, 16
"""Where rows can be compared without the others of their batch: so many of so many batches."""


@dataclass(frozen=True, slots=True, eq=False)
class LoaderOrder:
    """What a loader's passes are held against."""

    loader: Iterable[Any]
    rows: int | None
    """The number of samples, if it is known."""
    first: Any
    """The first batch."""
    looked_at: tuple[np.ndarray[Any, np.dtype[np.uint64]], ...]
    """The fingerprints of the first batches."""
    compared: dict[int, Any]
    """The sampler's own words for the batches that are compared with the data set, by number."""
    places: Sequence[Any] | None
    """What the sampler says of all samples; None where there is none, or not always the same."""

    def proved(self) -> Iterator[Any]:
        """The batches of a pass; raises before the first one if it begins otherwise than before."""
        delivered = filled_batches(self.loader, self.places)
        begin = list(itertools.islice(delivered, len(self.looked_at)))
        for before, batch in zip(self.looked_at, begin, strict=False):
            found = digests(batch)
            if not np.array_equal(before, found):
                raise self._unsteady(before, found, batch)
        place = 0
        for number, batch in enumerate(itertools.chain(begin, delivered)):
            if number in self.compared:
                self._compare(self.compared[number], batch, place)
            yield batch
            place += batch_size(batch)

    def _compare(self, wanted: Any, batch: Any, place: int) -> None:
        rows = np.arange(batch_size(batch))
        if collates_by_row(self.loader) and len(rows) == len(wanted):
            rows = np.unique(np.linspace(0, len(rows) - 1, _ROWS).round().astype(int))
            wanted = [wanted[row] for row in rows]
            batch = chosen_rows(batch, rows)
        found, own = digests(batch), digests(_fetched(self.loader, wanted))
        if np.array_equal(found, own):
            return
        if _is_random(self.loader, wanted):
            raise _augmented()
        wrong = rows if len(own) != len(found) else rows[found != own]
        raise CaptureError(
            "the loader delivers other contents than its data set holds at these places",
            found=f"{type(self.loader).__name__} with others at {named(place + wrong)}",
            expected="row i of the data set at place i",
            fix="use a plain DataLoader with shuffle=False; or pass ids=, one for each delivered "
            "sample in order. If rows were kept already, use another name= or delete the capture",
        )

    def _unsteady(
        self,
        before: np.ndarray[Any, np.dtype[np.uint64]],
        found: np.ndarray[Any, np.dtype[np.uint64]],
        batch: Any,
    ) -> CaptureError:
        if len(found) == len(before) and bool((np.isin(found, before) & (found != before)).any()):
            return shuffled()  # rows of then, at other places
        if self.compared:
            return _augmented()  # the sampler says the same in every pass
        indexed = _indices(self.loader)
        random = _is_random(self.loader, indexed[0]) if indexed else _same_labels(self.first, batch)
        return _augmented() if random else shuffled()


def order_of(loader: Iterable[Any], *, by_position: bool) -> LoaderOrder:
    """The order of a loader; an error if there is none, or not the one that ids by position need.

    Cost: going through the sampler twice, which reads no data, and the first batches once.
    """
    indices = _indices(loader)
    compared: dict[int, Any] = {}
    places: Sequence[Any] | None = None
    rows: int | None = None
    if isinstance(loader, list | tuple):
        rows = sum(batch_size(batch) for batch in loader)
    if indices is not None and isinstance(loader, DataLoader):
        if not is_sequential(loader) and not _equal(indices, _indices(loader)):
            raise shuffled()
        places = _flat(indices)
        rows = len(places) if loader.batch_sampler is not None else None
        if by_position:
            if places != list(range(len(places))):
                raise _reordered(places)
            told = [batch for batch in indices if said_places(batch)]
            most = _COMPARED if len(told) <= 4 * _COMPARED else _FEW
            most = _BATCHES if collates_by_row(loader) else most
            numbers = np.linspace(0, len(told) - 1, min(len(told), most))
            compared = {int(number): told[int(number)] for number in numbers.round()}
    try:
        delivered = filled_batches(loader)
    except TypeError as error:
        raise CaptureError(
            "the loader gives no batches", found=type(loader).__name__, expected=str(error)
        ) from None
    begin = list(itertools.islice(delivered, _LOOKED_AT))
    steady = type(loader) in (list, tuple)  # it cannot change between passes
    return LoaderOrder(
        loader=loader,
        rows=rows,
        first=begin[0] if begin else None,
        looked_at=() if steady else tuple(digests(batch) for batch in begin),
        compared=compared,
        places=places,
    )


def _indices(loader: Iterable[Any]) -> list[Any] | None:
    """What the sampler says, batch by batch; None where there is no data set to look things up in."""
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return None
    said = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    try:
        most = len(said)  # type: ignore[arg-type]
    except TypeError:
        return None
    return list(itertools.islice(said, most + 1))


def _flat(indices: list[Any]) -> list[Any]:
    found: list[Any] = []
    for batch in indices:
        found += said_places(batch)
    return found


def _equal(one: list[Any], other: list[Any] | None) -> bool:
    return other is not None and _flat(one) == _flat(other) and len(one) == len(other)


def _fetched(loader: Any, wanted: Any) -> Any:
    """What the data set holds at the places of one batch, as the loader would put it together."""
    if loader.batch_sampler is None:
        return loader.collate_fn(loader.dataset[wanted])
    if hasattr(loader.dataset, "__getitems__"):
        return loader.collate_fn(loader.dataset.__getitems__(wanted))
    return loader.collate_fn([loader.dataset[at] for at in wanted])


def _is_random(loader: Any, wanted: Any) -> bool:
    """Whether the data set gives other contents each time it is asked for the same."""
    return not np.array_equal(digests(_fetched(loader, wanted)), digests(_fetched(loader, wanted)))


def _same_labels(one: Any, other: Any) -> bool:
    """Whether the whole numbers of two batches are the same, and tell rows apart."""
    pairs = zip(leaves(one), leaves(other), strict=False)
    labels = [
        (a, b)
        for a, b in pairs
        if isinstance(a, torch.Tensor) and not a.dtype.is_floating_point and a.ndim == 1
    ]
    return bool(labels) and all(
        a.shape == b.shape and torch.equal(a, b) and bool((a != a[0]).any()) for a, b in labels
    )


def _augmented() -> CaptureError:
    return CaptureError(
        "the data changes each time it is read: random augmentation in the data set or in its "
        "collate function",
        found="other contents when the same samples are read a second time",
        expected="the same contents behind every id, so that a run can be resumed and proved",
        fix="capture the data set with the transforms of evaluation",
    )


def _reordered(flat: list[Any]) -> CaptureError:
    at = next(place for place, index in enumerate(flat) if index != place)
    return CaptureError(
        "the sampler's order is the same in every pass, but it is not the data set's order: ids by "
        "position would not be the data set's indices",
        found=f"index {flat[at]} at place {at}",
        expected="0, 1, 2 ...",
        fix="pass ids=list(loader.sampler), or with a batch sampler "
        "ids=[i for batch in loader.batch_sampler for i in batch], to keep every row under its "
        "index; or use shuffle=False",
    )
