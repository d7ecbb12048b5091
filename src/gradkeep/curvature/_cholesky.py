"""Damped, weighted kernel of the training rows, solved by Cholesky factorization."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from gradkeep._budgets import parse_bytes
from gradkeep.curvature._sketches import require_room
from gradkeep.errors import AttributionError
from gradkeep.factors._arithmetic import RESTORED, squared, squared_lengths, tiles
from gradkeep.query import along
from gradkeep.query._engine import GradientPair, ProductEngine, stream_shares
from gradkeep.query._sums import Directions

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor

    from gradkeep.query import Gradients
    from gradkeep.query._engine import ComputeSpec

    Ids = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True, slots=True, eq=False)
class WeightedKernel:
    """M = s K s + damping I, with K `[N, N]` the products of all training rows and s = sqrt(weight)."""

    train: Gradients
    weight: Tensor
    """`[N]`, positive"""
    damping: float
    compute: ComputeSpec = None
    memory_budget: float | str | None = None
    report: Callable[[str], None] = lambda text: None
    """Progress callback."""

    @property
    def rows(self) -> int:
        """Number of rows N."""
        return len(self.train)

    @property
    def free_bytes(self) -> int:
        """Bytes that solving may take."""
        # Without a budget, 2 GiB for solving a kernel.
        return 2 << 30 if self.memory_budget is None else parse_bytes(self.memory_budget)

    @property
    def passing(self) -> int:
        """Bytes for streamed rows and temporaries: a quarter, and at least what one segment needs."""
        return max(self.free_bytes // 4, 2 * self.train.largest_segment + (8 << 20))


def lower_rows(
    train: Gradients, start: int, stop: int, compute: ComputeSpec, memory_budget: int
) -> Iterator[tuple[int, int, Tensor]]:
    """Yield products of rows `start` to `stop` with all rows before `stop`: (row, first column, `[b, n]`)."""
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

    method: str
    steps: int = 0
    """Most steps of conjugate gradients for any query."""
    residual: float | None = None
    """Largest |A x - b| / |b| of any query; None for rounding only."""

    def __str__(self) -> str:
        if self.residual is None:
            return self.method
        return f"{self.method}, {self.steps} steps to a relative residual of {self.residual:.1e}"


def summarize_solutions(solutions: Sequence[Solution | None]) -> str | None:
    """Summarize solutions by method, with the most steps and the largest residual."""
    by_method: dict[str, Solution] = {}
    for one in solutions:
        if one is None:
            continue
        other = by_method.get(one.method, one)
        residuals = [part.residual for part in (one, other) if part.residual is not None]
        by_method[one.method] = Solution(
            one.method, max(one.steps, other.steps), max(residuals) if residuals else None
        )
    return "; ".join(map(str, by_method.values())) or None


BLOCK = 1024
"""Rows of a block: large enough for fast products, while little more than one triangle is held."""


@dataclass(frozen=True, slots=True, eq=False)
class CholeskyFactor:
    """A = L L^T in blocks of rows, each with the columns up to its last row.

    >>> factor = CholeskyFactor.of(torch.tensor([[4.0, 2.0], [2.0, 3.0]]).split(1))
    >>> factor.solved(torch.tensor([[8.0], [8.0]])).flatten()
    tensor([1., 2.])
    """

    blocks: tuple[Tensor, ...]
    """`[b, start + b]` from each start"""

    @classmethod
    def of(cls, lower: Iterator[Tensor] | tuple[Tensor, ...]) -> CholeskyFactor:
        """Factor a matrix given by its blocks of rows, which are overwritten; n^3 / 3 operations.

        Columns after the last row of a block are ignored.
        """
        blocks: list[Tensor] = []
        start = 0
        for block in lower:
            start += len(block)
            lower_block = block[:, :start]
            _reduce(lower_block, blocks)
            blocks.append(lower_block)
        return cls(tuple(blocks))

    def solved(self, right: Tensor) -> Tensor:
        """Return A^-1 b for right-hand sides `[n, b]`, which are overwritten; 2 n^2 operations each."""
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
        """Describe the solution, exact up to rounding."""
        return Solution("Cholesky's factorisation of the kernel")


def factor_bytes(size: int) -> int:
    """Return the bytes of a factor, and of one block's temporaries while it is computed."""
    return 4 * (size * (size + BLOCK) // 2 + BLOCK * size)


def kernel_factor(kernel: WeightedKernel) -> CholeskyFactor:
    """Factor M; N^2 / 2 products of pairs and N^3 / 3 operations, in 2 N^2 bytes."""
    s = kernel.weight.sqrt()

    def lower() -> Iterator[Tensor]:
        for start in range(0, kernel.rows, BLOCK):
            kernel.report(f"row {start} of {kernel.rows} factored")
            stop = min(start + BLOCK, kernel.rows)
            block = torch.empty(stop - start, stop)
            for row, first, part in lower_rows(
                kernel.train, start, stop, kernel.compute, kernel.passing
            ):
                block[row - start : row - start + len(part), first : first + part.shape[1]] = part
            block *= s[:stop]
            block *= s[start:stop].unsqueeze(1)
            block[:, start:].diagonal().add_(kernel.damping)
            yield block

    return CholeskyFactor.of(lower())


def _reduce(rows: Tensor, above: list[Tensor]) -> None:
    """Turn a block of rows of A into those of L, given all blocks above it."""
    at = 0
    for block in above:
        end = at + len(block)
        here = rows[:, at:end]
        here.addmm_(rows[:, :at], block[:, :at].t(), alpha=-1)
        corner = block[:, at:].t()
        here.copy_(torch.linalg.solve_triangular(corner, here, upper=True, left=False))
        at = end
    corner = rows[:, at:]
    corner.addmm_(rows[:, :at], rows[:, :at].t(), alpha=-1)
    corner.copy_(cholesky(corner))


def cholesky(matrix: Tensor) -> Tensor:
    """Factor one matrix, in float64 if float32 is too imprecise for a tiny damping."""
    for kind in (torch.float32, torch.float64):
        result = torch.linalg.cholesky_ex(matrix.to(kind))
        if int(result.info) == 0:
            factor: Tensor = result.L
            return factor.float()
    raise AttributionError(
        "the damped kernel is not positive definite",
        code="attribute.not_positive_definite",
        found=f"a diagonal of {float(matrix.diagonal().mean()):.3g} on average",
        fix="Use a larger damping=.",
    )


@dataclass(frozen=True, slots=True, eq=False)
class ParameterSolver:
    """With A = G^T diag(weight) G + damping I `[P, P]`: s G A^-1 g = M^-1 (s G g) for any gradient g."""

    kernel: WeightedKernel
    factor: CholeskyFactor

    def along_rows(self, gradients: Tensor) -> Tensor:
        """Return G A^-1 g `[b, N]` for gradients g `[b, P]`; 2 P^2 + 2 N P operations each."""
        train = self.kernel.train
        solved = self.factor.solved(gradients.t().contiguous()).t()
        sizes = [form.restored_size for form in train.forms.values()]
        parts = dict(zip(train.forms, torch.split(solved, sizes, 1), strict=True))
        directions = Directions(tuple(range(len(solved))), parts, train.forms, train.weights)
        held = 4 * (len(solved) * (len(train) + solved.shape[1]))
        return along(train, directions, memory_budget=self.kernel.passing + held)

    def solution(self) -> Solution:
        """Describe the solution, exact up to rounding."""
        return Solution("Cholesky's factorisation among the parameters")


def parameter_solver(kernel: WeightedKernel) -> ParameterSolver:
    """Sum and factor A; N P^2 + P^3 / 3 operations, in 2 P^2 bytes."""
    train = kernel.train
    size = sum(form.restored_size for form in train.forms.values())
    lower = tuple(
        torch.zeros(min(BLOCK, size - at), min(at + BLOCK, size)) for at in range(0, size, BLOCK)
    )
    scale, slopes = kernel.weight.sqrt(), train.slopes()
    scale = scale if slopes is None else scale * slopes
    free_bytes = max(1, min(RESTORED, kernel.free_bytes // 16))
    for some in train.stream(stream_shares(train, kernel.passing, answer=0).train_rows):
        for start, stop in tiles(some.stop - some.start, size, 4, free_bytes):
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


def relative_damping(damping: float | str, diagonal: float, *, name: str) -> float:
    """Return the damping times a mean diagonal; raise unless both are positive."""
    if isinstance(damping, str) or not damping > 0:
        raise AttributionError(
            f"{name} must be positive, or a singular matrix would be inverted",
            code="attribute.damping",
            found=damping,
            fix=f"Leave out {name}= for 1 x the mean diagonal.",
        )
    if not diagonal > 0:
        raise AttributionError(
            "the gradients of the training rows are all zero, or not finite",
            code="attribute.zero_gradients",
            found=f"a mean squared norm of {diagonal}",
            fix="Capture a model that still has something to learn, or other layers.",
        )
    return float(damping * diagonal)


ROWS_AT_ONCE = 4096
"""Rows, and targets, that are read at a time."""


def dual(
    kernel: Tensor, *, weight: Tensor, pull: Tensor, damping: float
) -> Callable[[Tensor], Tensor]:
    """Return a function from products of queries with rows to scores `[..., N]`, by the kernel `[N, N]`.

    With s = sqrt(weight), M = s K s + damping I and k the products of a query with all rows, the scores are
    pull / s * (M^-1 (s k)). Takes N^3 / 3 operations once, N^2 per query; `kernel` is overwritten.
    """
    s = weight.sqrt()
    kernel *= s
    kernel *= s.unsqueeze(1)
    kernel.diagonal().add_(damping)
    factor = cholesky(kernel)
    after = pull / s

    def scores(products: Tensor) -> Tensor:
        flat = (products * s).reshape(-1, len(s))
        return (torch.cholesky_solve(flat.T, factor).T * after).reshape(products.shape)

    return scores


def primal(
    features: StreamedRows, *, weight: Tensor, pull: Tensor, damping: float
) -> Callable[[Tensor], Tensor]:
    """Return a function from features `[B, k]` of queries to scores `[B, N]`, by those `[N, k]` of the rows.

    With A = X^T diag(weight) X + damping I, the scores are pull * (X A^-1 g). The same as `dual` with K = X X^T,
    in k^3 / 3 + N k^2 operations once, N k per query.
    """
    gram = torch.zeros(features.dim, features.dim)
    for ids in row_blocks(features.count):
        gram += squared(features.read(ids) * weight[ids].sqrt().unsqueeze(1))
    gram.diagonal().add_(damping)
    factor = cholesky(gram)

    def scores(queries: Tensor) -> Tensor:
        moved = torch.cholesky_solve(queries.T, factor).T
        out = torch.empty(len(queries), features.count)
        for ids in row_blocks(features.count):
            torch.mm(moved, features.read(ids).T, out=out[:, ids[0] : ids[-1] + 1])
        return out.mul_(pull)

    return scores


def by_features(
    features: StreamedRows, *, weight: Tensor, pull: Tensor, damping: float
) -> Callable[[Tensor], Tensor]:
    """Choose `primal`, or `dual` if there are fewer rows than features."""
    if features.dim <= features.count:
        return primal(features, weight=weight, pull=pull, damping=damping)
    x = features.read(np.arange(features.count))
    solve = dual(squared(x.T), weight=weight, pull=pull, damping=damping)
    return lambda queries: solve(queries @ x.T)


def mean_square(features: StreamedRows, weight: Tensor) -> float:
    """Return the mean diagonal of the weighted kernel of features `[N, k]`: mean of weight x |x|^2."""
    squares = [
        squared_lengths(features.read(ids)).double() * weight[ids]
        for ids in row_blocks(features.count)
    ]
    return float(torch.cat(squares).mean())


class StreamedRows(Protocol):
    """Projected gradients, or features, that are read some rows at a time."""

    @property
    def count(self) -> int:
        """Number of rows."""

    @property
    def dim(self) -> int:
        """Number of features k."""

    def read(self, ids: Ids) -> Tensor:
        """Return rows `[len(ids), k]`."""


def add_damped_scores(
    out: Any, train: StreamedRows, targets: StreamedRows, *, damping: float, share: float
) -> None:
    """Add X (X^T X + l I)^-1 G^T `[n, m]`, times `share`, to an array that may be on disk.

    l is the damping times the mean diagonal of X^T X, or of X X^T if there are fewer rows than features.
    """
    few = train.count < train.dim
    x = train.read(np.arange(train.count)) if few else torch.empty(0)
    gram = squared(x.T) if few else streamed_gram(train, torch.float32)
    diagonal = float(gram.diagonal().double().mean())
    gram.diagonal().add_(relative_damping(damping, diagonal, name="ridge"))
    factor = torch.linalg.cholesky(gram)
    if not few:
        add_products(out, train, targets, lambda g: torch.cholesky_solve(g.T, factor), share=share)
        return
    for block in row_blocks(targets.count):
        solved = torch.cholesky_solve(x @ targets.read(block).T, factor) * share
        out[:, block[0] : block[-1] + 1] += solved.numpy()


def add_products(
    out: Any,
    train: StreamedRows,
    targets: StreamedRows,
    solve: Callable[[Tensor], Tensor],
    *,
    share: float,
) -> None:
    """Add X solve(G) `[n, m]`, times `share`, to an array that may be on disk."""
    for block in row_blocks(targets.count):
        solved = solve(targets.read(block)).float() * share
        for ids in row_blocks(train.count):
            part = train.read(ids) @ solved
            out[ids[0] : ids[-1] + 1, block[0] : block[-1] + 1] += part.numpy()


def streamed_gram(train: StreamedRows, dtype: torch.dtype) -> Tensor:
    """Compute X^T X `[k, k]` of rows that are read some at a time."""
    require_room(
        2 * train.dim**2 * dtype.itemsize,
        f"the {train.dim} x {train.dim} matrix to invert",
        fix="Choose a smaller proj_dim=, or with fewer rows than that leave out lambda_reg=.",
    )
    out = torch.zeros(train.dim, train.dim, dtype=dtype)
    for ids in row_blocks(train.count):
        rows = train.read(ids).to(dtype)
        out.addmm_(rows.T, rows)
    return out


def row_blocks(count: int) -> Iterator[Ids]:
    """Yield rows in fixed blocks, so that sums are the same in every run."""
    for start in range(0, count, ROWS_AT_ONCE):
        yield np.arange(start, min(start + ROWS_AT_ONCE, count))
