"""The kernel solved by block conjugate gradients, with products made from factors."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import torch

from gradkeep._budgets import format_bytes
from gradkeep.curvature._cholesky import (
    Solution,
    bytes_of,
    kernel_factor,
    lower_rows,
    parameter_solver,
)
from gradkeep.curvature._row_parts import weighted_part
from gradkeep.errors import AttributionError, BudgetError
from gradkeep.factors._cost import FLOPS, ProductSize
from gradkeep.query import along, dot
from gradkeep.query._engine import GradientPair, ProductEngine, stream_shares
from gradkeep.query._planner import choose_compute
from gradkeep.query._sums import Directions

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor

    from gradkeep.curvature._cholesky import CholeskyFactor, ParameterSolver, WeightedKernel
    from gradkeep.query import Gradients
    from gradkeep.query._engine import ComputeSpec


_NEGLIGIBLE = 1e-6
"""Eigenvalues below this share of the largest are rounding."""


@dataclass(frozen=True, slots=True, eq=False)
class LeadingDirections:
    """A stand-in U diag(values) U^T + damping I for a matrix, whose roots are easily multiplied with."""

    vectors: Tensor
    """U `[N, m]`, orthonormal"""
    values: Tensor
    """`[m]`, float64"""
    damping: float

    def root(self, right: Tensor, power: float) -> Tensor:
        """The stand-in to some power, times `[N, b]`; 4 N m b operations."""
        rest = self.damping**power
        share = ((self.values + self.damping) ** power - rest).float().unsqueeze(1)
        return torch.addmm(rest * right, self.vectors, share * (self.vectors.t() @ right))


def leading_directions(columns: Tensor, chosen: Tensor, damping: float) -> LeadingDirections:
    """Nystrom's approximation of a kernel `[N, N]` from some of its columns `[N, m]`.

    `chosen` `[m]` says which; 2 N m^2 operations.

    >>> kernel = torch.diag(torch.tensor([4.0, 1.0, 0.0]))
    >>> leading_directions(kernel[:, :2], torch.tensor([0, 1]), 1.0).values
    tensor([1., 4.], dtype=torch.float64)
    """
    core = columns[chosen].double()
    core = (core + core.t()) / 2
    values, turned = torch.linalg.eigh(core)
    there = values > _NEGLIGIBLE * values[-1].clamp(min=1e-300)
    # C core^-1 C^T = B B^T, and U are the left singular vectors of B.
    half = columns @ (turned[:, there] / values[there].sqrt()).float()
    values, turned = torch.linalg.eigh((half.t() @ half).double())
    there = values > _NEGLIGIBLE * values[-1:].clamp(min=1e-300)
    vectors = half @ (turned[:, there] / values[there].sqrt()).float()
    return LeadingDirections(vectors, values[there], damping)


@dataclass(frozen=True, slots=True, eq=False)
class Solved:
    """Solutions `[N, b]`, how they were found, and the largest |A x - b| / |b|."""

    values: Tensor
    steps: int
    residual: float


def block_conjugate_gradients(
    product: Callable[[Tensor], Tensor],
    right: Tensor,
    near: LeadingDirections,
    *,
    tolerance: float,
    max_steps: int,
    report: Callable[[int, float], None] = lambda steps, residual: None,
) -> Solved:
    """A^-1 b of right sides `[N, b]`, each to |A x - b| <= tolerance |b|, or an error.

    A is positive definite and given by its products with `[N, b]`; `near` stands in for it. All
    right sides are solved in the space that their residuals span together, so that many of them
    need few steps; residuals are kept orthonormal (Dubrulle's block method), so that equal right
    sides do no harm. The last product is that of the residual itself, which is what is told.

    >>> near = LeadingDirections(torch.zeros(3, 0), torch.zeros(0), 1.0)
    >>> a = torch.diag(torch.tensor([1.0, 2.0, 4.0]))
    >>> block_conjugate_gradients(
    ...     lambda v: a @ v, torch.ones(3, 1), near, tolerance=1e-6, max_steps=9
    ... ).values.flatten()
    tensor([1.0000, 0.5000, 0.2500])
    """
    sizes = right.norm(dim=0).clamp(min=1e-30)
    found, left = torch.zeros_like(right), right
    steps, worst = 0, float("inf")
    # How often what rounding left is solved for again.
    for _ in range(4):
        # What rounding left over is solved for relative to the right sides themselves.
        made, taken = _one_run(
            product, left, near, goal=tolerance * sizes, most=max_steps - steps, report=report
        )
        found += made
        steps += taken
        left = right - product(found)
        worst = float((left.norm(dim=0) / sizes).max())
        report(steps, worst)
        if worst <= tolerance:
            return Solved(found, steps, worst)
        if steps >= max_steps:
            break
    raise AttributionError(
        f"conjugate gradients did not converge in {steps} steps",
        found=f"a relative residual of {worst:.2g}",
        expected=f"{tolerance:g}",
        fix="use a larger damping or tolerance, or solver='cholesky'",
    )


def _one_run(
    product: Callable[[Tensor], Tensor],
    right: Tensor,
    near: LeadingDirections,
    *,
    goal: Tensor,
    most: int,
    report: Callable[[int, float], None],
) -> tuple[Tensor, int]:
    """Solutions from nothing, until the residuals that are updated step by step are small."""
    # Half of the tolerance: what is updated is not quite the residual.
    goal = goal / 2
    basis, sizes = torch.linalg.qr(near.root(right, -0.5))
    along, found = basis.clone(), torch.zeros_like(right)
    for step in range(1, most + 1):
        moved = near.root(product(near.root(along, -0.5)), -0.5)
        if not bool(moved.isfinite().all()):
            raise AttributionError("a product with the kernel is no number")
        bend = _factor(along, moved)
        found.addmm_(along, torch.cholesky_solve(sizes.double(), bend).float())
        basis, turned = torch.linalg.qr(basis - moved @ torch.cholesky_inverse(bend).float())
        sizes = turned @ sizes
        left = near.root(basis @ sizes, 0.5).norm(dim=0)
        report(step, float((left / goal).max()))
        if bool((left <= goal).all()):
            break
        along = torch.addmm(basis, along, turned.t())
    return near.root(found, -0.5), step if most else 0


def _factor(along: Tensor, moved: Tensor) -> Tensor:
    """Cholesky's factor of along^T A along, in float64; directions that are spent are propped up."""
    bend = (along.t() @ moved).double()
    bend = (bend + bend.t()) / 2
    size = bend.diagonal().abs().mean()
    for share in (0.0, 1e-10, 1e-7, 1e-4):
        propped = bend + share * size * torch.eye(len(bend), dtype=bend.dtype)
        found = torch.linalg.cholesky_ex(propped)
        if int(found.info) == 0:
            factor: Tensor = found.L
            return factor
    raise AttributionError("the damped kernel is not positive definite", fix="use a larger damping")


_BLOCK = 2048
"""Rows whose products with all rows before them are made at a time."""


@dataclass(frozen=True, slots=True, eq=False)
class KernelProducts:
    """K v of many vectors at once, in two ways that differ by layer.

    Of `paired` layers the products of all pairs of rows are made anew and multiplied with the vectors:
    N^2 / 2 pairs, however many vectors there are. Of `moved` ones the gradients are summed with the
    vectors as weights, and every row is multiplied with the sums: 4 N P operations a vector.
    """

    train: Gradients
    paired: tuple[str, ...]
    moved: tuple[str, ...]
    compute: ComputeSpec = None

    @property
    def moved_values(self) -> int:
        """Values of one vector's sum of gradients."""
        return sum(self.train.forms[name].restored_size for name in self.moved)

    def times(self, vectors: Tensor, memory_budget: int) -> Tensor:
        """K v `[N, b]` of vectors `[N, b]`."""
        out = torch.zeros_like(vectors)
        if self.paired:
            self._add_paired(vectors, out, memory_budget)
        if self.moved:
            self._add_moved(vectors, out, memory_budget)
        return out

    def _add_paired(self, vectors: Tensor, out: Tensor, memory_budget: int) -> None:
        train = only_layers(self.train, self.paired)
        for start in range(0, len(train), _BLOCK):
            stop = min(start + _BLOCK, len(train))
            for row, first, part in lower_rows(train, start, stop, self.compute, memory_budget):
                ours, theirs = slice(row, row + len(part)), slice(first, first + part.shape[1])
                out[ours].addmm_(part, vectors[theirs])
                # The kernel is symmetric: pairs with rows before the block count for both.
                before = part[:, : max(0, start - first)]
                if before.shape[1]:
                    out[first : first + before.shape[1]].addmm_(before.t(), vectors[ours])

    def _add_moved(self, vectors: Tensor, out: Tensor, memory_budget: int) -> None:
        train = only_layers(self.train, self.moved)
        slopes = train.slopes()
        weights = vectors.t() if slopes is None else vectors.t() * slopes
        sums = {
            name: torch.zeros(len(weights), form.restored_size)
            for name, form in train.forms.items()
        }
        for some in train.stream(stream_shares(train, memory_budget, answer=0).train_rows):
            part = weights[:, some.start : some.stop]
            for name, form in train.forms.items():
                rows = some.factors[name].widened()
                sums[name] += weighted_part(form, rows, part.to(rows.example.dtype)).float()
        directions = Directions(tuple(range(len(weights))), sums, train.forms, train.weights)
        held = 4 * (out.numel() + len(weights) * self.moved_values)
        out += along(train, directions, memory_budget=memory_budget + held).t()


def only_layers(gradients: Gradients, layers: tuple[str, ...]) -> Gradients:
    """The gradients of some layers; only their arrays are read."""
    return dataclasses.replace(gradients, forms={name: gradients.forms[name] for name in layers})


def pair_seconds(train: Gradients, compute: ComputeSpec, memory_budget: int) -> dict[str, float]:
    """Predicted seconds of the products of all pairs of rows, each pair once, by layer."""
    engine = ProductEngine(
        [GradientPair(train, train)], compute=compute, memory_budget=memory_budget, answer=0
    )
    return {step.layer: step.predicted_seconds / 2 for step in engine.plan.steps}


def moved_seconds(train: Gradients, vectors: int) -> dict[str, float]:
    """Predicted seconds to move so many vectors through all rows, there or back, by layer."""
    # Rows that are looked at for their number of positions.
    count = min(len(train), 16)
    some = train.rows([at * len(train) // count for at in range(count)])
    found = {}
    for name, form in train.forms.items():
        load = ProductSize(len(train), vectors, t_train=some.factors[name].positions / count)
        costs = choose_compute(form, load).alternatives
        ways = [cost.seconds for way, cost in costs.items() if way in ("half", "restored", "dense")]
        found[name] = min(ways)
    return found


def cheapest_products(
    train: Gradients,
    vectors: int,
    compute: ComputeSpec,
    pairs: Mapping[str, float],
) -> tuple[KernelProducts, float]:
    """The cheapest way for each layer with so many vectors, and its predicted seconds."""
    moved = {name: 2 * each for name, each in moved_seconds(train, vectors).items()}
    better = tuple(name for name in train.forms if pairs[name] < moved[name])
    others = tuple(name for name in train.forms if name not in better)
    whole = 2.0 * len(train) ** 2 * vectors / FLOPS
    mixed = whole + sum(pairs[name] for name in better) + sum(moved[name] for name in others)
    if better and mixed < sum(moved.values()):
        return KernelProducts(train, better, others, compute), mixed
    return KernelProducts(train, (), tuple(train.forms), compute), sum(moved.values())


ARRAYS = 10
"""Arrays of one number for each row that a right side has while it is solved."""
STEPS = 200
"""More are a sign of a damping that is far too small."""


@dataclass(slots=True, eq=False)
class ConjugateSolver:
    """M^-1 b by block conjugate gradients, so many right sides at a time."""

    kernel: WeightedKernel
    products: KernelProducts
    near: LeadingDirections
    columns: int
    tolerance: float
    worst: list[Solution] = field(default_factory=list)

    def solved(self, right: Tensor) -> Tensor:
        """M^-1 b `[N, b]` of right sides `[N, b]`, which are overwritten."""
        for start in range(0, right.shape[1], self.columns):
            here = right[:, start : start + self.columns]
            here.copy_(self._some(here.contiguous()))
        return right

    def solution(self) -> Solution:
        """The most steps and the largest residual so far."""
        residuals = [one.residual for one in self.worst if one.residual is not None]
        steps = max((one.steps for one in self.worst), default=0)
        return Solution("block conjugate gradients", steps, max(residuals, default=0.0))

    def _some(self, right: Tensor) -> Tensor:
        kernel, s = self.kernel, self.kernel.weight.sqrt().unsqueeze(1)

        def product(vectors: Tensor) -> Tensor:
            moved = self.products.times(vectors * s, kernel.passing).mul_(s)
            return moved.add_(vectors, alpha=kernel.damping)

        def report(steps: int, left: float) -> None:
            kernel.report(f"step {steps}, residual {left:.1e} for {right.shape[1]} queries")

        found = block_conjugate_gradients(
            product,
            right,
            self.near,
            tolerance=self.tolerance,
            max_steps=STEPS,
            report=report,
        )
        self.worst.append(Solution("", found.steps, found.residual))
        return found.values


def pivots_for(rows: int, room: int) -> int:
    """How many columns are held, in an eighth of the room."""
    # Rows whose columns of the kernel stand in for all of it: that is a small part of one product
    # with it, and saves most of the steps of few right sides.
    return max(1, min(512, math.ceil(rows / 4), room // 8 // (4 * rows)))


def stand_in(kernel: WeightedKernel, pivots: int) -> LeadingDirections:
    """The leading directions of M, from the columns of rows drawn by what they add to its trace."""
    share = kernel.weight.double() * kernel.train.norms().double().square()
    draws = torch.Generator().manual_seed(0)
    there = int((share > 0).sum())
    chosen = torch.multinomial(share, max(1, min(pivots, there)), generator=draws).sort().values
    s = kernel.weight.sqrt()
    columns = dot(
        kernel.train,
        kernel.train,
        ids=kernel.train.ids[chosen.numpy()],
        compute=kernel.compute,
        memory_budget=kernel.passing + 4 * len(chosen) * kernel.rows,
    ).values
    columns *= s
    columns *= s[chosen].unsqueeze(1)
    return leading_directions(columns.t(), chosen, kernel.damping)


KernelWay = Literal["cholesky", "parameters", "cg"]
WAYS: tuple[KernelWay, ...] = ("cholesky", "parameters", "cg")


@dataclass(frozen=True, slots=True, eq=False)
class WayCost:
    """What a way would take."""

    way: KernelWay
    seconds: float
    bytes: int
    columns: int = 0
    """Right sides at a time, of conjugate gradients."""
    products: KernelProducts | None = None


def way_costs(kernel: WeightedKernel, queries: int) -> list[WayCost]:
    """What all ways would take for so many right sides, in the order of `WAYS`."""
    rows, flops = kernel.rows, FLOPS
    size = sum(form.restored_size for form in kernel.train.forms.values())
    pairs = pair_seconds(kernel.train, kernel.compute, kernel.passing)
    moved = sum(moved_seconds(kernel.train, queries).values())
    whole = WayCost(
        "cholesky",
        sum(pairs.values()) + (rows**3 / 3 + 2 * rows**2 * queries) / flops,
        bytes_of(rows),
    )
    few = WayCost(
        "parameters",
        moved + (rows * size**2 + size**3 / 3 + 2 * size**2 * queries) / flops,
        bytes_of(size),
    )
    return [whole, few, _conjugate_cost(kernel, queries, pairs)]


def _conjugate_cost(kernel: WeightedKernel, queries: int, pairs: dict[str, float]) -> WayCost:
    rows, room = kernel.rows, kernel.room // 2
    held = 4 * 3 * rows * pivots_for(rows, kernel.room)
    wanted = max(1, queries)
    products, seconds = cheapest_products(kernel.train, wanted, kernel.compute, pairs)
    each = 4 * (ARRAYS * rows + 3 * products.moved_values)
    columns = max(1, min(wanted, (room - held) // each))
    if columns < wanted:
        products, seconds = cheapest_products(kernel.train, columns, kernel.compute, pairs)
        each = 4 * (ARRAYS * rows + 3 * products.moved_values)
        columns = max(1, min(wanted, (room - held) // each))
    # Fewer right sides at a time are not worth their steps, unless no more are asked about.
    least = held + each * min(wanted, 16)
    # Products that conjugate gradients usually take, with the one that measures the residual.
    times = 6 * math.ceil(wanted / columns)
    return WayCost("cg", seconds * times, least, columns, products)


def choose_way(kernel: WeightedKernel, queries: int, wish: KernelWay | None = None) -> WayCost:
    """The fastest way whose bytes are at most half of the room; an error that names the least."""
    costs = way_costs(kernel, queries)
    if wish is not None:
        costs = [cost for cost in costs if cost.way == wish]
    fitting = [cost for cost in costs if cost.bytes <= kernel.room // 2]
    if not fitting:
        least = min(costs, key=lambda cost: cost.bytes)
        raise BudgetError(
            f"the kernel of {kernel.rows} rows cannot be solved in the memory budget",
            found=format_bytes(kernel.room),
            expected=f"at least {format_bytes(2 * least.bytes)}"
            + (f" for solver={wish!r}" if wish else f", by solver={least.way!r}"),
            fix=f"pass memory_budget={2 * least.bytes} or more"
            + (", or leave solver out" if wish else ", or dim=1024 for a projection"),
        )
    return min(fitting, key=lambda cost: cost.seconds)


def kernel_solver(
    kernel: WeightedKernel, queries: int, *, tolerance: float, wish: KernelWay | None = None
) -> CholeskyFactor | ParameterSolver | ConjugateSolver:
    """The kernel made ready to be solved for so many right sides, in the cheapest way or the wished one."""
    chosen = choose_way(kernel, queries, wish)
    if chosen.way == "cholesky":
        return kernel_factor(kernel)
    if chosen.way == "parameters":
        return parameter_solver(kernel)
    assert chosen.products is not None
    near = stand_in(kernel, pivots_for(kernel.rows, kernel.room))
    return ConjugateSolver(kernel, chosen.products, near, chosen.columns, tolerance)
