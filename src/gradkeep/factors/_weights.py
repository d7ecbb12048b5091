"""Matrices and vectors of a dense gradient, and projections of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from gradkeep.factors._form import Form, GradientRows


@dataclass(frozen=True, slots=True)
class WeightMatrix:
    """A weight as matrices `[G, R, C]`, one per group, with its bias as their last column."""

    groups: int
    rows: int
    cols: int
    start: int = 0
    """Start of the weight in the dense gradient."""
    bias: int | None = None
    """Start of the bias; None without a bias."""
    transposed: bool = False
    """True if the weight is laid out `[C, R]`."""

    @property
    def size(self) -> int:
        """Number of values."""
        return self.groups * self.rows * self.cols

    def taken(self, dense: Tensor) -> Tensor:
        """Return the matrices `[B, G, R, C]` in dense gradients `[B, P]`."""
        inner = self.cols - (self.bias is not None)
        weight = dense[:, self.start : self.start + self.groups * self.rows * inner]
        if self.transposed:
            weight = weight.reshape(-1, self.groups, inner, self.rows).transpose(2, 3)
        else:
            weight = weight.reshape(-1, self.groups, self.rows, inner)
        if self.bias is None:
            return weight
        bias = dense[:, self.bias : self.bias + self.groups * self.rows]
        return torch.cat([weight, bias.reshape(-1, self.groups, self.rows, 1)], 3)

    matrices = taken

    def put(self, values: Tensor, into: Tensor) -> None:
        """Write matrices `[B, G, R, C]` into dense gradients `[B, P]`."""
        inner = self.cols - (self.bias is not None)
        weight = values[..., :inner]
        if self.transposed:
            weight = weight.transpose(2, 3)
        size = self.groups * self.rows * inner
        into[:, self.start : self.start + size] = weight.reshape(len(values), size)
        if self.bias is not None:
            size = self.groups * self.rows
            into[:, self.bias : self.bias + size] = values[..., inner].reshape(len(values), size)


@dataclass(frozen=True, slots=True)
class WeightVector:
    """Values that are not a matrix: those of a norm layer, a separate bias, or any small block."""

    size: int
    start: int = 0

    groups: ClassVar[int] = 1
    cols: ClassVar[int] = 1

    @property
    def rows(self) -> int:
        """Number of values: as a matrix it has one column."""
        return self.size

    def matrices(self, dense: Tensor) -> Tensor:
        """Return the values as matrices `[B, 1, size, 1]`."""
        return self.taken(dense)[:, None, :, None]

    def taken(self, dense: Tensor) -> Tensor:
        """Return the values `[B, size]` in dense gradients `[B, P]`."""
        return dense[:, self.start : self.start + self.size]

    def put(self, values: Tensor, into: Tensor) -> None:
        """Write the values into dense gradients."""
        into[:, self.start : self.start + self.size] = values


WeightBlock = WeightMatrix | WeightVector
"""One part of a dense gradient."""


@dataclass(frozen=True, slots=True, eq=False)
class BlockProjection:
    """Coordinates of one block W `[G, R, C]`: chosen entries of `L^T W R`, weighed and folded.

    `y_j = sum over f of weights[f, j] * (L^T W R)[chosen[f, j]]`.
    """

    row_vectors: Tensor
    """L `[G, R, r]`"""
    col_vectors: Tensor
    """R `[G, C, c]`"""
    weights: Tensor
    """`[folds, k]`"""
    chosen: Tensor | None = None
    """`[folds, k]` int64, places among the G r c entries; None for all of them, in order."""

    @property
    def size(self) -> int:
        """Number of coordinates k."""
        return self.weights.shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        parts = (self.row_vectors, self.col_vectors, self.weights, self.chosen)
        return sum(part.numel() * part.element_size() for part in parts if part is not None)

    def applied(self, form: Form[GradientRows], rows: GradientRows, block: WeightBlock) -> Tensor:
        """Return the coordinates `[B, k]` of rows; products of both sides, then `folds * k` sums per row."""
        values = form.between(rows, block, self.row_vectors, self.col_vectors).flatten(1)
        if self.chosen is not None:
            values = values.index_select(1, self.chosen.flatten().to(values.device))
        weights = self.weights.to(values)
        if len(weights) == 1:
            return values.mul_(weights[0])
        return torch.einsum("bfk,fk->bk", values.view(len(values), *weights.shape), weights)

    def pulled_back(self, coordinates: Tensor) -> Tensor:
        """Return matrices `[K, G, R, C]` whose products with W are those of coordinates `[K, k]` with W's."""
        groups, r, c = (
            self.row_vectors.shape[0],
            self.row_vectors.shape[2],
            self.col_vectors.shape[2],
        )
        weights = self.weights.to(coordinates)
        each = (coordinates.unsqueeze(1) * weights).flatten(1)
        if self.chosen is None:
            inner = each
        else:
            inner = each.new_zeros(len(each), groups * r * c)
            inner.index_add_(1, self.chosen.flatten().to(each.device), each)
        high, wide = self.row_vectors.to(each), self.col_vectors.to(each)
        return high @ inner.view(-1, groups, r, c) @ wide.mT


@dataclass(frozen=True, slots=True, eq=False)
class LayerProjection:
    """Coordinates of all blocks of a layer, one after the other.

    >>> from gradkeep.factors._outer import Outer, OuterRows
    >>> from gradkeep.factors._form import Parameter
    >>> form = Outer((Parameter("w", (1, 2)),), "w.prefix", "w.suffix", d_in=2, d_out=1)
    >>> rows = OuterRows(torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0]]))
    >>> first = BlockProjection(torch.ones(1, 1, 1), torch.eye(2)[None], torch.ones(1, 2))
    >>> LayerProjection((first,)).applied(form, rows)
    tensor([[3., 6.]])
    """

    blocks: tuple[BlockProjection | None, ...]
    """None for blocks without coordinates."""

    @property
    def size(self) -> int:
        """Number of coordinates."""
        return sum(block.size for block in self.blocks if block is not None)

    @property
    def nbytes(self) -> int:
        """Bytes of all blocks."""
        return sum(block.nbytes for block in self.blocks if block is not None)

    def applied(
        self,
        form: Form[GradientRows],
        rows: GradientRows,
        blocks: Sequence[WeightBlock] | None = None,
    ) -> Tensor:
        """Return the coordinates `[B, size]` of some rows; `blocks` are those of the form by default."""
        parts = [
            own.applied(form, rows, block)
            for own, block in zip(self.blocks, blocks or form.weight_blocks(), strict=True)
            if own is not None
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts, 1)

    def pulled_back(self, form: Form[GradientRows], coordinates: Tensor) -> Tensor:
        """Return dense directions `[K, P]` whose products with gradients are those of coordinates `[K, size]`.

        `<directions, gradient> = <coordinates, applied(gradient)>`: the transposed map.
        """
        out = coordinates.new_zeros(len(coordinates), form.gradient_size)
        at = 0
        for own, block in zip(self.blocks, form.weight_blocks(), strict=True):
            if own is None:
                continue
            matrices = own.pulled_back(coordinates[:, at : at + own.size])
            block.put(matrices.flatten(1) if isinstance(block, WeightVector) else matrices, out)
            at += own.size
        return out
