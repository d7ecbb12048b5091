"""All chosen layers' parameters as one vector."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from gradkeep.attribution.kronecker._row_parts import dense_rows
from gradkeep.errors import AttributionError
from gradkeep.query import Directions

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from gradkeep.factors import AnyForm, Parameter
    from gradkeep.query import Gradients


@dataclass(frozen=True, slots=True, eq=False)
class GradientSpace:
    """Vectors `[P]`: the layers one after the other, each layer's parameters in order."""

    forms: Mapping[str, AnyForm]
    weights: str
    """The fingerprint of the model's weights."""

    @classmethod
    def of(cls, gradients: Gradients) -> GradientSpace:
        """That of a capture's gradients, if they are kept unprojected."""
        for name, form in gradients.forms.items():
            if form.restored_parameters != form.parameters:
                raise AttributionError(
                    f"layer {name} is kept as a sketch, which has no curvature of its own",
                    fix="capture it dense or as factors",
                )
        return cls(gradients.forms, gradients.weights)

    @property
    def size(self) -> int:
        """P"""
        return sum(form.gradient_size for form in self.forms.values())

    @property
    def parameters(self) -> list[Parameter]:
        """Those of all layers, in order."""
        return [parameter for form in self.forms.values() for parameter in form.parameters]

    def rows(self, gradients: Gradients, positions: list[int]) -> Tensor:
        """The gradients `[B, P]` of some rows, float64."""
        return torch.cat([dense_rows(gradients, n, positions).double() for n in self.forms], 1)

    def directions(self, vectors: Tensor) -> Directions:
        """Vectors `[K, P]` layer by layer, float32."""
        sizes = [form.gradient_size for form in self.forms.values()]
        parts = [part.float() for part in torch.split(vectors, sizes, 1)]
        named = dict(zip(self.forms, parts, strict=True))
        return Directions(tuple(range(len(vectors))), named, self.forms, self.weights)

    def split(self, vector: Tensor) -> list[Tensor]:
        """A vector `[P]` as the parameters' shapes."""
        parts = torch.split(vector, [parameter.size for parameter in self.parameters])
        shapes = [parameter.shape for parameter in self.parameters]
        return [part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)]
