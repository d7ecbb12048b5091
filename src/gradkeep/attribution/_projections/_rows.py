"""Projections of one layer's gradients, from whatever they are kept as."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from gradkeep.attribution._projections._bias import conv_bias, outer_bias
from gradkeep.attribution._projections._sketch import Sketch, sketch_of, wide
from gradkeep.attribution._projections._sum import Sum
from gradkeep.query import _operators
from gradkeep.query._factors import (
    ConvRows,
    DenseRows,
    LookupRows,
    OuterRows,
    TiedRows,
    example_of,
)
from gradkeep.query._forms import Conv, Dense, Lookup, Outer, Parameter, Tied, size_of
from gradkeep.query._patches import patch_values, unfolded
from gradkeep.query._segments import Spans, row_of, spans
from gradkeep.query._tiles import CACHED, tiles

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from gradkeep.attribution._projections._projection import Projection
    from gradkeep.attribution._projections._tensor_sketch import Way
    from gradkeep.query._factors import Factors
    from gradkeep.query._forms import Form

_TEMPORARIES = 6
"""Arrays of k numbers that a position has while its spectrum is made."""


def project_rows(
    form: Form,
    rows: Factors,
    projection: Projection,
    *,
    model: object = 0,
    way: Way | None = None,
    scratch: int = CACHED,
) -> Tensor:
    """The projections `[B, k]` of one layer's gradients, in the dtype of the rows.

    The layer's part is named by its parameters, so that sums over layers are projections of the
    whole gradient. `way` forces how a TensorSketch is computed, else the cheapest is taken.

    >>> import torch
    >>> from gradkeep.attribution._projections import Projection
    >>> form = Outer((Parameter("w", (1, 2)),), "w.prefix", "w.suffix", d_in=2, d_out=1)
    >>> rows = OuterRows(torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0]]))
    >>> project_rows(form, rows, Projection(dim=8)).abs().sum()
    tensor(9.)
    """
    rows = widened(rows)
    like = example_of(rows)
    into = Sum(len(rows), projection.dim, dtype=like.dtype, device=like.device)
    add_rows(sketch_of(projection, model), into, form, rows, way=way, scratch=scratch)
    return into.values()


def add_rows(
    sketch: Sketch,
    into: Sum,
    form: Form,
    rows: Factors,
    *,
    way: Way | None = None,
    scratch: int = CACHED,
) -> None:
    """Add the projections of one layer's gradients to a sum."""
    if not len(rows):
        return
    if sketch.tensor:
        match form, rows:
            case Outer(), OuterRows():
                if _add_outer(sketch, into, form, rows, way, scratch):
                    return
            case Conv(), ConvRows():
                if _add_conv(sketch, into, form, rows, way, scratch):
                    return
            case Lookup(), LookupRows():
                _add_lookup(sketch, into, form, rows, scratch)
                return
            case Tied(), TiedRows():
                outer = dataclasses.replace(form.outer, parameters=form.parameters)
                lookup = dataclasses.replace(form.lookup, parameters=form.parameters[:1])
                add_rows(sketch, into, outer, rows.outer, way=way, scratch=scratch)
                _add_lookup(sketch, into, lookup, rows.lookup, scratch)
                return
    _add_restored(sketch, into, form, rows, scratch)


def _add_outer(
    sketch: Sketch, into: Sum, form: Outer, rows: OuterRows, way: Way | None, scratch: int
) -> bool:
    """Add factors without restoring them; False if restoring is cheaper."""
    weight = form.parameters[0]
    sides = sketch.sides(weight.name, weight.shape)
    parts = spans(rows.offsets, len(rows.x))
    chosen = way or sides.way(1 if parts.uniform == 1 else len(rows.g) / len(rows))
    if chosen == "matrix":
        return False
    x = rows.x[:, : form.d_in]
    left, right = (x, rows.g) if form.transposed else (rows.g, x)
    if chosen == "blocks":
        sides.add_blocks(into, 0, left, right)
    else:
        for start, at, own in _pieces(parts, sides.dim, rows.x.element_size(), scratch):
            sides.add_spectrum(into, start, left[at], right[at], own)
    _add_bias(sketch, into, form, outer_bias(form, rows))
    return True


