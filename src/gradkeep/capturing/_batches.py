"""Batches of any nesting: their rows, leaves and digests, and the order in which a loader delivers them.

A row's id is its place, so a loader must deliver the same row at the same place in every pass. Four
things are compared: the sampler's indices, twice and completely; the indices of every delivered batch;
the first batches of every pass; and the data set itself at some of these indices.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import xxhash
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    SequentialSampler,
    TensorDataset,
    default_collate,
)

from gradkeep.errors import CaptureError

if TYPE_CHECKING:
    Ids = np.ndarray[Any, np.dtype[np.int64]]
    Digests = np.ndarray[Any, np.dtype[np.uint64]]

_ROWS = 16
"""Number of rows, and of batches, to compare if rows do not depend on the others of their batch."""


def batch_size(batch: Any) -> int:
    """Return the number of samples: the length of the first tensor in the batch.

    >>> batch_size({"input_ids": torch.zeros(3, 7), "labels": torch.zeros(3)})
    3
    """
    first = batch
    while isinstance(first, tuple | list) and first:
        first = first[0]  # the usual case; this runs many times per batch
    if isinstance(first, torch.Tensor) and first.ndim:
        return len(first)
    for leaf in leaves(batch):
        if isinstance(leaf, torch.Tensor | np.ndarray) and leaf.ndim:
            return len(leaf)
    raise CaptureError(
        "a batch must hold a tensor",
        code="capture.batch_without_tensor",
        found=type(batch).__name__,
        expected="a tensor, or a tuple, list or dict of tensors with one row per sample",
    )


def to_device(batch: Any, device: torch.device) -> Any:
    """Copy the batch with its tensors on the device; numpy arrays become tensors.

    A copy, because a model may write into its inputs and a loader may refill its buffers.
    """

    def move(leaf: Any) -> Any:
        if isinstance(leaf, np.ndarray) and leaf.dtype.kind in "biuf":
            leaf = torch.from_numpy(leaf)
        return _own(leaf, device) if isinstance(leaf, torch.Tensor) else leaf

    return map_leaves(batch, move)


def copied(batch: Any) -> Any:
    """Copy all tensors and arrays of a batch."""

    def copy(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return _own(leaf, leaf.device)
        return leaf.copy() if isinstance(leaf, np.ndarray) else leaf

    return map_leaves(batch, copy)


def _own(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    return tensor.detach().to(device, copy=True).requires_grad_(tensor.requires_grad)


def rows_of(batch: Any, start: int, stop: int) -> Any:
    """Return samples `start` to `stop`; leaves without one row per sample stay whole."""
    count = batch_size(batch)

    def cut(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor | np.ndarray) and leaf.ndim and len(leaf) == count:
            return leaf[start:stop]
        return leaf

    return map_leaves(
        batch, cut, listed=lambda items: items[start:stop] if len(items) == count else items
    )


def chosen_rows(batch: Any, rows: np.ndarray[Any, Any]) -> Any:
    """Return these samples of a batch in which every tensor has one row per sample."""
    return map_leaves(
        batch,
        lambda leaf: leaf[rows] if isinstance(leaf, torch.Tensor | np.ndarray) else leaf,
        listed=lambda items: [items[row] for row in rows],
    )


def digests(batch: Any) -> Digests:
    """Return a fingerprint `[B]` of each sample, to notice changed or reordered data.

    It hashes the sample's bytes in every tensor and array that has a row for it, and its entries in
    lists of texts or numbers. Cost: reading the batch once.
    """
    count = batch_size(batch)
    parts_of_batch: list[Any] = []
    map_leaves(batch, parts_of_batch.append, listed=parts_of_batch.append)
    arrays: list[np.ndarray[Any, Any]] = []
    lists: list[Any] = []
    for leaf in parts_of_batch:
        if isinstance(leaf, torch.Tensor) and not leaf.is_sparse:
            values = leaf.detach().cpu().resolve_conj().resolve_neg()
            leaf = (values.view(torch.int16) if values.dtype == torch.bfloat16 else values).numpy()
        if isinstance(leaf, np.ndarray) and leaf.ndim and len(leaf) == count:
            if leaf.dtype.hasobject:
                lists.append(leaf.tolist())
            elif leaf.size:
                arrays.append(np.ascontiguousarray(leaf).reshape(count, -1).view(np.uint8))
        elif isinstance(leaf, list | tuple) and len(leaf) == count:
            lists.append(leaf)
    # Up to 4 KiB per sample, joining its parts is cheaper than hashing them one by one.
    if sum(part.shape[1] for part in arrays) <= 4096:
        arrays = [np.concatenate(arrays, 1)] if len(arrays) > 1 else arrays
    parts = [(part.reshape(-1).data, part.shape[1]) for part in arrays]
    if len(parts) == 1 and not lists:
        ((whole, width),) = parts
        samples = (whole[at : at + width] for at in range(0, count * width, width))
        return np.fromiter(map(xxhash.xxh3_64_intdigest, samples), np.uint64, count)
    return np.array([_digest(parts, lists, row) for row in range(count)], np.uint64)


def _digest(parts: list[tuple[memoryview, int]], lists: list[Any], row: int) -> int:
    digest = xxhash.xxh3_64()
    for whole, width in parts:
        digest.update(whole[row * width : (row + 1) * width])
    for items in lists:
        digest.update(repr(items[row]).encode("utf-8", "surrogatepass"))
    return digest.intdigest()


def leaves(batch: Any) -> list[Any]:
    """Return the tensors, arrays and other leaves of a batch, however it is nested."""
    items: list[Any] = []
    map_leaves(batch, items.append)
    return items


def map_leaves(
    batch: Any, change: Callable[[Any], Any], *, listed: Callable[[Any], Any] = lambda items: items
) -> Any:
    """Apply `change` to every leaf, and `listed` to every list of texts or numbers."""

    def inner(item: Any) -> Any:
        return map_leaves(item, change, listed=listed)

    if isinstance(batch, Mapping):
        # Hugging Face batches have their own constructor; a dict works as well.
        return {name: inner(item) for name, item in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*map(inner, batch))
    if isinstance(batch, tuple | list):
        if batch and not any(_is_part(item) for item in batch):
            return listed(batch)
        return type(batch)(map(inner, batch))
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        names = [part.name for part in dataclasses.fields(batch)]
        return dataclasses.replace(batch, **{name: inner(getattr(batch, name)) for name in names})
    return change(batch)


def _is_part(item: Any) -> bool:
    return isinstance(item, torch.Tensor | np.ndarray | Mapping | tuple | list)


def format_ids(ids: Any) -> str:
    """Format some ids for a message."""
    text = ", ".join(str(number) for number in np.asarray(ids)[:8].tolist())
    return text + (" ..." if len(ids) > 8 else "")


def iter_batches(loader: Iterable[Any], places: Sequence[Any] | None = None) -> Iterator[Any]:
    """Iterate over the batches of one pass that have a sample.

    With `places`, the sampler's indices of an earlier pass, raise if this pass has others.
    Cost: comparing integers, and copying the batches of loaders that may reuse their memory.
    """
    if isinstance(loader, DataLoader) and _is_sliced(loader):
        iter(loader)  # as a pass of the loader, draw a random number
        delivered: Iterator[Any] = _slices(loader)
    elif places is not None and _can_replace_sampler(loader):
        indices = _indices(loader) or []
        _check_places(_flat(indices), places)
        delivered = iter(_with_indices(loader, indices))
    else:
        delivered = iter(loader)
    return _nonempty(loader, delivered)


def _nonempty(loader: Iterable[Any], delivered: Iterable[Any]) -> Iterator[Any]:
    """Skip empty batches, and copy batches whose memory the loader may reuse.

    Loaders that map or pin memory refill the same tensors, and so may a collate function.
    """
    torch_own = type(loader) is DataLoader and collates_by_row(loader)
    own = torch_own or type(loader) in (list, tuple)
    filled = (batch for batch in delivered if batch_size(batch))
    return filled if own else map(copied, filled)


def batches_within(loader: Iterable[Any], start: int, stop: int) -> tuple[int, Iterator[Any]]:
    """Return the place of the first sample of the batch with `start`, and the batches up to `stop`.

    Other batches are not read if the loader is a list, or a torch DataLoader with a map-style data set;
    else the whole pass begins at 0.
    """
    if isinstance(loader, list | tuple):
        filled = [batch for batch in loader if batch_size(batch)]
        first, last, at = _among([batch_size(batch) for batch in filled], start, stop)
        return at, iter(filled[first:last])
    if isinstance(loader, DataLoader) and _is_sliced(loader):
        size = loader.batch_sampler.batch_size  # type: ignore[union-attr]
        return start // size * size, _slices(loader, start // size * size, stop)
    own: Any = loader
    if _can_replace_sampler(loader) and own.batch_sampler is not None:
        indices = [list(batch_indices(batch)) for batch in own.batch_sampler]
        first, last, at = _among([len(batch) for batch in indices], start, stop)
        return at, _nonempty(loader, _with_indices(loader, indices[first:last]))
    return 0, iter_batches(loader)


def _among(sizes: Sequence[int], start: int, stop: int) -> tuple[int, int, int]:
    """Return the range of batches with samples of `[start, stop)`, and the place of the first one."""
    ends = np.cumsum(sizes)
    first = int(np.searchsorted(ends, start, side="right"))
    last = int(np.searchsorted(ends, stop, side="left")) + 1
    return first, last, int(ends[first - 1]) if first else 0


def batch_indices(batch: Any) -> list[Any]:
    """Return a sampler's indices of one batch as a list."""
    if isinstance(batch, list):
        return batch
    if isinstance(batch, torch.Tensor | np.ndarray):
        return [batch.item()] if batch.ndim == 0 else batch.tolist()
    return list(batch) if isinstance(batch, Iterable) and not isinstance(batch, str) else [batch]


