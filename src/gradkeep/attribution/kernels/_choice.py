"""Which way to solve the kernel: the one with the least predicted time that fits into the budget."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from gradkeep._budgets import format_bytes
from gradkeep.attribution.kernels._cholesky import bytes_of, kernel_factor
from gradkeep.attribution.kernels._conjugate import ARRAYS, ConjugateSolver, pivots_for, stand_in
from gradkeep.attribution.kernels._parameters import parameter_solver
from gradkeep.attribution.kernels._products import (
    KernelProducts,
    cheapest_products,
    moved_seconds,
    pair_seconds,
)
from gradkeep.errors import BudgetError
from gradkeep.factors._cost import MachineSpeeds

if TYPE_CHECKING:
    from gradkeep.attribution.kernels._cholesky import CholeskyFactor
    from gradkeep.attribution.kernels._parameters import ParameterSolver
    from gradkeep.attribution.kernels._weighted import WeightedKernel

KernelWay = Literal["cholesky", "parameters", "cg"]
WAYS: tuple[KernelWay, ...] = ("cholesky", "parameters", "cg")
_STEPS = 6
"""Products that conjugate gradients usually take, with the one that measures the residual."""
_LEAST_COLUMNS = 16
"""Fewer right sides at a time are not worth their steps, unless no more are asked about."""


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
    rows, flops = kernel.rows, MachineSpeeds().flops
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
    least = held + each * min(wanted, _LEAST_COLUMNS)
    times = _STEPS * math.ceil(wanted / columns)
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
