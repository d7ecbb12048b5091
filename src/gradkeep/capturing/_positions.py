"""Which dimension of a layer's tensors counts the samples, and which the positions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, get_args

if TYPE_CHECKING:
    import torch

Lay = Literal["first", "second", "flat"]
LAYS: tuple[Lay, ...] = get_args(Lay)


def possible(shape: torch.Size, rows: int, lay: Lay) -> bool:
    """Whether a tensor of this shape can be read so for that many samples."""
    if lay == "first":
        return len(shape) >= 1 and shape[0] == rows
    if lay == "second":
        return len(shape) >= 2 and shape[1] == rows
    return len(shape) >= 1 and rows > 0 and shape[0] > rows and shape[0] % rows == 0


def by_sample(tensor: torch.Tensor, rows: int, lay: Lay) -> torch.Tensor:
    """The tensor as `[B, ...]`: `first` is `[B, ...]`, `second` `[T, B, ...]`, `flat` `[B * T, ...]`.

    >>> import torch
    >>> by_sample(torch.zeros(5, 2, 3), 2, "second").shape
    torch.Size([2, 5, 3])
    """
    if lay == "first":
        return tensor
    if lay == "second":
        return tensor.transpose(0, 1)
    return tensor.reshape(rows, len(tensor) // rows, *tensor.shape[1:])