def is_sequential(loader: Any) -> bool:
    """Return True if the sampler is torch's own and yields 0, 1, 2 ..."""
    batch_sampler = loader.batch_sampler
    sampler = batch_sampler.sampler if type(batch_sampler) is BatchSampler else loader.sampler
    own = batch_sampler is None or type(batch_sampler) is BatchSampler
    return own and type(sampler) is SequentialSampler and sampler.data_source is loader.dataset


def collates_by_row(loader: Any) -> bool:
    """Return True if a row of a batch does not depend on the other rows."""
    return loader.batch_sampler is not None and loader.collate_fn is default_collate


def shuffled_error(order: str = "another order in a second pass") -> CaptureError:
    """The error for a loader without an order."""
    return CaptureError(
        "the loader shuffles, so a sample would have another id in every run",
        code="capture.shuffled_loader",
        found=order,
        fix="Use shuffle=False, or return ids with the rows and pass ids=, their key or index.",
    )


def _can_replace_sampler(loader: Any) -> bool:
    """Return True if batches arrive in the order in which the loader reads its sampler."""
    return (
        type(loader) is DataLoader
        and not isinstance(loader.dataset, IterableDataset)
        and not loader.persistent_workers  # their iterator belongs to the loader
        and getattr(loader, "in_order", True)
    )


