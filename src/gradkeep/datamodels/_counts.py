"""All that a regression from masks to outputs needs to know of the models, in exact sums."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Any

import numpy as np

from gradkeep.datamodels._gram import add_pairs, pair_dtype
from gradkeep.errors import DatamodelsError

if TYPE_CHECKING:
    from pathlib import Path

    from gradkeep.datamodels._masks import AnyArray, Masks

_ROWS = 1024
"""Models per float64 product: fixed, so that equal rows in equal order give equal bits."""


@dataclass(frozen=True, slots=True, eq=False)
class Counts:
    """Sums over m models: `pairs` X'X `[n, n]` (exact), `cross` X'(Y - o) `[n, t]`, `total` and
    `squares` of Y - o `[t]`, in float64, with a fixed `offset` o `[t]` so that nothing cancels.

    Costs one pass over the masks; more models are added, and left-out ones taken away, without it.

    >>> from gradkeep.datamodels import Masks
    >>> counts = Counts.of(Masks.of([[1, 0], [1, 1]]), np.array([[3.0], [5.0]]))
    >>> counts.pairs.tolist(), counts.mean().tolist()
    ([[2, 1], [1, 1]], [4.0])
    """

    models: int
    pairs: AnyArray
    cross: AnyArray
    total: AnyArray
    squares: AnyArray
    offset: AnyArray

    @classmethod
    def of(
        cls,
        masks: Masks,
        outputs: AnyArray,
        *,
        offset: AnyArray | None = None,
        most: int = 0,
        folder: Path | None = None,
        device: str = "cpu",
    ) -> Counts:
        """The counts of these models; up to `most` will come, and pairs lie in `folder` if given."""
        n = masks.num_examples
        pairs = zeros((n, n), pair_dtype(max(len(masks), most)), folder)
        start = outputs.mean(axis=0, dtype=np.float64) if offset is None else offset
        counts = cls(0, pairs, *_sums(masks[:0], outputs[:0], start), offset=start)
        return counts.add(masks, outputs, device=device)

    def copy(self, folder: Path | None = None) -> Counts:
        """The same with pairs of its own, so that `add` leaves this one as it is."""
        pairs = zeros(self.pairs.shape, self.pairs.dtype, folder)
        pairs[:] = self.pairs
        return replace(self, pairs=pairs)

    def add(self, masks: Masks, outputs: AnyArray, *, device: str = "cpu") -> Counts:
        """The counts with more models; takes over the pairs of this one, which is then of no use."""
        models = self.models + len(masks)
        pairs = self.pairs
        if pair_dtype(models).itemsize > pairs.dtype.itemsize:
            pairs = pairs.astype(pair_dtype(models))
        add_pairs(masks, pairs, device=device)
        cross, total, squares = _sums(masks, outputs, self.offset)
        return Counts(
            models,
            pairs,
            self.cross + cross,
            self.total + total,
            self.squares + squares,
            self.offset,
        )

    def without(
        self,
        masks: Masks,
        outputs: AnyArray,
        *,
        folder: Path | None = None,
        device: str = "cpu",
    ) -> Counts:
        """The counts of all but these models, which must be among them; nothing is changed."""
        if len(masks) > self.models:
            raise DatamodelsError(
                "more models to leave out than were counted",
                found=len(masks),
                expected=f"at most {self.models}",
            )
        out = zeros(self.pairs.shape, self.pairs.dtype, folder)
        add_pairs(masks, out, device=device)
        np.subtract(self.pairs, out, out=out)
        cross, total, squares = _sums(masks, outputs, self.offset)
        return Counts(
            self.models - len(masks),
            out,
            self.cross - cross,
            self.total - total,
            self.squares - squares,
            self.offset,
        )

    def mean(self) -> AnyArray:
        """The mean output, `[t]`."""
        return np.asarray(self.offset + self.total / self.models)

    def variance(self) -> AnyArray:
        """The population variance of the outputs, `[t]`; exactly 0 for a constant target."""
        spread = self.squares / self.models - (self.total / self.models) ** 2
        # What rounding leaves of a constant is no signal to regress on.
        floor = 1e-14 * (self.squares / self.models + 1e-2 * self.mean() ** 2)
        return np.where(spread <= floor, 0.0, spread)

    def frequency(self) -> AnyArray:
        """In which part of the models each example is, `[n]`."""
        return np.asarray(self.pairs.diagonal() / self.models)


def zeros(shape: tuple[int, ...], dtype: Any, folder: Path | None) -> AnyArray:
    """Zeros in memory, or in a file of a folder."""
    if folder is None:
        return np.zeros(shape, dtype)
    # Without a name: the bytes go when the last array does, also after a crash.
    with TemporaryFile(dir=folder) as file:
        file.truncate(max(1, math.prod(shape)) * np.dtype(dtype).itemsize)
        return np.memmap(file, dtype, "r+", shape=shape)


def _sums(masks: Masks, outputs: AnyArray, offset: AnyArray) -> tuple[AnyArray, AnyArray, AnyArray]:
    cross = np.zeros((masks.num_examples, outputs.shape[1]))
    total, squares = np.zeros(outputs.shape[1]), np.zeros(outputs.shape[1])
    for start, rows in masks.blocks(_ROWS):
        y = outputs[start : start + _ROWS].astype(np.float64) - offset
        cross += rows.T.astype(np.float64) @ y
        total += y.sum(axis=0)
        squares += (y * y).sum(axis=0)
    return cross, total, squares
