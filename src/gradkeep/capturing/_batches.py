"""Rows, leaves and digests of batches of any nesting."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
import xxhash

from gradkeep.errors import CaptureError


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

    return _mapped(batch, move)


def copied(batch: Any) -> Any:
    """Copy all tensors and arrays of a batch."""

    def copy(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return _own(leaf, leaf.device)
        return leaf.copy() if isinstance(leaf, np.ndarray) else leaf

    return _mapped(batch, copy)


def _own(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    return tensor.detach().to(device, copy=True).requires_grad_(tensor.requires_grad)


def rows_of(batch: Any, start: int, stop: int) -> Any:
    """Return samples `start` to `stop`; leaves without one row per sample stay whole."""
    count = batch_size(batch)

    def cut(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor | np.ndarray) and leaf.ndim and len(leaf) == count:
            return leaf[start:stop]
        return leaf

    return _mapped(
        batch, cut, listed=lambda items: items[start:stop] if len(items) == count else items
    )


def chosen_rows(batch: Any, rows: np.ndarray[Any, Any]) -> Any:
    """Return these samples of a batch in which every tensor has one row per sample."""

    def taken(leaf: Any) -> Any:
        return leaf[rows] if isinstance(leaf, torch.Tensor | np.ndarray) else leaf

    return _mapped(batch, taken, listed=lambda items: [items[row] for row in rows])


def digests(batch: Any) -> np.ndarray[Any, np.dtype[np.uint64]]:
    """Return a fingerprint `[B]` of each sample, to notice changed or reordered data.

    It hashes the sample's bytes in every tensor and array that has a row for it, and its entries in
    lists of texts or numbers. Cost: reading the batch once.
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
    _mapped(batch, items.append)
    return items


def map_leaves(batch: Any, change: Callable[[Any], Any]) -> Any:
    """Apply a function to every leaf of a batch, keeping its nesting."""
    return _mapped(batch, change)


def _same(item: Any) -> Any:
    return item


def _mapped(
    batch: Any, change: Callable[[Any], Any], *, listed: Callable[[Any], Any] = _same
) -> Any:
    """Apply `change` to every leaf, and `listed` to every list of texts or numbers."""
    if isinstance(batch, Mapping):
        # Hugging Face batches have their own constructor; a dict works as well.
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
