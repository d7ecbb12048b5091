"""Gradients that are stored as coordinates of few bits each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
import torch
from torch.nn import functional

from gradkeep._arguments import one_of
from gradkeep.errors import QueryError
from gradkeep.factors._arithmetic import CACHED, pairwise, tiles
from gradkeep.factors._form import Compute, Form, GradientRows, Parameter
from gradkeep.factors._weights import WeightBlock, WeightVector

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


BitWidth = Literal[1, 4, 8, 16, 32]
"""Bits of a stored coordinate."""
PACKED: tuple[BitWidth, ...] = (1, 4)
"""Widths that are packed into bytes, with one scale per row for all layers."""
_LEVELS: dict[BitWidth, tuple[float, float]] = {1: (2.0, -1.0), 4: (1.0, -7.5)}
"""Step and first value of the levels that codes represent, before scaling."""
_TINY = torch.finfo(torch.float32).tiny
MOST_IN_GROUP = 128
"""Coordinates of which one byte can hold the index of the largest, and its sign."""


@dataclass(frozen=True, slots=True, eq=False)
class BitRows(GradientRows):
    """Coordinates of B rows: packed codes with a scale per row, or plain numbers."""

    codes: Tensor
    """`[B, size * bits / 8]` uint8, or `[B, size]` of numbers"""
    scales: Tensor | None = None
    """`[B]`; None if the codes are plain numbers."""

    @classmethod
    def stacked(cls, parts: Sequence[Any]) -> BitRows:
        """Concatenate the codes and scales of all parts."""
        scales = [part.scales for part in parts if part.scales is not None]
        codes = torch.cat([part.codes for part in parts])
        return cls(codes, torch.cat(scales) if scales else None)


@dataclass(frozen=True, slots=True)
class Bits(Form[BitRows]):
    """Coordinates `[size]` of a gradient in a basis of the store, `bits` each.

    One bit stores the sign; a row's scale is then the mean absolute value of its coordinates, which minimizes the
    error of the decoded row. Products are those of coordinates: estimates of whitened products if the basis
    whitens, else of products of gradients.
    """

    kind: ClassVar[str] = "bits"
    computes: ClassVar[tuple[Compute, ...]] = ("dense",)
    rows_type: ClassVar[type[Any]] = BitRows
    parameters: tuple[Parameter, ...]
    codes: str
    scale: str
    """Array with the scales of rows, which all layers share; empty if none is needed."""
    size: int
    bits: BitWidth = 1
    basis: str = ""
    """Fingerprint of the basis."""
    whitened: bool = True
    """True if the basis divides by the roots of damped eigenvalues."""
    group: int = 0
    """Coordinates that share a byte: the index of the largest, and its sign; 0 if each has its own
    bits."""

    def __post_init__(self) -> None:
        one_of("bits", self.bits, (1, 4, 8, 16, 32), error=QueryError)
        if not 0 <= self.group <= MOST_IN_GROUP or (self.group and self.size % self.group):
            raise QueryError(
                "the groups of coordinates are invalid",
                code="query.bit_groups",
                found=f"{self.size} coordinates in groups of {self.group}",
                expected=f"whole groups of at most {MOST_IN_GROUP}",
            )

    @property
    def arrays(self) -> tuple[str, ...]:
        """The names of the arrays that hold codes and scales."""
        return (self.codes, self.scale) if self.scale else (self.codes,)

    @property
    def restored_parameters(self) -> tuple[Parameter, ...]:
        """The coordinates themselves."""
        return (Parameter(self.codes, (self.size,)),)

    @property
    def approximate(self) -> str:
        """Description of what is stored instead of the gradient."""
        white = "whitened " if self.whitened else ""
        return f"{white}coordinates, {describe_bits(self.bits, self.group)}"

    def weight_blocks(self) -> tuple[WeightBlock, ...]:
        """The coordinates, as one vector."""
        return (WeightVector(self.size),)

    def restore(self, rows: BitRows) -> Tensor:
        """Decode the coordinates `[B, size]`."""
        if rows.scales is None:
            return rows.codes
        if self.group:
            out = rows.scales.new_zeros(len(rows), self.size)
            places, signs = self._largest(rows.codes)
            return out.scatter_(1, places, signs * rows.scales.unsqueeze(1))
        step, first = _LEVELS[self.bits]
        codes = self._unpacked(rows.codes).to(rows.scales.dtype)
        return codes.mul_(step).add_(first).mul_(rows.scales.unsqueeze(1))

    def squared_norms(self, rows: BitRows) -> Tensor:
        """Return squared norms `[B]` of the decoded coordinates."""
        if rows.scales is not None and (self.bits == 1 or self.group):
            return rows.scales.square() * (self.size // (self.group or 1))
        return Form.squared_norms(self, rows)

    def products(
        self, queries: BitRows, train: BitRows, compute: Compute, *, scratch: int
    ) -> Tensor:
        """Return inner products `[Q, N]` of decoded coordinates; 2 size operations per pair."""
        return self.half(train, self.restore(queries), scratch=scratch)

    def half(self, rows: BitRows, directions: Tensor, *, scratch: int) -> Tensor:
        """Return products `[K, B]` with directions `[K, size]`, decoding rows while they are in the cache.

        Codes c are multiplied directly. Of their levels `step c + first` the rest is a sum over the direction, and each
        row's scale is applied last.
        """
        if rows.scales is None:
            return pairwise(directions, rows.codes.to(directions.dtype))
        if self.group:
            return self._table_products(rows, directions)
        out = directions.new_empty(len(directions), len(rows))
        parts = list(tiles(len(rows), self.size, 4, min(scratch, 2 * CACHED)))
        space = directions.new_empty(parts[0][1] if parts else 0, self.size)
        for start, stop in parts:
            codes = space[: stop - start].copy_(self._unpacked(rows.codes[start:stop]))
            torch.mm(directions, codes.t(), out=out[:, start:stop])
        step, first = _LEVELS[self.bits]
        out.mul_(step).add_(first * directions.double().sum(1, keepdim=True).to(out.dtype))
        return out.mul_(rows.scales.to(out.dtype))

    def sketched(self, rows: BitRows, directions: Tensor, *, scratch: int) -> Tensor:
        """Compute `half` in integers: directions rounded to 127 steps, codes multiplied as bytes.

        A quarter of the time of float32 if the processor multiplies bytes.
        """
        if rows.scales is None or self.group or not len(rows):
            return self.half(rows, directions, scratch=scratch)
        steps = directions.abs().amax(1, keepdim=True).clamp(min=1e-30) / 127
        rounded = (directions / steps).round_().to(torch.int8).t().contiguous()
        out = directions.new_empty(len(directions), len(rows))
        for start, stop in tiles(len(rows), self.size, 1, min(scratch, 8 * CACHED)):
            out[:, start:stop] = torch._int_mm(self._unpacked(rows.codes[start:stop]), rounded).t()
        step, first = _LEVELS[self.bits]
        whole = rounded.sum(0, dtype=torch.int64).unsqueeze(1)
        return out.mul_(step).add_(first * whole).mul_(steps).mul_(rows.scales.to(out.dtype))

    def temporaries(self, rows: BitRows) -> int:
        """Values of the temporaries of a row while it is decoded."""
        return self.size // 4

    def _table_products(self, rows: BitRows, directions: Tensor) -> Tensor:
        """Return products `[K, B]`: the value of each byte is looked up in a table `[256, K]` of its group.

        Some groups at a time, whose tables stay in the cache; one lookup per byte, row and direction.
        """
        assert rows.scales is not None
        count, groups = len(directions), self.size // self.group
        out = directions.new_zeros(len(rows), count)
        step = max(1, CACHED // (2 * 256 * max(1, count) * directions.element_size()))
        for start in range(0, groups, step):
            stop = min(start + step, groups)
            some = directions[:, start * self.group : stop * self.group]
            table = directions.new_zeros(stop - start, 2, MOST_IN_GROUP, count)
            table[:, 0, : self.group] = some.view(count, stop - start, self.group).permute(1, 2, 0)
            torch.neg(table[:, 0], out=table[:, 1])
            places = rows.codes[:, start:stop].int()
            places += torch.arange(0, 256 * (stop - start), 256, dtype=torch.int32)
            out += functional.embedding_bag(places, table.view(-1, count), mode="sum")
        return out.mul_(rows.scales.unsqueeze(1).to(out.dtype)).t()

    def _largest(self, codes: Tensor) -> tuple[Tensor, Tensor]:
        """Return the places of the stored coordinates `[B, groups]`, and their signs."""
        starts = torch.arange(0, self.size, self.group, device=codes.device)
        places = (codes & (MOST_IN_GROUP - 1)).long() + starts
        return places, 1.0 - 2.0 * (codes >= MOST_IN_GROUP).float()

    def _unpacked(self, packed: Tensor) -> Tensor:
        """Unpack codes `[B, size]` int8."""
        array = packed.cpu().numpy()
        if self.bits == 1:
            codes = np.unpackbits(array, axis=1, count=self.size, bitorder="little")
            return torch.from_numpy(codes.view(np.int8))
        codes = np.empty((len(array), 2 * array.shape[1]), np.uint8)
        np.bitwise_and(array, 15, out=codes[:, ::2])
        np.right_shift(array, 4, out=codes[:, 1::2])
        return torch.from_numpy(codes[:, : self.size].view(np.int8))


def describe_bits(bits: int, group: int = 0) -> str:
    """Describe how coordinates are stored."""
    if group:
        return f"of each {group} the largest in a byte"
    return "one bit each" if bits == 1 else f"{bits} bits each"


def largest_in_groups(coordinates: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Return the code and the absolute value of the largest coordinate of each group, both `[B, groups]`.

    Some rows at a time: fresh memory for all of them takes longer than the comparisons.
    """
    rows, count = len(coordinates), coordinates.shape[1] // group
    codes = torch.empty(rows, count, dtype=torch.uint8, device=coordinates.device)
    largest = coordinates.new_empty(rows, count)
    for start, stop in tiles(rows, count * group, coordinates.element_size(), CACHED):
        groups = coordinates[start:stop].view(stop - start, count, group)
        sizes, places = groups.abs().max(2)
        below = groups.gather(2, places.unsqueeze(2)).squeeze(2) < 0
        codes[start:stop] = places + MOST_IN_GROUP * below
        largest[start:stop] = sizes
    return codes, largest


