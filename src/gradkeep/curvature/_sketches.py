"""Random projections of gradients: dense matrices, folds, and sketches directly from factors."""

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
from gradkeep.factors._arithmetic import CACHED, sum_rows

if TYPE_CHECKING:
    from gradkeep.factors._arithmetic import Spans


ProjectionKind = Literal["auto", "tensor-sketch", "fold", "sjlt", "rademacher", "normal"]
KINDS: tuple[str, ...] = get_args(ProjectionKind)
PARTS = 4
"""Number of the k values that an SJLT adds each value to."""


@dataclass(frozen=True, slots=True)
class Projection:
    """A random linear map of gradients to `dim` numbers, the same for the same seed everywhere.

    - `tensor-sketch`: directly from factors; value (r, c) of a weight `[R, C]` is added, with a
      random sign for r and one for c, at a random place for r shifted by c;
    - `fold`: blocks of k values, each shifted at random, with random signs;
    - `sjlt`: four folds of k / 4, divided by 2;
    - `rademacher`, `normal`: a dense random matrix / sqrt(k);
    - `auto`: `tensor-sketch` if parameters are known by name, `fold` for flat gradients.

    Attributes:
        kind: Kind of the projection, see above.
        dim: Number k of values per row.
        seed: Seed of the random numbers.

    Raises:
        AttributionError: An option has a wrong value.

    Example:
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
                code="attribute.projection_dim",
                found=f"dim={self.dim}",
                fix="Use dim=512 to 4096.",
            )

    @property
    def expected_error(self) -> float:
        """Standard deviation of (estimate - true) / (|x| |y|): 1 / sqrt(k)."""
        return 1 / math.sqrt(self.dim)


def whole(name: str, value: object) -> int:
    """Validate a whole number."""
    least = -_arguments.LARGEST
    return _arguments.count(
        f"the {name} of a projection", value, error=AttributionError, least=least
    )


def require_finite(values: Tensor, ids: Any = None) -> Tensor:
    """Return values `[B, k]` if all are finite; else raise with the first rows."""
    # One infinite value makes the sum infinite, so one pass is mostly enough.
    if bool(values.sum().isfinite()):
        return values
    good = values.isfinite().all(1)
    if bool(good.all()):
        return values
    bad = (~good).nonzero()[:, 0].tolist()
    named = bad if ids is None else [int(ids[row]) for row in bad]
    raise AttributionError(
        f"{len(bad)} gradients are infinite or NaN",
        code="attribute.not_finite",
        found=(
            f"{'rows' if ids is None else 'ids'} {', '.join(map(str, named[:5]))}"
            + (" ..." if len(bad) > 5 else "")
        ),
        fix="Check the inputs and losses of these rows, or leave them out.",
    )


def require_room(needed: int, name: str, *, fix: str) -> None:
    """Raise if this many bytes are more than the machine has.

    >>> require_room(1 << 60, "a matrix", fix="Make it smaller.")
    Traceback (most recent call last):
    gradkeep.errors.AttributionError: a matrix does not fit into memory...
    """
    available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > available:
        raise AttributionError(
            f"{name} does not fit into memory",
            code="attribute.out_of_memory",
            found=f"{format_bytes(needed)} needed",
            expected=f"less than the {format_bytes(available)} of this machine",
            fix=fix,
        )


TILE = 1024
"""Rows and columns of a whole tile; changing it changes the matrix."""


class DenseMatrix:
    """values `[b, P]` @ matrix `[P, k]` / sqrt(k); 2 P k operations per row, and P k draws per call."""

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
        """Return the whole matrix `[P, k]`, without its scale."""
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

    One pass and no temporary; P operations per row. Two values of one block never collide.
    """

    def __init__(self, size: int, dim: int, *words: object) -> None:
        self.size, self.dim = size, dim
        # One byte each; floats would take four times the memory, and blocks are converted quickly.
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
            target = values.new_zeros(len(values), 2 * fold.dim)
            fold_into(target, values, fold._signs.to(values.device), fold._shifts, fold.dim)
            both = target[:, : fold.dim].add_(target[:, fold.dim :])
            at = into.buffer[start : start + len(values), low : low + fold.dim]
            at.add_(both, alpha=self._scale)


