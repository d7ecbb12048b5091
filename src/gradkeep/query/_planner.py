"""Estimate the cost of each algorithm for products of gradients, and choose one.

Costs follow from shapes alone. Rates are those of one core of a server in float32; only their ratios matter
for the choice.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from gradkeep import _arguments
from gradkeep._budgets import format_bytes
from gradkeep.errors import QueryError
from gradkeep.factors._arithmetic import CACHED, RESTORED
from gradkeep.factors._bits import Bits
from gradkeep.factors._convolution import Convolution
from gradkeep.factors._dense import Dense
from gradkeep.factors._lookup import Lookup
from gradkeep.factors._outer import Outer
from gradkeep.factors._pixel_gram import gram_tile, phase_pixels, phases
from gradkeep.factors._tied import Tied

if TYPE_CHECKING:
    from collections.abc import Mapping

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
_VALUE = 4
"""Bytes of a float32."""
FLOPS = 75e9
"""Operations per second of a large matrix product."""
_TOUCH, _FOLD, WRITE, _TURN, _RUN = 1e-10, 2e-10, 4e-10, 1e-9, 7e-9
"""Seconds to read a value in the cache, to sum it there, to write it to memory, to copy it
transposed, and per contiguous run of a copy of short runs."""
_CALL = 3e-6
"""Seconds of an operator on an empty tensor."""


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
class ProductSize:
    """Number of rows on both sides, and their mean number of positions."""

    n_train: int
    n_query: int
    t_train: float = 1.0
    t_query: float = 1.0
    scratch: int = 1 << 28
    """Bytes that temporaries may take."""

    @property
    def query_positions(self) -> float:
        """Positions of all queries."""
        return self.n_query * self.t_query

    @property
    def train_positions(self) -> float:
        """Positions of all training rows."""
        return self.n_train * self.t_train


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds, operations, and bytes of simultaneous temporaries.

    >>> (Cost(1.0, scratch=8) + Cost(2.0, scratch=4)).scratch
    8
    """

    seconds: float = 0.0
    flops: float = 0.0
    scratch: float = 0.0

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            self.seconds + other.seconds,
            self.flops + other.flops,
            max(self.scratch, other.scratch),
        )

    def __mul__(self, times: float) -> Cost:
        return Cost(self.seconds * times, self.flops * times, self.scratch)


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

    >>> from gradkeep.factors._form import Parameter
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
        return _products(form, load, compute)
    size = form.gradient_size
    # `fit` restored queries fit; for the others the training rows are read again.
    fit = max(1, load.scratch // 2 // (size * _VALUE))
    visits = max(1, math.ceil(load.n_query / fit))
    cost = _restore(form, load.n_query, load.t_query)
    held = min(load.n_query, fit) * size * _VALUE
    share = replace(load, n_query=math.ceil(load.n_query / visits), scratch=load.scratch // 2)
    if compute == "half":
        one = _half(form, share)
    else:
        rows = max(1, min(load.n_train, min(share.scratch, RESTORED) // (size * _VALUE)))
        tiles = math.ceil(load.n_train / rows)
        one = _restore(form, rows, load.t_train) + _matrix_product(share.n_query, rows, size)
        one = (one + _calls(8)) * tiles + _temporaries(rows * size)
    cost += one * visits
    return replace(cost, scratch=held + one.scratch)


def _products(form: AnyForm, load: ProductSize, compute: Compute) -> Cost:
    """Cost of `Form.products`; for forms without an estimate, one matrix product of dense rows."""
    ours, theirs = load.query_positions, load.train_positions
    if isinstance(form, Outer):
        return _linear(form.d_in, form.d_out, load)
    if isinstance(form, Convolution):
        return _pixel_products(form, load) if compute == "gram" else _patch_products(form, load)
    if isinstance(form, Lookup):
        # Pairs of equal tokens, if words are as frequent as in natural text (Zipf).
        pairs = ours * theirs * min(1.0, 1.6 / (1 + math.log(form.rows)) ** 2)
        cost = _matrix_product(math.sqrt(pairs), math.sqrt(pairs), form.width)
        cost += _elementwise((ours + theirs) * 8 + pairs, _TOUCH + _RUN)
        cost += _elementwise((ours + theirs) * form.width, _TOUCH + _RUN / form.width)
        return cost + _calls(4 * min(form.rows, ours, theirs))
    if isinstance(form, Tied):
        cross = _matrix_product(ours, theirs, form.lookup.width) + _pair_sums(load)
        cross += _elementwise(ours * theirs, _TOUCH + _RUN)
        both = _products(form.lookup, load, compute) + _products(form.outer, load, compute)
        return both + cross * 2
    if isinstance(form, Bits):
        unpacked = _elementwise(load.n_train * form.size, WRITE)
        return _matrix_product(load.n_query, load.n_train, form.size) + unpacked
    return _matrix_product(load.n_query, load.n_train, form.gradient_size)


def _half(form: AnyForm, load: ProductSize) -> Cost:
    """Cost of `Form.half`, with the queries as directions."""
    if isinstance(form, Outer):
        # Each query's weight times every position, one pass and a sum.
        high, inner = (form.d_in, form.d_out) if form.transposed else (form.d_out, form.d_in)
        values = load.n_query * load.train_positions * high
        tile = max(min(load.scratch // 4, CACHED) // _VALUE, load.t_train * high)
        cost = _matrix_product(load.train_positions, load.n_query * high, inner)
        cost += _elementwise(values, _TOUCH + _FOLD) + _temporaries(2 * min(tile, values))
        if form.bias:
            cost += _elementwise(load.n_query * high * inner, WRITE)
        return cost + _calls(8 * math.ceil(values / max(1.0, tile)))
    if isinstance(form, Convolution):
        # Each query's weight as the kernel of a convolution, one pass and a sum.
        results = load.n_query * load.n_train * form.filters * form.positions
        channels = form.channels // form.groups
        flops = 2.0 * results * channels * form.taps
        # Few channels fill few lanes of the processor.
        rate = 0.85 * FLOPS * channels / (channels + 3)
        tile = max(min(load.scratch // 4, CACHED) // _VALUE, form.filters * form.positions)
        cost = Cost(flops / rate + results * (WRITE + _TOUCH + _FOLD), flops)
        cost += _elementwise(load.n_train * form.channels * math.prod(form.size), WRITE)
        cost += _temporaries(2 * min(tile, results))
        return cost + _calls(20 * math.ceil(results / tile))
    if isinstance(form, Lookup):
        # A gathered copy of the directions, one pass and a sum.
        values = load.n_query * load.train_positions * form.width
        return _elementwise(values, 2 * _TURN + _TOUCH + _FOLD)
    if isinstance(form, Tied):
        return _half(form.lookup, load) + _half(form.outer, load)
    return _products(form, load, "dense")


def _restore(form: AnyForm, rows: float, positions: float) -> Cost:
    """Cost of `Form.restore` for this many rows and positions."""
    if isinstance(form, Outer):
        if positions == 1:
            cost = _elementwise(rows * form.d_in * form.d_out, WRITE)
        else:
            cost = _batched_products(rows, form.d_out, form.d_in, positions)
        bias = rows * form.d_out * positions if form.bias else 0.0
        return cost + _elementwise(bias, WRITE) + _calls(8)
    if isinstance(form, Convolution):
        inner, outer = form.channels // form.groups * form.taps, form.filters // form.groups
        patches = form.channels * form.taps * form.positions * (_TOUCH + _RUN / form.out[-1])
        cost = Cost(rows * (patches + form.channels * math.prod(form.size) * WRITE))
        cost += _batched_products(rows * form.groups, outer, inner, form.positions)
        return cost + _calls(12)
    if isinstance(form, Tied):
        added = _elementwise(2 * rows * form.gradient_size, WRITE)
        return _restore(form.outer, rows, positions) + added
    if isinstance(form, Dense):
        return Cost()
    return _elementwise(rows * form.restored_size, WRITE)


def _patch_products(form: Convolution, load: ProductSize) -> Cost:
    """Cost of building the patches of both sides, and of one linear layer for each group."""
    inner, outer = form.channels // form.groups * form.taps, form.filters // form.groups
    each = (form.channels * form.taps + form.filters) * form.positions
    fit = max(1, load.scratch // 6 // (each * _VALUE))
    laid_out = load.n_query + load.n_train * math.ceil(load.n_query / fit)
    patches = form.channels * form.taps * form.positions * (_TOUCH + _RUN / form.kernel[-1])
    cost = Cost(laid_out * (patches + form.filters * form.positions * _TURN))
    cost += _temporaries(2 * each * (min(fit, load.n_query) + min(fit, load.n_train)))
    one = replace(load, t_query=form.positions, t_train=form.positions, scratch=load.scratch // 3)
    return cost + _linear(inner, outer, one) * form.groups


def _pixel_products(form: Convolution, load: ProductSize) -> Cost:
    """Cost of copying pixels, the products of all pairs, and their sums along the kernel."""
    groups, length = form.groups, form.positions
    high, wide = gram_tile(form, load.n_query, load.n_train, itemsize=_VALUE, scratch=load.scratch)
    rounds = math.ceil(load.n_train / wide)
    count = rounds * math.ceil(load.n_query / high) * groups
    each = form.channels * math.prod(form.size) + form.filters * length
    meetings = load.n_train * load.n_query * groups
    touch = _TOUCH + _RUN / (wide * form.out[-1])
    cost = Cost((load.n_train + load.n_query * rounds) * each * _TURN)
    cost += _matrix_product(high * length, wide * length, form.filters / groups) * count
    for which, shifts in phases(form):
        size = [len(range(*part.indices(n))) for part, n in zip(which, form.size, strict=True)]
        area = math.prod(size)
        cost += _matrix_product(high * area, wide * area, form.channels / groups) * count
        for axis, taps in enumerate(shifts):
            size[axis] = form.out[axis]
            cost += _elementwise(meetings * math.prod(size) ** 2 * len(taps), touch)
            cost += _calls(count * len(taps) * 6)
    cost += _elementwise(meetings * length**2, touch + _FOLD) + _calls(count * 12)
    pixels = max(phase_pixels(form), length) ** 2
    return cost + _temporaries(4 * pixels * high * wide + 2 * each * (high + wide))


def _linear(d_in: int, d_out: int, load: ProductSize) -> Cost:
    """Cost of both matrix products of every tile, one pass over their product, and its sums."""
    ours, theirs = load.query_positions, load.train_positions
    return _matrix_product(ours, theirs, d_in + d_out) + _pair_sums(load)


def _pair_sums(load: ProductSize) -> Cost:
    """Cost of the elementwise product of two matrices of all positions, summed for each pair of rows."""
    pairs = load.query_positions * load.train_positions
    tile = max(min(load.scratch // 3, CACHED) // _VALUE, load.t_query * load.t_train)
    cost = _elementwise(pairs, _TOUCH + WRITE) + _temporaries(3 * min(tile, pairs))
    if load.t_query != 1:
        cost += _elementwise(pairs, _FOLD)
    if load.t_train != 1:
        # Short sums along a row do not use vector instructions.
        cost += _elementwise(load.n_query * load.train_positions, _TOUCH + _RUN / load.t_train)
    return cost + _calls(8 * math.ceil(pairs / tile))


def _matrix_product(rows: float, columns: float, inner: float) -> Cost:
    """Cost of `[rows, inner] @ [inner, columns]`."""
    flops = 2.0 * rows * columns * inner
    # 3e-10 seconds per value of the operands, read from memory.
    moved = rows * columns * WRITE + (rows + columns) * inner * 3e-10
    return Cost(flops / FLOPS + moved + _CALL, flops)


def _batched_products(count: float, rows: float, columns: float, inner: float) -> Cost:
    """Cost of one call for `count` small matrix products; narrow results fill few lanes."""
    flops = 2.0 * count * rows * columns * inner
    # Operations per second of many small matrix products in one call.
    rate = min(FLOPS, 1.5 * 40e9 * columns / (columns + 64))
    # 5e-7 seconds per matrix of a batch.
    return Cost(flops / rate + count * (rows * columns * WRITE + 5e-7) + _CALL, flops)


def _elementwise(values: float, seconds: float) -> Cost:
    """Cost of one pass over values that takes this many seconds per value."""
    return Cost(values * seconds, values)


def _calls(count: float) -> Cost:
    """Cost of operators that do almost nothing."""
    return Cost(count * _CALL)


def _temporaries(values: float) -> Cost:
    """Cost of float32 values that are held at once."""
    return Cost(scratch=values * _VALUE)
