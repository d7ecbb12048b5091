"""Order of a loader: one pass over its batches, and whether every pass delivers the same rows.

A row's id is its place, so a loader must deliver the same row at the same place in every pass. Four
things are compared: the sampler's indices, twice and to the end; the indices of every batch as it is
delivered; the first batches of every pass; and the data set itself at these places.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    SequentialSampler,
    TensorDataset,
    default_collate,
)

from gradkeep.capturing._batches import batch_size, chosen_rows, copied, digests, leaves
from gradkeep.capturing._resume import named
from gradkeep.errors import CaptureError


def filled_batches(loader: Iterable[Any], places: Sequence[Any] | None = None) -> Iterator[Any]:
    """The batches of one pass that have a sample.

    With `places`, what the sampler said of all samples when it was asked before, a pass raises at the
    first batch of which it says something else. Cost: comparing whole numbers, and a copy of every
    batch of a loader that may fill the same memory again.
    """
    if isinstance(loader, DataLoader) and _is_sliced(loader):
        iter(loader)  # it draws a random number
        delivered: Iterator[Any] = _slices(loader)
    elif places is not None and _can_be_watched(loader):
        delivered = _watched(loader, places)
    else:
        delivered = iter(loader)
    return _filled(loader, delivered)


def _filled(loader: Iterable[Any], delivered: Iterable[Any]) -> Iterator[Any]:
    """Those with a sample, which stay as they are when the next one comes.

    Loaders that map or pin memory fill the same tensors again, and so may a collate function.
    """
    torch_own = type(loader) is DataLoader and collates_by_row(loader)
    own = torch_own or type(loader) in (list, tuple)
    filled = (batch for batch in delivered if batch_size(batch))
    return filled if own else map(copied, filled)


def batches_within(loader: Iterable[Any], start: int, stop: int) -> tuple[int, Iterator[Any]]:
    """Batches that hold the samples `start` to `stop`, and the place of the first one's first sample.

    What comes before and after is not read where the loader is a list, or one of torch's own with a
    data set that can be looked into; else the whole pass begins at 0.
    """
    if isinstance(loader, list | tuple):
        filled = [batch for batch in loader if batch_size(batch)]
        first, last, at = _among([batch_size(batch) for batch in filled], start, stop)
        return at, iter(filled[first:last])
    if isinstance(loader, DataLoader) and _is_sliced(loader):
        size = loader.batch_sampler.batch_size  # type: ignore[union-attr]
        return start // size * size, _slices(loader, start // size * size, stop)
    if _can_be_watched(loader):
        made: Any = loader
        if made.batch_sampler is not None:
            said = [list(said_places(batch)) for batch in made.batch_sampler]
            first, last, at = _among([len(batch) for batch in said], start, stop)
            own = copy.copy(made)  # as `_watched` does
            own.__dict__["batch_sampler"] = said[first:last]
            return at, _filled(loader, own)
    return 0, filled_batches(loader)


def _among(sizes: Sequence[int], start: int, stop: int) -> tuple[int, int, int]:
    """The first batch with a sample of `[start, stop)`, the one after the last, and where it begins."""
    ends = np.cumsum(sizes)
    first = int(np.searchsorted(ends, start, side="right"))
    last = int(np.searchsorted(ends, stop, side="left")) + 1
    return first, last, int(ends[first - 1]) if first else 0


def said_places(batch: Any) -> list[Any]:
    """What a sampler says of one batch, as a list."""
    if isinstance(batch, list):
        return batch
    if isinstance(batch, torch.Tensor | np.ndarray):
        return [batch.item()] if batch.ndim == 0 else batch.tolist()
    return list(batch) if isinstance(batch, Iterable) and not isinstance(batch, str) else [batch]


def is_sequential(loader: Any) -> bool:
    """Whether the sampler is one of torch's own that cannot but say 0, 1, 2 ..."""
    made = loader.batch_sampler
    sampler = made.sampler if type(made) is BatchSampler else loader.sampler
    own = made is None or type(made) is BatchSampler
    return own and type(sampler) is SequentialSampler and sampler.data_source is loader.dataset


def collates_by_row(loader: Any) -> bool:
    """Whether a row of a batch is the same whichever others are in it."""
    return loader.batch_sampler is not None and loader.collate_fn is default_collate


def shuffled(found: str = "another order in a second pass") -> CaptureError:
    """The error for a loader without an order."""
    return CaptureError(
        "the loader shuffles: a sample would have another id in every run",
        found=found,
        fix="use a DataLoader with shuffle=False, or have the dataset give ids and pass ids=, the key "
        "or place of them in a batch",
    )


