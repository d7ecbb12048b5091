"""Fisher matrices of layers as Kronecker products: fitting, eigenbases and damped inverses."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gradkeep._budgets import parse_bytes
from gradkeep.curvature._basis import MatrixBasis, VectorBasis, coordinate_squares, eigen_side
from gradkeep.curvature._eigen_influence import empty_rows, room_for_rows
from gradkeep.curvature._moments import MatrixMoments, StoredMoments, VectorMoments, matrix_moments
from gradkeep.curvature._row_parts import held_rows, joined, row_parts
from gradkeep.errors import AttributionError
from gradkeep.factors._dense import Dense
from gradkeep.factors._outer import OuterRows
from gradkeep.factors._weights import WeightMatrix
from gradkeep.query._engine import DEFAULT_BUDGET

if TYPE_CHECKING:
    from collections.abc import Iterable

    from gradkeep.curvature._basis import Basis, EigenSide
    from gradkeep.curvature._moments import SideMoments
    from gradkeep.curvature._row_parts import RowPart
    from gradkeep.factors._form import AnyForm
    from gradkeep.factors._weights import WeightBlock
    from gradkeep.query import Gradients


CoordinateRows = Tensor | OuterRows
"""Coordinates `[N, P]`, or for one position per row their factors `[N, R]` and `[N, C]`."""

DECADES = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
"""Relative dampings to choose from: no single one is right for all models."""


def coordinate_bytes(rows: CoordinateRows | None) -> int:
    """Return the bytes of coordinates."""
    if rows is None:
        return 0
    return rows.nbytes if isinstance(rows, Tensor) else rows.x.nbytes + rows.g.nbytes


@dataclass(frozen=True, slots=True)
class Damping:
    """Number that is added to eigenvalues before they are inverted."""

    relative: float = 0.3
    """Multiple of the layer's mean eigenvalue."""
    absolute: float | None = None
    """The same number for all layers, instead of the relative one."""

    def __post_init__(self) -> None:
        value = self.relative if self.absolute is None else self.absolute
        if not 0 < value < float("inf"):
            raise AttributionError(
                "damping must be positive and finite",
                code="attribute.damping",
                found=value,
                fix="Use 0.01 to 10 times the mean eigenvalue.",
            )

    @classmethod
    def parse(cls, relative: float | str, absolute: float | None = None) -> Damping:
        """Build from options; `"auto"` must have been replaced by a number."""
        if isinstance(relative, str):
            raise AttributionError(
                "damping must be a number or 'auto'",
                code="attribute.damping_type",
                found=repr(relative),
            )
        return cls(relative, absolute)

    def of(self, mean: float) -> float:
        """Return the damping of a layer with this mean eigenvalue."""
        return self.relative * mean if self.absolute is None else self.absolute


@dataclass(frozen=True, slots=True, eq=False)
class LayerFisher:
    """Fisher matrix F of one layer."""

    bases: tuple[Basis, ...]
    """One basis per block of its gradient."""
    rows: CoordinateRows | None = None
    """Coordinates of the rows that it was computed from, if there was room for them."""

    @property
    def size(self) -> int:
        """Number of values P of a gradient."""
        return sum(basis.piece.size for basis in self.bases)

    @property
    def mean(self) -> float:
        """Mean eigenvalue."""
        return float(sum(basis.values.sum() for basis in self.bases)) / max(1, self.size)

    @property
    def nbytes(self) -> int:
        """Bytes of eigenvectors, eigenvalues and coordinates."""
        return coordinate_bytes(self.rows) + sum(basis.nbytes for basis in self.bases)

    def solved(self, dense: Tensor, damping: Damping) -> Tensor:
        """Return (F + damping)^-1 g `[B, P]` of dense gradients g `[B, P]`.

        Zeros for a layer whose rows were all zero. Cost: 4 R C (R + C) operations per row.
        """
        out = torch.zeros_like(dense)
        added = damping.of(self.mean)
        if added > 0:
            for basis in self.bases:
                weights = 1 / (basis.values + added)
                if isinstance(basis, VectorBasis) or basis.whole:
                    basis.put(basis.coordinates(dense) * weights.to(dense.dtype), out)
                else:  # outside of the vectors there is only the damping
                    more = (weights - 1 / added).to(dense.dtype)
                    basis.put(basis.coordinates(dense) * more, out, plus=dense / added)
        return out


_RETAINED_SHARE = 4
"""Coordinates that stay until the last query take a fourth of what those of one layer may."""