def _with_indices(loader: Any, indices: list[Any]) -> Any:
    """Return the loader with these indices; a copy, since its sampler cannot be replaced."""
    own = copy.copy(loader)
    own.__dict__["sampler" if loader.batch_sampler is None else "batch_sampler"] = indices
    return own


def _check_places(indices: Sequence[Any], places: Sequence[Any]) -> None:
    if indices != places:
        pairs = enumerate(itertools.zip_longest(indices, places))
        at, (now, before) = next(pair for pair in pairs if pair[1][0] != pair[1][1])
        raise shuffled_error(f"row {now} at place {at}, where an earlier pass had {before}")


def _is_sliced(loader: Any) -> bool:
    """Return True if the batches are consecutive slices of tensors, by torch's own classes alone."""
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
    """Yield the loader's batches as slices, without building single samples.

    Building them can cost more than a small model. Slices are copies, as the loader's batches are.
    """
    data, sampler = loader.dataset, loader.batch_sampler
    stop = len(data) - len(data) % sampler.batch_size if sampler.drop_last else len(data)
    for start in range(first, stop if last is None else min(stop, last), sampler.batch_size):
        end = min(start + sampler.batch_size, stop)
        yield [
            part[start:end].clone(memory_format=torch.contiguous_format) for part in data.tensors
        ]


@dataclass(frozen=True, slots=True, eq=False)
class LoaderOrder:
    """Reference that passes of a loader are compared with."""

    loader: Iterable[Any]
    rows: int | None
    """Number of samples, if known."""
    first: Any
    """The first batch."""
    first_digests: tuple[Digests, ...]
    """Fingerprints of the first batches."""
    compared: dict[int, Any]
    """The sampler's indices of batches that are compared with the data set, by number."""
    places: Sequence[Any] | None
    """The sampler's indices of all samples; None if there are none, or not always the same."""

    def iter_checked(self) -> Iterator[Any]:
        """Iterate over the batches of a pass; raise before the first one if it begins differently."""
        delivered = iter_batches(self.loader, self.places)
        begin = list(itertools.islice(delivered, len(self.first_digests)))
        for before, batch in zip(self.first_digests, begin, strict=False):
            contents = digests(batch)
            if not np.array_equal(before, contents):
                raise self._order_error(before, contents, batch)
        place = 0
        for number, batch in enumerate(itertools.chain(begin, delivered)):
            if number in self.compared:
                self._compare(self.compared[number], batch, place)
            yield batch
            place += batch_size(batch)

    def _compare(self, indices: Any, batch: Any, place: int) -> None:
        rows = np.arange(batch_size(batch))
        if collates_by_row(self.loader) and len(rows) == len(indices):
            rows = np.unique(np.linspace(0, len(rows) - 1, _ROWS).round().astype(int))
            indices = [indices[row] for row in rows]
            batch = chosen_rows(batch, rows)
        delivered, own = digests(batch), digests(_fetch(self.loader, indices))
        if np.array_equal(delivered, own):
            return
        if _is_augmented(self.loader, indices):
            raise _augmentation_error()
        wrong = rows if len(own) != len(delivered) else rows[delivered != own]
        raise CaptureError(
            "the loader delivers other contents than its data set has at these indices",
            code="capture.loader_differs",
            found=f"other contents at {format_ids(place + wrong)}",
            fix="Use a plain DataLoader with shuffle=False, or pass ids=, one for each row in order.",
        )

    def _order_error(self, before: Digests, after: Digests, batch: Any) -> CaptureError:
        if len(after) == len(before) and bool((np.isin(after, before) & (after != before)).any()):
            return shuffled_error()  # the same rows at other places
        if self.compared:
            return _augmentation_error()  # the sampler's indices are the same in every pass
        indexed = _indices(self.loader)
        random = (
            _is_augmented(self.loader, indexed[0]) if indexed else _same_labels(self.first, batch)
        )
        return _augmentation_error() if random else shuffled_error()