class _Watched:
    """A sampler that notes what it said."""

    def __init__(self, sampler: Any) -> None:
        self._sampler = sampler
        self.said: list[Any] = []

    def __iter__(self) -> Iterator[Any]:
        for batch in self._sampler:
            self.said.append(batch)
            yield batch

    def __len__(self) -> int:
        return len(self._sampler)


def _can_be_watched(loader: Any) -> bool:
    """Whether batches come in the order in which torch's own loader asks a sampler for them."""
    return (
        type(loader) is DataLoader
        and not isinstance(loader.dataset, IterableDataset)
        and not loader.persistent_workers  # their iterator belongs to the loader itself
        and getattr(loader, "in_order", True)
    )


def _watched(loader: Any, places: Sequence[Any]) -> Iterator[Any]:
    # A loader's sampler cannot be set; that of a copy can, and all else is shared.
    own = copy.copy(loader)
    name = "sampler" if loader.batch_sampler is None else "batch_sampler"
    watched = own.__dict__[name] = _Watched(getattr(loader, name))
    at = 0
    for number, batch in enumerate(own):
        said = said_places(watched.said[number])
        expected = list(places[at : at + len(said)])
        if said != expected:
            pairs = zip(said, [*expected, *[None] * len(said)], strict=False)
            wrong = next(place for place, (one, other) in enumerate(pairs) if one != other)
            raise shuffled(
                f"row {said[wrong]} at place {at + wrong}, where an earlier pass had another; rows "
                "before it were kept rightly"
            )
        at += len(said)
        yield batch


def _is_sliced(loader: Any) -> bool:
    """Whether the batches are slices of tensors, one after the other, by torch's own classes alone."""
    data = loader.dataset
    return (
        type(loader) is DataLoader
        and type(data) is TensorDataset
        and type(loader.batch_sampler) is BatchSampler
        and is_sequential(loader)
        and loader.collate_fn is default_collate
        and loader.num_workers == 0
        and not loader.pin_memory
        and all(type(part) is torch.Tensor for part in data.tensors)
        and all(part.layout is torch.strided for part in data.tensors)
        and not any(part.requires_grad for part in data.tensors)
    )


def _slices(loader: Any, first: int = 0, last: int | None = None) -> Iterator[list[torch.Tensor]]:
    """The loader's batches without making each of their samples, which can cost more than a model.

    They are copies, as the loader's are.
    """
    data, made = loader.dataset, loader.batch_sampler
    stop = len(data) - len(data) % made.batch_size if made.drop_last else len(data)
    for start in range(first, stop if last is None else min(stop, last), made.batch_size):
        end = min(start + made.batch_size, stop)
        yield [
            part[start:end].clone(memory_format=torch.contiguous_format) for part in data.tensors
        ]


_ROWS = 16
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
        places = _flat(indices)
        if not is_sequential(loader):
            again = _indices(loader) or []
            if len(again) != len(indices) or _flat(again) != places:
                raise shuffled()
        rows = len(places) if loader.batch_sampler is not None else None
        if by_position:
            if places != list(range(len(places))):
                at = next(place for place, index in enumerate(places) if index != place)
                raise CaptureError(
                    "the sampler's order is the same in every pass, but it is not the data set's "
                    "order: ids by position would not be the data set's indices",
                    found=f"index {places[at]} at place {at}",
                    fix="pass ids=list(loader.sampler), or with a batch sampler ids=[i for batch in "
                    "loader.batch_sampler for i in batch], to keep every row under its index; or "
                    "use shuffle=False",
                )
            filled = [batch for batch in indices if said_places(batch)]
            # Fewer of many, where the sampler has more to contradict itself in.
            most = 8 if len(filled) <= 32 else 4
            most = _ROWS if collates_by_row(loader) else most
            numbers = np.linspace(0, len(filled) - 1, min(len(filled), most))
            compared = {int(number): filled[int(number)] for number in numbers.round()}
    try:
        delivered = filled_batches(loader)
    except TypeError as error:
        raise CaptureError(
            "the loader gives no batches", found=type(loader).__name__, expected=str(error)
        ) from None
    # Batches at the beginning of which every pass must be the same.
    begin = list(itertools.islice(delivered, 2))
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
    return [place for batch in indices for place in said_places(batch)]


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
    tensors = [(a, b) for a, b in pairs if isinstance(a, torch.Tensor) and a.ndim == 1]
    labels = [(a, b) for a, b in tensors if not a.dtype.is_floating_point]
    return bool(labels) and all(torch.equal(a, b) and bool((a != a[0]).any()) for a, b in labels)


def _augmented() -> CaptureError:
    return CaptureError(
        "the data changes each time it is read: random augmentation in the data set or in its "
        "collate function",
        fix="capture the data set with the transforms of evaluation",
    )
