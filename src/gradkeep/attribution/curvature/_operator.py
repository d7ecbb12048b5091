"""Products with a curvature: Gauss-Newton by replay, or Fisher from kept gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch

from gradkeep import query
from gradkeep.attribution.kronecker._fisher import Damping
from gradkeep.attribution.kronecker._row_parts import dense_rows, weighted
from gradkeep.errors import AttributionError
from gradkeep.query._sums import Directions

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from torch import Tensor, nn

    from gradkeep.attribution._question import CheckpointView
    from gradkeep.capturing._mode import Mode
    from gradkeep.capturing.tasks._task import Task
    from gradkeep.factors._form import AnyForm, Parameter
    from gradkeep.query import Gradients

CurvatureKind = Literal["hessian", "ggn", "fisher"]


@dataclass(frozen=True, slots=True)
class CurvatureOptions:
    """Which curvature, of what, and what is added to it: what its methods can all be told."""

    curvature: CurvatureKind = "ggn"
    """Of the mean loss: its Hessian, its Gauss-Newton matrix, or, from the store alone, the
    empirical Fisher matrix."""
    model: nn.Module | None = None
    """With the weights of the checkpoint; not for the Fisher matrix."""
    data: Iterable[Any] | None = None
    """The training batches; not for the Fisher matrix."""
    task: Task | None = None
    """By default `gk.Classification()`."""
    damping: float = 0.3
    """Times the mean eigenvalue of the empirical Fisher matrix."""
    absolute_damping: float | None = None
    """As it is, in place of the relative damping."""


@dataclass(frozen=True, slots=True, eq=False)
class CurvatureProblem:
    """A curvature and what is added to it."""

    space: GradientSpace
    product: Callable[[Tensor], Tensor]
    """A v for vectors `[K, P]`, float64."""
    damping: float

    def damped(self, vectors: Tensor) -> Tensor:
        """(A + damping) v"""
        return self.product(vectors) + self.damping * vectors


def curvature(at: CheckpointView, told: CurvatureOptions) -> CurvatureProblem:
    """That of the mean loss in the parameters of the chosen layers, at one checkpoint.

    A relative damping is times the mean eigenvalue of the empirical Fisher matrix, which the kept
    norms tell.
    """
    kind, model, data = told.curvature, told.model, told.data
    train = at.train()
    space = GradientSpace.of(train)
    damping = Damping(told.damping, told.absolute_damping)
    added = damping.of(float(train.norms().double().square().mean()) / max(1, space.size))
    if not added > 0:
        raise AttributionError(
            f"all gradients of {at.question.train} at {at.place} are zero",
            fix="capture a checkpoint that does not fit its data perfectly, or other layers",
        )
    if kind == "fisher":
        budget = at.question.memory_budget

        def product(vectors: Tensor) -> Tensor:
            return fisher_product(space, train, vectors, memory_budget=budget)

        return CurvatureProblem(space, product, added)
    if kind not in ("hessian", "ggn"):
        raise AttributionError(f"no curvature {kind!r}", expected="'hessian', 'ggn' or 'fisher'")
    if model is None or data is None:
        raise AttributionError(
            f"curvature={kind!r} runs the model again",
            found="no model" if model is None else "no data",
            fix="pass model= with the checkpoint's weights and data= with the training batches, "
            "or curvature='fisher'",
        )
    from gradkeep.attribution.curvature._replayed import ReplayedGaussNewton
    from gradkeep.capturing.tasks._supervised import Classification

    mode: Mode = "train" if at.train_block.schema.fingerprints.get("mode") == "train" else "eval"
    replayed = ReplayedGaussNewton(space, model, data, told.task or Classification(), mode)
    return CurvatureProblem(
        space, replayed.hessian if kind == "hessian" else replayed.gauss_newton, added
    )


def fisher_product(
    space: GradientSpace, train: Gradients, vectors: Tensor, *, memory_budget: float | str | None
) -> Tensor:
    """F v = mean over rows of g (g . v), for vectors `[K, P]`; two passes over the rows."""
    directions = space.directions(vectors)
    shares = query.along(train, directions, memory_budget=memory_budget) / len(train)
    found = [weighted(train, name, shares, memory_budget) for name in train.forms]
    return torch.cat(found, 1)


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
