"""Projections of captures, of one layer's rows and of dense gradients."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from gradkeep import _arguments
from gradkeep._arguments import checked
from gradkeep.curvature import _random
from gradkeep.curvature._sketches import (
    FLAT,
    DenseMatrix,
    GradientSketch,
    ProjectionSum,
    require_finite,
    require_room,
    sketch_of,
    whole,
)
from gradkeep.errors import AttributionError
from gradkeep.factors._arithmetic import CACHED, Spans, pad, row_of, tiles
from gradkeep.factors._convolution import Convolution
from gradkeep.factors._form import FactoredForm, widened
from gradkeep.query._engine import stream_shares

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from torch import Tensor

    from gradkeep.curvature._sketches import Projection, SketchMethod, TensorSketch
    from gradkeep.factors._form import AnyForm, GradientRows, OuterProducts, Parameter
    from gradkeep.query import Gradients
    from gradkeep.query._gradients import FactorBatch


@checked(AttributionError)
def project(
    gradients: Gradients,
    projection: Projection,
    *,
    model: object = 0,
    rows: Any = None,
    memory_budget: float | str | None = None,
) -> torch.Tensor:
    """Project a capture's gradients to k numbers per row.

    The gradient of all layers together is projected. For gradients of the loss, those of the output are multiplied
    with the stored slopes. Cost: one read of the factors and, per row and layer, the cheaper of a weight's values
    and two transforms of k numbers per position.

    Args:
        gradients: Gradients of a capture, from `gk.gradients`.
        projection: Kind, dimension and seed of the projection.
        model: Name of the model; projections of different models are independent.
        rows: Positions of the rows to project; None for all. Only these are read.
        memory_budget: Memory limit, such as `"2GiB"`; None for the default.

    Returns:
        Projections `[N, k]`, float32 on the CPU.

    Raises:
        AttributionError: A gradient is not finite, or the result does not fit into memory.
        BudgetError: The memory budget is too small.

    Example:
        >>> import gradkeep as gk, tempfile
        >>> from gradkeep.curvature._sketches import Projection
        >>> store, net = gk.open(tempfile.mkdtemp()), torch.nn.Linear(4, 3)
        >>> data = [(torch.randn(5, 4), torch.tensor([0, 1, 2, 0, 1]))]
        >>> _ = gk.capture(store, net, data, task=gk.Classification(), split="train")
        >>> project(gk.gradients(store, split="train"), Projection(dim=64)).shape
        torch.Size([5, 64])
    """
    chosen = None
    if rows is not None:
        most = max(0, len(gradients) - 1)
        chosen = _arguments.whole_numbers("rows", rows, error=AttributionError, most=most)
    count = len(gradients) if chosen is None else len(chosen)
    # Raises before anything is computed.
    tiling(gradients, projection.dim, memory_budget, held=count)
    out = torch.empty(count, projection.dim)
    parts = project_parts(
        gradients, projection, model=model, chosen=chosen, memory_budget=memory_budget, held=count
    )
    for start, values in parts:
        out[start : start + len(values)] = values
    return out


def project_parts(
    gradients: Gradients,
    projection: Projection,
    *,
    model: object = 0,
    chosen: Any = None,
    memory_budget: float | str | None = None,
    held: int = 0,
) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield the number of the first row and projections `[n, k]` from it on.

    For all rows, or those at the positions `chosen`; the caller will hold `held` rows at once.
    """
    dim = projection.dim
    batch_rows, scratch = tiling(gradients, dim, memory_budget, held=held)
    sketch = sketch_of(projection, model)
    slopes, ids = gradients.slopes(), gradients.ids
    if chosen is not None:
        slopes, ids = None if slopes is None else slopes[chosen], ids[chosen]
    for some in _parts(gradients, chosen, batch_rows):
        factors = {name: rows.widened() for name, rows in some.factors.items()}
        kinds = {rows.example.dtype for rows in factors.values()}
        dtype = torch.float64 if torch.float64 in kinds else torch.float32
        out = torch.empty(some.stop - some.start, dim)
        # Tiles that stay in the cache while all layers are added to them.
        for start, stop in tiles(some.stop - some.start, 4 * dim, dtype.itemsize, 2 * CACHED):
            into = ProjectionSum(stop - start, dim, dtype=dtype, device=torch.device("cpu"))
            for name, form in gradients.forms.items():
                taken = factors[name].take(start, stop)
                add_rows(sketch, into, form, taken, scratch=scratch)
            out[start:stop] = into.values()
        if slopes is not None:
            out *= slopes[some.start : some.stop].unsqueeze(1)
        yield some.start, require_finite(out, ids[some.start : some.stop])


