"""Which matrices and vectors a layer's dense gradient is made of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from gradkeep.query._forms import Conv, Dense, Lookup, Outer, Tied
from gradkeep.query._tiles import CACHED

if TYPE_CHECKING:
    from torch import Tensor

    from gradkeep.query._forms import Form

FULL = 512
"""A block of at most so many values has its whole matrix; a longer vector only the diagonal."""
SCRATCH = 8 * CACHED
"""Bytes of gradients that are restored at a time."""


@dataclass(frozen=True, slots=True)
class Matrix:
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
class Vector:
    """Values that are no matrix: a norm layer's, a bias by itself, or any small block."""

    size: int
    start: int = 0

    def taken(self, dense: Tensor) -> Tensor:
        """The values `[B, size]` in dense gradients `[B, P]`."""
        return dense[:, self.start : self.start + self.size]

    def put(self, values: Tensor, into: Tensor) -> None:
        """Writes the values into dense gradients."""
        into[:, self.start : self.start + self.size] = values


Piece = Matrix | Vector


def size_kept(form: Form) -> int:
    """P, the number of values that a restored gradient has."""
    return sum(piece.size for piece in layout(form))


def layout(form: Form) -> tuple[Piece, ...]:
    """The pieces of a form's dense gradient.

    >>> from gradkeep.query._forms import Parameter
    >>> layout(Outer((), "", "", d_in=3, d_out=2, bias=True))
    (Matrix(groups=1, rows=2, cols=4, start=0, bias=6, transposed=False),)
    """
    match form:
        case Outer():
            return (_outer(form),)
        case Conv():
            inner = form.channels // form.groups * form.taps
            high = form.filters // form.groups
            weights = form.filters * inner
            if form.bias == "narrow":
                return (Matrix(form.groups, high, inner + 1, bias=weights),)
            weight = Matrix(form.groups, high, inner)
            return (weight, Vector(form.channels, weights)) if form.bias == "wide" else (weight,)
        case Lookup():
            return (Matrix(1, form.rows, form.width),)
        case Tied():
            return (_outer(form.outer),)
        case Dense():
            return _dense(form)


def _outer(form: Outer) -> Matrix:
    weights = form.d_in * form.d_out
    bias = weights if form.bias else None
    return Matrix(1, form.d_out, form.d_in + form.bias, bias=bias, transposed=form.transposed)


def _dense(form: Dense) -> tuple[Piece, ...]:
    if form.sketch or form.size <= FULL:
        return (Vector(form.size),)
    pieces: list[Piece] = []
    at, parameters = 0, list(form.parameters)
    while parameters:
        first = parameters.pop(0)
        if len(first.shape) < 2:
            pieces.append(Vector(first.size, at))
            at += first.size
            continue
        rows, cols = first.shape[0], first.size // max(1, first.shape[0])
        follows = bool(parameters) and parameters[0].shape == first.shape[:1]
        bias = at + first.size if follows else None
        pieces.append(Matrix(1, rows, cols + follows, at, bias=bias))
        at += first.size + (parameters.pop(0).size if follows else 0)
    return tuple(pieces)