def _add_conv(
    sketch: Sketch, into: Sum, form: Conv, rows: ConvRows, way: Way | None, scratch: int
) -> bool:
    """Add patches as a linear layer's inputs; False if restoring is cheaper."""
    weight = form.parameters[0]
    sides = sketch.sides(weight.name, weight.shape)
    # Every group has its own patches, and its own part of the filters.
    chosen = way or sides.way(form.positions * form.groups, patches=True)
    if chosen == "matrix":
        return False
    item = rows.wide.element_size()
    for start, stop in tiles(len(rows), 2 * patch_values(form), item, scratch):
        _, groups = unfolded(form, ConvRows(rows.wide[start:stop], rows.narrow[start:stop]))
        for number, group in enumerate(groups):
            parts = spans(group.offsets, len(group.x))
            first = number * group.g.shape[1]
            for row, at, own in _pieces(parts, sides.dim, item, scratch):
                sides.add_spectrum(into, start + row, group.g[at], group.x[at], own, first=first)
    _add_bias(sketch, into, form, conv_bias(form, rows))
    return True


def _pieces(parts: Spans, dim: int, item: int, scratch: int) -> Iterator[tuple[int, slice, Spans]]:
    """(first row, positions, their spans) of so many positions that their spectra fit.

    A row with more than that comes in several pieces, which add up.
    """
    most = max(1, scratch // (_TEMPORARIES * dim * item))
    for start, stop in parts.tiles(most):
        low, high = parts.bounds[start], parts.bounds[stop]
        if high - low <= most:
            yield start, slice(low, high), parts.cut(start, stop)
            continue
        for first in range(low, high, most):
            length = min(most, high - first)
            yield start, slice(first, first + length), Spans((0, length), length)


def _add_lookup(sketch: Sketch, into: Sum, form: Lookup, rows: LookupRows, scratch: int) -> None:
    weight = form.parameters[0]
    sides = sketch.sides(weight.name, weight.shape)
    where = row_of(spans(rows.offsets, len(rows.ids)), rows.g.device)
    # Of each value a place beside it, twice while it is made.
    for start, stop in tiles(len(where), 6 * sides.width, rows.g.element_size(), scratch):
        sides.add_tokens(into, rows.ids[start:stop], rows.g[start:stop], where[start:stop])


def _add_bias(sketch: Sketch, into: Sum, form: Outer | Conv, sums: Tensor | None) -> None:
    if sums is not None:
        bias = form.parameters[1]
        sketch.add_values(into, 0, bias.name, bias.shape, sums)


def _add_restored(sketch: Sketch, into: Sum, form: Form, rows: Factors, scratch: int) -> None:
    """Restore the gradients, some rows at a time, and add each parameter's."""
    item = example_of(rows).element_size()
    for start, stop in tiles(len(rows), size_of(form), item, scratch):
        dense = _operators.restore(form, _operators.take(form, rows, start, stop))
        at = 0
        for parameter in parameters_of(form, dense.shape[1]):
            part = dense[:, at : at + parameter.size]
            sketch.add_values(into, start, parameter.name, parameter.shape, part)
            at += parameter.size


def parameters_of(form: Form, size: int) -> tuple[Parameter, ...]:
    """The parameters that a dense gradient is made of; of a kept sketch, the sketch itself."""
    if isinstance(form, Dense) and (form.sketch or size_of(form) != size):
        return (Parameter(form.gradient, (size,)),)
    return form.parameters


def widened(rows: Factors) -> Factors:
    """Rows whose factors have 32 bits at least."""
    match rows:
        case OuterRows():
            return OuterRows(wide(rows.x), wide(rows.g), rows.offsets)
        case ConvRows():
            return ConvRows(wide(rows.wide), wide(rows.narrow))
        case LookupRows():
            return LookupRows(rows.ids, wide(rows.g), rows.offsets)
        case DenseRows():
            return DenseRows(wide(rows.values))
        case TiedRows(lookup, outer):
            return TiedRows(
                LookupRows(lookup.ids, wide(lookup.g), lookup.offsets),
                OuterRows(wide(outer.x), wide(outer.g), outer.offsets),
            )
