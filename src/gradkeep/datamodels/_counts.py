"""Sufficient statistics of a regression from masks to outputs, as exact sums.

In how many subsets two training examples occur together is counted without a matrix product.

The Method of Four Russians: models are taken six at a time, the sums of all 64 subsets of
the six are tabulated for a strip of columns, and each column's six bits choose one table row to
add. The adding is an embedding bag, whose kernel is vectorised on every CPU, and two columns share
one float (12 bits each, for float32 is exact to 2^24). One float addition so stands for twelve
multiply-adds, and only one triangle is computed.

int8 products (`torch._int_mm`) are as fast where the CPU has VNNI, but on an AVX2 machine they
took thirty times as long as float32; popcounts through numpy spend their time on the intermediate
arrays.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Any

import numpy as np

from gradkeep.datamodels._l1 import Gram

if TYPE_CHECKING:
    from pathlib import Path

    import torch

    from gradkeep.datamodels._masks import AnyArray, Masks


_SIX = 6
_GROUPS = 28
"""Groups of six that share a table: 28 x 64 x 96 floats are 672 KiB, which a core's cache holds."""
_STRIP = 96
"""Floats, and so pairs of columns, in a strip."""
_FIELD = 4096


def pair_dtype(models: int) -> np.dtype[Any]:
    """The smallest dtype that can count this many models."""
    return np.dtype(np.uint16 if models < 1 << 16 else np.int32)


def add_pairs(masks: Masks, out: AnyArray) -> None:
    """Add X'X of the masks to the symmetric counts `out [n, n]`, an array or a memory map.

    Costs m n^2 / 24 float additions and 5 bytes per mask bit of 4,032 models.

    >>> from gradkeep.datamodels import Masks
    >>> out = np.zeros((3, 3), np.int32)
    >>> add_pairs(Masks.of([[1, 1, 0], [1, 0, 1], [1, 1, 0]]), out)
    >>> out.tolist()
    [[3, 2, 1], [2, 2, 0], [1, 0, 1]]
    """
    import torch

    with torch.inference_mode():
        # 4032 models: no field overflows its 12 bits.
        for _, rows in masks.blocks(_SIX * _GROUPS * 24):
            _four_russians(rows, out)
    _mirror(out)


def _four_russians(rows: AnyArray, out: AnyArray) -> None:
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


def _mirror(out: AnyArray, side: int = 256) -> None:
    """Copy the upper triangle to the lower one, in tiles that stay in the cache."""
    for start in range(0, len(out), side):
        rows = slice(start, start + side)
        out[rows, rows] = np.triu(out[rows, rows]) + np.triu(out[rows, rows], 1).T
        for below in range(start + side, len(out), side):
            out[below : below + side, rows] = out[rows, below : below + side].T


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
    ) -> Counts:
        """The counts of these models; up to `most` will come, and pairs lie in `folder` if given."""
        n = masks.num_examples
        pairs = zeros((n, n), pair_dtype(max(len(masks), most)), folder)
        start = outputs.mean(axis=0, dtype=np.float64) if offset is None else offset
        counts = cls(0, pairs, *_sums(masks[:0], outputs[:0], start), offset=start)
        return counts.add(masks, outputs)

    def copy(self, folder: Path | None = None) -> Counts:
        """The same with pairs of its own, so that `add` leaves this one as it is."""
        pairs = zeros(self.pairs.shape, self.pairs.dtype, folder)
        pairs[:] = self.pairs
        return replace(self, pairs=pairs)

    def add(self, masks: Masks, outputs: AnyArray) -> Counts:
        """The counts with more models; takes over the pairs of this one, which is then of no use."""
        models = self.models + len(masks)
        pairs = self.pairs
        if pair_dtype(models).itemsize > pairs.dtype.itemsize:
            pairs = pairs.astype(pair_dtype(models))
        add_pairs(masks, pairs)
        cross, total, squares = _sums(masks, outputs, self.offset)
        return Counts(
            models,
            pairs,
            self.cross + cross,
            self.total + total,
            self.squares + squares,
            self.offset,
        )

    def without(self, masks: Masks, outputs: AnyArray, *, folder: Path | None = None) -> Counts:
        """The counts of all but these models, which must be among them; nothing is changed."""
        out = zeros(self.pairs.shape, self.pairs.dtype, folder)
        add_pairs(masks, out)
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
    # Blocks of fixed size, so that equal rows in equal order give equal bits.
    for start, rows in masks.blocks(1024):
        y = outputs[start : start + 1024].astype(np.float64) - offset
        cross += rows.T.astype(np.float64) @ y
        total += y.sum(axis=0)
        squares += (y * y).sum(axis=0)
    return cross, total, squares


