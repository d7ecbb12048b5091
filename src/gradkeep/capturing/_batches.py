"""Batches of any shape: their rows and their digests."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
import xxhash

from gradkeep.errors import CaptureError


def batch_size(batch: Any) -> int:
    """The number of samples: the length of the first tensor in the batch.

    >>> batch_size({"input_ids": torch.zeros(3, 7), "labels": torch.zeros(3)})
    3
    """
    first = batch
    while isinstance(first, tuple | list) and first:
        first = first[0]  # nearly always it is here: this is asked of every batch, many times
    if isinstance(first, torch.Tensor) and first.ndim:
        return len(first)
    for leaf in leaves(batch):
        if isinstance(leaf, torch.Tensor | np.ndarray) and leaf.ndim:
            return len(leaf)
    raise CaptureError(
        "a batch without any tensor",
        found=type(batch).__name__,
        expected="a tensor, or a tuple, list or dict of tensors with one row per sample",
    )


def to_device(batch: Any, device: torch.device) -> Any:
    """A copy of the batch with its tensors on the device; numpy arrays become tensors.

    A model may write into what it is given, and a loader fill it anew: neither may change the other's.
    """

    def move(leaf: Any) -> Any:
        if isinstance(leaf, np.ndarray) and leaf.dtype.kind in "biuf":
            leaf = torch.from_numpy(leaf)
        return _own(leaf, device) if isinstance(leaf, torch.Tensor) else leaf

    return _mapped(batch, move)


def copied(batch: Any) -> Any:
    """The batch in memory of its own."""

    def copy(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return _own(leaf, leaf.device)
        return leaf.copy() if isinstance(leaf, np.ndarray) else leaf

    return _mapped(batch, copy)


def _own(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    return tensor.detach().to(device, copy=True).requires_grad_(tensor.requires_grad)


def rows_of(batch: Any, start: int, stop: int) -> Any:
    """Samples `start` to `stop` of the batch; what has not one row per sample is kept whole."""
    count = batch_size(batch)

    def cut(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor | np.ndarray) and leaf.ndim and len(leaf) == count:
            return leaf[start:stop]
        return leaf

    return _mapped(
        batch, cut, listed=lambda items: items[start:stop] if len(items) == count else items
    )


def chosen_rows(batch: Any, rows: np.ndarray[Any, Any]) -> Any:
    """These samples of a batch of which every tensor has one row per sample."""

    def taken(leaf: Any) -> Any:
        return leaf[rows] if isinstance(leaf, torch.Tensor | np.ndarray) else leaf

    return _mapped(batch, taken, listed=lambda items: [items[row] for row in rows])


def digests(batch: Any) -> np.ndarray[Any, np.dtype[np.uint64]]:
    """A fingerprint `[B]` of each sample, by which changed or reordered data is noticed.

    It is the hash of the sample's bytes in every tensor and array that has a row for it, and of what
    stands for it in lists of texts or numbers. Cost: reading the batch once.
    """
    count = batch_size(batch)
    parts_of_batch: list[Any] = []
    _mapped(batch, parts_of_batch.append, listed=parts_of_batch.append)
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
    # Bytes of a sample up to which it is cheaper to join its parts than to hash one after the
    # other.
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
    """The tensors, arrays and other things in a batch, however it is nested."""
    items: list[Any] = []
    _mapped(batch, items.append)
    return items


def with_leaves(batch: Any, change: Callable[[Any], Any]) -> Any:
    """The same nesting with every tensor, array and other thing changed."""
    return _mapped(batch, change)


def _same(item: Any) -> Any:
    return item


def _mapped(
    batch: Any, change: Callable[[Any], Any], *, listed: Callable[[Any], Any] = _same
) -> Any:
    """The same nesting with every leaf changed, and with every list of texts or numbers, too."""
    if isinstance(batch, Mapping):
        # Hugging Face batches are mappings with a constructor of their own: a dict serves.
        return {name: _mapped(item, change, listed=listed) for name, item in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(_mapped(item, change, listed=listed) for item in batch))
    if isinstance(batch, tuple | list):
        if batch and not any(_is_part(item) for item in batch):
            return listed(batch)
        return type(batch)(_mapped(item, change, listed=listed) for item in batch)
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        names = [part.name for part in dataclasses.fields(batch)]
        changed = {name: _mapped(getattr(batch, name), change, listed=listed) for name in names}
        return dataclasses.replace(batch, **changed)
    return change(batch)


def _is_part(item: Any) -> bool:
    return isinstance(item, torch.Tensor | np.ndarray | Mapping | tuple | list)
