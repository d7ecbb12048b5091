"""The matrices and vectors that a dense gradient is made of."""

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
    """A weight as matrices `[G, R, C]`, one for each group, its bias as their last column."""

    groups: int
    rows: int
    cols: int
    start: int = 0
    """Where the weight begins in the dense gradient."""
    bias: int | None = None
    """Where the bias begins."""
    transposed: bool = False
    """Whether the weight is laid out `[C, R]`."""

    @property
    def size(self) -> int:
        """The number of values."""
        return self.groups * self.rows * self.cols

    def taken(self, dense: Tensor) -> Tensor:
        """The matrices `[B, G, R, C]` in dense gradients `[B, P]`."""
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

    def matrices(self, dense: Tensor) -> Tensor:
        """The matrices `[B, G, R, C]` in dense gradients `[B, P]`."""
        return self.taken(dense)

    def put(self, values: Tensor, into: Tensor) -> None:
        """Writes matrices `[B, G, R, C]` into dense gradients `[B, P]`."""
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
    """Values that are no matrix: a norm layer's, a bias by itself, or any small block."""

    size: int
    start: int = 0

    groups: ClassVar[int] = 1
    cols: ClassVar[int] = 1

    @property
    def rows(self) -> int:
        """The number of values: as a matrix it has one column."""
        return self.size

    def matrices(self, dense: Tensor) -> Tensor:
        """The values as matrices `[B, 1, size, 1]`."""
        return self.taken(dense)[:, None, :, None]

    def taken(self, dense: Tensor) -> Tensor:
        """The values `[B, size]` in dense gradients `[B, P]`."""
        return dense[:, self.start : self.start + self.size]

    def put(self, values: Tensor, into: Tensor) -> None:
        """Writes the values into dense gradients."""
        into[:, self.start : self.start + self.size] = values


WeightBlock = WeightMatrix | WeightVector
"""One part of a dense gradient."""


@dataclass(frozen=True, slots=True, eq=False)
class BlockProjection:
    """Coordinates of one block W `[G, R, C]`: chosen entries of `left^T W right`, weighed and folded.

    `y_j = sum over f of weights[f, j] * (left^T W right)[chosen[f, j]]`.
    """

    row_vectors: Tensor
    """`[G, R, r]`"""
    col_vectors: Tensor
    """`[G, C, c]`"""
    weights: Tensor
    """`[folds, k]`"""
    chosen: Tensor | None = None
    """`[folds, k]` int64, places among the G r c entries; None: all of them, in order."""

    @property
    def size(self) -> int:
        """k, the number of coordinates."""
        return self.weights.shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes of all that it is made of."""
        parts = (self.row_vectors, self.col_vectors, self.weights, self.chosen)
        return sum(part.numel() * part.element_size() for part in parts if part is not None)

    def applied(self, form: Form[GradientRows], rows: GradientRows, block: WeightBlock) -> Tensor:
        """The coordinates `[B, k]` of some rows; products of both sides, then `folds * k` sums a row."""
        found = form.between(rows, block, self.row_vectors, self.col_vectors).flatten(1)
        if self.chosen is not None:
            found = found[:, self.chosen.flatten().to(found.device)]
        weights = self.weights.to(found)
        if len(weights) == 1:
            return found.mul_(weights[0])
        return torch.einsum("bfk,fk->bk", found.view(len(found), *weights.shape), weights)

    def pulled_back(self, coordinates: Tensor) -> Tensor:
        """Matrices `[K, G, R, C]` whose product with W is that of coordinates `[K, k]` with W's own."""
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
        left, right = self.row_vectors.to(each), self.col_vectors.to(each)
        return left @ inner.view(-1, groups, r, c) @ right.mT


@dataclass(frozen=True, slots=True, eq=False)
class LayerProjection:
    """The coordinates of all blocks of a layer, one after the other.

    >>> from gradkeep.factors._outer import Outer, OuterRows
    >>> from gradkeep.factors._form import Parameter
    >>> form = Outer((Parameter("w", (1, 2)),), "w.prefix", "w.suffix", d_in=2, d_out=1)
    >>> rows = OuterRows(torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0]]))
    >>> first = BlockProjection(torch.ones(1, 1, 1), torch.eye(2)[None], torch.ones(1, 2))
    >>> LayerProjection((first,)).applied(form, rows)
    tensor([[3., 6.]])
    """

    blocks: tuple[BlockProjection | None, ...]
    """None: no coordinate of that block is kept."""

    @property
    def size(self) -> int:
        """The number of coordinates."""
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
        """The coordinates `[B, size]` of some rows; `blocks` are those of the form by default."""
        parts = [
            own.applied(form, rows, block)
            for own, block in zip(self.blocks, blocks or form.weight_blocks(), strict=True)
            if own is not None
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts, 1)

    def pulled_back(self, form: Form[GradientRows], coordinates: Tensor) -> Tensor:
        """Dense directions `[K, P]`, whose products with gradients are those of coordinates `[K, size]`.

        `<directions, gradient> = <coordinates, applied(gradient)>`: the transposed map.
        """
        out = coordinates.new_zeros(len(coordinates), form.gradient_size)
        at = 0
        for own, block in zip(self.blocks, form.weight_blocks(), strict=True):
            if own is None:
                continue
            found = own.pulled_back(coordinates[:, at : at + own.size])
            block.put(found.flatten(1) if isinstance(block, WeightVector) else found, out)
            at += own.size
        return out
