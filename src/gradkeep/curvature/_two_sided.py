"""Two-sided projection (LoGra): both sides of every weight, layer by layer."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from gradkeep.curvature import _random
from gradkeep.curvature._project import tiling
from gradkeep.curvature._sketches import require_finite, whole
from gradkeep.errors import AttributionError
from gradkeep.factors._arithmetic import CACHED, pad, tiles
from gradkeep.factors._form import FactoredForm

if TYPE_CHECKING:
    from torch import Tensor

    from gradkeep.factors._form import AnyForm, GradientRows, OuterProducts, Parameter
    from gradkeep.query import Gradients


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
    maps = _Maps(projection, model)
    for some in gradients.stream(batch_rows):
        parts = [
            _layer(maps, form, some.factors[name].widened(), scratch)
            for name, form in gradients.forms.items()
        ]
        values = torch.cat(parts, 1)
        if slopes is not None:
            values = values * slopes[some.start : some.stop].unsqueeze(1).to(values.dtype)
        out[some.start : some.stop] = values
    return require_finite(out, gradients.ids)


def two_sided_rows(
    form: AnyForm,
    rows: GradientRows,
    projection: TwoSided,
    *,
    model: object = 0,
    scratch: int = CACHED,
) -> Tensor:
    """Project one layer's gradients to `[B, K]`, in the dtype of the rows."""
    return _layer(_Maps(projection, model), form, rows.widened(), scratch)


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


class _Maps:
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


def _layer(maps: _Maps, form: AnyForm, rows: GradientRows, scratch: int) -> Tensor:
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


def _products(maps: _Maps, weight: _Weight, part: OuterProducts) -> Tensor:
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


def _restored(maps: _Maps, form: AnyForm, rows: GradientRows, scratch: int) -> Tensor:
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


def _matrices(maps: _Maps, weight: _Weight, values: Tensor) -> Tensor:
    """Return L^T G M of gradients `[B, R, c]` of the first c columns."""
    right = maps.right(weight)[: values.shape[2]].to(values)
    return maps.left(weight).t().to(values) @ values @ right


def _with_bias(maps: _Maps, weight: _Weight, projected: Tensor, sums: Tensor | None) -> Tensor:
    """Add the bias, whose gradients are `[B, R]`, to a weight's projection `[B, rows, cols]`."""
    if not weight.bias or sums is None:
        return projected
    rows = sums @ maps.left(weight).to(sums)
    return projected + rows.unsqueeze(2) * maps.right(weight)[-1].to(sums)
