"""The damped, weighted kernel of the training rows, solved by Cholesky factorization."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from gradkeep._budgets import parse_bytes
from gradkeep.errors import AttributionError
from gradkeep.factors._arithmetic import RESTORED, tiles
from gradkeep.query import along
from gradkeep.query._engine import GradientPair, ProductEngine, stream_shares
from gradkeep.query._sums import Directions

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor

    from gradkeep.query import Gradients
    from gradkeep.query._engine import ComputeSpec


UNLESS_SAID = 2 << 30
"""Bytes that a kernel is solved in, unless a budget says otherwise."""
_LEAST = 8 << 20


@dataclass(frozen=True, slots=True, eq=False)
class WeightedKernel:
    """M = s K s + damping I, with K `[N, N]` the products of all training rows and s = sqrt(weight)."""

    train: Gradients
    weight: Tensor
    """`[N]`, above zero"""
    damping: float
    compute: ComputeSpec = None
    memory_budget: float | str | None = None
    report: Callable[[str], None] = lambda doing: None
    """Is told what is being done, from time to time."""

    @property
    def rows(self) -> int:
        """N."""
        return len(self.train)

    @property
    def room(self) -> int:
        """Bytes that solving may take."""
        return UNLESS_SAID if self.memory_budget is None else parse_bytes(self.memory_budget)

    @property
    def passing(self) -> int:
        """Bytes for rows that pass and their temporaries: a quarter, but what one segment needs."""
        return max(self.room // 4, 2 * self.train.largest_segment + _LEAST)


def lower_rows(
    train: Gradients, start: int, stop: int, compute: ComputeSpec, memory_budget: int
) -> Iterator[tuple[int, int, Tensor]]:
    """Products of rows `start` to `stop` with all rows before `stop`: (row, first column, `[b, n]`)."""
    engine = ProductEngine(
        [GradientPair(train, train)],
        compute=compute,
        memory_budget=memory_budget,
        answer=0,
        positions=range(start, stop),
        stop=stop,
    )
    for tile in engine.tiles():
        yield (
            start + tile.query_start,
            tile.train_start,
            tile.values[0, :, : stop - tile.train_start],
        )


@dataclass(frozen=True, slots=True)
class Solution:
    """How linear systems were solved."""

    way: str
    steps: int = 0
    """Of conjugate gradients, the most for any query."""
    residual: float | None = None
    """The largest |A x - b| / |b| of any query; None: rounding only."""

    def __str__(self) -> str:
        if self.residual is None:
            return self.way
        return f"{self.way}, {self.steps} steps to a relative residual of {self.residual:.1e}"


def summed_up(found: Sequence[Solution | None]) -> str | None:
    """What is told of several checkpoints: each way once, with the most steps and the worst residual."""
    by_way: dict[str, Solution] = {}
    for one in found:
        if one is None:
            continue
        other = by_way.get(one.way, one)
        residuals = [part.residual for part in (one, other) if part.residual is not None]
        by_way[one.way] = Solution(
            one.way, max(one.steps, other.steps), max(residuals) if residuals else None
        )
    return "; ".join(map(str, by_way.values())) or None


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
    for some in train.stream(stream_shares(train, kernel.passing, answer=0).train_rows):
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
