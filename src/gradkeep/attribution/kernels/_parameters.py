"""The kernel solved among the parameters, where there are fewer of them than rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from gradkeep.attribution.kernels._cholesky import BLOCK, CholeskyFactor
from gradkeep.attribution.kernels._products import rows_at_once
from gradkeep.attribution.kernels._weighted import Solution
from gradkeep.factors._arithmetic import RESTORED, tiles
from gradkeep.query import along
from gradkeep.query._sums import Directions

if TYPE_CHECKING:
    from torch import Tensor

    from gradkeep.attribution.kernels._weighted import WeightedKernel


@dataclass(frozen=True, slots=True, eq=False)
class ParameterSolver:
    """With A = G^T diag(weight) G + damping I `[P, P]`: s G A^-1 g = M^-1 (s G g) of any gradient g."""

    kernel: WeightedKernel
    factor: CholeskyFactor

    def along_rows(self, gradients: Tensor) -> Tensor:
        """G A^-1 g `[b, N]` of gradients g `[b, P]`; 2 P^2 + 2 N P operations for each."""
        train = self.kernel.train
        solved = self.factor.solved(gradients.t().contiguous()).t()
        sizes = [form.restored_size for form in train.forms.values()]
        parts = dict(zip(train.forms, torch.split(solved, sizes, 1), strict=True))
        directions = Directions(tuple(range(len(solved))), parts, train.forms, train.weights)
        held = 4 * (len(solved) * (len(train) + solved.shape[1]))
        return along(train, directions, memory_budget=self.kernel.passing + held)

    def solution(self) -> Solution:
        """Exact up to rounding."""
        return Solution("Cholesky's factorisation among the parameters")


def parameter_solver(kernel: WeightedKernel) -> ParameterSolver:
    """Adds up A and factors it; N P^2 + P^3 / 3 operations, in 2 P^2 bytes."""
    train = kernel.train
    size = sum(form.restored_size for form in train.forms.values())
    lower = tuple(
        torch.zeros(min(BLOCK, size - at), min(at + BLOCK, size)) for at in range(0, size, BLOCK)
    )
    scale, slopes = kernel.weight.sqrt(), train.slopes()
    scale = scale if slopes is None else scale * slopes
    room = max(1, min(RESTORED, kernel.room // 16))
    for some in train.stream(rows_at_once(train, kernel.passing)):
        for start, stop in tiles(some.stop - some.start, size, 4, room):
            parts = [
                form.restore(some.factors[name].take(start, stop).widened())
                for name, form in train.forms.items()
            ]
            dense = torch.cat(parts, 1).float()
            dense *= scale[some.start + start : some.start + stop].unsqueeze(1)
            for at, into in zip(range(0, size, BLOCK), lower, strict=True):
                into.addmm_(dense[:, at : at + len(into)].t(), dense[:, : into.shape[1]])
        kernel.report(f"row {some.stop} of {kernel.rows} added up")
    for into in lower:
        into[:, into.shape[1] - len(into) :].diagonal().add_(kernel.damping)
    return ParameterSolver(kernel, CholeskyFactor.of(lower))
