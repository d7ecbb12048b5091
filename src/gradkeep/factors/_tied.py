"""A weight used as an embedding and as a linear layer: both uses, and their cross products."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from gradkeep.factors._arithmetic import RESTORED, sum_pairs
from gradkeep.factors._form import (
    Compute,
    FactoredForm,
    GradientRows,
    OuterProducts,
    Parameter,
    PositionProducts,
)
from gradkeep.factors._outer import Outer, OuterRows

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from gradkeep.factors._form import AnyForm, ArraySource
    from gradkeep.factors._lookup import Lookup, LookupRows
    from gradkeep.factors._weights import WeightBlock


@dataclass(frozen=True, slots=True, eq=False)
class TiedRows(GradientRows):
    """Both uses of a weight by the same B rows."""

    lookup: LookupRows
    outer: OuterRows

    @property
    def positions(self) -> float:
        """Positions of the linear layer, of all rows together."""
        return self.outer.positions


@dataclass(frozen=True, slots=True)
class Tied(FactoredForm[TiedRows]):
    """One weight `[rows, width]` used as an embedding and as a linear layer, whose gradients add up.

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
        """Names of the arrays that hold the factors of both uses."""
        return (*self.lookup.arrays, *self.outer.arrays)

    def read(self, source: ArraySource) -> TiedRows:
        """Read rows from arrays."""
        return TiedRows(self.lookup.read(source), self.outer.read(source))

    def tensors(self, rows: TiedRows) -> dict[str, Tensor]:
        """Return the tensors of both uses by the names of their arrays."""
        return self.lookup.tensors(rows.lookup) | self.outer.tensors(rows.outer)

    def offsets(self, rows: TiedRows, array: str) -> Tensor | None:
        """Return the start and end of each row's tokens, or positions."""
        if array in self.lookup.arrays:
            return rows.lookup.offsets
        return rows.outer.offsets

    @property
    def unchanged(self) -> bool:
        """False: both uses are factors of their own."""
        return False

    def weight_blocks(self) -> tuple[WeightBlock, ...]:
        """Return the matrix that both uses add up to."""
        return self.outer.weight_blocks()

    def products(
        self, queries: TiedRows, train: TiedRows, compute: Compute, *, scratch: int
    ) -> Tensor:
        """Return inner products `[Q, N]`: those of each use, and the cross products of both."""
        out = self.lookup.products(queries.lookup, train.lookup, compute, scratch=scratch)
        out += self.outer.products(queries.outer, train.outer, compute, scratch=scratch)
        out += self.cross(queries.lookup, train.outer, scratch=scratch)
        out += self.cross(train.lookup, queries.outer, scratch=scratch).t()
        return out

    def cross(self, tokens: LookupRows, uses: OuterRows, *, scratch: int) -> Tensor:
        """Return inner products of the embedding's part with the linear layer's part.

        The sum over tokens t and positions t' of `h_t'[id_t] (g_t . x_t')`, where h is the suffix of the linear layer; 2 T
        T' width operations per pair.
        """
        x = uses.x[:, : self.outer.d_in]

        def product(ours: slice, theirs: slice) -> Tensor:
            chosen = uses.g[theirs].index_select(1, tokens.ids[ours])
            return (tokens.g[ours] @ x[theirs].t()).mul_(chosen.t())

        return sum_pairs(tokens.spans, uses.spans, product, like=x, scratch=scratch)

    def restore(self, rows: TiedRows) -> Tensor:
        """Return gradients `[B, P]`: the sum of both uses, then the bias."""
        out = self.outer.restore(rows.outer)
        out[:, : self.lookup.rows * self.lookup.width] += self.lookup.restore(rows.lookup)
        return out

    def between(
        self, rows: TiedRows, block: WeightBlock, row_vectors: Tensor, col_vectors: Tensor
    ) -> Tensor:
        """Return L^T W R `[B, 1, r, c]` of both uses."""
        out = self.outer.between(rows.outer, block, row_vectors, col_vectors)
        return out.add_(
            self.lookup.between(
                rows.lookup, block, row_vectors, col_vectors[:, : self.lookup.width]
            )
        )

    def squared_norms(self, rows: TiedRows) -> Tensor:
        """Return squared norms `[B]`: of each use, and twice the product of both."""
        out = self.lookup.squared_norms(rows.lookup)
        out = out + self.outer.squared_norms(rows.outer)
        for row in range(len(rows)):
            one = rows.take(row, row + 1)
            out[row] += 2 * self.cross(one.lookup, one.outer, scratch=RESTORED)[0, 0]
        return out

    def weighted_sum(self, rows: TiedRows, weights: Tensor) -> Tensor:
        """Return weighted sums `[K, P]` of both uses."""
        out = self.outer.weighted_sum(rows.outer, weights)
        out[:, : self.lookup.rows * self.lookup.width] += self.lookup.weighted_sum(
            rows.lookup, weights
        )
        return out

    def half(self, rows: TiedRows, directions: Tensor, *, scratch: int) -> Tensor:
        """Return products with dense directions `[K, P]`, of both uses."""
        out = self.outer.half(rows.outer, directions, scratch=scratch)
        weights = directions[:, : self.lookup.rows * self.lookup.width]
        return out.add_(self.lookup.half(rows.lookup, weights, scratch=scratch))

    def along_positions(
        self, rows: TiedRows, directions: Tensor
    ) -> tuple[PositionProducts, ...] | None:
        """Return those of the linear layer, then those of the embedding's tokens."""
        outer = self.outer.along_positions(rows.outer, directions)
        weights = directions[:, : self.lookup.rows * self.lookup.width]
        lookup = self.lookup.along_positions(rows.lookup, weights)
        return None if outer is None or lookup is None else (*outer, *lookup)

    def temporaries(self, rows: TiedRows) -> int:
        """Return the temporary values per row while it is restored: both uses."""
        values = self.lookup.temporaries(rows.lookup) + self.outer.temporaries(rows.outer)
        return values + self.lookup.rows * self.lookup.width

    def outer_products(self, rows: TiedRows, *, scratch: int) -> Iterator[OuterProducts]:
        """Yield the outer products of both uses."""
        yield from self.outer.outer_products(rows.outer, scratch=scratch)
        yield from self.lookup.outer_products(rows.lookup, scratch=scratch)

    def bias_gradients(self, rows: TiedRows) -> Tensor | None:
        """Return the bias gradients of the linear layer."""
        return self.outer.bias_gradients(rows.outer)


def places_array(form: AnyForm) -> str | None:
    """Return the array of the token of every stored position, if a capture has it.

    Layers that share a prefix have the same positions. Equal tokens of an embedding are summed.
    """
    if isinstance(form, Tied):
        form = form.outer
    return f"{form.prefix}.places" if isinstance(form, Outer) else None