def fisher(
    gradients: Gradients, *, corrected: bool, memory_budget: float | str | None = None
) -> dict[str, LayerFisher]:
    """Compute the mean of g g^T over all rows as Kronecker products, for all layers: see `FisherFit`."""
    fit = FisherFit(gradients, corrected=corrected, memory_budget=memory_budget, row_space=True)
    layers = {name: fit.layer(name) for name in gradients.forms}
    fit.check()
    return layers


class FisherFit:
    """Compute the mean of g g^T over all rows as Kronecker products, layer by layer on demand.

    For a weight: moments of suffixes x moments of prefixes (K-FAC); for layers that are stored dense those of the
    capture's first rows or, if none are stored, those of the gradient matrices. `corrected` measures the
    eigenvalues again in their eigenbasis, over all rows (EK-FAC). Small blocks without moments and norm layers of
    up to 512 values have their whole matrix, longer vectors its diagonal.

    Cost: one pass over the rows, S (R^2 + C^2) products and an eigendecomposition of each side. The correction is
    a second pass, of which `keep_rows` keeps the rows' coordinates if there is room: a layer is returned with them
    once, so that there is room for those of the next. With `row_space` a long side with few positions is
    decomposed by these, S^3 instead of R^3 or C^3: that covers these rows, though not other gradients.
    """

    def __init__(
        self,
        gradients: Gradients,
        *,
        corrected: bool,
        memory_budget: float | str | None = None,
        keep_rows: bool = False,
        row_space: bool = False,
    ) -> None:
        self.gradients, self.corrected, self.memory_budget = gradients, corrected, memory_budget
        self.row_space = row_space
        self.free_bytes = room_for_rows(memory_budget)
        self.keep_rows = keep_rows
        dense = [
            name
            for name, form in gradients.forms.items()
            if isinstance(form, Dense) and any(len(part.shape) > 1 for part in form.parameters)
        ]
        stored = StoredMoments.of(gradients) if dense else None
        self._known = (
            {} if stored is None else {n: stored.layers for n in dense if n in stored.layers}
        )
        self._layers: dict[str, LayerFisher] = {}
        self._spare: Tensor | None = None
        self.approximate = _approximate(
            "" if stored is None else _describe_rows(stored, gradients),
            list(self._known),
            [name for name in dense if name not in self._known],
        )
        """Description of the approximations."""

    @property
    def nbytes(self) -> int:
        """Bytes of the computed layers, with the coordinates that stay."""
        return sum(layer.nbytes for layer in self._layers.values())

    def layer(self, name: str) -> LayerFisher:
        """Return a layer, computing it at first use; then with coordinates, if there is room.

        Coordinates that do not stay are valid until the next layer is computed, which reuses their memory.
        """
        if name in self._layers:
            return self._layers[name]
        moments = self._known[name][name] if name in self._known else None
        one = self._layer(name, moments, held=self.nbytes)
        staying = sum(coordinate_bytes(layer.rows) for layer in self._layers.values())
        stays = staying + coordinate_bytes(one.rows) <= self.free_bytes // _RETAINED_SHARE
        self._layers[name] = one if stays else dataclasses.replace(one, rows=None)
        if isinstance(one.rows, Tensor) and not stays:
            self._spare = one.rows.view(-1)
        return one

    def check(self) -> None:
        """Raise if all layers were computed and all of them are zero."""
        if len(self._layers) == len(self.gradients.forms) and not any(
            layer.mean > 0 for layer in self._layers.values()
        ):
            key = self.gradients.key
            raise AttributionError(
                f"all gradients of {key.split} at {key.checkpoint} are zero",
                code="attribute.zero_fisher",
                fix="Capture a checkpoint that does not fit its data perfectly, or other layers.",
            )

    def _layer(self, name: str, moments: SideMoments | None, *, held: int) -> LayerFisher:
        gradients, budget = self.gradients, self.memory_budget
        form = gradients.forms[name]
        pieces = (form if moments is None else moments.form).weight_blocks()
        known: list[Basis] = []
        if moments is not None and isinstance(pieces[0], WeightMatrix):
            both = (eigen_side(side.double()) for side in (moments.suffixes, moments.prefixes))
            known = [_matrix_basis(pieces[0], *both)]
            held += 24 * (moments.suffixes.numel() + moments.prefixes.numel() + pieces[0].size)
        sums = [
            _sums(piece, form, budget, row_space=self.row_space) for piece in pieces[len(known) :]
        ]
        held += sum(3 * one.nbytes + one.row_bytes for one in sums)
        free_bytes = self.free_bytes - held - gradients.largest_segment
        rows = None
        if self.corrected:
            rows = held_rows(gradients, name, budget, held=held, free_bytes=free_bytes // 2)

        def parts() -> Iterable[RowPart]:
            if rows is not None:
                return joined(form, rows)
            return row_parts(gradients, name, budget, held=held)

        for part in parts() if sums else ():
            for one in sums:
                one.add(part.factors, part.slopes)
        bases = known + [fisher_basis(one, name) for one in sums]
        del sums
        if not self.corrected:
            return LayerFisher(tuple(bases))
        taken = sum(part.factors.nbytes for part in rows or ())
        coordinates, spare, self._spare = None, self._spare, None
        if self.keep_rows:
            coordinates = empty_rows(gradients, name, bases, free_bytes - taken, spare)
        del spare  # if it was too small, free it before its replacement is filled
        held += coordinate_bytes(coordinates)
        squared = [torch.zeros_like(basis.values) for basis in bases]
        for part in parts():
            at = 0
            for basis, into in zip(bases, squared, strict=True):
                end = at + basis.values.numel()
                keep = _some(coordinates, slice(part.start, part.stop), slice(at, end))
                into += coordinate_squares(basis, form, part.factors, part.slopes, keep=keep)
                at = end
        count = max(1, len(gradients))
        bases = [
            dataclasses.replace(basis, values=into / count)
            for basis, into in zip(bases, squared, strict=True)
        ]
        return LayerFisher(tuple(bases), coordinates)


def _describe_rows(moments: StoredMoments, gradients: Gradients) -> str:
    """Describe which rows the moments are of; empty if they are all rows and no others."""
    dropped = moments.dropped(gradients)
    if dropped == 0 and moments.rows >= len(gradients):
        return ""
    text = f"the first {moments.rows} rows"
    if dropped is None:
        return f"{text}, of which some may have been dropped since"
    return f"{text}, {dropped} of which were dropped since" if dropped else text


def _approximate(whose: str, known: list[str], by_gradients: list[str]) -> str:
    notes = ["layers are independent, and each one's Fisher matrix is a Kronecker product"]
    if known and whose:
        notes.append(
            f"of layers that are kept dense ({', '.join(known)}) its eigenvectors are those of {whose}"
        )
    if by_gradients:
        notes.append(
            f"of layers that are kept dense without moments ({', '.join(by_gradients)}) it "
            "is made of gradients, not of prefixes and suffixes"
        )
    return "; ".join(notes)


def _some(coordinates: CoordinateRows | None, rows: slice, columns: slice) -> CoordinateRows | None:
    """Return the view for the coordinates of some rows and of one block of the gradient."""
    if coordinates is None or isinstance(coordinates, Tensor):
        return None if coordinates is None else coordinates[rows, columns]
    return coordinates.take(rows.start, rows.stop)


def _sums(
    piece: WeightBlock, form: AnyForm, memory_budget: float | str | None, *, row_space: bool
) -> MatrixMoments | VectorMoments:
    if not isinstance(piece, WeightMatrix):
        return VectorMoments(piece, form)
    limit = DEFAULT_BUDGET if memory_budget is None else parse_bytes(memory_budget)
    space = limit // 16 if row_space else 0
    return matrix_moments(piece, form, row_space=space)


def fisher_basis(sums: MatrixMoments | VectorMoments, layer: str) -> Basis:
    """Return the eigenbasis of a block's moments, with products of eigenvalues."""
    try:
        if isinstance(sums, MatrixMoments):
            return _matrix_basis(sums.piece, *sums.eigen())
        moment = sums.mean()
        values, vectors = eigen_side(moment.unsqueeze(0))
        return VectorBasis(sums.piece, None if vectors is None else vectors[0], values[0])
    except ArithmeticError:
        raise _not_finite_error(layer) from None


def _matrix_basis(piece: WeightMatrix, rows: EigenSide, cols: EigenSide) -> MatrixBasis:
    """Return the eigenbasis of both sides, with products of their eigenvalues."""
    (high, tops), (wide, sides) = rows, cols
    return MatrixBasis(piece, tops, sides, high.unsqueeze(2) * wide.unsqueeze(1))


def _not_finite_error(layer: str) -> AttributionError:
    return AttributionError(
        f"gradients of layer {layer} are not finite",
        code="attribute.not_finite",
        found="NaN or infinity",
        fix="Look for damaged or exploded gradients: gk.gradients(store, split=...).norms().",
    )