def _parts(gradients: Gradients, chosen: Any, batch_rows: int) -> Iterator[FactorBatch]:
    """Iterate over all rows in order, or those at some positions, `batch_rows` at a time."""
    if chosen is None:
        yield from gradients.stream(batch_rows)
        return
    for start in range(0, len(chosen), batch_rows):
        stop = min(len(chosen), start + batch_rows)
        yield dataclasses.replace(gradients.rows(chosen[start:stop]), start=start, stop=stop)


def tiling(
    gradients: Gradients, dim: int, memory_budget: float | str | None, *, held: int
) -> tuple[int, int]:
    """Return rows at a time and bytes of temporaries, for k numbers per row and `held` rows in memory."""
    answer = held * dim * 4
    require_room(
        answer,
        f"an array of {held} x {dim} projections",
        fix="Choose a smaller dim=.",
    )
    # Six arrays of k numbers per row: the buffer, spectra, the result.
    split = stream_shares(gradients, memory_budget, answer=answer, beside=6 * dim * 4)
    return split.train_rows, min(split.scratch, CACHED)


def project_dense(
    gradients: torch.Tensor, projection: Projection, *, model: object = 0
) -> torch.Tensor:
    """Project flat gradients `[B, P]` to `[B, k]`; `auto` folds them.

    >>> import torch
    >>> from gradkeep.curvature._sketches import Projection
    >>> x = torch.sin(torch.arange(20_000.0)).view(2, 10_000)
    >>> low = project_dense(x, Projection(dim=1000))
    >>> bool((low.norm(dim=1) / x.norm(dim=1) - 1).abs().max() < 0.1)
    True
    """
    if gradients.dim() != 2:
        raise AttributionError(
            "gradients must have one row per sample",
            code="attribute.gradient_shape",
            found=f"shape {tuple(gradients.shape)}",
            expected="[B, P]",
        )
    values = widened(gradients)
    into = ProjectionSum(len(values), projection.dim, dtype=values.dtype, device=values.device)
    if values.numel():
        sketch_of(projection, model).flat(FLAT, values.shape[1]).add(into, 0, values)
    return require_finite(into.values())


def dense_matrix(size: int, projection: Projection, *, model: object = 0) -> torch.Tensor:
    """Return the matrix `[P, k]` that `rademacher` and `normal` multiply with, before / sqrt(k)."""
    _arguments.count("size", size, error=AttributionError, least=1)
    sketch = sketch_of(projection, model).flat(FLAT, size)
    if not isinstance(sketch, DenseMatrix):
        raise AttributionError(
            f"a projection of kind {projection.kind!r} has no dense matrix",
            code="attribute.no_dense_matrix",
            expected="rademacher or normal",
        )
    return sketch.matrix()


def project_parameters(
    gradients: Mapping[str, torch.Tensor], projection: Projection, *, model: object = 0
) -> torch.Tensor:
    """Project gradients `[B, *shape]` of parameters, by their full names, to `[B, k]`.

    The same numbers as `project` computes from the factors of their layers.
    """
    if not gradients:
        raise AttributionError("gradients is empty", code="attribute.no_gradients")
    for name, value in gradients.items():
        _arguments.instance(f"gradients[{name!r}]", value, torch.Tensor, error=AttributionError)
    named = {name: widened(value) for name, value in gradients.items()}
    like = next(iter(named.values()))
    sketch = sketch_of(projection, model)
    into = ProjectionSum(len(like), projection.dim, dtype=like.dtype, device=like.device)
    for name, value in named.items():
        if len(value) != len(like):
            raise AttributionError(
                "the gradients have different numbers of samples",
                code="attribute.gradient_counts",
                found=f"{len(like)}, and {len(value)} for {name}",
            )
        if value.numel():
            flat = value.reshape(len(value), -1)
            sketch.add_values(into, 0, name, tuple(value.shape[1:]), flat)
    return require_finite(into.values())


