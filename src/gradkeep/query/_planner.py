"""Estimate the cost of each algorithm for products of gradients, and choose one."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from gradkeep import _arguments
from gradkeep._budgets import format_bytes
from gradkeep.errors import QueryError
from gradkeep.factors._arithmetic import RESTORED
from gradkeep.factors._cost import VALUE, calls, matrix_product, temporaries

if TYPE_CHECKING:
    from collections.abc import Mapping

    from gradkeep.factors._cost import Cost, ProductSize
    from gradkeep.factors._form import AnyForm, Compute

_NAMES: dict[str, tuple[Compute, ...]] = {
    "factored": ("factored", "dense"),
    "gram": ("gram", "factored", "dense"),
    "half": ("half", "dense"),
    "restored": ("restored", "dense"),
    "dense": ("dense", "restored"),
    "naive": ("dense", "restored"),
    "recon": ("restored", "dense"),
    "ted": ("gram", "factored", "dense"),
    "restore": ("restored", "dense"),
}
"""Accepted names and the algorithms they mean: the first that the form supports."""


@dataclass(frozen=True, slots=True)
class QueryStep:
    """Algorithm of one layer."""

    layer: str
    form: str
    compute: Compute
    predicted_seconds: float


@dataclass(frozen=True, slots=True)
class QueryPlan:
    """Algorithm of each layer, and memory use."""

    steps: tuple[QueryStep, ...]
    query_rows: int
    """Queries held at a time."""
    train_rows: int
    """Training rows held at a time."""
    scratch: int
    """Bytes of temporaries."""
    memory: int
    """Planned bytes in total."""

    def __str__(self) -> str:
        rows = [
            f"{s.layer}: {s.form}, {s.compute}, {s.predicted_seconds:.3g} s" for s in self.steps
        ]
        held = (
            f"{self.query_rows} queries against {self.train_rows} rows at a time "
            f"in {format_bytes(self.memory)}"
        )
        return "\n".join([*rows, held])


@dataclass(frozen=True, slots=True)
class ComputeChoice:
    """Chosen algorithm, and the cost of every algorithm."""

    compute: Compute
    cost: Cost
    alternatives: Mapping[Compute, Cost]


def choose_compute(form: AnyForm, load: ProductSize, *, force: str | None = None) -> ComputeChoice:
    """Choose the algorithm with the least estimated time whose temporaries fit into `load.scratch`.

    `force` names an algorithm for every form; a form that does not support it uses its nearest. If none fits,
    the one with the smallest temporaries is chosen.

    >>> from gradkeep.factors._outer import Outer
    >>> from gradkeep.factors._form import Parameter
    >>> from gradkeep.factors._cost import ProductSize
    >>> form = Outer((Parameter("w", (256, 64)),), "x", "g", d_in=64, d_out=256)
    >>> choose_compute(form, ProductSize(1500, 297)).compute
    'factored'
    >>> choose_compute(form, ProductSize(1500, 297), force="naive").compute
    'restored'
    """
    costs = {compute: estimate_cost(form, load, compute) for compute in form.computes}
    if force is not None:
        chosen = forced(form, force)
    else:
        fitting = [compute for compute in costs if costs[compute].scratch <= load.scratch]
        if fitting:
            chosen = min(fitting, key=lambda compute: costs[compute].seconds)
        else:
            chosen = min(costs, key=lambda compute: costs[compute].scratch)
    return ComputeChoice(chosen, costs[chosen], costs)


def forced(form: AnyForm, name: str) -> Compute:
    """Return the algorithm of this form for a name."""
    _arguments.one_of("compute", name, _NAMES, error=QueryError)
    return next(compute for compute in _NAMES[name] if compute in form.computes)


def estimate_cost(form: AnyForm, load: ProductSize, compute: Compute) -> Cost:
    """Estimate the cost of the products of all queries with all rows by one algorithm."""
    if compute not in ("half", "restored"):
        return form.products_cost(load, compute)
    size = form.gradient_size
    # `fit` restored queries fit; for the others the training rows are read again.
    fit = max(1, load.scratch // 2 // (size * VALUE))
    visits = max(1, math.ceil(load.n_query / fit))
    cost = form.restore_cost(load.n_query, load.t_query)
    held = min(load.n_query, fit) * size * VALUE
    share = replace(load, n_query=math.ceil(load.n_query / visits), scratch=load.scratch // 2)
    if compute == "half":
        one = form.half_cost(share)
    else:
        rows = max(1, min(load.n_train, min(share.scratch, RESTORED) // (size * VALUE)))
        tiles = math.ceil(load.n_train / rows)
        one = form.restore_cost(rows, load.t_train) + matrix_product(share.n_query, rows, size)
        one = (one + calls(8)) * tiles + temporaries(rows * size)
    cost += one * visits
    return replace(cost, scratch=held + one.scratch)