def bit_scales(coordinates: Tensor, bits: BitWidth, group: int = 0) -> Tensor | None:
    """Return the scale `[B]` of each row of all layers' coordinates `[B, K]`; None if none is needed.

    One bit: the mean absolute value of a coordinate; groups: that of their largest. Four bits: the step of 16 even
    levels.
    """
    if group:
        return largest_in_groups(coordinates, group)[1].mean(1)
    if bits not in PACKED:
        return None
    if bits == 1:
        return coordinates.abs().mean(1)
    # The step of 16 even levels with the least error on standard normal numbers.
    return coordinates.square().mean(1).sqrt() * 0.3352


def packed_bits(coordinates: Tensor, scales: Tensor, bits: BitWidth, group: int = 0) -> Tensor:
    """Pack coordinates `[B, size]` into codes `[B, ceil(size * bits / 8)]` uint8, or a byte per group.

    >>> packed_bits(torch.tensor([[1.0, -2.0, 3.0]]), torch.ones(1), 1)
    tensor([[5]], dtype=torch.uint8)
    """
    if group:
        return largest_in_groups(coordinates, group)[0]
    if bits == 1:
        signs = (coordinates > 0).cpu().numpy()
        return torch.from_numpy(np.packbits(signs, axis=1, bitorder="little"))
    steps = coordinates / torch.where(scales > 0, scales, 1).unsqueeze(1)
    levels = steps.add_(8).floor_().clamp_(0, 15).to(torch.uint8).cpu().numpy()
    if levels.shape[1] % 2:
        levels = np.pad(levels, ((0, 0), (0, 1)))
    return torch.from_numpy(levels[:, ::2] | (levels[:, 1::2] << 4))


