"""Linear layers: products of prefixes times products of suffixes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, get_args

import torch
from torch import Tensor

from gradkeep._arguments import one_of
from gradkeep.errors import QueryError
from gradkeep.factors._arithmetic import (
    CACHED,
    Spans,
    inner,
    pad,
    pairwise,
    row_of,
    squared_lengths,
    sum_columns,
    sum_pairs,
    sum_rows,
    tiles,
)
from gradkeep.factors._bits import Levels, from_levels, to_levels
from gradkeep.factors._form import (
    OMIT_DEFAULT,
    Compute,
    FactoredForm,
    OuterProducts,
    Parameter,
    PositionProducts,
    RaggedRows,
)
from gradkeep.factors._weights import WeightBlock, WeightMatrix

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from gradkeep.factors._form import ArraySource


@dataclass(frozen=True, slots=True, eq=False)
class OuterRows(RaggedRows):
    """Positions of B rows one after the other, S = sum of T_i in total."""

    x: Tensor
    """Prefix `[S, d_in]`, or `[S, d_in + 1]` if the form has `ones`."""
    g: Tensor
    """Suffix `[S, d_out]`"""
    offsets: Tensor | None = None
    """`[B + 1]` int64 on the CPU; None for one position per row, B = S."""

    @classmethod
    def stacked(cls, parts: Sequence[OuterRows]) -> OuterRows:
        """Concatenate the rows of some parts."""
        x, g = torch.cat([one.x for one in parts]), torch.cat([one.g for one in parts])
        if all(one.offsets is None for one in parts):
            return cls(x, g)
        lengths = torch.cat([torch.tensor(one.spans.bounds).diff() for one in parts])
        return cls(x, g, torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]))

    def at_positions(self, used: Tensor) -> OuterRows:
        """Select the used positions `[S]` of rows that have several."""
        assert self.offsets is not None
        if bool(used.all()):
            return self
        before = torch.cat([torch.zeros(1, dtype=torch.int64), used.cpu().long().cumsum(0)])
        return OuterRows(self.x[used], self.g[used], before[self.offsets])


@dataclass(frozen=True, slots=True)
class Outer(FactoredForm[OuterRows]):
    """Linear layers: gradient `[d_out, d_in]` = suffix `[T, d_out]`^T @ prefix `[T, d_in]`.

    With `bias`, the gradient of the bias, the sum of the suffix over T, follows the weight's; it equals that of a
    prefix with one more column of ones. With `ones` the stored prefix has that column already (a truncated SVD does
    not leave it constant).
    """

    kind: ClassVar[str] = "outer"
    computes: ClassVar[tuple[Compute, ...]] = ("factored", "half", "restored")
    rows_type: ClassVar[type[Any]] = OuterRows
    parameters: tuple[Parameter, ...]
    prefix: str
    suffix: str
    d_in: int
    d_out: int
    bias: bool = False
    ones: bool = False
    transposed: bool = False
    """True if the weight is laid out `[d_in, d_out]`."""
    error: float = 0.0
    """Largest relative error of a stored gradient whose rank was cut."""
    levels: Levels = field(default=0, metadata=OMIT_DEFAULT)
    """Levels that stored numbers are rounded to, for one position per row; 0 if they are not."""

    def __post_init__(self) -> None:
        one_of("levels", self.levels, get_args(Levels), error=QueryError)

    @property
    def arrays(self) -> tuple[str, ...]:
        """Names of the arrays that hold the factors."""
        return (self.prefix, self.suffix)

    @property
    def unchanged(self) -> bool:
        """True without a stored column of ones."""
        return not self.ones

    @property
    def approximate(self) -> str | None:
        """Description of the cut, if any."""
        if self.levels:
            return f"factors rounded to {self.levels} levels"
        cut = f"gradients of cut rank, relative error at most {self.error:g}"
        return cut if self.error > 0 else None

    def read(self, source: ArraySource) -> OuterRows:
        """Read rows from arrays, decoding those of few levels."""
        if not self.levels:
            return FactoredForm.read(self, source)
        x, g = (source.tensor(name) for name in self.arrays)
        sides = from_levels(x, self.levels, self.d_in), from_levels(g, self.levels, self.d_out)
        return OuterRows(*sides)

    def tensors(self, rows: OuterRows) -> dict[str, Tensor]:
        """Return the tensors of rows by the names of their arrays, encoding those of few levels."""
        if not self.levels:
            return FactoredForm.tensors(self, rows)
        sides = to_levels(rows.x, self.levels), to_levels(rows.g, self.levels)
        return dict(zip(self.arrays, sides, strict=True))

    def weight_blocks(self) -> tuple[WeightBlock, ...]:
        """Return one matrix `[d_out, d_in]` with the bias as its last column."""
        weights = self.d_in * self.d_out
        bias = weights if self.bias else None
        width = self.d_in + self.bias
        return (WeightMatrix(1, self.d_out, width, bias=bias, transposed=self.transposed),)

    def products(
        self, queries: OuterRows, train: OuterRows, compute: Compute, *, scratch: int
    ) -> Tensor:
        """Return inner products `[Q, N]`: sum over t, t' of `(x_t . x'_t' + bias) (g_t . g'_t')`.

        2 T T' (d_in + d_out) operations per pair, in two matrix products for all pairs of a tile.
        """
        plus_one = self.bias and not self.ones

        def product(ours: slice, theirs: slice) -> Tensor:
            inputs = pairwise(queries.x[ours], train.x[theirs])
            grads = pairwise(queries.g[ours], train.g[theirs])
            return grads.addcmul_(inputs, grads) if plus_one else grads.mul_(inputs)

        return sum_pairs(queries.spans, train.spans, product, like=train.x, scratch=scratch)

    def restore(self, rows: OuterRows) -> Tensor:
        """Return gradients `[B, P]`: `g^T x` of each row, then the bias; 2 T d_in d_out operations per row."""
        parts = rows.spans
        out = rows.x.new_empty(len(rows), self.restored_size)
        weight, bias = self.split(out)
        row_factor, col_factor = self._sides(rows)
        if parts.uniform == 1:
            torch.mul(row_factor[:, :, None], col_factor[:, None, :], out=weight)
        else:
            torch.bmm(pad(row_factor, parts).transpose(1, 2), pad(col_factor, parts), out=weight)
        if bias is not None:
            bias.copy_(sum_rows(self._bias_terms(rows), parts))
        return out

    def between(
        self, rows: OuterRows, block: WeightBlock, row_vectors: Tensor, col_vectors: Tensor
    ) -> Tensor:
        """Return L^T W R `[B, 1, r, c]` from factors; T (d_out r + d_in c + r c) products per row.

        A narrow weight, as that of an adapter, is restored first and then multiplied, once per row instead of T times.
        """
        (high, r), (wide, c) = row_vectors.shape[1:], col_vectors.shape[1:]
        positions = rows.positions / max(1, len(rows))
        moved_first = positions * (high * r + wide * c + r * c)
        if positions * high * wide + r * wide * (high + c) < moved_first:
            return FactoredForm.between(self, rows, block, row_vectors, col_vectors)
        x = rows.x @ col_vectors[0, : rows.x.shape[1]].to(rows.x.dtype)
        if self.bias and not self.ones:
            x += col_vectors[0, -1].to(x.dtype)
        return summed_products(rows.g @ row_vectors[0].to(rows.g.dtype), x, rows.spans)

    def squared_norms(self, rows: OuterRows) -> Tensor:
        """Return squared norms `[B]` from each row's Gram matrices, or restored rows if T is large."""
        parts = rows.spans
        if parts.uniform == 1:
            inputs = squared_lengths(rows.x)
            if self.bias and not self.ones:
                inputs = inputs + 1
            return inputs * squared_lengths(rows.g)
        out = rows.x.new_empty(len(rows))
        if len(rows) == 0:
            return out
        both = self.d_in + self.d_out
        gram = parts.longest * both < self.d_in * self.d_out
        needed = parts.longest * (3 * parts.longest + both) if gram else self.restored_size
        for start, stop in tiles(len(rows), needed, rows.x.element_size(), CACHED):
            some = rows.take(start, stop)
            out[start:stop] = (
                self._gram_norms(some) if gram else squared_lengths(self.restore(some))
            )
        return out

    def weighted_sum(self, rows: OuterRows, weights: Tensor) -> Tensor:
        """Return weighted sums `[K, P]`: `(w g)^T x` over the positions of the rows with a weight.

        2 S d_in d_out operations for each of K, or once if no row has a weight in two sums.
        """
        parts = rows.spans
        out = rows.x.new_zeros(len(weights), self.restored_size)
        where = row_of(parts, rows.x.device)
        terms = self._bias_terms(rows) if self.bias else None
        for one, into in zip(weights, out, strict=True):
            each = one[where]
            x, g = rows.x[:, : self.d_in], rows.g
            chosen = each.nonzero()[:, 0]
            weight, bias = self.split(into[None])
            if bias is not None and terms is not None:
                bias[0] = each[chosen] @ terms[chosen]
            if len(chosen) < len(each):
                x, g, each = x[chosen], g[chosen], each[chosen]
            g = g * each[:, None]
            torch.mm(*((x.t(), g) if self.transposed else (g.t(), x)), out=weight[0])
        return out

    def weighted_squares(self, rows: OuterRows, weights: Tensor) -> Tensor:
        """Return weighted sums of squared gradients `[K, P]`; from squares with one position per row."""
        if rows.spans.uniform != 1:
            return FactoredForm.weighted_squares(self, rows, weights)
        return self.weighted_sum(OuterRows(rows.x.square(), rows.g.square()), weights)

    def half(self, rows: OuterRows, directions: Tensor, *, scratch: int) -> Tensor:
        """Return products `[K, B]` with dense directions W `[K, P]`: sum over t of `g_t . (W x_t)`.

        2 K T d_in d_out operations per row, without a gradient.
        """
        parts = rows.spans
        out = rows.x.new_zeros(len(directions), len(rows))
        row_factor, col_factor = self._sides(rows)
        terms = self._bias_terms(rows) if self.bias else None
        values = max(1, min(scratch // 4, CACHED) // rows.x.element_size() // row_factor.shape[1])
        # Many positions and few directions at a time: fast matrix products.
        positions = max(parts.longest, min(1024, values))
        # Weights followed by a bias are copied, which takes half of the temporaries.
        free_bytes = scratch // 2 // (rows.x.element_size() * self.restored_size)
        kinds = max(1, min(values // positions, free_bytes))
        for first in range(0, len(directions), kinds):
            weight, bias = self.split(directions[first : first + kinds])
            matrix = weight.reshape(-1, weight.shape[2]).t()
            for start, stop in parts.tiles(positions):
                at = slice(parts.bounds[start], parts.bounds[stop])
                moved = (col_factor[at] @ matrix).view(-1, len(weight), row_factor.shape[1])
                summed = moved.mul_(row_factor[at, None, :]).sum(2)
                if bias is not None and terms is not None:
                    summed.addmm_(terms[at], bias.t())
                out[first : first + kinds, start:stop] = sum_columns(
                    summed.t(), parts.cut(start, stop)
                )
        return out

    def along_positions(
        self, rows: OuterRows, directions: Tensor
    ) -> tuple[PositionProducts, ...] | None:
        """Return `g_t . (W x_t)` of every position, `[K, S]`; None if the rank was cut, which mixes positions.

        2 K S d_in d_out operations, one direction at a time.
        """
        if self.error > 0:
            return None
        row_factor, col_factor = self._sides(rows)
        weight, bias = self.split(directions)
        out = rows.x.new_empty(len(directions), len(rows.g))
        for one, into in zip(weight, out, strict=True):
            torch.sum((col_factor @ one.t()).mul_(row_factor), 1, out=into)
        if bias is not None:
            out += bias @ self._bias_terms(rows).t()
        return (PositionProducts(out, rows.spans),)

    def split(self, dense: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return views of dense gradients `[B, P]`: the weights, and the biases `[B, d_out]`."""
        shape = (self.d_in, self.d_out) if self.transposed else (self.d_out, self.d_in)
        weight = dense[:, : self.d_in * self.d_out].view(-1, *shape)
        return weight, dense[:, self.d_in * self.d_out :] if self.bias else None

    def temporaries(self, rows: OuterRows) -> int:
        """Return the temporary values per row while it is restored."""
        parts = rows.spans
        return self.d_out if parts.uniform is not None else parts.longest * (self.d_in + self.d_out)

    def _sides(self, rows: OuterRows) -> tuple[Tensor, Tensor]:
        """Return the factors of the weight's rows and of its columns, `[S, R]` and `[S, C]`."""
        x = rows.x[:, : self.d_in]
        return (x, rows.g) if self.transposed else (rows.g, x)

    def _bias_terms(self, rows: OuterRows) -> Tensor:
        """Return what each position adds to the gradient of the bias, `[S, d_out]`."""
        return rows.g * rows.x[:, self.d_in :] if self.ones else rows.g

    def _gram_norms(self, rows: OuterRows) -> Tensor:
        parts = rows.spans
        x, g = pad(rows.x, parts), pad(rows.g, parts)
        inputs, grads = torch.bmm(x, x.transpose(1, 2)), torch.bmm(g, g.transpose(1, 2))
        if self.bias and not self.ones:
            inputs.add_(1)
        return inner(inputs.flatten(1), grads.flatten(1))

    def outer_products(self, rows: OuterRows, *, scratch: int) -> Iterator[OuterProducts]:
        """Yield suffixes times prefixes, in the layout of the weight."""
        row_factor, col_factor = self._sides(rows)
        yield OuterProducts(0, col_factor, rows.spans, row_factor=row_factor)

    def bias_gradients(self, rows: OuterRows) -> Tensor | None:
        """Return sums of suffixes over positions `[B, d_out]`; None without a bias."""
        return sum_rows(self._bias_terms(rows), rows.spans) if self.bias else None

    def with_ones(self, x: Tensor) -> Tensor:
        """Append the column of ones that the bias reads to the prefix `[S, C]`."""
        return torch.cat([x, x.new_ones(len(x), 1)], 1) if self.bias and not self.ones else x


def summed_products(row_factor: Tensor, col_factor: Tensor, spans: Spans) -> Tensor:
    """Sum `row_t col_t^T` over each row's positions: `[S, r]`, `[S, c]` -> `[B, 1, r, c]`."""
    if spans.uniform == 1:
        return (row_factor.unsqueeze(2) * col_factor.unsqueeze(1)).unsqueeze(1)
    return torch.bmm(pad(row_factor, spans).mT, pad(col_factor, spans)).unsqueeze(1)
