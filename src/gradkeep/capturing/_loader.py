"""Going through a loader: batches with the ids of their samples, the same ones in every run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, RandomSampler

from gradkeep.capturing._batches import size_of
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
            count = size_of(batch)
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
        rows = sum(size_of(batch) for batch in loader)
    if not isinstance(ids, str | int | type(None)) and not callable(ids):
        if rows is not None and len(ids) != rows:
            raise CaptureError(
                "every sample needs one id", found=f"{len(ids)} ids for {rows} samples"
            )
        rows = len(ids)
    return Batches(loader, ids, rows)
