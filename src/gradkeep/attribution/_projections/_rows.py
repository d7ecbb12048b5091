"""Projections of one layer's gradients, from whatever they are kept as."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gradkeep.attribution._projections._sketch import Sketch, sketch_of
from gradkeep.attribution._projections._sum import Sum
from gradkeep.factors import CACHED, Spans, row_of, tiles

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from gradkeep.attribution._projections._projection import Projection
    from gradkeep.attribution._projections._tensor_sketch import TensorSketch, Way
    from gradkeep.factors import AnyForm, OuterProducts, Rows

_TEMPORARIES = 6
"""Arrays of k numbers that a position has while its spectrum is made."""


def project_rows(
    form: AnyForm,
    rows: Rows,
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
    >>> from gradkeep.factors import Outer, OuterRows, Parameter
    >>> form = Outer((Parameter("w", (1, 2)),), "w.prefix", "w.suffix", d_in=2, d_out=1)
    >>> rows = OuterRows(torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0]]))
    >>> project_rows(form, rows, Projection(dim=8)).abs().sum()
    tensor(9.)
    """
    rows = rows.widened()
    like = rows.example
    into = Sum(len(rows), projection.dim, dtype=like.dtype, device=like.device)
    add_rows(sketch_of(projection, model), into, form, rows, way=way, scratch=scratch)
    return into.values()


def add_rows(
    sketch: Sketch,
    into: Sum,
    form: AnyForm,
    rows: Rows,
    *,
    way: Way | None = None,
    scratch: int = CACHED,
) -> None:
    """Add the projections of one layer's gradients to a sum."""
    if not len(rows):
        return
    if not (sketch.tensor and _add_products(sketch, into, form, rows, way, scratch)):
        _add_restored(sketch, into, form, rows, scratch)


def _add_products(
    sketch: Sketch, into: Sum, form: AnyForm, rows: Rows, way: Way | None, scratch: int
) -> bool:
    """Add outer products without restoring them; False if there are none or restoring is cheaper."""
    products = form.outer_products(rows, scratch=scratch)
    if products is None:
        return False
    weight = form.parameters[0]
    sides = sketch.sides(weight.name, weight.shape)
    chosen = way or sides.way(form.count_outer_products(rows), patches=form.unfolds)
    for part in products:
        if part.ids is not None:
            _add_tokens(sides, into, part, scratch)
            continue
        assert part.left is not None
        if chosen == "matrix":
            return False
        if chosen == "blocks":
            sides.add_blocks(into, part.start, part.left, part.right)
            continue
        for row, at, own in _pieces(part.spans, sides.dim, part.right.element_size(), scratch):
            sides.add_spectrum(
                into, part.start + row, part.left[at], part.right[at], own, first=part.first
            )
    bias = form.bias_gradients(rows)
    if bias is not None:
        second = form.parameters[1]
        sketch.add_values(into, 0, second.name, second.shape, bias)
    return True


def _add_tokens(sides: TensorSketch, into: Sum, part: OuterProducts, scratch: int) -> None:
    assert part.ids is not None
    where = row_of(part.spans, part.right.device) + part.start
    # Of each value a place beside it, twice while it is made.
    for start, stop in tiles(len(where), 6 * sides.width, part.right.element_size(), scratch):
        some = slice(start, stop)
        sides.add_tokens(into, part.ids[some], part.right[some], where[some])


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


def _add_restored(sketch: Sketch, into: Sum, form: AnyForm, rows: Rows, scratch: int) -> None:
    """Restore the gradients, some rows at a time, and add each parameter's."""
    item = rows.example.element_size()
    for start, stop in tiles(len(rows), form.gradient_size, item, scratch):
        dense = form.restore(rows.take(start, stop))
        at = 0
        for parameter in form.restored_parameters:
            part = dense[:, at : at + parameter.size]
            sketch.add_values(into, start, parameter.name, parameter.shape, part)
            at += parameter.size
