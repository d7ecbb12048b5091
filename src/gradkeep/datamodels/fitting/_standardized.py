"""The regression in standard units: what the solvers see."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from gradkeep.datamodels.fitting._l1 import Gram

if TYPE_CHECKING:
    import torch

    from gradkeep.datamodels.fitting._counts import Counts
    from gradkeep.datamodels.fitting._masks import AnyArray


_ROWS = 1024


class DenseGram(Gram):
    """The matrix in memory: 4 n^2 bytes in float32."""

    def __init__(self, matrix: torch.Tensor) -> None:
        super().__init__()
        self.matrix, self.size, self.panel = matrix, len(matrix), _ROWS

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
    rows: int = _ROWS,
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
