"""Random projections of gradients: dense matrices, folds, and sketches straight from factors."""

from __future__ import annotations

import math
import os
from collections.abc import Hashable
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal, Protocol, get_args

import torch
from torch import Tensor

from gradkeep import _arguments
from gradkeep._budgets import format_bytes
from gradkeep.curvature import _random
from gradkeep.errors import AttributionError
from gradkeep.factors._arithmetic import sum_rows

if TYPE_CHECKING:
    from gradkeep.factors._arithmetic import Spans


ProjectionKind = Literal["auto", "tensor-sketch", "fold", "sjlt", "rademacher", "normal"]
KINDS: tuple[str, ...] = get_args(ProjectionKind)
PARTS = 4
"""Of an SJLT: each value is added to so many of the k numbers."""


@dataclass(frozen=True, slots=True)
class Projection:
    """A random linear map of gradients to `dim` numbers, the same for the same seed everywhere.

    - `tensor-sketch`: straight from factors; value (r, c) of a weight `[R, C]` is added, with a
      random sign for r and one for c, at a random place for r moved by c;
    - `fold`: blocks of k values, each shifted at random, with random signs;
    - `sjlt`: four folds of k / 4, divided by 2;
    - `rademacher`, `normal`: a dense random matrix / sqrt(k);
    - `auto`: `tensor-sketch` where parameters are known by name, `fold` for flat gradients.

    >>> Projection(dim=1024).expected_error
    0.03125
    """

    kind: ProjectionKind = "auto"
    dim: int = 2048
    seed: int = 0

    def __post_init__(self) -> None:
        _arguments.one_of("the kind of a projection", self.kind, KINDS, error=AttributionError)
        object.__setattr__(self, "dim", whole("dim", self.dim))
        object.__setattr__(self, "seed", whole("seed", self.seed))
        least = PARTS if self.kind == "sjlt" else 1
        if self.dim < least:
            raise AttributionError(
                "a projection needs a positive dimension"
                if least == 1
                else f"an SJLT needs at least {least} dimensions",
                found=f"dim={self.dim}",
                fix="512 to 4096 are usual",
            )

    @property
    def expected_error(self) -> float:
        """The standard deviation of (estimate - true) / (|x| |y|) to expect: 1 / sqrt(k)."""
        return 1 / math.sqrt(self.dim)


def whole(name: str, value: object) -> int:
    """A whole number of any kind, as Python's own."""
    least = -_arguments.LARGEST
    return _arguments.count(
        f"the {name} of a projection", value, error=AttributionError, least=least
    )


def require_finite(values: Tensor, ids: Any = None) -> Tensor:
    """The values `[B, k]`, if all are finite; else an error that names the first rows."""
    # What is not finite leaves no sum finite: one pass, and a closer look only if it must be.
    if bool(values.sum().isfinite()):
        return values
    good = values.isfinite().all(1)
    if bool(good.all()):
        return values
    bad = (~good).nonzero()[:, 0].tolist()
    named = bad if ids is None else [int(ids[row]) for row in bad]
    raise AttributionError(
        f"{len(bad)} gradients are infinite or not a number",
        found=f"{'rows' if ids is None else 'ids'} {', '.join(map(str, named[:5]))}"
        + (" ..." if len(bad) > 5 else ""),
        fix="look at the inputs and losses of these rows, or leave them out",
    )


def require_room(needed: int, what: str, *, fix: str) -> None:
    """Raise if so many bytes are more than the machine has.

    >>> require_room(1 << 60, "a matrix", fix="make it smaller")
    Traceback (most recent call last):
    gradkeep.errors.AttributionError: a matrix does not fit into memory...
    """
    there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > there:
        raise AttributionError(
            f"{what} does not fit into memory",
            found=f"{format_bytes(needed)} needed",
            expected=f"less than the machine's {format_bytes(there)}",
            fix=fix,
        )


TILE = 1024
"""Rows and columns of a whole tile; part of what the matrix is, so it must not change."""


