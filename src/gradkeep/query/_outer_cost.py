"""What products of linear layers' gradients cost."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from gradkeep.query._tally import VALUE
from gradkeep.query._tiles import CACHED

if TYPE_CHECKING:
    from gradkeep.query._forms import Outer
    from gradkeep.query._load import Load
    from gradkeep.query._tally import Tally

_STEPS = 8
"""Operators on a tile that do next to nothing: slices, views, assignments."""


def factored(tally: Tally, d_in: int, d_out: int, load: Load) -> None:
    """Both matrix products of every tile, one pass over their product, and its sums."""
    ours, theirs = load.n_query * load.t_query, load.n_train * load.t_train
    high, wide = pair_tile(load)
    count = ours / high * (theirs / wide)
    tally.product(high, wide, d_in, times=count)
    tally.product(high, wide, d_out, times=count)
    sums(tally, load)
    tally.hold(3 * high * wide)


def pair_tile(load: Load) -> tuple[float, float]:
    """Positions of queries and of others whose products are formed at a time."""
    ours, theirs = load.n_query * load.t_query, load.n_train * load.t_train
    values = max(1, min(load.scratch // 3, CACHED) // VALUE)
    wide = max(1.0, min(theirs, max(load.t_train, min(2048, values))))
    high = max(1.0, min(ours, max(load.t_query, values // wide)))
    return high, max(1.0, min(theirs, max(load.t_train, values // high)))


def sums(tally: Tally, load: Load) -> None:
    """The elementwise product of two matrices of all positions, summed for each pair of rows."""
    ours, theirs = load.n_query * load.t_query, load.n_train * load.t_train
    high, wide = pair_tile(load)
    count = math.ceil(ours / high) * math.ceil(theirs / wide)
    tally.touch(ours * theirs)
    if load.t_query != 1:
        tally.fold(ours * theirs)
    if load.t_train != 1:
        # Short sums along a row cannot use the processor's lanes.
        tally.copy(load.n_query * theirs, run=max(1.0, load.t_train))
    tally.touch(load.n_query * load.n_train, passes=2)
    tally.call(count * _STEPS)


def half(tally: Tally, form: Outer, load: Load) -> None:
    """Each query's weight times every position, then one pass and a sum."""
    positions = load.n_train * load.t_train
    rows, inner = (form.d_in, form.d_out) if form.transposed else (form.d_out, form.d_in)
    values = max(1, min(load.scratch // 4, CACHED) // VALUE // rows)
    room = max(1, load.scratch // 2 // (VALUE * rows * inner))
    high = min(positions, max(load.t_train, min(1024, values)))
    kinds = max(1.0, min(load.n_query, room, values // max(1.0, high)))
    count = math.ceil(positions / max(1.0, high)) * math.ceil(load.n_query / kinds)
    tally.product(high, kinds * rows, inner, times=count)
    tally.touch(load.n_query * positions * rows)
    tally.fold(load.n_query * positions * rows)
    if form.bias:
        tally.write(load.n_query * rows * inner)
    tally.call(count * _STEPS)
    tally.hold(2 * high * kinds * rows)


def restore(tally: Tally, form: Outer, count: float, positions: float) -> None:
    """The gradients of so many rows."""
    if positions == 1:
        tally.write(count * form.d_in * form.d_out)
    else:
        tally.batch(count, form.d_out, form.d_in, positions)
    if form.bias:
        tally.write(count * form.d_out * positions)
    tally.call(_STEPS)