def find_order(loader: Iterable[Any], *, by_position: bool) -> LoaderOrder:
    """Find the order of a loader; raise if it has none, or not the one that ids by position need.

    Cost: iterating over the sampler twice, which reads no data, and reading the first batches once.
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
            _check_places(_flat(_indices(loader) or []), places)
        rows = len(places) if loader.batch_sampler is not None else None
        if by_position:
            if places != list(range(len(places))):
                at = next(place for place, index in enumerate(places) if index != place)
                raise CaptureError(
                    "ids by position would not be the data set's indices",
                    code="capture.sampler_order",
                    found=f"a sampler with index {places[at]} at place {at}",
                    fix="Pass ids=list(loader.sampler), or the indices of its batch_sampler; or shuffle=False.",
                )
            filled = [batch for batch in indices if batch_indices(batch)]
            # Fewer of long loaders, whose samplers have more indices to compare.
            most = 8 if len(filled) <= 32 else 4
            most = _ROWS if collates_by_row(loader) else most
            numbers = np.linspace(0, len(filled) - 1, min(len(filled), most))
            compared = {int(number): filled[int(number)] for number in numbers.round()}
    # Every pass must begin with the same two batches.
    begin = list(itertools.islice(iter_batches(loader), 2))
    is_fixed = type(loader) in (list, tuple)  # cannot change between passes
    return LoaderOrder(
        loader=loader,
        rows=rows,
        first=begin[0] if begin else None,
        first_digests=() if is_fixed else tuple(digests(batch) for batch in begin),
        compared=compared,
        places=places,
    )


def _indices(loader: Iterable[Any]) -> list[Any] | None:
    """Return the sampler's indices batch by batch; None without a map-style data set."""
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return None
    sampler = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    try:
        most = len(sampler)  # type: ignore[arg-type]
    except TypeError:
        return None
    return list(itertools.islice(sampler, most + 1))


def _flat(indices: list[Any]) -> list[Any]:
    return [place for batch in indices for place in batch_indices(batch)]


def _fetch(loader: Any, indices: Any) -> Any:
    """Read the samples of one batch from the data set, and collate them as the loader does."""
    if loader.batch_sampler is None:
        return loader.collate_fn(loader.dataset[indices])
    if hasattr(loader.dataset, "__getitems__"):
        return loader.collate_fn(loader.dataset.__getitems__(indices))
    return loader.collate_fn([loader.dataset[at] for at in indices])


def _is_augmented(loader: Any, indices: Any) -> bool:
    """Return True if reading the same samples twice gives different contents."""
    first, second = (digests(_fetch(loader, indices)) for _ in range(2))
    return not np.array_equal(first, second)


def _same_labels(one: Any, other: Any) -> bool:
    """Return True if the integers of two batches are equal, and differ between rows."""
    pairs = zip(leaves(one), leaves(other), strict=False)
    tensors = [(a, b) for a, b in pairs if isinstance(a, torch.Tensor) and a.ndim == 1]
    labels = [(a, b) for a, b in tensors if not a.dtype.is_floating_point]
    return bool(labels) and all(torch.equal(a, b) and bool((a != a[0]).any()) for a, b in labels)


def _augmentation_error() -> CaptureError:
    return CaptureError(
        "the data changes each time it is read, as with random augmentation",
        code="capture.random_augmentation",
        fix="Capture the data set with the transforms of evaluation.",
    )
