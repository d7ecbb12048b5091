"""Gradients that are stored as they are, or as a sketch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from gradkeep.factors._arithmetic import pairwise
from gradkeep.factors._form import Compute, Form, GradientRows, Parameter, check_rows
from gradkeep.factors._weights import WeightBlock, WeightMatrix, WeightVector

if TYPE_CHECKING:
    from torch import Tensor

WHOLE = 512
"""A gradient of at most this many values is one vector; curvature uses its whole matrix."""


@dataclass(frozen=True, slots=True, eq=False)
class DenseRows(GradientRows):
    """Gradients, or sketches of them, of B rows."""

    values: Tensor
    """`[B, P]`"""


@dataclass(frozen=True, slots=True)
class Dense(Form[DenseRows]):
    """The gradient itself `[P]`, or a sketch of it."""

    kind: ClassVar[str] = "dense"
    computes: ClassVar[tuple[Compute, ...]] = ("dense",)
    rows_type: ClassVar[type[Any]] = DenseRows
    parameters: tuple[Parameter, ...]
    gradient: str
    size: int
    sketch: bool = False
    """True if the array is a random projection, whose products are estimates."""

    @property
    def arrays(self) -> tuple[str, ...]:
        """Names of the arrays that hold the gradient."""
        return (self.gradient,)

    @property
    def restored_parameters(self) -> tuple[Parameter, ...]:
        """The parameters, or the sketch itself."""
        if self.sketch or self.gradient_size != self.size:
            return (Parameter(self.gradient, (self.size,)),)
        return self.parameters

    @property
    def approximate(self) -> str | None:
        """Description of the sketch, if it is one."""
        return f"random projections of {self.size} numbers" if self.sketch else None

    def weight_blocks(self) -> tuple[WeightBlock, ...]:
        """Return weights with the biases that follow them, and vectors; small gradients as one vector."""
        if self.sketch or self.size <= WHOLE:
            return (WeightVector(self.size),)
        blocks: list[WeightBlock] = []
        at, parameters = 0, list(self.parameters)
        while parameters:
            first = parameters.pop(0)
            if len(first.shape) < 2:
                blocks.append(WeightVector(first.size, at))
                at += first.size
                continue
            rows, cols = first.shape[0], first.size // max(1, first.shape[0])
            follows = bool(parameters) and parameters[0].shape == first.shape[:1]
            bias = at + first.size if follows else None
            blocks.append(WeightMatrix(1, rows, cols + follows, at, bias=bias))
            at += first.size + (parameters.pop(0).size if follows else 0)
        return tuple(blocks)

    def restore(self, rows: DenseRows) -> Tensor:
        """Return the gradients `[B, P]` themselves."""
        check_rows(self, rows)
        return rows.values

    def weighted_sum(self, rows: DenseRows, weights: Tensor) -> Tensor:
        """Return weighted sums `[K, B] @ [B, P]`."""
        return weights @ rows.values

    def products(
        self, queries: DenseRows, train: DenseRows, compute: Compute, *, scratch: int
    ) -> Tensor:
        """Return inner products `[Q, P] @ [P, N]`; 2 P operations per pair, no temporaries."""
        return pairwise(queries.values, train.values)

    def half(self, rows: DenseRows, directions: Tensor, *, scratch: int) -> Tensor:
        """Return products with dense directions, `[K, P] @ [P, B]`."""
        return pairwise(directions, rows.values)
