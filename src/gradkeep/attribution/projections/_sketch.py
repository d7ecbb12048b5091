"""A projection made ready: what it does to each parameter, kept for the next rows."""

from __future__ import annotations

import math
from collections.abc import Hashable
from functools import lru_cache
from typing import TYPE_CHECKING, Protocol

from gradkeep import _arguments
from gradkeep.attribution.projections._flat_sketches import (
    CountSketch,
    DenseMatrix,
    Fold,
    Sjlt,
    Srht,
)
from gradkeep.attribution.projections._projection import PARTS
from gradkeep.attribution.projections._tensor_sketch import TensorSketch
from gradkeep.errors import AttributionError

if TYPE_CHECKING:
    from torch import Tensor

    from gradkeep.attribution.projections._flat_sketches import ProjectionSum
    from gradkeep.attribution.projections._projection import Projection

FLAT = "gradient"
"""The name of a gradient whose parameters are not told apart."""


class FlatSketch(Protocol):
    """What a projection does to a vector of values."""

    def add(self, into: ProjectionSum, start: int, values: Tensor) -> None:
        """Add the projections of values `[b, P]` to rows from `start` on."""


class GradientSketch:
    """One projection of one model's gradients; its parts are made when they are first needed.

    Parts belong to parameters by name and shape, not to layers: however a layer is kept, and
    whether its gradients come from factors or from autograd, the numbers are the same.
    """

    def __init__(self, projection: Projection, model: object) -> None:
        self.projection = projection
        self.model = model
        self._flat: dict[tuple[str, int], FlatSketch] = {}
        self._sides: dict[tuple[str, tuple[int, ...]], TensorSketch] = {}

    @property
    def tensor(self) -> bool:
        """Whether factors are sketched as they are."""
        return self.projection.kind in ("auto", "tensor-sketch")

    def sides(self, name: str, shape: tuple[int, ...]) -> TensorSketch:
        """What a TensorSketch does to a parameter."""
        if (name, shape) not in self._sides:
            rows = shape[0] if len(shape) > 1 else 1
            words = (self.projection.seed, self.model, name)
            size = math.prod(shape)
            cols = size // rows if rows else 0
            self._sides[name, shape] = TensorSketch(rows, cols, self.projection.dim, *words)
        return self._sides[name, shape]

    def flat(self, name: str, size: int) -> FlatSketch:
        """What any other projection does to the values of a parameter."""
        if (name, size) not in self._flat:
            self._flat[name, size] = self._made(name, size)
        return self._flat[name, size]

    def _made(self, name: str, size: int) -> FlatSketch:
        dim = self.projection.dim
        words = (self.projection.seed, self.model, name)
        match self.projection.kind:
            case "rademacher" | "normal" as kind:
                return DenseMatrix(kind, size, dim, *words)
            case "count-sketch":
                return CountSketch(size, dim, *words)
            case "srht":
                return Srht(size, dim, *words)
            case "sjlt":
                return Sjlt(size, dim, PARTS, *words)
            case "auto" | "fold" | "tensor-sketch":
                return Fold(size, dim, *words)

    def add_values(
        self, into: ProjectionSum, start: int, name: str, shape: tuple[int, ...], values: Tensor
    ) -> None:
        """Add the dense gradients `[b, P]` of one parameter to rows from `start` on."""
        if not values.shape[1]:
            return
        if self.tensor:
            sides = self.sides(name, shape)
            sides.add_matrix(into, start, values.view(-1, sides.rows, sides.cols))
        else:
            self.flat(name, values.shape[1]).add(into, start, values)


def sketch_of(projection: Projection, model: object) -> GradientSketch:
    """The sketch of a model, kept for the next batch."""
    if not isinstance(model, Hashable):
        raise _arguments.refused(
            "model", model, error=AttributionError, expected="a number, a text or the like"
        )
    return _kept_sketch(projection, model)


@lru_cache(maxsize=4)
def _kept_sketch(projection: Projection, model: object) -> GradientSketch:
    return GradientSketch(projection, model)