class DenseGram(Gram):
    """The matrix in memory: 4 n^2 bytes in float32."""

    def __init__(self, matrix: torch.Tensor) -> None:
        super().__init__()
        self.matrix, self.size, self.panel = matrix, len(matrix), 1024

    def rows(
        self, where: slice | torch.Tensor, columns: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Some rows; those of a slice without a copy."""
        result = (
            self.matrix[where] if isinstance(where, slice) else self.matrix.index_select(0, where)
        )
        return result if columns is None else result.index_select(1, columns)

    def times(self, x: torch.Tensor) -> torch.Tensor:
        """X G, one product for all targets."""
        return x @ self.matrix


class CountedGram(Gram):
    """G = (C / m - mu mu') scale scale', computed from counts C that may lie on a disk.

    A product reads all n^2 counts: what it saves is memory.
    """

    def __init__(
        self,
        counts: Counts,
        mean: AnyArray,
        scale: AnyArray,
        dtype: torch.dtype,
        device: str,
        panel: int,
    ) -> None:
        super().__init__()
        self.counts, self.mean, self.scale = counts, mean, scale
        self.dtype, self.device = dtype, device
        self.size, self.panel = len(mean), max(1, panel)

    def dense(self) -> DenseGram:
        """The whole matrix, made a panel at a time so that nothing else of its size exists."""
        import torch

        out = torch.empty(self.size, self.size, dtype=self.dtype, device=self.device)
        for start in range(0, self.size, self.panel):
            rows = slice(start, start + self.panel)
            out[rows] = self.rows(rows)
        return DenseGram(out)

    def rows(
        self, where: slice | torch.Tensor, columns: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Some rows, reading only their counts."""
        import torch

        rows = where if isinstance(where, slice) else where.cpu().numpy()
        across = slice(None) if columns is None else columns.cpu().numpy()
        # In float64, because C and m mu mu' agree in their leading digits.
        part = torch.from_numpy(self.counts.pairs[rows][:, across].astype(np.float64))
        mean, models = torch.from_numpy(self.mean), self.counts.models
        part.addr_(mean[rows], mean[across], alpha=-models)
        result = part.to(self.device, self.dtype)
        scale = torch.from_numpy(self.scale / np.sqrt(models)).to(self.device, self.dtype)
        return result.mul_(scale[rows].unsqueeze(1)).mul_(scale[across])


@dataclass(frozen=True, slots=True, eq=False)
class StandardizedRegression:
    """min over w of 1/2 w'Gw - c'w + penalty(w) for t targets at once, every target of variance 1.

    Column j is (x_j - mean_j) `scale`_j, with scale = 1/sd (0 for an example that is in all models
    or in none), times the square root of the variance that a prior allows the example.
    """

    gram: Gram
    c: torch.Tensor
    """`[t, n]`, the covariance of columns and targets."""
    power: torch.Tensor
    """`[t]`, the variance of what is left to explain: 1, less what a prior explains, or 0."""
    mean: AnyArray
    scale: AnyArray
    spread: AnyArray
    """`[t]`, the standard deviation of the outputs; 1 for a constant target."""
    centre: AnyArray
    """`[t]`, the mean output."""
    base: torch.Tensor | None = None
    """`[t, n]`, the weights of a prior, which `c` and `power` are the remainder of."""

    @property
    def largest(self) -> torch.Tensor:
        """`[t]`, the smallest L1 penalty with which all weights are 0: max_j |c_j|."""
        return self.c.abs().amax(dim=1)

    def targets(self, which: torch.Tensor) -> StandardizedRegression:
        """The same for some targets."""
        host = which.cpu().numpy()
        return replace(
            self,
            c=self.c[which],
            power=self.power[which],
            spread=self.spread[host],
            centre=self.centre[host],
            base=None if self.base is None else self.base[which],
        )

    def in_mask_units(self, w: torch.Tensor) -> tuple[AnyArray, AnyArray]:
        """Weights `[n, t]` and bias `[t]` such that output = mask . weights + bias."""
        whole = w if self.base is None else w + self.base
        weights = whole.double().cpu().numpy() * self.scale * self.spread[:, None]
        return weights.T, self.centre - weights @ self.mean

    def from_mask_units(self, weights: AnyArray) -> torch.Tensor:
        """Standard weights `[t, n]` from those in mask units `[n, t]`: a warm start."""
        import torch

        inverse = np.divide(1.0, self.scale, out=np.zeros_like(self.scale), where=self.scale > 0)
        whole = torch.from_numpy(weights.T * inverse / self.spread[:, None]).to(self.c)
        return whole if self.base is None else whole - self.base


def standardize(
    counts: Counts,
    *,
    dtype: torch.dtype,
    device: str,
    dense: bool,
    rows: int = 1024,
    variances: AnyArray | None = None,
) -> StandardizedRegression:
    """The regression of these counts; with `dense` the matrix is made once, else on demand."""
    import torch

    mean, variance = counts.frequency(), counts.variance()
    sd = np.sqrt(mean - mean * mean)
    scale = np.divide(1.0, sd, out=np.zeros_like(sd), where=sd > 0)
    if variances is not None:
        scale = scale * np.sqrt(variances / variances.mean())
    spread = np.where(variance > 0, np.sqrt(variance), 1.0)
    covariance = counts.cross / counts.models
    covariance -= np.multiply.outer(mean, counts.total / counts.models)
    covariance *= scale[:, None]
    c = (covariance / spread * (variance > 0)).T
    gram = CountedGram(counts, mean, scale, dtype, device, rows)
    return StandardizedRegression(
        gram.dense() if dense else gram,
        torch.from_numpy(np.ascontiguousarray(c)).to(device, dtype),
        torch.from_numpy(np.where(variance > 0, 1.0, 0.0)).to(device, dtype),
        mean,
        scale,
        spread,
        counts.mean(),
    )


def after_prior(
    standard: StandardizedRegression, prior: AnyArray, models: int
) -> tuple[StandardizedRegression, AnyArray]:
    """Return the residual after prior weights `[n, t]` in mask units, and their scale `[t]`.

    The scale is the least-squares one, never negative (scores only promise an order), and shrunk
    as far as the prior's correlation r with the outputs may be chance: noise alone gives 1/m in
    the mean of r^2 over the targets. A prior that knows nothing so leaves the plain regression.
    """
    import torch
    from torch.linalg import vecdot

    p = standard.from_mask_units(prior)
    gp = standard.gram.times(p)
    against, own = vecdot(p, standard.c), vecdot(p, gp)
    tiny = torch.finfo(own.dtype).tiny
    known = (own > 0) & (standard.power > 0)
    r = torch.where(known, against / (own * standard.power).sqrt().clamp_min(tiny), 0 * own)
    signal = (r * r.abs()).sum() / known.sum().clamp_min(1)  # opposite signs speak against it
    trust = (1 - (1 - signal) / (models * signal.clamp_min(tiny))).clamp_min(0)
    trust = torch.where(signal > 0, trust, 0 * trust)
    fitted = trust * against / own.clamp_min(tiny)
    scale = torch.where(known & (against > 0), fitted, 0 * own)
    remainder = replace(
        standard,
        c=standard.c - scale[:, None] * gp,
        power=(standard.power - 2 * scale * against + scale * scale * own).clamp_min(0),
        base=scale[:, None] * p,
    )
    return remainder, scale.double().cpu().numpy()
