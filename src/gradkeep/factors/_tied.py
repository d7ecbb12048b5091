"""A weight used as an embedding and as a linear layer: both uses, and where they meet."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from gradkeep.factors._arithmetic import RESTORED, sum_pairs
from gradkeep.factors._cost import (
    RUN,
    TOUCH,
    WRITE,
    Cost,
    ProductSize,
    elementwise,
    matrix_product,
)
from gradkeep.factors._form import (
    Compute,
    Form,
    GradientRows,
    OuterProducts,
    Parameter,
    PositionProducts,
)
from gradkeep.factors._outer import Outer, OuterRows, pair_sums_cost

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from gradkeep.factors._form import ArraySource
    from gradkeep.factors._lookup import Lookup, LookupRows
    from gradkeep.factors._weights import WeightBlock


@dataclass(frozen=True, slots=True, eq=False)
class TiedRows(GradientRows):
    """Both uses of a weight by the same B rows."""

    lookup: LookupRows
    outer: OuterRows

    def __len__(self) -> int:
        return len(self.lookup)

    @property
    def positions(self) -> float:
        """The positions of the linear layer, of all rows together."""
        return self.outer.positions

    def take(self, start: int, stop: int) -> TiedRows:
        """A view of some rows."""
        return TiedRows(self.lookup.take(start, stop), self.outer.take(start, stop))


@dataclass(frozen=True, slots=True)
class Tied(Form[TiedRows]):
    """One weight `[rows, width]` used as an embedding and as a linear layer: the uses add up.

    The bias of the linear layer, if it has one, follows the weight.
    """

    kind: ClassVar[str] = "tied"
    computes: ClassVar[tuple[Compute, ...]] = ("factored", "half", "restored")
    rows_type: ClassVar[type[Any]] = TiedRows
    parameters: tuple[Parameter, ...]
    lookup: Lookup
    outer: Outer

    @property
    def arrays(self) -> tuple[str, ...]:
        """The names of the arrays that hold the factors of both uses."""
        return (*self.lookup.arrays, *self.outer.arrays)

    @property
    def restored_size(self) -> int:
        """P: both uses add up."""
        return self.outer.restored_size

    def read(self, source: ArraySource) -> TiedRows:
        """The rows that some arrays hold."""
        return TiedRows(self.lookup.read(source), self.outer.read(source))

    def tensors(self, rows: TiedRows) -> dict[str, Tensor]:
        """The tensors of both uses by the names of their arrays."""
        return self.lookup.tensors(rows.lookup) | self.outer.tensors(rows.outer)

    def offsets(self, rows: TiedRows, array: str) -> Tensor | None:
        """Where each row's tokens, or positions, begin and end."""
        if array in self.lookup.arrays:
            return rows.lookup.offsets
        return rows.outer.offsets

    @property
    def places_array(self) -> str | None:
        """That of the linear layer; equal tokens of the embedding are added up."""
        return self.outer.places_array

    def weight_blocks(self) -> tuple[WeightBlock, ...]:
        """The matrix that both uses add up to."""
        return self.outer.weight_blocks()

    def products(
        self, queries: TiedRows, train: TiedRows, compute: Compute, *, scratch: int
    ) -> Tensor:
        """Inner products `[Q, N]`: the products of like uses and, both ways, of unlike ones."""
        out = self.lookup.products(queries.lookup, train.lookup, compute, scratch=scratch)
        out += self.outer.products(queries.outer, train.outer, compute, scratch=scratch)
        out += self.cross(queries.lookup, train.outer, scratch=scratch)
        out += self.cross(train.lookup, queries.outer, scratch=scratch).t()
        return out

    def cross(self, tokens: LookupRows, uses: OuterRows, *, scratch: int) -> Tensor:
        """Inner products of the embedding's part with the linear layer's part.

        The sum over tokens t and positions t' of `h_t'[id_t] (g_t . x_t')`, where h is the suffix of
        the linear layer; 2 T T' width operations a pair.
        """
        x = uses.x[:, : self.outer.d_in]

        def product(left: slice, right: slice) -> Tensor:
            chosen = uses.g[right].index_select(1, tokens.ids[left])
            return (tokens.g[left] @ x[right].t()).mul_(chosen.t())

        return sum_pairs(tokens.spans, uses.spans, product, like=x, scratch=scratch)

    def restore(self, rows: TiedRows) -> Tensor:
        """Gradients `[B, P]`: the sum of both uses, then the bias."""
        out = self.outer.restore(rows.outer)
        out[:, : self.lookup.rows * self.lookup.width] += self.lookup.restore(rows.lookup)
        return out

    def between(self, rows: TiedRows, block: WeightBlock, left: Tensor, right: Tensor) -> Tensor:
        """`left^T W right` `[B, 1, r, c]` of both uses."""
        out = self.outer.between(rows.outer, block, left, right)
        return out.add_(
            self.lookup.between(rows.lookup, block, left, right[:, : self.lookup.width])
        )

    def squared_norms(self, rows: TiedRows) -> Tensor:
        """Squared lengths `[B]`: of each use, and twice the product of both."""
        out = self.lookup.squared_norms(rows.lookup)
        out = out + self.outer.squared_norms(rows.outer)
        for row in range(len(rows)):
            one = rows.take(row, row + 1)
            out[row] += 2 * self.cross(one.lookup, one.outer, scratch=RESTORED)[0, 0]
        return out

    def weighted_sum(self, rows: TiedRows, weights: Tensor) -> Tensor:
        """Weighted sums `[K, P]` of both uses."""
        out = self.outer.weighted_sum(rows.outer, weights)
        out[:, : self.lookup.rows * self.lookup.width] += self.lookup.weighted_sum(
            rows.lookup, weights
        )
        return out

    def half(self, rows: TiedRows, directions: Tensor, *, scratch: int) -> Tensor:
        """Products with dense directions `[K, P]`, of both uses."""
        out = self.outer.half(rows.outer, directions, scratch=scratch)
        weights = directions[:, : self.lookup.rows * self.lookup.width]
        return out.add_(self.lookup.half(rows.lookup, weights, scratch=scratch))

    def along_positions(
        self, rows: TiedRows, directions: Tensor
    ) -> tuple[PositionProducts, ...] | None:
        """Those of the linear layer, then those of the embedding's tokens."""
        outer = self.outer.along_positions(rows.outer, directions)
        weights = directions[:, : self.lookup.rows * self.lookup.width]
        lookup = self.lookup.along_positions(rows.lookup, weights)
        return None if outer is None or lookup is None else (*outer, *lookup)

    def temporaries(self, rows: TiedRows) -> int:
        """Values of the temporaries of a row while it is restored: one use beside the other."""
        values = self.lookup.temporaries(rows.lookup) + self.outer.temporaries(rows.outer)
        return values + self.lookup.rows * self.lookup.width

    def outer_products(self, rows: TiedRows, *, scratch: int) -> Iterator[OuterProducts]:
        """Those of both uses."""
        yield from self.outer.outer_products(rows.outer, scratch=scratch)
        yield from self.lookup.outer_products(rows.lookup, scratch=scratch)

    def bias_gradients(self, rows: TiedRows) -> Tensor | None:
        """Those of the linear layer."""
        return self.outer.bias_gradients(rows.outer)

    def products_cost(self, load: ProductSize, compute: Compute) -> Cost:
        """Both uses, and twice where they meet."""
        ours, theirs = load.query_positions, load.train_positions
        cross = matrix_product(ours, theirs, self.lookup.width) + pair_sums_cost(load)
        cross += elementwise(ours * theirs, TOUCH + RUN)
        both = self.lookup.products_cost(load, compute) + self.outer.products_cost(load, compute)
        return both + cross * 2

    def half_cost(self, load: ProductSize) -> Cost:
        """Both uses."""
        return self.lookup.half_cost(load) + self.outer.half_cost(load)

    def restore_cost(self, rows: float, positions: float) -> Cost:
        """One use beside the other."""
        added = elementwise(2 * rows * self.gradient_size, WRITE)
        return self.outer.restore_cost(rows, positions) + added
