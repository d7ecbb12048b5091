"""What each way of computing products of gradients costs here, and the choice."""

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
"""What may be asked for, and the ways it stands for: the first that the form has."""


@dataclass(frozen=True, slots=True)
class QueryStep:
    """How one layer was multiplied."""

    layer: str
    form: str
    compute: Compute
    predicted_seconds: float


@dataclass(frozen=True, slots=True)
class QueryPlan:
    """What was done, layer by layer, and in how many bytes."""

    steps: tuple[QueryStep, ...]
    query_rows: int
    """Queries held at once."""
    train_rows: int
    """Training rows held at once."""
    scratch: int
    """Bytes of temporaries."""
    memory: int
    """Bytes planned for in all."""

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
    """The way that was chosen, and what every way would cost."""

    compute: Compute
    cost: Cost
    alternatives: Mapping[Compute, Cost]


def choose_compute(form: AnyForm, load: ProductSize, *, force: str | None = None) -> ComputeChoice:
    """The way with the least estimated time among those whose temporaries fit into `load.scratch`.

    `force` names a way for every form; where a form does not have it, its nearest is taken. If no
    way fits, the one with the smallest temporaries is.

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
            chosen = min(fitting, key=lambda way: costs[way].seconds)
        else:
            chosen = min(costs, key=lambda way: costs[way].scratch)
    return ComputeChoice(chosen, costs[chosen], costs)


def forced(form: AnyForm, name: str) -> Compute:
    """The way of this form that a name stands for."""
    _arguments.one_of("compute", name, _NAMES, error=QueryError)
    return next(compute for compute in _NAMES[name] if compute in form.computes)


def estimate_cost(form: AnyForm, load: ProductSize, compute: Compute) -> Cost:
    """Estimate what the products of all queries with all rows cost in one of the ways."""
    if compute not in ("half", "restored"):
        return form.products_cost(load, compute)
    size = form.gradient_size
    # So many restored queries fit; for the others the training rows are gone through again.
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