Levels = Literal[0, 3, 6, 16]
"""Levels that a factor's numbers are rounded to: 5, 3 or 2 of them share a byte; 0 for numbers as they are."""
_PER_BYTE: dict[int, int] = {3: 5, 6: 3, 16: 2}
_HEAD = 5
"""Bytes before the codes of a row: the step between levels in float32, and the code of zero."""
_SHRINKS: dict[int, tuple[float, ...]] = {
    3: (1.0, 0.8, 0.6, 0.45, 0.35, 0.25),
    6: (1.0, 0.8, 0.65, 0.5),
    16: (1.0,),
}
"""Steps that are tried, relative to those with which the levels cover all values of a row."""


def to_levels(values: Tensor, levels: int) -> Tensor:
    """Round each row of `[B, d]` to even levels, one of them zero, and pack them into `[B, K]` uint8.

    The step is the one of a few with the least error in that row. Zero stays zero: behind a rectifier half of the
    values are zero, in all rows the same ones, so their errors would add up.
    """
    each, size = _PER_BYTE[levels], values.shape[1]
    low, high = values.amin(1).clamp(max=0).float(), values.amax(1).clamp(min=0).float()
    zero = (-low * (levels - 1) / (high - low).clamp(min=_TINY)).round_()
    if levels == 3:  # a step on each side of zero, unless all values lie on one side
        zero = ((low < 0).float() + (high <= 0).float()).clamp_(max=2)
    reach = torch.maximum(-low / zero.clamp(min=0.5), high / (levels - 1 - zero).clamp(min=0.5))
    codes, step, least = None, reach, None
    for shrink in _SHRINKS[levels]:
        tried = (reach * shrink).clamp_(min=_TINY)
        rounded = (values / tried.unsqueeze(1)).add_(zero.unsqueeze(1)).round_()
        rounded.clamp_(0, levels - 1)
        if len(_SHRINKS[levels]) == 1:
            codes, step = rounded, tried
            break
        error = (rounded - zero.unsqueeze(1)).mul_(tried.unsqueeze(1)).sub_(values).square_().sum(1)
        if codes is None or least is None:
            codes, step, least = rounded, tried, error
            continue
        better = error < least
        codes = torch.where(better.unsqueeze(1), rounded, codes)
        step, least = torch.where(better, tried, step), torch.minimum(error, least)
    assert codes is not None
    padded = functional.pad(codes, (0, -size % each)).view(len(values), -1, each)
    powers = torch.tensor([levels**at for at in range(each)], dtype=padded.dtype)
    packed = (padded @ powers.to(padded.device)).to(torch.uint8)
    head = step.unsqueeze(1).contiguous().view(torch.uint8), zero.to(torch.uint8).unsqueeze(1)
    return torch.cat([*head, packed], 1)


def from_levels(packed: Tensor, levels: int, size: int) -> Tensor:
    """Decode rows `[B, size]` of `to_levels` in float32.

    >>> from_levels(to_levels(torch.tensor([[0.0, 7.0, -8.0]]), 16), 16, 3)
    tensor([[ 0.,  7., -8.]])
    """
    head, codes = packed[:, :_HEAD], packed[:, _HEAD:]
    # A clone: what is viewed as float32 must be aligned.
    step = head[:, :4].clone(memory_format=torch.contiguous_format).view(torch.float32)
    code = torch.arange(256).unsqueeze(1)
    powers = torch.tensor([levels**at for at in range(_PER_BYTE[levels])])
    table = (code // powers % levels).float().to(packed.device)
    values = functional.embedding(codes.int(), table).flatten(1)[:, :size]
    return (values - head[:, 4:].float()).mul_(step)