def fold_into(target: Tensor, values: Tensor, signs: Tensor, shifts: list[int], dim: int) -> None:
    """Add values `[b, P]` with signs `[P]` to room `[b, 2 dim]`, block by block."""
    for block, shift in enumerate(shifts):
        part = slice(block * dim, (block + 1) * dim)
        some = values[:, part]
        target[:, shift : shift + some.shape[1]].addcmul_(some, signs[part].to(values.dtype))


def folded(values: Tensor, signs: Tensor, shifts: list[int], dim: int) -> Tensor:
    """Fold values `[..., C]` to `[..., min(C, dim)]`; up to `dim` values keep their places."""
    if values.shape[-1] <= dim:
        return values * signs.to(values.dtype)
    flat = values.reshape(-1, values.shape[-1])
    target = flat.new_zeros(len(flat), 2 * dim)
    fold_into(target, flat, signs, shifts, dim)
    return torch.add(target[:, :dim], target[:, dim:]).view(*values.shape[:-1], dim)


class ProjectionSum:
    """Sketch `[B, k]` of rows, as the sum of what was added so far.

    Blocks of up to k numbers are added at a shift below k without wrapping: the buffer has 2k numbers, and the
    second half is added to the first at the end. Products of spectra are added as spectra, so that all layers
    share one inverse transform.
    """

    def __init__(self, rows: int, dim: int, *, dtype: torch.dtype, device: torch.device) -> None:
        self.dim = dim
        self.buffer = torch.zeros(rows, 2 * dim, dtype=dtype, device=device)
        self._spectrum: Tensor | None = None

    def add_spectrum(self, start: int, spectrum: Tensor) -> None:
        """Add a half spectrum `[b, k // 2 + 1]` to rows from `start` on."""
        if self._spectrum is None:
            self._spectrum = spectrum.new_zeros(len(self.buffer), spectrum.shape[1])
        self._spectrum[start : start + len(spectrum)] += spectrum

    def values(self) -> Tensor:
        """Return the sum `[B, k]`."""
        out = self.buffer[:, : self.dim] + self.buffer[:, self.dim :]
        if self._spectrum is not None:
            out += torch.fft.irfft(self._spectrum, n=self.dim)
        return out


FLAT = "gradient"
"""Name of a gradient that is not split into parameters."""


class FlatSketch(Protocol):
    """Projection of a vector of values."""

    def add(self, into: ProjectionSum, start: int, values: Tensor) -> None:
        """Add the projections of values `[b, P]` to rows from `start` on."""


class GradientSketch:
    """Projection of one model's gradients; its parts are created at first use.

    Parts belong to parameters by name and shape, not to layers: the numbers do not depend on how a layer is stored,
    and whether its gradients come from factors or from autograd.
    """

    def __init__(self, projection: Projection, model: object) -> None:
        self.projection = projection
        self.model = model
        self._flat: dict[tuple[str, int], FlatSketch] = {}
        self._sides: dict[tuple[str, tuple[int, ...]], TensorSketch] = {}

    @property
    def tensor(self) -> bool:
        """True if factors are sketched directly."""
        return self.projection.kind in ("auto", "tensor-sketch")

    def sides(self, name: str, shape: tuple[int, ...]) -> TensorSketch:
        """Return the TensorSketch of a parameter."""
        if (name, shape) not in self._sides:
            rows = shape[0] if len(shape) > 1 else 1
            words = (self.projection.seed, self.model, name)
            size = math.prod(shape)
            cols = size // rows if rows else 0
            self._sides[name, shape] = TensorSketch(rows, cols, self.projection.dim, *words)
        return self._sides[name, shape]

    def flat(self, name: str, size: int) -> FlatSketch:
        """Return any other projection of the values of a parameter."""
        if (name, size) not in self._flat:
            self._flat[name, size] = self._build(name, size)
        return self._flat[name, size]

    def _build(self, name: str, size: int) -> FlatSketch:
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
    """Return the sketch of a model, cached for the next batch."""
    if not isinstance(model, Hashable):
        raise _arguments.argument_error(
            "model", model, error=AttributionError, expected="a number, a text or the like"
        )
    return _cached_sketch(projection, model)


@lru_cache(maxsize=4)
def _cached_sketch(projection: Projection, model: object) -> GradientSketch:
    return GradientSketch(projection, model)