def project_layers(
    layers: Iterable[tuple[AnyForm, GradientRows]],
    projection: Projection,
    *,
    rows: int,
    device: torch.device,
    model: object = 0,
) -> Tensor:
    """Return the summed projections `[rows, k]` of several layers' gradients of the same rows."""
    sketch = sketch_of(projection, model)
    into = ProjectionSum(rows, projection.dim, dtype=torch.float32, device=device)
    for form, some in layers:
        add_rows(sketch, into, form, some.widened())
    return into.values()


def add_rows(
    sketch: GradientSketch,
    into: ProjectionSum,
    form: AnyForm,
    rows: GradientRows,
    *,
    method: SketchMethod | None = None,
    scratch: int = CACHED,
) -> None:
    """Add the projections of one layer's gradients to a sum."""
    if not len(rows):
        return
    if not (sketch.tensor and _add_products(sketch, into, form, rows, method, scratch)):
        _add_restored(sketch, into, form, rows, scratch)


def _add_products(
    sketch: GradientSketch,
    into: ProjectionSum,
    form: AnyForm,
    rows: GradientRows,
    method: SketchMethod | None,
    scratch: int,
) -> bool:
    """Add outer products without restoring them; False if there are none or restoring is cheaper."""
    if not isinstance(form, FactoredForm):
        return False
    weight = form.parameters[0]
    sides = sketch.sides(weight.name, weight.shape)
    # Each group of a convolution has its own patches.
    groups = form.groups if isinstance(form, Convolution) else 1
    count = rows.positions / max(1, len(rows)) * groups
    chosen = method or sides.choose_method(count, patches=form.kind == "conv")
    for part in form.outer_products(rows, scratch=scratch):
        if part.ids is not None:
            _add_tokens(sides, into, part, scratch)
            continue
        assert part.row_factor is not None
        if chosen == "matrix":
            return False
        for row, at, own in _pieces(part.spans, sides.dim, part.col_factor.element_size(), scratch):
            sides.add_spectrum(
                into,
                part.start + row,
                part.row_factor[at],
                part.col_factor[at],
                own,
                first=part.first,
            )
    bias = form.bias_gradients(rows)
    if bias is not None:
        second = form.parameters[1]
        sketch.add_values(into, 0, second.name, second.shape, bias)
    return True


def _add_tokens(
    sides: TensorSketch, into: ProjectionSum, part: OuterProducts, scratch: int
) -> None:
    assert part.ids is not None
    where = row_of(part.spans, part.col_factor.device) + part.start
    # Six values per value: its index, and temporaries.
    for start, stop in tiles(len(where), 6 * sides.width, part.col_factor.element_size(), scratch):
        some = slice(start, stop)
        sides.add_tokens(into, part.ids[some], part.col_factor[some], where[some])


