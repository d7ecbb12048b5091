"""Kernel systems solved by block conjugate gradients, with products computed from factors."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import torch

from gradkeep._budgets import format_bytes
from gradkeep.curvature._cholesky import (
    Solution,
    factor_bytes,
    kernel_factor,
    lower_rows,
    parameter_solver,
)
from gradkeep.curvature._row_parts import weighted_part
from gradkeep.errors import AttributionError, BudgetError
from gradkeep.query import along, dot
from gradkeep.query._engine import GradientPair, ProductEngine, stream_shares
from gradkeep.query._planner import FLOPS, ProductSize, choose_compute
from gradkeep.query._sums import Directions

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor

    from gradkeep.curvature._cholesky import CholeskyFactor, ParameterSolver, WeightedKernel
    from gradkeep.query import Gradients
    from gradkeep.query._engine import ComputeSpec


@dataclass(frozen=True, slots=True, eq=False)
class Preconditioner:
    """Approximation U diag(values) U^T + damping I of a matrix, whose powers are cheap to multiply with."""

    vectors: Tensor
    """U `[N, m]`, orthonormal"""
    values: Tensor
    """`[m]`, float64"""
    damping: float

    def root(self, right: Tensor, power: float) -> Tensor:
        """Multiply a power of the approximation with `[N, b]`; 4 N m b operations."""
        rest = self.damping**power
        share = ((self.values + self.damping) ** power - rest).float().unsqueeze(1)
        return torch.addmm(rest * right, self.vectors, share * (self.vectors.t() @ right))


def nystrom_preconditioner(columns: Tensor, chosen: Tensor, damping: float) -> Preconditioner:
    """Compute Nystrom's approximation of a kernel `[N, N]` from some of its columns `[N, m]`.

    `chosen` `[m]` are the indices of the columns; 2 N m^2 operations.

    >>> kernel = torch.diag(torch.tensor([4.0, 1.0, 0.0]))
    >>> nystrom_preconditioner(kernel[:, :2], torch.tensor([0, 1]), 1.0).values
    tensor([1., 4.], dtype=torch.float64)
    """
    core = columns[chosen].double()
    # C core^-1 C^T = B B^T, and U are the left singular vectors of B.
    half, _ = _times_root(columns, (core + core.t()) / 2)
    return Preconditioner(*_times_root(half, (half.t() @ half).double()), damping)


def _times_root(columns: Tensor, core: Tensor) -> tuple[Tensor, Tensor]:
    """Multiply with the inverse root of a matrix, up to rounding errors; also return its eigenvalues."""
    values, rotation = torch.linalg.eigh(core)
    is_large = values > 1e-6 * values[-1:].clamp(min=1e-300)
    root = rotation[:, is_large] / values[is_large].sqrt()
    return columns @ root.float(), values[is_large]


@dataclass(frozen=True, slots=True, eq=False)
class Solved:
    """Solutions `[N, b]`, the number of steps, and the largest |A x - b| / |b|."""

    values: Tensor
    steps: int
    residual: float


def block_conjugate_gradients(
    product: Callable[[Tensor], Tensor],
    right: Tensor,
    preconditioner: Preconditioner,
    *,
    tolerance: float,
    max_steps: int,
    report: Callable[[int, float], None] = lambda steps, residual: None,
) -> Solved:
    """Solve A x = b for right-hand sides `[N, b]`, each to |A x - b| <= tolerance |b|, or raise.

    A is positive definite and given by its products with `[N, b]`. All right-hand sides are solved in the space
    that their residuals span together, so that many of them need few steps; residuals are kept orthonormal
    (Dubrulle's block method), so that equal right-hand sides do no harm. The last product computes the reported
    residual.

    >>> identity = Preconditioner(torch.zeros(3, 0), torch.zeros(0), 1.0)
    >>> a = torch.diag(torch.tensor([1.0, 2.0, 4.0]))
    >>> block_conjugate_gradients(
    ...     lambda v: a @ v, torch.ones(3, 1), identity, tolerance=1e-6, max_steps=9
    ... ).values.flatten()
    tensor([1.0000, 0.5000, 0.2500])
    """
    sizes = right.norm(dim=0).clamp(min=1e-30)
    solution, remainder = torch.zeros_like(right), right
    steps, worst = 0, float("inf")
    # Up to four runs of iterative refinement.
    for _ in range(4):
        # The tolerance stays relative to the original right-hand sides.
        correction, taken = _one_run(
            product,
            remainder,
            preconditioner,
            goal=tolerance * sizes,
            most=max_steps - steps,
            report=report,
        )
        solution += correction
        steps += taken
        remainder = right - product(solution)
        worst = float((remainder.norm(dim=0) / sizes).max())
        report(steps, worst)
        if worst <= tolerance:
            return Solved(solution, steps, worst)
        if steps >= max_steps:
            break
    fix = "Use a larger damping= or tolerance=, or solver='cholesky'."
    raise _not_converged(steps, worst, tolerance, fix)


def _one_run(
    product: Callable[[Tensor], Tensor],
    right: Tensor,
    preconditioner: Preconditioner,
    *,
    goal: Tensor,
    most: int,
    report: Callable[[int, float], None],
) -> tuple[Tensor, int]:
    """Solve from zero until the updated residuals are small."""
    # Half of the tolerance: the updated residual is not exact.
    goal = goal / 2
    basis, sizes = torch.linalg.qr(preconditioner.root(right, -0.5))
    along, solution = basis.clone(), torch.zeros_like(right)
    for step in range(1, most + 1):
        moved = preconditioner.root(product(preconditioner.root(along, -0.5)), -0.5)
        _require_finite(moved)
        bend = _factor(along, moved)
        solution.addmm_(along, torch.cholesky_solve(sizes.double(), bend).float())
        basis, rotation = torch.linalg.qr(basis - moved @ torch.cholesky_inverse(bend).float())
        sizes = rotation @ sizes
        residual_norms = preconditioner.root(basis @ sizes, 0.5).norm(dim=0)
        report(step, float((residual_norms / goal).max()))
        if bool((residual_norms <= goal).all()):
            break
        along = torch.addmm(basis, along, rotation.t())
    return preconditioner.root(solution, -0.5), step if most else 0


def _require_finite(product: Tensor) -> None:
    if not bool(product.isfinite().all()):
        raise AttributionError(
            "a product of gradients is not finite",
            code="attribute.not_finite",
            fix="Check the gradients: gk.gradients(store, split=...).norms().",
        )


def _not_converged(steps: int, residual: float, tolerance: float, fix: str) -> AttributionError:
    return AttributionError(
        f"conjugate gradients did not converge in {steps} steps",
        code="attribute.not_converged",
        found=f"a relative residual of {residual:.2g}",
        expected=f"{tolerance:g}",
        fix=fix,
    )


def _factor(along: Tensor, moved: Tensor) -> Tensor:
    """Return Cholesky's factor of along^T A along in float64, regularized for exhausted directions."""
    bend = (along.t() @ moved).double()
    bend = (bend + bend.t()) / 2
    size = bend.diagonal().abs().mean()
    for share in (0.0, 1e-10, 1e-7, 1e-4):
        regularized = bend + share * size * torch.eye(len(bend), dtype=bend.dtype)
        result = torch.linalg.cholesky_ex(regularized)
        if int(result.info) == 0:
            factor: Tensor = result.L
            return factor
    raise AttributionError(
        "the damped kernel is not positive definite",
        code="attribute.not_positive_definite",
        fix="Use a larger damping=.",
    )


_BLOCK = 2048
"""Rows whose products with all earlier rows are computed at a time."""


@dataclass(frozen=True, slots=True, eq=False)
class KernelProducts:
    """Products K v of many vectors at once, in one of two ways per layer.

    For `paired` layers the products of all pairs of rows are computed anew and multiplied with the vectors: N^2 / 2
    pairs for any number of vectors. For `moved` layers the gradients are summed with the vectors as weights, and
    every row is multiplied with the sums: 4 N P operations per vector.
    """

    train: Gradients
    paired: tuple[str, ...]
    moved: tuple[str, ...]
    compute: ComputeSpec = None

    @property
    def moved_values(self) -> int:
        """Number of values of one vector's sum of gradients."""
        return sum(self.train.forms[name].restored_size for name in self.moved)

    def times(self, vectors: Tensor, memory_budget: int) -> Tensor:
        """Return K v `[N, b]` for vectors `[N, b]`."""
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
    """Restrict gradients to some layers; only their arrays are read."""
    return dataclasses.replace(gradients, forms={name: gradients.forms[name] for name in layers})


def pair_seconds(train: Gradients, compute: ComputeSpec, memory_budget: int) -> dict[str, float]:
    """Predict the seconds of the products of all pairs of rows, each pair once, by layer."""
    engine = ProductEngine(
        [GradientPair(train, train)], compute=compute, memory_budget=memory_budget, answer=0
    )
    return {step.layer: step.predicted_seconds / 2 for step in engine.plan.steps}


def moved_seconds(train: Gradients, vectors: int) -> dict[str, float]:
    """Predict the seconds of one product of `vectors` vectors with all rows, by layer."""
    # Sample 16 rows for their number of positions.
    count = min(len(train), 16)
    some = train.rows([at * len(train) // count for at in range(count)])
    seconds = {}
    for name, form in train.forms.items():
        load = ProductSize(len(train), vectors, t_train=some.factors[name].positions / count)
        costs = choose_compute(form, load).alternatives
        candidates = [
            costs[kind].seconds for kind in ("half", "restored", "dense") if kind in costs
        ]
        seconds[name] = min(candidates)
    return seconds


def cheapest_products(
    train: Gradients,
    vectors: int,
    compute: ComputeSpec,
    pairs: Mapping[str, float],
) -> tuple[KernelProducts, float]:
    """Choose the cheapest products for each layer with this many vectors, and predict the seconds."""
    moved = {name: 2 * each for name, each in moved_seconds(train, vectors).items()}
    better = tuple(name for name in train.forms if pairs[name] < moved[name])
    others = tuple(name for name in train.forms if name not in better)
    whole = 2.0 * len(train) ** 2 * vectors / FLOPS
    mixed = whole + sum(pairs[name] for name in better) + sum(moved[name] for name in others)
    if better and mixed < sum(moved.values()):
        return KernelProducts(train, better, others, compute), mixed
    return KernelProducts(train, (), tuple(train.forms), compute), sum(moved.values())


@dataclass(slots=True, eq=False)
class ConjugateSolver:
    """Solve M x = b by block conjugate gradients, `columns` right-hand sides at a time."""

    kernel: WeightedKernel
    products: KernelProducts
    preconditioner: Preconditioner
    columns: int
    tolerance: float
    worst: list[Solution] = field(default_factory=list)

    def solved(self, right: Tensor) -> Tensor:
        """Return M^-1 b `[N, b]` for right-hand sides `[N, b]`, which are overwritten."""
        for start in range(0, right.shape[1], self.columns):
            here = right[:, start : start + self.columns]
            here.copy_(self._some(here.contiguous()))
        return right

    def solution(self) -> Solution:
        """Return the most steps and the largest residual so far."""
        residuals = [one.residual for one in self.worst if one.residual is not None]
        steps = max((one.steps for one in self.worst), default=0)
        return Solution("block conjugate gradients", steps, max(residuals, default=0.0))

    def _some(self, right: Tensor) -> Tensor:
        kernel, s = self.kernel, self.kernel.weight.sqrt().unsqueeze(1)

        def product(vectors: Tensor) -> Tensor:
            moved = self.products.times(vectors * s, kernel.passing).mul_(s)
            return moved.add_(vectors, alpha=kernel.damping)

        def report(steps: int, residual: float) -> None:
            kernel.report(f"step {steps}, residual {residual:.1e} for {right.shape[1]} queries")

        # More than 200 steps are a sign of a damping that is far too small.
        solved = block_conjugate_gradients(
            product,
            right,
            self.preconditioner,
            tolerance=self.tolerance,
            max_steps=200,
            report=report,
        )
        self.worst.append(Solution("", solved.steps, solved.residual))
        return solved.values


def pivots_for(rows: int, free_bytes: int) -> int:
    """Return the number of preconditioner columns that fit in an eighth of the room."""
    # At most 1024 columns: about one product with the kernel for many right-hand sides, and more
    # save no further steps.
    return max(1, min(1024, math.ceil(rows / 4), free_bytes // 8 // (4 * rows)))


def build_preconditioner(kernel: WeightedKernel, pivots: int) -> Preconditioner:
    """Build the preconditioner of M from columns of rows drawn by their share of its trace."""
    share = kernel.weight.double() * kernel.train.norms().double().square()
    draws = torch.Generator().manual_seed(0)
    positive = int((share > 0).sum())
    chosen = torch.multinomial(share, max(1, min(pivots, positive)), generator=draws).sort().values
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
    return nystrom_preconditioner(columns.t(), chosen, kernel.damping)


KernelMethod = Literal["cholesky", "parameters", "cg"]
KERNEL_METHODS: tuple[KernelMethod, ...] = ("cholesky", "parameters", "cg")


@dataclass(frozen=True, slots=True, eq=False)
class MethodCost:
    """Predicted cost of a method."""

    method: KernelMethod
    seconds: float
    bytes: int
    columns: int = 0
    """Right-hand sides at a time, for conjugate gradients."""
    products: KernelProducts | None = None


def method_costs(kernel: WeightedKernel, queries: int) -> list[MethodCost]:
    """Predict the cost of all methods for this many right-hand sides, in the order of `KERNEL_METHODS`."""
    rows, flops = kernel.rows, FLOPS
    size = sum(form.restored_size for form in kernel.train.forms.values())
    pairs = pair_seconds(kernel.train, kernel.compute, kernel.passing)
    moved = sum(moved_seconds(kernel.train, queries).values())
    whole = MethodCost(
        "cholesky",
        sum(pairs.values()) + (rows**3 / 3 + 2 * rows**2 * queries) / flops,
        factor_bytes(rows),
    )
    few = MethodCost(
        "parameters",
        moved + (rows * size**2 + size**3 / 3 + 2 * size**2 * queries) / flops,
        factor_bytes(size),
    )
    return [whole, few, _conjugate_cost(kernel, queries, pairs)]


def _conjugate_cost(kernel: WeightedKernel, queries: int, pairs: dict[str, float]) -> MethodCost:
    rows, free_bytes = kernel.rows, kernel.free_bytes // 2
    held = 4 * 3 * rows * pivots_for(rows, kernel.free_bytes)
    count = max(1, queries)
    products, seconds = cheapest_products(kernel.train, count, kernel.compute, pairs)
    # Ten arrays of N numbers per right-hand side while it is solved.
    each = 4 * (10 * rows + 3 * products.moved_values)
    columns = max(1, min(count, (free_bytes - held) // each))
    if columns < count:  # fewer columns may favor other products
        products, seconds = cheapest_products(kernel.train, columns, kernel.compute, pairs)
        each = 4 * (10 * rows + 3 * products.moved_values)
        columns = max(1, min(count, (free_bytes - held) // each))
    # Fewer than 16 right-hand sides at a time are not worth their steps.
    least = held + each * min(count, 16)
    # Conjugate gradients take some 10 products, including the one for the residual.
    times = 10 * math.ceil(count / columns)
    return MethodCost("cg", seconds * times, least, columns, products)


def choose_method(
    kernel: WeightedKernel, queries: int, method: KernelMethod | None = None
) -> MethodCost:
    """Choose the fastest method that fits in half of the room; raise with the least budget if none does."""
    costs = method_costs(kernel, queries)
    if method is not None:
        costs = [cost for cost in costs if cost.method == method]
    fitting = [cost for cost in costs if cost.bytes <= kernel.free_bytes // 2]
    if not fitting:
        least = min(costs, key=lambda cost: cost.bytes)
        raise BudgetError(
            f"the kernel of {kernel.rows} rows cannot be solved in the memory budget",
            code="budget.kernel_too_large",
            found=format_bytes(kernel.free_bytes),
            expected=(
                f"at least {format_bytes(2 * least.bytes)}"
                + (f" for solver={method!r}" if method else f", by solver={least.method!r}")
            ),
            fix=f"Pass memory_budget={2 * least.bytes} or more"
            + (", or leave out solver=." if method else ", or dim=1024 for a projection."),
        )
    return min(fitting, key=lambda cost: cost.seconds)


def kernel_solver(
    kernel: WeightedKernel, queries: int, *, tolerance: float, method: KernelMethod | None = None
) -> CholeskyFactor | ParameterSolver | ConjugateSolver:
    """Prepare the kernel for this many right-hand sides, by the cheapest or the requested method."""
    chosen = choose_method(kernel, queries, method)
    if chosen.method == "cholesky":
        return kernel_factor(kernel)
    if chosen.method == "parameters":
        return parameter_solver(kernel)
    assert chosen.products is not None
    preconditioner = build_preconditioner(kernel, pivots_for(kernel.rows, kernel.free_bytes))
    return ConjugateSolver(kernel, chosen.products, preconditioner, chosen.columns, tolerance)


def conjugate_gradients(
    product: Callable[[Tensor], Tensor], right: Tensor, *, tolerance: float, max_steps: int
) -> Tensor:
    """Solve A x = right for x `[K, P]`, of a positive definite A given by its products.

    Each to |A x - right| <= tolerance |right|, or raise. Cost: one product per step.

    >>> conjugate_gradients(lambda x: 2 * x, torch.ones(1, 3), tolerance=1e-6, max_steps=3)
    tensor([[0.5000, 0.5000, 0.5000]])
    """
    solution, residual = torch.zeros_like(right), right.clone()
    along, size = residual.clone(), residual.square().sum(1)
    goal = tolerance**2 * size
    for _ in range(max_steps):
        if bool((size <= goal).all()):
            return solution
        curved = product(along)
        bend = (along * curved).sum(1)
        _require_finite(curved)
        unsolved = size > goal
        if bool((bend[unsolved] <= 0).any()):
            raise AttributionError(
                "the damped curvature is not positive definite",
                code="attribute.negative_curvature",
                found=f"v^T (A + damping) v = {float(bend[unsolved].min()):.3g}",
                fix="Use curvature='ggn' or 'fisher', or a larger damping=.",
            )
        step = torch.where(unsolved, size / bend, torch.zeros_like(bend)).unsqueeze(1)
        solution, residual = solution + step * along, residual - step * curved
        before, size = size, residual.square().sum(1)
        grown = torch.where(before > 0, size / before, torch.zeros_like(size))
        along = residual + grown.unsqueeze(1) * along
    if bool((size <= goal).all()):
        return solution
    worst = float((size / right.square().sum(1).clamp(min=1e-300)).sqrt().max())
    fix = "Use a larger damping=, max_steps= or tolerance=."
    raise _not_converged(max_steps, worst, tolerance, fix)


@dataclass(frozen=True, slots=True, eq=False)
class Eigenpairs:
    """Eigenvalues `[r]`, descending, and eigenvectors `[r, P]` of norm one."""

    values: Tensor
    vectors: Tensor


def lanczos(
    product: Callable[[Tensor], Tensor], start: Tensor, *, iterations: int, rank: int
) -> Eigenpairs:
    """Compute the `rank` largest positive eigenpairs in the Krylov space of `start` `[P]`.

    Arnoldi's iteration: every new vector is made orthogonal, twice, to all earlier ones. Cost: one product per
    iteration, iterations x P values.

    >>> pairs = lanczos(lambda v: v * torch.tensor([3.0, 2.0, 1.0]), torch.ones(3), iterations=3, rank=2)
    >>> pairs.values
    tensor([3.0000, 2.0000])
    """
    steps = min(iterations, len(start))
    basis = start.new_zeros(steps, len(start))
    small = start.new_zeros(steps, steps)
    vector, count = start / start.norm(), 0
    for count in range(1, steps + 1):
        basis[count - 1] = vector
        moved = product(vector)
        _require_finite(moved)
        known = basis[:count]
        shares = known @ moved
        small[:count, count - 1] = shares
        rest = moved - shares @ known
        rest = rest - (known @ rest) @ known
        # The rest is rounding: the space is closed under the product.
        if float(rest.norm()) <= 1e-6 * float(moved.norm()):
            break
        vector = rest / rest.norm()
    # The matrix is symmetric; only its upper half is filled.
    values, rotation = torch.linalg.eigh(small[:count, :count], UPLO="U")
    above = values > 1e-10 * values.abs().amax()  # below it, zero up to rounding
    order = [at for at in range(count - 1, -1, -1) if bool(above[at])][:rank]
    if not order:
        raise AttributionError(
            "the curvature has no positive eigenvalue",
            code="attribute.no_positive_eigenvalue",
            fix="Use curvature='ggn' or 'fisher', more iterations=, or another checkpoint.",
        )
    return Eigenpairs(values[order], rotation[:, order].T @ basis[:count])
