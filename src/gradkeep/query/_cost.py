"""What a product of gradients costs, before it is computed: operations, bytes, calls, seconds.

The steps and tiles are those of the algebra; a change there is a change here.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from gradkeep.query import _conv_cost, _outer_cost
from gradkeep.query._forms import Conv, Dense, Lookup, Outer, Tied, size_of
from gradkeep.query._load import Load
from gradkeep.query._tally import VALUE, Cost, Tally
from gradkeep.query._tiles import RESTORED

if TYPE_CHECKING:
    from gradkeep.query._forms import Form
    from gradkeep.query._machine import Machine
    from gradkeep.query._ways import How

__all__ = ["Cost", "Load", "cost"]


def cost(form: Form, load: Load, how: How, machine: Machine) -> Cost:
    """What the products of all queries with all rows cost in one of the ways.

    >>> from gradkeep.query._forms import Outer, Parameter
    >>> from gradkeep.query._machine import Machine
    >>> form = Outer((Parameter("w", (256, 64)),), "x", "g", d_in=64, d_out=256)
    >>> ways = [cost(form, Load(1500, 300), how, Machine()) for how in ("factored", "restore")]
    >>> 50 < ways[1].flops / ways[0].flops < 52
    True
    """
    tally = Tally(machine)
    if how == "dense":
        tally.product(load.n_query, load.n_train, size_of(form))
    elif how == "half":
        visits = _restore_queries(tally, form, load)
        tally.repeat(visits, lambda part: _half(part, form, _share(load, visits)))
    elif how == "restore":
        visits = _restore_queries(tally, form, load)
        tally.repeat(visits, lambda part: _against(part, form, _share(load, visits)))
    elif how == "gram":
        assert isinstance(form, Conv)
        _conv_cost.gram(tally, form, load)
    else:
        _factored(tally, form, load)
    return tally.cost()


def _factored(tally: Tally, form: Form, load: Load) -> None:
    match form:
        case Outer():
            _outer_cost.factored(tally, form.d_in, form.d_out, load)
        case Conv():
            _conv_cost.factored(tally, form, load)
        case Lookup():
            _lookup(tally, form, load)
        case Tied():
            _lookup(tally, form.lookup, load)
            _outer_cost.factored(tally, form.outer.d_in, form.outer.d_out, load)
            for _ in range(2):
                high, wide = _outer_cost.pair_tile(load)
                ours, theirs = load.n_query * load.t_query, load.n_train * load.t_train
                count = ours / high * (theirs / wide)
                tally.product(high, wide, form.lookup.width, times=count)
                tally.copy(ours * theirs, run=1)
                _outer_cost.sums(tally, load)
        case Dense():
            raise AssertionError("gradients that are kept whole have no factors")


def _lookup(tally: Tally, form: Lookup, load: Load) -> None:
    """Pairs of equal tokens, if words are as frequent as in natural text (Zipf)."""
    ours, theirs = load.n_query * load.t_query, load.n_train * load.t_train
    equal = min(1.0, 1.6 / (1 + math.log(form.rows)) ** 2)
    pairs = ours * theirs * equal
    tally.product(math.sqrt(pairs), math.sqrt(pairs), form.width)
    tally.copy((ours + theirs) * 8 + pairs, run=1)
    tally.copy((ours + theirs) * form.width, run=form.width)
    tally.call(4 * min(form.rows, ours, theirs))


def _half(tally: Tally, form: Form, load: Load) -> None:
    match form:
        case Outer():
            _outer_cost.half(tally, form, load)
        case Conv():
            _conv_cost.half(tally, form, load)
        case Lookup():
            _gather(tally, form, load)
        case Tied():
            _gather(tally, form.lookup, load)
            _outer_cost.half(tally, form.outer, load)
        case Dense():
            tally.product(load.n_query, load.n_train, size_of(form))


def _gather(tally: Tally, form: Lookup, load: Load) -> None:
    values = load.n_query * load.n_train * load.t_train * form.width
    tally.turn(2 * values)  # a gathered copy is written to memory and read again
    tally.touch(values)
    tally.fold(values)


def _restore(tally: Tally, form: Form, count: float, positions: float) -> None:
    match form:
        case Outer():
            _outer_cost.restore(tally, form, count, positions)
        case Conv():
            _conv_cost.restore(tally, form, count)
        case Tied():
            _outer_cost.restore(tally, form.outer, count, positions)
            tally.write(2 * count * size_of(form))
        case Lookup():
            tally.write(count * size_of(form))
        case Dense():
            pass


def _restore_queries(tally: Tally, form: Form, load: Load) -> int:
    """Restores all queries; how many times the others must be gone through for them."""
    fit = max(1, load.scratch // 2 // (size_of(form) * VALUE))
    _restore(tally, form, load.n_query, load.t_query)
    tally.hold(min(load.n_query, fit) * size_of(form))
    return max(1, math.ceil(load.n_query / fit))


def _share(load: Load, visits: int) -> Load:
    return replace(load, n_query=math.ceil(load.n_query / visits), scratch=load.scratch // 2)


def _against(tally: Tally, form: Form, load: Load) -> None:
    """The others restored in tiles, and multiplied with the queries."""
    size = size_of(form)
    rows = max(1, min(load.n_train, min(load.scratch, RESTORED) // (size * VALUE)))
    count = load.n_train / rows
    tally.repeat(math.ceil(count), lambda part: _restore(part, form, rows, load.t_train))
    tally.product(load.n_query, rows, size, times=count)
    tally.call(8 * count)
    tally.hold(rows * size)
