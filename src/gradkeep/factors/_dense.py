"""Gradients that are kept as they are, or as a sketch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from gradkeep.factors._arithmetic import pairwise, squared_lengths
from gradkeep.factors._cost import Cost, ProductSize, matrix_product
from gradkeep.factors._form import ArrayRole, Compute, Form, GradientRows, Parameter, Storage
from gradkeep.factors._weights import WeightBlock, WeightMatrix, WeightVector

if TYPE_CHECKING:
    from torch import Tensor

    from gradkeep.factors._form import ArraySource

WHOLE = 512
"""A gradient of at most so many values is one vector; curvature has its whole matrix."""


@dataclass(frozen=True, slots=True, eq=False)
class DenseRows(GradientRows):
    """Gradients, or sketches of them, of B rows."""

    values: Tensor
    """`[B, P]`"""

    def __len__(self) -> int:
        return len(self.values)

    def take(self, start: int, stop: int) -> DenseRows:
        """A view of some rows."""
        return DenseRows(self.values[start:stop])


@dataclass(frozen=True, slots=True)
class Dense(Form[DenseRows]):
    """Anything: the gradient itself `[P]`, or a sketch of it."""

    kind: ClassVar[str] = "dense"
    computes: ClassVar[tuple[Compute, ...]] = ("dense",)
    rows_type: ClassVar[type[Any]] = DenseRows
    storage: ClassVar[Storage] = "dense"
    parameters: tuple[Parameter, ...]
    gradient: str
    size: int
    sketch: bool = False
    """Whether the array is a random projection, whose products are estimates."""

    @property
    def arrays(self) -> tuple[str, ...]:
        """The names of the arrays that hold the gradient."""
        return (self.gradient,)

    @property
    def restored_size(self) -> int:
        """The values that are kept: P, or those of the sketch."""
        return self.size

    @property
    def restored_parameters(self) -> tuple[Parameter, ...]:
        """The parameters, or the sketch itself."""
        if self.sketch or self.gradient_size != self.size:
            return (Parameter(self.gradient, (self.size,)),)
        return self.parameters

    @property
    def exact(self) -> bool:
        """Whether it is the gradient itself."""
        return not self.sketch

    @property
    def approximate(self) -> str | None:
        """What is kept of a sketch."""
        return f"random projections of {self.size} numbers" if self.sketch else None

    def read(self, source: ArraySource) -> DenseRows:
        """The rows that an array holds."""
        return DenseRows(source.tensor(self.gradient))

    def tensors(self, rows: DenseRows) -> dict[str, Tensor]:
        """The gradients by the name of their array."""
        return {self.gradient: rows.values}

    def role(self, array: str) -> ArrayRole:
        """What the array holds."""
        del array
        return "projection" if self.sketch else "gradient"

    def weight_blocks(self) -> tuple[WeightBlock, ...]:
        """Weights with the biases that follow them, vectors by themselves; small ones as one vector."""
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
        """The gradients `[B, P]` themselves."""
        self.check_rows(rows)
        return rows.values

    def squared_norms(self, rows: DenseRows) -> Tensor:
        """Squared lengths `[B]`; 2 P operations a row."""
        return squared_lengths(rows.values)

    def weighted_sum(self, rows: DenseRows, weights: Tensor) -> Tensor:
        """Weighted sums `[K, B] @ [B, P]`."""
        return weights @ rows.values

    def products(
        self, queries: DenseRows, train: DenseRows, compute: Compute, *, scratch: int
    ) -> Tensor:
        """Inner products `[Q, P] @ [P, N]`; 2 P operations a pair, no temporaries."""
        del compute, scratch
        return pairwise(queries.values, train.values)

    def half(self, rows: DenseRows, directions: Tensor, *, scratch: int) -> Tensor:
        """Products with dense directions, `[K, P] @ [P, B]`."""
        del scratch
        return pairwise(directions, rows.values)

    def same_layout(self, other: Form[Any]) -> bool:
        """Whether both are kept whole."""
        return isinstance(other, Dense)

    def products_cost(self, load: ProductSize, compute: Compute) -> Cost:
        """One matrix product."""
        del compute
        return matrix_product(load.n_query, load.n_train, self.gradient_size)

    def half_cost(self, load: ProductSize) -> Cost:
        """One matrix product."""
        return self.products_cost(load, "dense")

    def restore_cost(self, rows: float, positions: float) -> Cost:
        """Nothing."""
        del rows, positions
        return Cost()
