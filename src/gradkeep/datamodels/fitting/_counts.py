"""Sufficient statistics of a regression from masks to outputs, as exact sums.

In how many subsets two training examples occur together is counted without a matrix product.

On a CPU the Method of Four Russians: models are taken six at a time, the sums of all 64 subsets of
the six are tabulated for a strip of columns, and each column's six bits choose one table row to
add. The adding is an embedding bag, whose kernel is vectorised on every CPU, and two columns share
one float (12 bits each, for float32 is exact to 2^24). One float addition so stands for twelve
multiply-adds, and only one triangle is computed.

int8 products (`torch._int_mm`) are as fast where the CPU has VNNI, but on an AVX2 machine they
took thirty times as long as float32; popcounts through numpy spend their time on the intermediate
arrays. Elsewhere than on a CPU, float32 products of 0 and 1 are exact, and fast.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Any

import numpy as np

from gradkeep.errors import DatamodelsError

if TYPE_CHECKING:
    from pathlib import Path

    import torch

    from gradkeep.datamodels.fitting._masks import AnyArray, Masks


_SIX = 6
_GROUPS = 28
"""Groups of six that share a table: 28 x 64 x 96 floats are 672 KiB, which a core's cache holds."""
_STRIP = 96
"""Floats, and so pairs of columns, in a strip."""
_CHUNK = _SIX * _GROUPS * 24  # 4032 models: no field overflows its 12 bits
_FIELD = 4096
_MIRROR = 256
_ROWS = 1024
"""Models per float64 product: fixed, so that equal rows in equal order give equal bits."""


def pair_dtype(models: int) -> np.dtype[Any]:
    """The smallest dtype that can count this many models."""
    return np.dtype(np.uint16 if models < 1 << 16 else np.int32)


def add_pairs(masks: Masks, out: AnyArray, *, device: str = "cpu") -> None:
    """Add X'X of the masks to the symmetric counts `out [n, n]`, an array or a memory map.

    Costs m n^2 / 24 float additions and 5 bytes per mask bit of 4,032 models.

    >>> from gradkeep.datamodels import Masks
    >>> out = np.zeros((3, 3), np.int32)
    >>> add_pairs(Masks.of([[1, 1, 0], [1, 0, 1], [1, 1, 0]]), out)
    >>> out.tolist()
    [[3, 2, 1], [2, 2, 0], [1, 0, 1]]
    """
    import torch

    strips = _four_russians if torch.device(device).type == "cpu" else _products
    with torch.inference_mode():
        for _, rows in masks.blocks(_CHUNK):
            strips(rows, out, device)
    _mirror(out)


def _four_russians(rows: AnyArray, out: AnyArray, device: str) -> None:
    """Add the upper triangle, in strips of rows of `out`."""
    import torch

    models, n = rows.shape
    per_table = _SIX * _GROUPS
    tables = -(-models // per_table)
    wide = -(-n // (2 * _STRIP)) * 2 * _STRIP
    padded = torch.zeros(tables * per_table, wide, dtype=torch.uint8)
    padded[:models, :n] = torch.from_numpy(rows)
    chosen = _patterns(padded[:, :n], tables)
    table = torch.zeros(_GROUPS, 1 << _SIX, _STRIP)
    # The sums with a bit are those without it and one more row: from which part to which, by bit.
    steps = [(table[:, : 1 << bit], table[:, 1 << bit : 2 << bit]) for bit in range(_SIX)]
    flat, bags = table.view(-1, _STRIP), torch.arange(0, n * _GROUPS, _GROUPS, dtype=torch.int32)
    for start in range(0, n, 2 * _STRIP):
        first = padded[:, start : start + _STRIP].float()
        both = first.add_(padded[:, start + _STRIP : start + 2 * _STRIP], alpha=_FIELD)
        six = both.view(tables, _GROUPS, _SIX, 1, _STRIP)
        total = torch.zeros(n - start, _STRIP)
        for index in range(tables):
            for (without, within), row in zip(steps, six[index].unbind(1), strict=True):
                torch.add(without, row, out=within)
            places = chosen[index, start:].view(-1)
            total += torch.embedding_bag(flat, places, bags[: n - start])[0]
        _add_fields(total, out[start : start + 2 * _STRIP, start:])


def _patterns(padded: torch.Tensor, tables: int) -> torch.Tensor:
    """Which row of its table each column chooses, int32 `[tables, n, groups]`."""
    import torch

    bits = padded.view(tables, _GROUPS, _SIX, -1)
    pattern = bits[:, :, 0].clone()
    for bit in range(1, _SIX):
        pattern += bits[:, :, bit] << bit
    chosen = pattern.transpose(1, 2).to(torch.int32, memory_format=torch.contiguous_format)
    chosen += torch.arange(_GROUPS, dtype=torch.int32) << _SIX
    return chosen


def _add_fields(total: torch.Tensor, out: AnyArray) -> None:
    """Split floats `[columns, strip]` into their two counts; add them to `out [<= 2 strip, columns]`."""
    import torch

    counts = total.T.to(torch.int32).numpy()
    out[:_STRIP] += (counts & (_FIELD - 1))[: len(out)].astype(out.dtype)
    out[_STRIP:] += (counts >> 12)[: max(0, len(out) - _STRIP)].astype(out.dtype)


def _products(rows: AnyArray, out: AnyArray, device: str) -> None:
    """The same by float32 products, exact below 2^24 models; TF32 does no harm to 0 and 1."""
    import torch

    x = torch.from_numpy(rows).to(device).float()
    step = 16 * _STRIP
    for start in range(0, len(out), step):
        part = x[:, start : start + step].T @ x[:, start:]
        out[start : start + step, start:] += part.cpu().numpy().astype(out.dtype)


def _mirror(out: AnyArray) -> None:
    for start in range(0, len(out), _MIRROR):
        stop = start + _MIRROR
        for below in range(start, len(out), _MIRROR):
            tile = out[start:stop, below : below + _MIRROR]
            if below == start:
                tile = np.triu(tile) + np.triu(tile, 1).T
                out[start:stop, start:stop] = tile
            else:
                out[below : below + _MIRROR, start:stop] = tile.T


@dataclass(frozen=True, slots=True, eq=False)
class Counts:
    """Sufficient statistics of m models.

    `pairs` X'X `[n, n]` (exact), `cross` X'(Y - o) `[n, t]`, and `total` and `squares` of Y - o `[t]` in float64, with a fixed
    `offset` o `[t]` against cancellation. Costs one pass over the masks; models can be added and subtracted without another.

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
                "more models to hold out than were counted",
                code="datamodels.too_many_held_out",
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
