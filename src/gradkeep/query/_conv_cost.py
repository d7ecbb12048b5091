"""What products of convolutions' gradients cost."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from gradkeep.query import _outer_cost
from gradkeep.query._phases import gram_tile, phase_pixels, phases
from gradkeep.query._tally import VALUE
from gradkeep.query._tiles import CACHED

if TYPE_CHECKING:
    from gradkeep.query._forms import Conv
    from gradkeep.query._load import Load
    from gradkeep.query._tally import Tally


def factored(tally: Tally, form: Conv, load: Load) -> None:
    """Patches of both sides laid out, then one linear layer for each group."""
    inner, outer = form.channels // form.groups * form.taps, form.filters // form.groups
    each = (form.channels * form.taps + form.filters) * form.positions
    ours, theirs = (
        max(1.0, min(count, load.scratch // 6 // (each * VALUE)))
        for count in (load.n_query, load.n_train)
    )
    visits = math.ceil(load.n_query / ours)
    for count in (load.n_query, load.n_train * visits):
        tally.copy(count * form.channels * form.taps * form.positions, run=form.kernel[-1])
        tally.turn(count * form.filters * form.positions)
    meetings = visits * math.ceil(load.n_train / theirs) * form.groups
    one = replace(
        load,
        n_query=int(ours),
        n_train=int(theirs),
        t_query=form.positions,
        t_train=form.positions,
        scratch=load.scratch // 3,
    )
    tally.hold(2 * each * (ours + theirs))
    tally.repeat(meetings, lambda part: _outer_cost.factored(part, inner, outer, one))


def gram(tally: Tally, form: Conv, load: Load) -> None:
    """Pixels laid out, the products of all pairs, their sums along the kernel."""
    groups, length = form.groups, form.positions
    high, wide = gram_tile(form, load.n_query, load.n_train, itemsize=VALUE, scratch=load.scratch)
    rounds = math.ceil(load.n_train / wide)
    count = rounds * math.ceil(load.n_query / high) * groups
    each = form.channels * math.prod(form.size) + form.filters * length
    tally.turn((load.n_train + load.n_query * rounds) * each)
    tally.product(high * length, wide * length, form.filters / groups, times=count)
    meetings = load.n_train * load.n_query * groups
    for at, (which, shifts) in enumerate(phases(form)):
        size = [len(range(*part.indices(n))) for part, n in zip(which, form.size, strict=True)]
        area = math.prod(size)
        tally.product(high * area, wide * area, form.channels / groups, times=count)
        for axis, taps in enumerate(shifts):
            whole = any(shift >= 0 and shift + form.out[axis] <= size[axis] for shift in taps)
            size[axis] = form.out[axis]
            if len(taps) > 1 or not whole:
                passes = len(taps) + (0 if whole else 1)
                tally.touch(meetings * math.prod(size) ** 2, passes, run=wide * form.out[-1])
                tally.call(count * passes * 6)
        if at:
            tally.touch(meetings * length**2, run=wide * form.out[-1])
    tally.touch(meetings * length**2, run=wide * form.out[-1])
    tally.fold(meetings * length**2)
    _bias(tally, form, load.n_train + load.n_query)
    tally.call(count * 12)
    tally.hold(4 * max(phase_pixels(form), length) ** 2 * high * wide + 2 * each * (high + wide))


def half(tally: Tally, form: Conv, load: Load) -> None:
    """Each query's weight as the kernel of a convolution, then one pass and a sum."""
    results = load.n_query * load.n_train * form.filters * form.positions
    inner = form.channels // form.groups * form.taps
    tally.write(load.n_train * form.channels * math.prod(form.size))
    tally.convolve(2.0 * results * inner, results, form.channels / form.groups)
    tally.touch(results)
    tally.fold(results)
    each = form.filters * form.positions * VALUE
    room = load.scratch // 4 // (form.filters * inner * VALUE)
    kinds = max(1, min(load.n_query, room, min(load.scratch // 4, CACHED) // each))
    rows = max(1, min(load.scratch // 4, 4 * CACHED) // (kinds * each))
    tally.call(math.ceil(load.n_query / kinds) * math.ceil(load.n_train / rows) * 20)
    _bias(tally, form, load.n_train)
    tally.hold(2 * kinds * min(rows, load.n_train) * each / VALUE)


def restore(tally: Tally, form: Conv, count: float) -> None:
    """Patches of so many rows, times the narrow array."""
    inner, outer = form.channels // form.groups * form.taps, form.filters // form.groups
    tally.copy(count * form.channels * form.taps * form.positions, run=form.out[-1])
    tally.write(count * form.channels * math.prod(form.size))
    tally.batch(count * form.groups, outer, inner, form.positions)
    _bias(tally, form, count)
    tally.call(12)


def _bias(tally: Tally, form: Conv, count: float) -> None:
    if form.bias is not None:
        wide = form.channels * math.prod(form.size)
        tally.fold(count * (wide if form.bias == "wide" else form.filters * form.positions))
