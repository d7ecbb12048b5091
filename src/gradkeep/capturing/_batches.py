"""Batches as loaders give them: tensors, tuples, dicts, nested; one row per sample in each part."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
import xxhash

from gradkeep.errors import CaptureError


def size_of(batch: Any) -> int:
    """The number of samples: the length of the first tensor in the batch.

    >>> size_of({"input_ids": torch.zeros(3, 7), "labels": torch.zeros(3)})
    3
    """
    for leaf in _leaves(batch):
        if isinstance(leaf, torch.Tensor | np.ndarray) and leaf.ndim:
            return len(leaf)
    raise CaptureError(
        "a batch without any tensor",
        found=type(batch).__name__,
        expected="a tensor, or a tuple, list or dict of tensors with one row per sample",
    )


def moved(batch: Any, device: torch.device) -> Any:
    """The batch with its tensors on the device; numpy arrays become tensors."""

    def move(leaf: Any) -> Any:
        if isinstance(leaf, np.ndarray) and leaf.dtype.kind in "biuf":
            leaf = torch.from_numpy(leaf)
        return leaf.to(device) if isinstance(leaf, torch.Tensor) else leaf

    return _mapped(batch, move)


def rows_of(batch: Any, start: int, stop: int) -> Any:
    """Samples `start` to `stop` of the batch; what has not one row per sample is kept whole."""
    count = size_of(batch)

    def cut(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor | np.ndarray) and leaf.ndim and len(leaf) == count:
            return leaf[start:stop]
        return leaf

    return _mapped(batch, cut, count=count, cut=slice(start, stop))


def digests(batch: Any) -> np.ndarray[Any, np.dtype[np.uint64]]:
    """A fingerprint `[B]` of each sample, by which changed or reordered data is noticed."""
    count = size_of(batch)
    parts = []
    for leaf in _leaves(batch):
        if isinstance(leaf, torch.Tensor) and not leaf.is_sparse:
            leaf = leaf.detach().cpu()
            leaf = leaf.view(torch.int16) if leaf.dtype == torch.bfloat16 else leaf
            leaf = leaf.numpy()
        if isinstance(leaf, np.ndarray) and leaf.ndim and len(leaf) == count:
            parts.append(np.ascontiguousarray(leaf))
    found = np.empty(count, np.uint64)
    for row in range(count):
        digest = xxhash.xxh3_64()
        for part in parts:
            digest.update(part[row].tobytes() if part.ndim == 1 else part[row])
        found[row] = digest.intdigest()
    return found


def _leaves(batch: Any) -> list[Any]:
    leaves: list[Any] = []
    _mapped(batch, leaves.append)
    return leaves


def _mapped(
    batch: Any, change: Callable[[Any], Any], *, count: int | None = None, cut: slice | None = None
) -> Any:
    """The same nesting with every leaf changed."""
    if isinstance(batch, Mapping):
        # Hugging Face batches are mappings with a constructor of their own: a dict serves.
        return {name: _mapped(item, change, count=count, cut=cut) for name, item in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(_mapped(item, change, count=count, cut=cut) for item in batch))
    if isinstance(batch, tuple | list):
        scalars = batch and not any(_is_part(item) for item in batch)
        if scalars:  # a list of texts or numbers: one per sample
            return batch[cut] if cut is not None and len(batch) == count else batch
        return type(batch)(_mapped(item, change, count=count, cut=cut) for item in batch)
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        names = [part.name for part in dataclasses.fields(batch)]
        changed = {n: _mapped(getattr(batch, n), change, count=count, cut=cut) for n in names}
        return dataclasses.replace(batch, **changed)
    return change(batch)


def _is_part(item: Any) -> bool:
    return isinstance(item, torch.Tensor | np.ndarray | Mapping | tuple | list)
