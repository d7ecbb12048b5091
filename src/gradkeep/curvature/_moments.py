"""Second moments of a layer's factors, which its Kronecker factors are computed from.

A dense gradient does not contain its prefixes and suffixes, so a capture that stores one keeps the moments of the
first rows' factors beside it.
"""

from __future__ import annotations

import abc
import contextlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch

from gradkeep.curvature._basis import RowSpace, eigen_side, even, scaled_suffixes
from gradkeep.errors import NotSealedError
from gradkeep.factors import form_from_fields
from gradkeep.factors._arithmetic import CACHED, squared, tiles
from gradkeep.factors._dense import WHOLE
from gradkeep.factors._form import form_to_fields, has_factors
from gradkeep.store import Array, Schema, Store

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from gradkeep.curvature._basis import EigenSide
    from gradkeep.factors._convolution import Convolution, ConvolutionRows
    from gradkeep.factors._form import AnyForm, GradientRows
    from gradkeep.factors._lookup import LookupRows
    from gradkeep.factors._outer import OuterRows
    from gradkeep.factors._weights import WeightMatrix, WeightVector
    from gradkeep.query._gradients import Gradients
    from gradkeep.store import Block, CaptureKey

WIDE = 4096
"""Sides longer than this use only the diagonal of their moments, unless a linear layer has fewer
positions than that (`RowSpace`)."""
_FORMAT = 1
_FORM = "form of "
_IDS = "row ids"


def whole(size: int) -> bool:
    """Return True if a side of this length uses its whole moments."""
    return size <= WIDE