def _pieces(parts: Spans, dim: int, item: int, scratch: int) -> Iterator[tuple[int, slice, Spans]]:
    """Yield (first row, positions, their spans) of as many positions as their spectra fit.

    A row with more positions is split into several pieces, which add up.
    """
    # Six arrays of k numbers per position while its spectrum is computed.
    most = max(1, scratch // (6 * dim * item))
    for start, stop in parts.tiles(most):
        low, high = parts.bounds[start], parts.bounds[stop]
        if high - low <= most:
            yield start, slice(low, high), parts.cut(start, stop)
            continue
        for first in range(low, high, most):
            length = min(most, high - first)
            yield start, slice(first, first + length), Spans((0, length), length)


def _add_restored(
    sketch: GradientSketch, into: ProjectionSum, form: AnyForm, rows: GradientRows, scratch: int
) -> None:
    """Restore the gradients, some rows at a time, and add each parameter's."""
    item = rows.example.element_size()
    for start, stop in tiles(len(rows), form.gradient_size, item, scratch):
        dense = form.restore(rows.take(start, stop))
        at = 0
        for parameter in form.restored_parameters:
            part = dense[:, at : at + parameter.size]
            sketch.add_values(into, start, parameter.name, parameter.shape, part)
            at += parameter.size


@dataclass(frozen=True, slots=True)
class TwoSided:
    """Sizes of the projected sides of a weight: `[R, C]` becomes `[min(R, rows), min(C, cols)]`.

    A side that is not longer than that stays as it is. The columns are the layer's inputs, followed by its bias (for
    transposed weights, its outputs).

    Attributes:
        rows: Size of the projected rows.
        cols: Size of the projected columns.
        seed: Seed of the random matrices.

    Example:
        >>> from gradkeep.factors._form import Parameter
        >>> TwoSided(32, 32).width((Parameter("w", (256, 64)), Parameter("b", (256,))))
        1024
    """

    rows: int = 64
    cols: int = 64
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("rows", "cols", "seed"):
            object.__setattr__(self, name, whole(name, getattr(self, name)))
        if min(self.rows, self.cols) < 1:
            raise AttributionError(
                "both sides of a two-sided projection need a positive dimension",
                code="attribute.projection_dim",
                found=f"rows={self.rows}, cols={self.cols}",
            )

    def width(self, parameters: tuple[Parameter, ...]) -> int:
        """Return the number of values that the parameters of a layer are projected to."""
        return sum(
            min(self.rows, weight.rows) * min(self.cols, weight.cols)
            for weight in _weights(parameters)
        )


def two_sided(
    gradients: Gradients,
    projection: TwoSided,
    *,
    model: object = 0,
    memory_budget: float | str | None = None,
) -> Tensor:
    """Project a capture's gradients to `[N, K]`, all layers side by side.

    For each weight's gradient sum_t u_t v_t^T, the numbers sum_t (L^T u_t)(M^T v_t)^T with normal matrices
    L / sqrt(rows) and M / sqrt(cols). Cost: T (R rows + C cols) products per row and layer.
    """
    width = sum(projection.width(form.restored_parameters) for form in gradients.forms.values())
    batch_rows, scratch = tiling(gradients, width, memory_budget, held=len(gradients))
    slopes = gradients.slopes()
    out = torch.empty(len(gradients), width)
    maps = SideMaps(projection, model)
    for some in gradients.stream(batch_rows):
        parts = [
            two_sided_layer(maps, form, some.factors[name].widened(), scratch)
            for name, form in gradients.forms.items()
        ]
        values = torch.cat(parts, 1)
        if slopes is not None:
            values = values * slopes[some.start : some.stop].unsqueeze(1).to(values.dtype)
        out[some.start : some.stop] = values
    return require_finite(out, gradients.ids)


@dataclass(frozen=True, slots=True)
class _Weight:
    """A weight with its bias as the last column, or a parameter alone."""

    name: str
    rows: int
    cols: int
    bias: bool = False


def _weights(parameters: tuple[Parameter, ...]) -> list[_Weight]:
    """Treat a second parameter with a value for each row of the first as its last column."""
    if len(parameters) == 2:
        first, second = parameters
        if len(first.shape) > 1 and second.shape == first.shape[:1]:
            return [_Weight(first.name, first.shape[0], first.size // first.shape[0] + 1, True)]
    rows = [parameter.shape[0] if len(parameter.shape) > 1 else 1 for parameter in parameters]
    return [
        _Weight(parameter.name, high, parameter.size // max(1, high))
        for parameter, high in zip(parameters, rows, strict=True)
    ]


class SideMaps:
    """Matrices that the sides of weights are multiplied with, created at first use."""

    def __init__(self, projection: TwoSided, model: object) -> None:
        self.projection, self._model = projection, model
        self._matrices: dict[tuple[str, str, int], Tensor] = {}

    def left(self, weight: _Weight) -> Tensor:
        """`[R, rows]`."""
        return self._of("rows", weight.name, weight.rows, self.projection.rows)

    def right(self, weight: _Weight) -> Tensor:
        """`[C, cols]`."""
        return self._of("columns", weight.name, weight.cols, self.projection.cols)

    def _of(self, side: str, name: str, size: int, to: int) -> Tensor:
        if (side, name, size) not in self._matrices:
            words = ("two-sided", self.projection.seed, self._model, name, side)
            matrix = torch.eye(size)
            if size > to:
                matrix = _random.normals(size * to, *words).view(size, to) / math.sqrt(to)
            self._matrices[side, name, size] = matrix
        return self._matrices[side, name, size]


def two_sided_layer(maps: SideMaps, form: AnyForm, rows: GradientRows, scratch: int) -> Tensor:
    """Return one layer's projections `[B, K]`."""
    parameters = form.restored_parameters
    if not len(rows):
        return torch.empty(0, maps.projection.width(parameters))
    if not isinstance(form, FactoredForm):
        return _restored(maps, form, rows, scratch)
    weights = _weights(parameters)
    like, sizes = rows.example, maps.projection
    high, wide = min(sizes.rows, weights[0].rows), min(sizes.cols, weights[0].cols)
    projected = like.new_zeros(len(rows), high, wide)
    for part in form.outer_products(rows, scratch=scratch):
        projected[part.start : part.start + len(part.spans)] += _products(maps, weights[0], part)
    bias = form.bias_gradients(rows)
    parts = [_with_bias(maps, weights[0], projected, bias).flatten(1)]
    if len(weights) > 1 and bias is not None:
        parts.append(_matrices(maps, weights[1], bias.unsqueeze(1)).flatten(1))
    return torch.cat(parts, 1)


def _products(maps: SideMaps, weight: _Weight, part: OuterProducts) -> Tensor:
    """Return sums over positions of products of both sides `[b, rows, cols]`, without the bias."""
    right = part.col_factor
    if part.row_factor is None:
        one = maps.left(weight).to(right)[part.ids]
    else:
        chosen = slice(part.first, part.first + part.row_factor.shape[1])
        one = part.row_factor @ maps.left(weight)[chosen].to(right)
    other = right @ maps.right(weight)[: right.shape[1]].to(right)
    if part.spans.uniform == 1:
        return one.unsqueeze(2) * other.unsqueeze(1)
    return torch.bmm(pad(one, part.spans).transpose(1, 2), pad(other, part.spans))


def _restored(maps: SideMaps, form: AnyForm, rows: GradientRows, scratch: int) -> Tensor:
    """Project gradients that are stored dense: each weight as a matrix between its two sides."""
    parameters = form.restored_parameters
    weights = _weights(parameters)
    out = []
    item = rows.nbytes // max(1, len(rows))
    for start, stop in tiles(len(rows), item, 1, scratch):
        dense = form.restore(rows.take(start, stop))
        split = torch.split(dense, [parameter.size for parameter in parameters], 1)
        if weights[0].bias:
            projected = _matrices(
                maps, weights[0], split[0].reshape(len(dense), weights[0].rows, -1)
            )
            parts = [_with_bias(maps, weights[0], projected, split[1])]
        else:
            parts = [
                _matrices(maps, weight, part.reshape(len(dense), weight.rows, -1))
                for weight, part in zip(weights, split, strict=True)
            ]
        out.append(torch.cat([part.flatten(1) for part in parts], 1))
    return torch.cat(out)


def _matrices(maps: SideMaps, weight: _Weight, values: Tensor) -> Tensor:
    """Return L^T G M of gradients `[B, R, c]` of the first c columns."""
    right = maps.right(weight)[: values.shape[2]].to(values)
    return maps.left(weight).t().to(values) @ values @ right


def _with_bias(maps: SideMaps, weight: _Weight, projected: Tensor, sums: Tensor | None) -> Tensor:
    """Add the bias, whose gradients are `[B, R]`, to a weight's projection `[B, rows, cols]`."""
    if not weight.bias or sums is None:
        return projected
    rows = sums @ maps.left(weight).to(sums)
    return projected + rows.unsqueeze(2) * maps.right(weight)[-1].to(sums)
