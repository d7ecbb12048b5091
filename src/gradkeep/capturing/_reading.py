"""Reading a loader: one pass over its batches, with the sampler's words watched as they are used."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence
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

from gradkeep.capturing._batches import batch_size, copied
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