class DenseMatrix:
    """values `[b, P]` @ matrix `[P, k]` / sqrt(k); 2 P k operations a row, and P k draws a call."""

    def __init__(
        self, kind: Literal["rademacher", "normal"], size: int, dim: int, *words: object
    ) -> None:
        self._kind, self._size, self._dim, self._words = kind, size, dim, words

    def add(self, into: ProjectionSum, start: int, values: Tensor) -> None:
        """Add values `[b, P]` to rows from `start` on."""
        for high in range(0, self._size, TILE):
            part = values[:, high : high + TILE]
            for low in range(0, self._dim, TILE):
                wide = min(TILE, self._dim - low)
                tile = self._tile(high // TILE, low // TILE, part.shape[1], wide)
                at = into.buffer[start : start + len(values), low : low + wide]
                at.addmm_(part, tile.to(values), alpha=self._dim**-0.5)

    def matrix(self) -> Tensor:
        """The whole matrix `[P, k]`, without its scale."""
        out = torch.empty(self._size, self._dim)
        for high in range(0, self._size, TILE):
            for low in range(0, self._dim, TILE):
                rows, cols = min(TILE, self._size - high), min(TILE, self._dim - low)
                tile = self._tile(high // TILE, low // TILE, rows, cols)
                out[high : high + rows, low : low + cols] = tile
        return out

    def _tile(self, row: int, column: int, rows: int, cols: int) -> Tensor:
        draw = _random.signs if self._kind == "rademacher" else _random.normals
        return draw(rows * cols, row, column, *self._words).view(rows, cols)


class Fold:
    """Value i of block j = i // k is added with its sign at (i mod k + shift_j) mod k.

    One pass and no temporary; P operations a row. Two values of one block never meet.
    """

    def __init__(self, size: int, dim: int, *words: object) -> None:
        self.size, self.dim = size, dim
        # A byte each: as floats they would take four times the room, and a block is soon widened.
        self._signs = _random.signs(size, *words)
        self._shifts = _random.places(-(-size // dim), dim, "shift", *words).tolist()

    def add(self, into: ProjectionSum, start: int, values: Tensor) -> None:
        """Add values `[b, P]` to rows from `start` on."""
        rows = into.buffer[start : start + len(values)]
        fold_into(rows, values, self._signs.to(values.device), self._shifts, self.dim)


class Sjlt:
    """Four folds of a quarter of the numbers each, divided by 2: every value is added four times."""

    def __init__(self, size: int, dim: int, parts: int, *words: object) -> None:
        self.dim = dim
        bounds = [dim * part // parts for part in range(parts + 1)]
        self._starts = bounds[:-1]
        self._scale = parts**-0.5
        self._folds = [
            Fold(size, high - low, "part", part, *words)
            for part, (low, high) in enumerate(pairwise(bounds))
        ]

    def add(self, into: ProjectionSum, start: int, values: Tensor) -> None:
        """Add values `[b, P]` to rows from `start` on."""
        for low, fold in zip(self._starts, self._folds, strict=True):
            room = values.new_zeros(len(values), 2 * fold.dim)
            fold_into(room, values, fold._signs.to(values.device), fold._shifts, fold.dim)
            both = room[:, : fold.dim].add_(room[:, fold.dim :])
            at = into.buffer[start : start + len(values), low : low + fold.dim]
            at.add_(both, alpha=self._scale)


def fold_into(room: Tensor, values: Tensor, signs: Tensor, shifts: list[int], dim: int) -> None:
    """Add values `[b, P]` with signs `[P]` to room `[b, 2 dim]`, block by block."""
    for block, shift in enumerate(shifts):
        part = slice(block * dim, (block + 1) * dim)
        some = values[:, part]
        room[:, shift : shift + some.shape[1]].addcmul_(some, signs[part].to(values.dtype))


def folded(values: Tensor, signs: Tensor, shifts: list[int], dim: int) -> Tensor:
    """Values `[..., C]` folded to `[..., min(C, dim)]`; up to `dim` they keep their places."""
    if values.shape[-1] <= dim:
        return values * signs.to(values.dtype)
    flat = values.reshape(-1, values.shape[-1])
    room = flat.new_zeros(len(flat), 2 * dim)
    fold_into(room, flat, signs, shifts, dim)
    return torch.add(room[:, :dim], room[:, dim:]).view(*values.shape[:-1], dim)


class ProjectionSum:
    """The sketch `[B, k]` of rows, as the sum of what was added so far.

    Blocks of up to k numbers are added at a shift below k without looking at the end: the buffer
    has 2k numbers, and the second half is added to the first when all is done. Products of
    spectra are added as spectra, so that all layers share one inverse transform.
    """

    def __init__(self, rows: int, dim: int, *, dtype: torch.dtype, device: torch.device) -> None:
        self.dim = dim
        self.buffer = torch.zeros(rows, 2 * dim, dtype=dtype, device=device)
        self._spectrum: Tensor | None = None

    def add_spectrum(self, start: int, spectrum: Tensor) -> None:
        """Add to rows from `start` on what has this half spectrum `[b, k // 2 + 1]`."""
        if self._spectrum is None:
            self._spectrum = spectrum.new_zeros(len(self.buffer), spectrum.shape[1])
        self._spectrum[start : start + len(spectrum)] += spectrum

    def values(self) -> Tensor:
        """The sum `[B, k]`."""
        out = self.buffer[:, : self.dim] + self.buffer[:, self.dim :]
        if self._spectrum is not None:
            out += torch.fft.irfft(self._spectrum, n=self.dim)
        return out


FLAT = "gradient"
"""The name of a gradient whose parameters are not told apart."""


class FlatSketch(Protocol):
    """What a projection does to a vector of values."""

    def add(self, into: ProjectionSum, start: int, values: Tensor) -> None:
        """Add the projections of values `[b, P]` to rows from `start` on."""


class GradientSketch:
    """One projection of one model's gradients; its parts are made when they are first needed.

    Parts belong to parameters by name and shape, not to layers: however a layer is kept, and
    whether its gradients come from factors or from autograd, the numbers are the same.
    """

    def __init__(self, projection: Projection, model: object) -> None:
        self.projection = projection
        self.model = model
        self._flat: dict[tuple[str, int], FlatSketch] = {}
        self._sides: dict[tuple[str, tuple[int, ...]], TensorSketch] = {}

    @property
    def tensor(self) -> bool:
        """Whether factors are sketched as they are."""
        return self.projection.kind in ("auto", "tensor-sketch")

    def sides(self, name: str, shape: tuple[int, ...]) -> TensorSketch:
        """What a TensorSketch does to a parameter."""
        if (name, shape) not in self._sides:
            rows = shape[0] if len(shape) > 1 else 1
            words = (self.projection.seed, self.model, name)
            size = math.prod(shape)
            cols = size // rows if rows else 0
            self._sides[name, shape] = TensorSketch(rows, cols, self.projection.dim, *words)
        return self._sides[name, shape]

    def flat(self, name: str, size: int) -> FlatSketch:
        """What any other projection does to the values of a parameter."""
        if (name, size) not in self._flat:
            self._flat[name, size] = self._made(name, size)
        return self._flat[name, size]

    def _made(self, name: str, size: int) -> FlatSketch:
        dim = self.projection.dim
        words = (self.projection.seed, self.model, name)
        match self.projection.kind:
            case "rademacher" | "normal" as kind:
                return DenseMatrix(kind, size, dim, *words)
            case "sjlt":
                return Sjlt(size, dim, PARTS, *words)
            case "auto" | "fold" | "tensor-sketch":
                return Fold(size, dim, *words)

    def add_values(
        self, into: ProjectionSum, start: int, name: str, shape: tuple[int, ...], values: Tensor
    ) -> None:
        """Add the dense gradients `[b, P]` of one parameter to rows from `start` on."""
        if not values.shape[1]:
            return
        if self.tensor:
            sides = self.sides(name, shape)
            sides.add_matrix(into, start, values.view(-1, sides.rows, sides.cols))
        else:
            self.flat(name, values.shape[1]).add(into, start, values)


def sketch_of(projection: Projection, model: object) -> GradientSketch:
    """The sketch of a model, kept for the next batch."""
    if not isinstance(model, Hashable):
        raise _arguments.argument_error(
            "model", model, error=AttributionError, expected="a number, a text or the like"
        )
    return _kept_sketch(projection, model)


@lru_cache(maxsize=4)
def _kept_sketch(projection: Projection, model: object) -> GradientSketch:
    return GradientSketch(projection, model)


SketchWay = Literal["matrix", "blocks", "spectrum"]
_FEW = 1 << 14
"""Values below which a block is not worth an operation of its own."""
_CALL, _ADD, _MOVE, _SCATTER, _BUTTERFLY, _PRODUCT = 3500.0, 0.15, 0.6, 1.0, 0.17, 0.04
"""Nanoseconds: to call an operation, and per value to add what is in the cache, to move what is
not, to scatter, to transform and to multiply."""
_ROWS = 64
"""Rows at once that costs are compared for."""
_CACHED = 1 << 21
"""Bytes of the rows of the sum that one block after the other is added to."""


class TensorSketch:
    """The sides of one parameter, `[R, C]` in its layout: shifts of rows, signs of both."""

    def __init__(self, rows: int, cols: int, dim: int, *words: object) -> None:
        self.rows, self.cols, self.dim = rows, cols, dim
        self._shifts = _random.places(rows, dim, "rows", *words)
        self._row_signs = _random.signs(rows, "rows", *words)
        self._col_signs = _random.signs(cols, "columns", *words)
        self._col_shifts = _random.places(-(-cols // dim), dim, "columns", *words).tolist()

    @property
    def width(self) -> int:
        """Numbers that a row of the weight takes once it is folded."""
        return min(self.cols, self.dim)

    def add_matrix(self, into: ProjectionSum, start: int, values: Tensor) -> None:
        """Add gradients `[b, R, C]` to rows from `start` on: each row of the weight at its shift.

        R C operations a row.
        """
        # Signs of the columns first: what is folded must have them before.
        flat = self._folded(values)
        count, device = len(values), values.device
        # Few rows of the sum at a time, so that they stay in the cache while all blocks pass.
        step = max(1, _CACHED // (2 * self.dim * values.element_size()))
        signs = self._row_signs.tolist()
        if min(step, count) * self.width < _FEW:
            index = (self._shifts[:, None] + torch.arange(self.width)).flatten().to(device)
            flat = flat * self._row_signs[:, None].to(flat)
            into.buffer[start : start + count].index_add_(1, index, flat.reshape(count, -1))
            return
        for first in range(0, count, step):
            room = into.buffer[start + first : start + min(first + step, count)]
            some = flat[first : first + step]
            for row, (shift, sign) in enumerate(zip(self._shifts.tolist(), signs, strict=True)):
                room[:, shift : shift + self.width].add_(some[:, row], alpha=sign)

    def add_blocks(self, into: ProjectionSum, start: int, left: Tensor, right: Tensor) -> None:
        """Add products `[b, R] x [b, C]` of one position a row, without forming them.

        R C operations a row.
        """
        right = self._folded(right)
        left = left * self._row_signs.to(left)
        step = max(1, _CACHED // (2 * self.dim * left.element_size()))
        shifts, width = self._shifts.tolist(), self.width
        for first in range(0, len(left), step):
            some, times = right[first : first + step], left[first : first + step].t().unsqueeze(2)
            room = into.buffer[start + first : start + first + len(some)]
            for row, shift in enumerate(shifts):
                room[:, shift : shift + width].addcmul_(some, times[row])

    def add_spectrum(
        self,
        into: ProjectionSum,
        start: int,
        left: Tensor,
        right: Tensor,
        parts: Spans,
        *,
        first: int = 0,
    ) -> None:
        """Add sums over positions of products `[S, R] x [S, C]`, as products of their transforms.

        Two transforms of k numbers a position. `left` may be some rows of the weight only, from
        `first` on.
        """
        if not len(left):  # the transforms refuse nothing at all
            return
        chosen = slice(first, first + left.shape[1])
        scattered = left.new_zeros(len(left), self.dim)
        scattered.index_add_(
            1, self._shifts[chosen].to(left.device), left * self._row_signs[chosen].to(left)
        )
        spectrum = torch.fft.rfft(scattered)
        spectrum *= torch.fft.rfft(self._folded(right), n=self.dim)
        into.add_spectrum(start, sum_rows(spectrum, parts))

    def add_tokens(self, into: ProjectionSum, ids: Tensor, values: Tensor, where: Tensor) -> None:
        """Add values `[S, C]` to the rows `ids` of the weight, of the rows `where` of the sum.

        C operations a token.
        """
        flat = self._folded(values) * self._row_signs.to(values)[ids].unsqueeze(1)
        begin = where * into.buffer.shape[1] + self._shifts.to(ids.device)[ids]
        index = begin.unsqueeze(1) + torch.arange(self.width, device=ids.device)
        into.buffer.view(-1).index_add_(0, index.flatten(), flat.flatten())

    def way(self, positions: float, *, patches: bool = False) -> SketchWay:
        """The cheapest way for rows with so many positions; `matrix` means to restore first."""
        return min(self.costs(positions, patches=patches).items(), key=lambda item: item[1])[0]

    def costs(self, positions: float, *, patches: bool = False) -> dict[SketchWay, float]:
        """Nanoseconds a row that each way takes, about; never a function of the batch.

        `patches` says that the columns are those of a convolution, which have to be laid out.
        """
        size = self.rows * self.cols
        calls = self.rows * _CALL / _ROWS
        put = _MOVE * size + calls if _ROWS * self.width >= _FEW else _SCATTER * size
        transform = _BUTTERFLY * self.dim * math.log2(self.dim + 1)
        position = 2 * transform + _MOVE * (self.dim + self.cols) + _SCATTER * self.rows
        if patches:
            # Nanoseconds more per value of a patch that is laid out by position, not by channel.
            position += 4.0 * self.cols
        found: dict[SketchWay, float] = {
            "matrix": _PRODUCT * positions * size + 2 * _MOVE * size + put,
            "spectrum": positions * position,
        }
        if positions == 1 and not patches:
            found["blocks"] = _ADD * size + calls
        return found

    def _folded(self, values: Tensor) -> Tensor:
        return folded(values, self._col_signs.to(values.device), self._col_shifts, self.dim)