SketchMethod = Literal["matrix", "spectrum"]


class TensorSketch:
    """Sketch of one parameter, `[R, C]` in its layout: shifts of rows, signs of both sides."""

    def __init__(self, rows: int, cols: int, dim: int, *words: object) -> None:
        self.rows, self.cols, self.dim = rows, cols, dim
        self._shifts = _random.places(rows, dim, "rows", *words)
        self._row_signs = _random.signs(rows, "rows", *words)
        self._col_signs = _random.signs(cols, "columns", *words)
        self._col_shifts = _random.places(-(-cols // dim), dim, "columns", *words).tolist()

    @property
    def width(self) -> int:
        """Numbers per row of the weight after folding."""
        return min(self.cols, self.dim)

    def add_matrix(self, into: ProjectionSum, start: int, values: Tensor) -> None:
        """Add gradients `[b, R, C]` to rows from `start` on: each row of the weight at its shift.

        R C operations per row.
        """
        # Signs of the columns must be applied before folding.
        flat = self._folded(values)
        count, device = len(values), values.device
        # Few rows of the sum at a time, so that they stay in the cache for all blocks.
        step = max(1, CACHED // (2 * self.dim * values.element_size()))
        signs = self._row_signs.tolist()
        if min(step, count) * self.width < 1 << 14:  # a block is not worth its own operation
            index = (self._shifts[:, None] + torch.arange(self.width)).flatten().to(device)
            flat = flat * self._row_signs[:, None].to(flat)
            into.buffer[start : start + count].index_add_(1, index, flat.reshape(count, -1))
            return
        for first in range(0, count, step):
            target = into.buffer[start + first : start + min(first + step, count)]
            some = flat[first : first + step]
            for row, (shift, sign) in enumerate(zip(self._shifts.tolist(), signs, strict=True)):
                target[:, shift : shift + self.width].add_(some[:, row], alpha=sign)

    def add_spectrum(
        self,
        into: ProjectionSum,
        start: int,
        suffixes: Tensor,
        prefixes: Tensor,
        parts: Spans,
        *,
        first: int = 0,
    ) -> None:
        """Add sums over positions of products `[S, R] x [S, C]`, as products of their transforms.

        Two transforms of k numbers per position. `suffixes` may be some rows of the weight only, from `first` on.
        """
        if not len(suffixes):  # transforms do not accept empty tensors
            return
        chosen = slice(first, first + suffixes.shape[1])
        scattered = suffixes.new_zeros(len(suffixes), self.dim)
        scattered.index_add_(
            1,
            self._shifts[chosen].to(suffixes.device),
            suffixes * self._row_signs[chosen].to(suffixes),
        )
        spectrum = torch.fft.rfft(scattered)
        spectrum *= torch.fft.rfft(self._folded(prefixes), n=self.dim)
        into.add_spectrum(start, sum_rows(spectrum, parts))

    def add_tokens(self, into: ProjectionSum, ids: Tensor, values: Tensor, where: Tensor) -> None:
        """Add values `[S, C]` to the rows `ids` of the weight, for the rows `where` of the sum.

        C operations per token.
        """
        flat = self._folded(values) * self._row_signs.to(values)[ids].unsqueeze(1)
        begin = where * into.buffer.shape[1] + self._shifts.to(ids.device)[ids]
        index = begin.unsqueeze(1) + torch.arange(self.width, device=ids.device)
        into.buffer.view(-1).index_add_(0, index.flatten(), flat.flatten())

    def choose_method(self, positions: float, *, patches: bool = False) -> SketchMethod:
        """Choose the cheaper method for rows with this many positions; `matrix` restores them first.

        With `patches` the columns are those of a convolution, which must be built.
        """
        # Nanoseconds per row: multiplying and moving the values of a weight, against two transforms
        # of k numbers per position with what they read and write.
        restored = self.rows * self.cols * (1.8 + 0.04 * positions)
        transform = 0.17 * self.dim * math.log2(self.dim + 1)
        position = 2 * transform + 0.6 * (self.dim + self.cols) + self.rows
        position += 4.0 * self.cols if patches else 0.0
        return "spectrum" if positions * position < restored else "matrix"

    def _folded(self, values: Tensor) -> Tensor:
        return folded(values, self._col_signs.to(values.device), self._col_shifts, self.dim)