def zeros(groups: int, size: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Return an empty sum for each group, `[groups, d, d]` or a diagonal `[groups, d]`."""
    shape = (groups, size, size) if whole(size) else (groups, size)
    return torch.zeros(shape, dtype=dtype)


def moment(values: Tensor, like: Tensor) -> Tensor:
    """Return the sum of v v^T over `[S, d]`, or its diagonal."""
    return values.square().sum(0) if like.dim() == 1 else squared(values)


class MatrixMoments(abc.ABC):
    """Sums over rows of both sides' second moments, for one weight.

    From factors: for suffixes sum g g^T over all S positions / N, for prefixes sum x x^T / S, so that their
    Kronecker product has the scale of the Fisher matrix.
    """

    row_bytes: int = 0
    """Bytes that positions of long sides may take while they are held and decomposed."""

    def __init__(self, piece: WeightMatrix, form: Any, *, lean: bool = False) -> None:
        self.piece, self.form, self.lean = piece, form, lean
        self.dtype = torch.float32 if lean else torch.float64
        self.left = self._empty_left()
        self.right = self._empty_right()
        self.rows = self.positions = 0

    def _empty_left(self) -> Tensor:
        return zeros(self.piece.groups, self.piece.rows, self.dtype)

    def _empty_right(self) -> Tensor:
        return zeros(self.piece.groups, self.piece.cols, self.dtype)

    @property
    def nbytes(self) -> int:
        """Bytes of both sides."""
        return 8 * (self.left.numel() + self.right.numel() + self.piece.size)

    @abc.abstractmethod
    def add(self, rows: Any, slopes: Tensor | None) -> None:
        """Add rows, whose gradients are multiplied with slopes `[B]`."""

    def sides(self) -> tuple[Tensor, Tensor]:
        """Return left and right moments, `[G, d, d]` or their diagonals `[G, d]`."""
        return self.left / max(1, self.rows), self.right / max(1, self.positions)

    def eigen(self) -> tuple[EigenSide, EigenSide]:
        """Return eigenvalues and vectors of both sides; ArithmeticError if they are not finite."""
        rows, cols = self.sides()
        return eigen_side(rows), eigen_side(cols)


class LinearMoments(MatrixMoments):
    """Moments of a linear layer's suffixes and prefixes.

    With `row_space` bytes a side with fewer positions than values is decomposed by its positions, even one that is
    too long for moments of its own.
    """

    def __init__(
        self,
        piece: WeightMatrix,
        form: Any,
        *,
        lean: bool = False,
        row_space: int = 0,
    ) -> None:
        super().__init__(piece, form, lean=lean)
        self._high, self._wide = (
            RowSpace(size, _held(size, row_space)) for size in (piece.rows, piece.cols)
        )
        self.row_bytes = row_space * sum(not whole(size) for size in (piece.rows, piece.cols))

    def eigen(self) -> tuple[EigenSide, EigenSide]:
        """Return eigenvalues and vectors of both sides; ArithmeticError if they are not finite."""
        suffixes = self._high, self.left, max(1, self.rows)
        prefixes = self._wide, self.right, max(1, self.positions)
        one, other = (
            space.eigen(count) if space.open else eigen_side(total / count)
            for space, total, count in (suffixes, prefixes)
        )
        return one, other

    def sides(self) -> tuple[Tensor, Tensor]:
        """Return left and right moments, `[1, d, d]` or their diagonals `[1, d]`."""
        high, wide = self._high.rows(), self._wide.rows()
        suffixes, prefixes = (
            self.left + moment(high, self.left[0]),
            self.right + moment(wide, self.right[0]),
        )
        return suffixes / max(1, self.rows), prefixes / max(1, self.positions)

    def add(self, rows: OuterRows, slopes: Tensor | None) -> None:
        """Add rows, whose gradients are multiplied with slopes `[B]`."""
        if self.lean and rows.offsets is not None:
            # Directly from a model: positions still include padding.
            rows = rows.at_positions((rows.g != 0).any(1))
        g = scaled_suffixes(rows.g, rows.offsets, slopes)
        plus_one = self.form.bias and not self.form.ones
        # 4096 positions are summed in their own precision before they are added to the total.
        for start in range(0, len(g), 4096):
            some = slice(start, start + 4096)
            for high in self._high.add(g[some]):
                self.left[0] += moment(high, self.left[0])
            if not self._wide.open:
                _add_with_ones(self.right[0], rows.x[some], plus_one=plus_one)
                continue
            for wide in self._wide.add(self.form.with_ones(rows.x[some])):
                self.right[0] += moment(wide, self.right[0])
        self.rows += len(rows)
        self.positions += len(rows.x)


def _held(size: int, free_bytes: int) -> int:
    """Return how many positions of a side may be held: fewer than its length, or as many as fit."""
    if whole(size):
        return size if free_bytes else 0
    # 16 bytes per held value: itself, in double precision, and in a vector.
    return free_bytes // (16 * size)


def _add_with_ones(into: Tensor, x: Tensor, *, plus_one: bool) -> None:
    """Add the moments of `x [S, d]` with a column of ones, without building it."""
    size = x.shape[1]
    if into.dim() == 1:
        into[:size] += moment(x, into)
    else:
        into[:size, :size] += moment(x, into)
    if plus_one and into.dim() == 1:
        into[size] += len(x)
    elif plus_one:
        summed = x.sum(0)
        into[size, :size] += summed
        into[:size, size] += summed
        into[size, size] += len(x)


class EmbeddingMoments(MatrixMoments):
    """Moments of an embedding: the frequency of each token, and the suffixes of all tokens."""

    def _empty_left(self) -> Tensor:
        return torch.zeros(1, self.piece.rows, dtype=torch.float64)

    def add(self, rows: LookupRows, slopes: Tensor | None) -> None:
        """Add rows, whose gradients are multiplied with slopes `[B]`."""
        g = scaled_suffixes(rows.g, rows.offsets, slopes)
        self.left[0] += torch.bincount(rows.ids, minlength=self.piece.rows)
        self.right[0] += moment(g, self.right[0])
        self.rows += len(rows)
        self.positions += len(rows.ids)

    def sides(self) -> tuple[Tensor, Tensor]:
        """Return the diagonal of the left moments `[1, R]`, and the right ones."""
        return self.left / max(1, self.positions), self.right / max(1, self.rows)


class ConvolutionMoments(MatrixMoments):
    """Moments of a convolution's patches, built for some rows at a time, and of its other array."""

    def _empty_right(self) -> Tensor:
        return zeros(self.piece.groups, _width(self.form))

    def add(self, rows: ConvolutionRows, slopes: Tensor | None) -> None:
        """Add rows, whose gradients are multiplied with slopes `[B]`."""
        wide, narrow = rows.wide, rows.narrow
        if slopes is not None:
            each = slopes.view(-1, *[1] * (wide.dim() - 1)).to(wide.dtype)
            if self.form.transposed:
                wide = wide * each
            else:
                narrow = narrow * each
        for groups in _patches_by_group(self.form, wide):
            for into, patches in zip(self.right, groups, strict=True):
                into += moment(patches, into)
        # By filters, not by positions: consecutive positions are copied faster.
        filters = narrow.transpose(0, 1).reshape(self.form.groups, self.piece.rows, -1)
        for into, one in zip(self.left, filters, strict=True):
            into += moment(one.t(), into)
        self.rows += len(rows)
        self.positions += len(rows) * self.form.positions

    def sides(self) -> tuple[Tensor, Tensor]:
        """Return left and right moments; patches of a transposed convolution are those of the suffix."""
        rows, positions = max(1, self.rows), max(1, self.positions)
        order = _column_order(self.form)
        right = self.right[:, order] if self.right.dim() == 2 else self.right[:, order][:, :, order]
        if self.form.transposed:
            return self.left / positions, right / rows
        return self.left / rows, right / positions


def _patches_by_group(form: Convolution, wide: Tensor) -> Iterator[list[Tensor]]:
    """Yield the patches `[b T, width]` of each group, for some rows of `[B, C, *size]` at a time.

    Columns are taps x channels, ones for the bias, and zeros up to a multiple of 16; products of other widths take
    up to twice as long.
    """
    for start, stop in tiles(len(wide), 2 * form.patch_values, wide.element_size(), 4 * CACHED):
        pixels = form.padded(wide[start:stop]).movedim(1, -1).contiguous()
        yield [_patches(form, pixels, group) for group in range(form.groups)]


def _width(form: Convolution) -> int:
    """Return the number of columns of such patches."""
    return even(form.channels // form.groups * form.taps + (form.bias == "narrow"))


def _column_order(form: Convolution) -> Tensor:
    """Return the place of each column of the weight's matrix among those of such patches."""
    inner = form.channels // form.groups
    columns = torch.arange(inner * form.taps).view(form.taps, inner).t().flatten()
    if form.bias != "narrow":
        return columns
    return torch.cat([columns, torch.tensor([inner * form.taps])])


def _patches(form: Convolution, wide: Tensor, group: int) -> Tensor:
    """Return the patches of one group, from padded pixels `[B, *size, C]`."""
    count, inner, axes = len(wide), form.channels // form.groups, range(1, wide.dim() - 1)
    steps = [wide.stride(axis) * form.stride[axis - 1] for axis in axes]
    taps = [wide.stride(axis) * form.dilation[axis - 1] for axis in axes]
    read = wide[..., group * inner :].as_strided(
        (count, *form.out, *form.kernel, inner),
        (wide.stride(0), *steps, *taps, 1),
        storage_offset=wide.storage_offset() + group * inner,
    )
    columns = inner * form.taps
    patches = wide.new_empty(count, *form.out, _width(form))
    patches[..., :columns].view(read.shape).copy_(read)
    patches[..., columns:] = 0
    if form.bias == "narrow":
        patches[..., columns] = 1
    return patches.view(-1, patches.shape[-1])


class GradientMoments(MatrixMoments):
    """Moments of gradient matrices G, for layers without factors: left = mean G G^T, right = mean G^T G.

    The right ones are divided by their trace.
    """

    def _empty_left(self) -> Tensor:
        if self.lean and self.form.kind == "tied":
            # Tokens are nearly independent, and a diagonal works for any vocabulary.
            return torch.zeros(1, self.piece.rows, dtype=self.dtype)
        return super()._empty_left()

    def add(self, rows: GradientRows, slopes: Tensor | None) -> None:
        """Add rows, whose gradients are multiplied with slopes `[B]`."""
        self.rows += len(rows)
        for start, stop in tiles(len(rows), self.piece.size, 8, 8 * CACHED):
            dense = self.form.restore(rows.take(start, stop))
            if slopes is not None:
                dense = dense * slopes[start:stop, None].to(dense.dtype)
            matrices = self.piece.taken(dense)
            for group in range(self.piece.groups):
                one = matrices[:, group]
                high = one.transpose(1, 2).reshape(-1, self.piece.rows)
                self.left[group] += moment(high, self.left[group])
                self.right[group] += moment(one.reshape(-1, self.piece.cols), self.right[group])

    def sides(self) -> tuple[Tensor, Tensor]:
        """Return left and right moments, `[G, d, d]` or their diagonals `[G, d]`."""
        rows, cols = self.left / max(1, self.rows), self.right / max(1, self.rows)
        size = cols if cols.dim() == 2 else cols.diagonal(dim1=1, dim2=2)
        trace = size.sum(1).clamp(min=torch.finfo(torch.float64).tiny)
        return rows, cols / trace.view(-1, *[1] * (cols.dim() - 1))


_MOMENTS: dict[str, type[MatrixMoments]] = {
    "outer": LinearMoments,
    "conv": ConvolutionMoments,
    "lookup": EmbeddingMoments,
}
"""Forms with the moments of K-FAC; others use those of their gradient matrices."""


def matrix_moments(
    piece: WeightMatrix,
    form: AnyForm,
    *,
    lean: bool = False,
    row_space: int = 0,
) -> MatrixMoments:
    """Return empty moments of a weight, from its factors if they are stored.

    `lean` moments are in float32, and for the tokens of a tied table they are diagonal. `row_space` bytes allow few
    positions of a long side to be decomposed directly (`LinearMoments`).
    """
    kind = _MOMENTS.get(form.kind, GradientMoments) if has_factors(form) else GradientMoments
    if kind is LinearMoments:
        return LinearMoments(piece, form, lean=lean, row_space=row_space)
    return kind(piece, form, lean=lean)


class VectorMoments:
    """Mean of v v^T, or only its diagonal for long v."""

    row_bytes: int = 0

    def __init__(self, piece: WeightVector, form: AnyForm) -> None:
        self.piece, self.form, self.rows = piece, form, 0
        size = (piece.size,) if piece.size > WHOLE else (piece.size, piece.size)
        self.moment = torch.zeros(size, dtype=torch.float64)

    @property
    def nbytes(self) -> int:
        """Bytes of the moment."""
        return 8 * self.moment.numel()

    def add(self, rows: GradientRows, slopes: Tensor | None) -> None:
        """Add rows, whose gradients are multiplied with slopes `[B]`."""
        self.rows += len(rows)
        values = self.form.restored_size
        for start, stop in tiles(len(rows), values, 8, 8 * CACHED):
            part = rows.take(start, stop)
            vectors = self.piece.taken(self.form.restore(part))
            if slopes is not None:
                vectors = vectors * slopes[start:stop, None].to(vectors.dtype)
            self.moment += moment(vectors, self.moment)

    def mean(self) -> Tensor:
        """Return the mean, `[size, size]` or `[size]`."""
        return self.moment / max(1, self.rows)


_SIDES = {"left": "suffixes", "right": "prefixes"}
"""Array names in the store, and the fields of `SideMoments`."""


@dataclass(frozen=True, slots=True, eq=False)
class SideMoments:
    """Moments of one layer, by the groups of its weight."""

    form: AnyForm
    """Form of its factors; the moments are those of its first weight block."""
    suffixes: torch.Tensor
    """sum g g^T / rows: `[G, R, R]`, or a diagonal `[G, R]`."""
    prefixes: torch.Tensor
    """sum x x^T / positions: `[G, C, C]`, or a diagonal `[G, C]`."""


@dataclass(frozen=True, slots=True, eq=False)
class StoredMoments:
    """Moments of a capture: of its first rows' loss gradients, by the layers that it stores dense."""

    layers: Mapping[str, SideMoments]
    rows: int
    """Number of rows, the first ones of the capture."""
    weights: str
    """Fingerprint of the weights."""
    ids: np.ndarray[Any, np.dtype[np.int64]] | None = None
    """Ids of those rows; None in old captures."""

    def dropped(self, gradients: Gradients) -> int | None:
        """Return how many of their rows are not among these gradients; None if unknown.

        Rows that were dropped from a capture remain in its moments, which are sums.
        """
        if self.ids is not None:
            return int((~np.isin(self.ids, gradients.ids)).sum())
        return 0 if gradients.block.version <= 0 else None

    @classmethod
    def of(cls, gradients: Gradients) -> Self | None:
        """Read the moments beside these gradients; None if there are none.

        >>> import gradkeep as gk, tempfile
        >>> store, model = gk.open(tempfile.mkdtemp()), torch.nn.Linear(4, 3)
        >>> data = [(torch.randn(5, 4), torch.tensor([0, 1, 2, 0, 1]))]
        >>> _ = gk.capture(store, model, data, task=gk.Classification(), split="train", keep="dense")
        >>> moments = StoredMoments.of(gk.gradients(store, split="train"))
        >>> moments.rows, [layer.suffixes.shape for layer in moments.layers.values()]
        (5, [torch.Size([1, 3, 3])])
        """
        if gradients.of != "loss":
            return None
        store = Store(gradients.block.backend, durability=gradients.block.durability)
        moments = cls.read(store, gradients.key)
        return moments if moments is not None and moments.weights == gradients.weights else None

    @classmethod
    def read(cls, store: Store, key: CaptureKey) -> Self | None:
        """Read the moments of a capture; None if there are none in a known format."""
        if not store.has(key.moments):
            return None
        with contextlib.suppress(NotSealedError):
            block = store.read(key.moments)
            facts = block.schema.fingerprints
            if facts.get("format") != _FORMAT:
                return None
            rows, weights = int(facts.get("rows") or 0), str(facts.get("weights"))
            ids = None
            if _IDS in block.names:
                ids = np.array(block.read_rows(np.zeros(1, np.int64), [_IDS])[_IDS])[0]
            return cls(_LayersOnDisk(block), rows, weights, ids)
        return None

    def save(self, store: Store, key: CaptureKey) -> None:
        """Write them beside a capture, replacing those of an interrupted run."""
        values = {
            f"{name}.{side}": getattr(one, field).cpu().float().numpy()
            for name, one in self.layers.items()
            for side, field in _SIDES.items()
        }
        if self.ids is not None:
            values[_IDS] = np.asarray(self.ids, np.int64)
        schema = Schema(
            arrays=tuple(
                Array(name, shape=v.shape, kind="data", dtype=str(v.dtype))
                for name, v in values.items()
            ),
            num_rows=1,
            fingerprints={
                "format": _FORMAT,
                "rows": self.rows,
                "weights": self.weights,
                "split": key.split,
                "capture": key.capture,
                **{
                    f"{_FORM}{name}": json.dumps(form_to_fields(one.form), sort_keys=True)
                    for name, one in self.layers.items()
                },
            },
        )
        if store.has(key.moments):
            store.delete(key.moments)
        with store.write(key.moments, schema) as writer:
            writer.append(np.zeros(1, np.int64), {name: v[None] for name, v in values.items()})


class _LayersOnDisk(Mapping[str, SideMoments]):
    """Layers that are read on access: together they may not fit in memory."""

    def __init__(self, block: Block) -> None:
        self._block = block
        facts = block.schema.fingerprints.items()
        self._forms = {
            name.removeprefix(_FORM): str(fields)
            for name, fields in facts
            if name.startswith(_FORM)
        }

    def __getitem__(self, name: str) -> SideMoments:
        form = form_from_fields(json.loads(self._forms[name]))
        names = [f"{name}.{side}" for side in _SIDES]
        row = self._block.read_rows(np.zeros(1, np.int64), names)
        suffixes, prefixes = (torch.from_numpy(np.array(row[array])[0]) for array in names)
        return SideMoments(form, suffixes, prefixes)

    def __iter__(self) -> Iterator[str]:
        return iter(self._forms)

    def __len__(self) -> int:
        return len(self._forms)
