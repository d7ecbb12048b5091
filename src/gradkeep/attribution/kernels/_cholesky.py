"""Cholesky's factorisation of a large matrix of which only one half is ever made or held."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from gradkeep.attribution.kernels._products import lower_rows
from gradkeep.attribution.kernels._weighted import Solution
from gradkeep.errors import AttributionError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from gradkeep.attribution.kernels._weighted import WeightedKernel

BLOCK = 1024
"""Rows of a block: its products are of a good shape, and little more than one half is held."""


@dataclass(frozen=True, slots=True, eq=False)
class CholeskyFactor:
    """A = L L^T in blocks of rows, of each block the columns up to its last row.

    >>> factor = CholeskyFactor.of(torch.tensor([[4.0, 2.0], [2.0, 3.0]]).split(1))
    >>> factor.solved(torch.tensor([[8.0], [8.0]])).flatten()
    tensor([1., 2.])
    """

    blocks: tuple[Tensor, ...]
    """`[b, start + b]` from each start"""

    @classmethod
    def of(cls, lower: Iterator[Tensor] | tuple[Tensor, ...]) -> CholeskyFactor:
        """That of a matrix given by its blocks of rows, which are overwritten; n^3 / 3 operations.

        Columns behind the last row of a block are not looked at.
        """
        blocks: list[Tensor] = []
        start = 0
        for given in lower:
            start += len(given)
            made = given[:, :start]
            _reduce(made, blocks)
            blocks.append(made)
        return cls(tuple(blocks))

    def solved(self, right: Tensor) -> Tensor:
        """A^-1 b of right sides `[n, b]`, which are overwritten; 2 n^2 operations for each."""
        start = 0
        for block in self.blocks:
            stop = start + len(block)
            here, corner = right[start:stop], block[:, start:]
            here.addmm_(block[:, :start], right[:start], alpha=-1)
            here.copy_(torch.linalg.solve_triangular(corner, here, upper=False))
            start = stop
        for block in reversed(self.blocks):
            stop, start = start, start - len(block)
            here, corner = right[start:stop], block[:, start:]
            here.copy_(torch.linalg.solve_triangular(corner.t(), here, upper=True))
            right[:start].addmm_(block[:, :start].t(), here, alpha=-1)
        return right

    def solution(self) -> Solution:
        """Exact up to rounding."""
        return Solution("Cholesky's factorisation of the kernel")


def bytes_of(size: int) -> int:
    """Of a factor, and of one block's temporaries while it is made."""
    return 4 * (size * (size + BLOCK) // 2 + BLOCK * size)


def kernel_factor(kernel: WeightedKernel) -> CholeskyFactor:
    """The factor of M; N^2 / 2 products of pairs and N^3 / 3 operations, in 2 N^2 bytes."""
    s = kernel.weight.sqrt()

    def lower() -> Iterator[Tensor]:
        for start in range(0, kernel.rows, BLOCK):
            kernel.report(f"row {start} of {kernel.rows} factored")
            stop = min(start + BLOCK, kernel.rows)
            made = torch.empty(stop - start, stop)
            for row, first, part in lower_rows(
                kernel.train, start, stop, kernel.compute, kernel.passing
            ):
                made[row - start : row - start + len(part), first : first + part.shape[1]] = part
            made *= s[:stop]
            made *= s[start:stop].unsqueeze(1)
            made[:, start:].diagonal().add_(kernel.damping)
            yield made

    return CholeskyFactor.of(lower())


def _reduce(made: Tensor, above: list[Tensor]) -> None:
    """Turn a block of rows of A into those of L, with all blocks above it."""
    at = 0
    for block in above:
        end = at + len(block)
        here = made[:, at:end]
        here.addmm_(made[:, :at], block[:, :at].t(), alpha=-1)
        corner = block[:, at:].t()
        here.copy_(torch.linalg.solve_triangular(corner, here, upper=True, left=False))
        at = end
    corner = made[:, at:]
    corner.addmm_(made[:, :at], made[:, :at].t(), alpha=-1)
    corner.copy_(cholesky(corner))


def cholesky(matrix: Tensor) -> Tensor:
    """The factor of one matrix; rounding of float32 can outweigh a tiny damping: then in float64."""
    for kind in (torch.float32, torch.float64):
        found = torch.linalg.cholesky_ex(matrix.to(kind))
        if int(found.info) == 0:
            factor: Tensor = found.L
            return factor.float()
    raise AttributionError(
        "the damped kernel is not positive definite",
        found=f"a diagonal of {float(matrix.diagonal().mean()):.3g} on average",
        fix="use a larger damping",
    )
