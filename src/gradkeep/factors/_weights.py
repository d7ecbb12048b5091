"""The matrices and vectors that a dense gradient is made of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

if TYPE_CHECKING:
    from torch import Tensor


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
