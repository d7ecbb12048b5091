"""The released formulas of features and scores, computed in float64 for any stored precision."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import torch

from gradkeep.errors import AttributionError

if TYPE_CHECKING:
    from torch import Tensor


class AbstractScoreComputer(ABC):
    """Compute features and scores from projected gradients X `[n, k]`."""

    def __init__(self, dtype: torch.dtype, device: str | torch.device) -> None:
        self.dtype, self.device = dtype, device

    @abstractmethod
    def get_xtx(self, grads: Tensor) -> Tensor:
        """Return X^T X `[k, k]`."""

    @abstractmethod
    def get_x_xtx_inv(self, grads: Tensor, xtx: Tensor) -> Tensor:
        """Return features X (X^T X)^-1 `[n, k]`."""

    @abstractmethod
    def get_scores(self, features: Tensor, target_grads: Tensor, accumulator: Tensor) -> None:
        """Add features @ target_grads^T to the accumulator `[n, m]`."""


class BasicScoreComputer(AbstractScoreComputer):
    """A = X^T X + lambda_reg I, features = X A^-1 / mean|A^-1|, by blocks of rows."""

    def __init__(
        self,
        dtype: torch.dtype,
        device: str | torch.device,
        CUDA_MAX_DIM_SIZE: int = 20_000,
        logging_level: int = logging.INFO,
        lambda_reg: float = 0.0,
    ) -> None:
        super().__init__(dtype, device)
        self.CUDA_MAX_DIM_SIZE = CUDA_MAX_DIM_SIZE
        self.lambda_reg = float(lambda_reg)

    def get_xtx(self, grads: Tensor) -> Tensor:
        """Return X^T X `[k, k]`, float64."""
        out = torch.zeros(grads.shape[1], grads.shape[1], dtype=torch.float64)
        for rows in torch.split(grads, self.CUDA_MAX_DIM_SIZE):
            wide = rows.double()
            out.addmm_(wide.T, wide)
        return out

    def get_x_xtx_inv(self, grads: Tensor, xtx: Tensor) -> Tensor:
        """Return X A^-1 / mean|A^-1| `[n, k]`, float32."""
        inverse = scaled_inverse(xtx, self.lambda_reg)
        parts = [
            (rows.double() @ inverse).float() for rows in torch.split(grads, self.CUDA_MAX_DIM_SIZE)
        ]
        return torch.cat(parts)

    def get_scores(self, features: Tensor, target_grads: Tensor, accumulator: Tensor) -> None:
        """Add features @ target_grads^T to the accumulator `[n, m]`."""
        targets = target_grads.float().T
        for start in range(0, len(features), self.CUDA_MAX_DIM_SIZE):
            some = slice(start, start + self.CUDA_MAX_DIM_SIZE)
            accumulator[some] += features[some].float() @ targets


class BasicSingleBlockScoreComputer(BasicScoreComputer):
    """Compute everything in one block."""

    def __init__(
        self,
        dtype: torch.dtype,
        device: str | torch.device,
        logging_level: int = logging.INFO,
        lambda_reg: float = 0.0,
    ) -> None:
        super().__init__(dtype, device, 1 << 62, logging_level, lambda_reg)


def scaled_inverse(xtx: Tensor, ridge: float) -> Tensor:
    """Return A^-1 / mean|A^-1| of A = X^T X + ridge I; raise if A is singular."""
    matrix = xtx.double() + ridge * torch.eye(len(xtx), dtype=torch.float64)
    # With a unit diagonal, a small pivot shows that the matrix is singular.
    diagonal = matrix.diagonal().clamp(min=0).sqrt()
    scale = torch.where(diagonal > 0, diagonal, torch.ones_like(diagonal))
    factor, failed = torch.linalg.cholesky_ex(matrix / scale / scale.unsqueeze(1))
    if int(failed) or float(factor.diagonal().min()) < _PIVOT:
        values = torch.linalg.eigvalsh(matrix / scale / scale.unsqueeze(1))
        rank = int((values > _PIVOT**2 * values.max()).sum())
        raise AttributionError(
            "the projected gradients do not span all dimensions, so without a ridge every score would "
            "be noise",
            code="compat.singular",
            found=f"a singular matrix of {len(xtx)} x {len(xtx)}, of rank {rank}, "
            f"lambda_reg={ridge:g}",
            fix="Remove lambda_reg to use the relative ridge, pass a positive one, or use "
            f"proj_dim={max(1, rank // 2)}.",
        )
    inverse = torch.cholesky_inverse(factor) / scale / scale.unsqueeze(1)
    return inverse / inverse.abs().mean()


_PIVOT = 1e-6
"""Pivots below this fraction of a column are rounding errors of float32, whose epsilon is 1.2e-7."""
