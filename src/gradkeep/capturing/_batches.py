"""Loaders and batches of any shape: their ids, their rows, their digests."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import xxhash
from torch.utils.data import DataLoader, RandomSampler

from gradkeep.errors import CaptureError

Ids = Sequence[int] | np.ndarray[Any, Any] | torch.Tensor | str | int | Callable[[Any], Any]
"""Ids of all samples in order, the key or place of the ids in a batch, or a function of it."""


@dataclass(frozen=True, slots=True, eq=False)
class Batches:
    """All batches of a loader with their ids; can be gone through again and again."""

    loader: Iterable[Any]
    ids: Ids | None
    num_rows: int | None
    """The number of samples, if the loader knows it."""

    def __iter__(self) -> Iterator[tuple[np.ndarray[Any, np.dtype[np.int64]], Any]]:
        at = 0
        listed = self._listed()
        for given in self.loader:
            batch, ids = self._taken_apart(given)
            count = batch_size(batch)
            if ids is None and listed is None:
                ids = np.arange(at, at + count)
            elif ids is None:
                assert listed is not None
                ids = listed[at : at + count]
            own = np.asarray(ids.cpu() if isinstance(ids, torch.Tensor) else ids).reshape(-1)
            if len(own) != count:
                raise CaptureError(
                    "every sample needs an id",
                    found=f"{len(own)} ids for {count} samples",
                    fix="give ids=, one for each sample of the loader, in its order",
                )
            yield own.astype(np.int64), batch
            at += count

    def _listed(self) -> np.ndarray[Any, np.dtype[np.int64]] | None:
        if self.ids is None or isinstance(self.ids, str | int) or callable(self.ids):
            return None
        return np.asarray(self.ids, np.int64)

    def _taken_apart(self, given: Any) -> tuple[Any, Any]:
        """The batch without its ids, and the ids if they are in it."""
        if callable(self.ids):
            return given, self.ids(given)
        if not isinstance(self.ids, str | int):
            return given, None
        try:
            found = given[self.ids]
        except (KeyError, IndexError, TypeError) as error:
            raise CaptureError(
                f"no ids at {self.ids!r} in the batch", found=type(given).__name__
            ) from error
        if isinstance(given, Mapping):
            return {key: value for key, value in given.items() if key != self.ids}, found
        at = range(len(given))[int(self.ids)]
        return tuple(item for place, item in enumerate(given) if place != at), found


def batches_of(loader: Iterable[Any], ids: Ids | None) -> Batches:
    """The batches of a loader, once it is clear that they come in the same order every time."""
    if isinstance(loader, Iterator):
        raise CaptureError(
            "a loader that can be gone through only once",
            found=type(loader).__name__,
            fix="pass the DataLoader itself, or a list of batches",
        )
    rows: int | None = None
    if isinstance(loader, DataLoader):
        if ids is None and isinstance(loader.sampler, RandomSampler):
            raise CaptureError(
                "the loader shuffles: a sample would have another id in every run",
                fix="use a DataLoader with shuffle=False, or have the dataset give ids and "
                "pass ids=, the key or place of them in a batch",
            )
        try:
            rows = len(loader.sampler)  # type: ignore[arg-type]
        except TypeError:
            rows = None
        if loader.drop_last and rows is not None and rows % (loader.batch_size or 1):
            raise CaptureError(
                "the loader drops its last samples",
                found=f"drop_last=True with {rows} samples in batches of {loader.batch_size}",
                fix="use drop_last=False",
            )
    elif isinstance(loader, list | tuple):
        rows = sum(batch_size(batch) for batch in loader)
    if not isinstance(ids, str | int | type(None)) and not callable(ids):
        if rows is not None and len(ids) != rows:
            raise CaptureError(
                "every sample needs one id", found=f"{len(ids)} ids for {rows} samples"
            )
        rows = len(ids)
    return Batches(loader, ids, rows)


def batch_size(batch: Any) -> int:
    """The number of samples: the length of the first tensor in the batch.

    >>> batch_size({"input_ids": torch.zeros(3, 7), "labels": torch.zeros(3)})
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


def to_device(batch: Any, device: torch.device) -> Any:
    """The batch with its tensors on the device; numpy arrays become tensors."""

    def move(leaf: Any) -> Any:
        if isinstance(leaf, np.ndarray) and leaf.dtype.kind in "biuf":
            leaf = torch.from_numpy(leaf)
        return leaf.to(device) if isinstance(leaf, torch.Tensor) else leaf

    return _mapped(batch, move)


def rows_of(batch: Any, start: int, stop: int) -> Any:
    """Samples `start` to `stop` of the batch; what has not one row per sample is kept whole."""
    count = batch_size(batch)

    def cut(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor | np.ndarray) and leaf.ndim and len(leaf) == count:
            return leaf[start:stop]
        return leaf

    return _mapped(batch, cut, count=count, cut=slice(start, stop))


def digests(batch: Any) -> np.ndarray[Any, np.dtype[np.uint64]]:
    """A fingerprint `[B]` of each sample, by which changed or reordered data is noticed."""
    count = batch_size(batch)
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
