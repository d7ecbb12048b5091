"""Fisher matrices of layers as Kronecker products: fitting, eigenbases and damped inverses."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gradkeep._budgets import parse_bytes
from gradkeep.curvature._basis import MatrixBasis, VectorBasis, eigen_side
from gradkeep.curvature._coordinates import coordinate_squares
from gradkeep.curvature._eigen_influence import empty_rows, room_for_rows
from gradkeep.curvature._moments import MatrixMoments, VectorMoments, matrix_moments
from gradkeep.curvature._row_parts import held_rows, joined, row_parts
from gradkeep.curvature._stored_moments import StoredMoments
from gradkeep.errors import AttributionError
from gradkeep.factors._outer import OuterRows
from gradkeep.factors._weights import WeightMatrix
from gradkeep.query._engine import DEFAULT_BUDGET

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from gradkeep.curvature._basis import Basis, EigenSide
    from gradkeep.curvature._row_parts import RowPart
    from gradkeep.curvature._stored_moments import SideMoments
    from gradkeep.factors._form import AnyForm
    from gradkeep.factors._weights import WeightBlock
    from gradkeep.query import Gradients


CoordinateRows = Tensor | OuterRows
"""Coordinates `[N, P]`, or of one position a row their factors `[N, R]` and `[N, C]`."""

DECADES = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
"""Relative dampings to choose from: no single one is right for all models."""


def bytes_kept(rows: CoordinateRows | None) -> int:
    """Bytes of coordinates."""
    if rows is None:
        return 0
    return rows.nbytes if isinstance(rows, Tensor) else rows.x.nbytes + rows.g.nbytes


@dataclass(frozen=True, slots=True)
class Damping:
    """What is added to eigenvalues before they are inverted."""

    relative: float = 0.3
    """Times the mean eigenvalue of the layer."""
    absolute: float | None = None
    """The same for all layers, in place of the relative one."""

    def __post_init__(self) -> None:
        value = self.relative if self.absolute is None else self.absolute
        if not 0 < value < float("inf"):
            raise AttributionError(
                "damping must be above zero: else the smallest eigenvalues decide everything",
                found=value,
                fix="0.01 to 10 times the mean eigenvalue are usual",
            )

    @classmethod
    def told(cls, relative: float | str, absolute: float | None = None) -> Damping:
        """As an option says it; what was to be chosen has been chosen by now."""
        if isinstance(relative, str):
            raise AttributionError("damping must be a number, or 'auto'", found=repr(relative))
        return cls(relative, absolute)

    def of(self, mean: float) -> float:
        """For a layer whose eigenvalues have this mean."""
        return self.relative * mean if self.absolute is None else self.absolute


@dataclass(frozen=True, slots=True, eq=False)
class LayerFisher:
    """The curvature F of one layer."""

    bases: tuple[Basis, ...]
    """One for each piece of its gradient."""
    rows: CoordinateRows | None = None
    """Coordinates of the rows that it was made of, where there was room to keep them."""

    @property
    def size(self) -> int:
        """P, the number of values of a gradient."""
        return sum(basis.piece.size for basis in self.bases)

    @property
    def mean(self) -> float:
        """The mean eigenvalue."""
        return float(sum(basis.values.sum() for basis in self.bases)) / max(1, self.size)

    @property
    def nbytes(self) -> int:
        """Bytes of eigenvectors, eigenvalues and kept coordinates."""
        return bytes_kept(self.rows) + sum(basis.nbytes for basis in self.bases)

    def solved(self, dense: Tensor, damping: Damping) -> Tensor:
        """(F + damping)^-1 g `[B, P]` of dense gradients g `[B, P]`.

        Of a layer whose rows were all zero nothing is known: zeros. Cost: 4 R C (R + C) operations
        a row.
        """
        out = torch.zeros_like(dense)
        added = damping.of(self.mean)
        if added > 0:
            for basis in self.bases:
                weights = 1 / (basis.values + added)
                if isinstance(basis, VectorBasis) or basis.whole:
                    basis.put(basis.coordinates(dense) * weights.to(dense.dtype), out)
                else:  # where there are no vectors the damping is all there is
                    more = (weights - 1 / added).to(dense.dtype)
                    basis.put(basis.coordinates(dense) * more, out, plus=dense / added)
        return out


@dataclass(frozen=True, slots=True, eq=False)
class KroneckerFisher:
    """The curvature of all chosen layers, each by itself."""

    layers: Mapping[str, LayerFisher]


_STAYING = 4
"""Coordinates that stay until the last query was asked take a fourth of what those of one layer may."""


def fisher(
    gradients: Gradients, *, corrected: bool, memory_budget: float | str | None = None
) -> KroneckerFisher:
    """The mean of g g^T over all rows, as Kronecker products, of all layers: see `FisherFit`."""
    fit = FisherFit(gradients, corrected=corrected, memory_budget=memory_budget, row_space=True)
    layers = {name: fit.layer(name) for name in gradients.forms}
    fit.check()
    return KroneckerFisher(layers)


class FisherFit:
    """The mean of g g^T over all rows, as Kronecker products, made layer by layer when asked for.

    Of a weight: left moments of suffixes x right moments of prefixes (K-FAC), of layers that are
    kept dense those of the capture's first rows, or, where none are known, those of the gradient
    matrices; `corrected` measures the eigenvalues anew in their eigenbasis, of all rows (EK-FAC).
    Small blocks without moments and norm layers of up to 512 values have their whole matrix,
    longer vectors its diagonal. Cost: one pass over the rows, S (R^2 + C^2)
    products and an eigendecomposition of each side; the correction is a second pass, of which
    `keep_rows` keeps the rows' coordinates where there is room: a layer is handed out with them once,
    so that there is room for those of the next. With `row_space` a long side of few positions is
    decomposed by these, S^3 in place of R^3 or C^3: its coordinates are all that these rows have,
    though not all that other gradients have.
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
        self.room = room_for_rows(memory_budget)
        self.keep_rows = keep_rows
        dense = [
            name
            for name, form in gradients.forms.items()
            if form.storage == "dense" and any(len(part.shape) > 1 for part in form.parameters)
        ]
        kept = StoredMoments.of(gradients) if dense else None
        self._known = {} if kept is None else {n: kept.layers for n in dense if n in kept.layers}
        self._made: dict[str, LayerFisher] = {}
        self._spare: Tensor | None = None
        self.approximate = _approximate(
            "" if kept is None else _whose_rows(kept, gradients),
            list(self._known),
            [name for name in dense if name not in self._known],
        )
        """In which ways it is not the curvature."""

    @property
    def nbytes(self) -> int:
        """Bytes of the layers that were made, with the coordinates that stay."""
        return sum(layer.nbytes for layer in self._made.values())

    def layer(self, name: str) -> LayerFisher:
        """One of them, made when it is first asked for; then with coordinates, if there is room.

        Those that do not stay are valid until the next layer is made, whose take their place.
        """
        if name in self._made:
            return self._made[name]
        moments = self._known[name][name] if name in self._known else None
        one = self._layer(name, moments, held=self.nbytes)
        staying = sum(bytes_kept(layer.rows) for layer in self._made.values())
        stays = staying + bytes_kept(one.rows) <= self.room // _STAYING
        self._made[name] = one if stays else dataclasses.replace(one, rows=None)
        if isinstance(one.rows, Tensor) and not stays:
            self._spare = one.rows.view(-1)
        return one

    def check(self) -> None:
        """An error if all layers were made, and none of them says anything."""
        if len(self._made) == len(self.gradients.forms) and not any(
            layer.mean > 0 for layer in self._made.values()
        ):
            key = self.gradients.key
            raise AttributionError(
                f"all gradients of {key.split} at {key.checkpoint} are zero",
                fix="capture a checkpoint that does not fit its data perfectly, or other layers",
            )

    def _layer(self, name: str, moments: SideMoments | None, *, held: int) -> LayerFisher:
        gradients, budget = self.gradients, self.memory_budget
        form = gradients.forms[name]
        pieces = (form if moments is None else moments.form).weight_blocks()
        known: list[Basis] = []
        if moments is not None and isinstance(pieces[0], WeightMatrix):
            both = (eigen_side(side.double()) for side in (moments.left, moments.right))
            known = [_matrix_basis(pieces[0], *both)]
            held += 24 * (moments.left.numel() + moments.right.numel() + pieces[0].size)
        sums = [
            _sums(piece, form, budget, row_space=self.row_space) for piece in pieces[len(known) :]
        ]
        held += sum(3 * one.nbytes + one.row_bytes for one in sums)
        room = self.room - held - gradients.largest_segment
        rows = None
        if self.corrected:
            rows = held_rows(gradients, name, budget, held=held, room=room // 2)

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
        kept, spare, self._spare = None, self._spare, None
        if self.keep_rows:
            kept = empty_rows(gradients, name, bases, room - taken, spare)
        del spare  # if it was not large enough, it goes before what was made in its place is filled
        held += bytes_kept(kept)
        squared = [torch.zeros_like(basis.values) for basis in bases]
        for part in parts():
            at = 0
            for basis, into in zip(bases, squared, strict=True):
                end = at + basis.values.numel()
                keep = _some(kept, slice(part.start, part.stop), slice(at, end))
                into += coordinate_squares(basis, form, part.factors, part.slopes, keep=keep)
                at = end
        count = max(1, len(gradients))
        bases = [
            dataclasses.replace(basis, values=into / count)
            for basis, into in zip(bases, squared, strict=True)
        ]
        return LayerFisher(tuple(bases), kept)


def _whose_rows(kept: StoredMoments, gradients: Gradients) -> str:
    """Which rows the moments are of, unless they are all that are there and no others."""
    dropped = kept.dropped(gradients)
    if dropped == 0 and kept.rows >= len(gradients):
        return ""
    told = f"the first {kept.rows} rows"
    if dropped is None:
        return f"{told}, of which some may have been dropped since"
    return f"{told}, {dropped} of which were dropped since" if dropped else told


def _approximate(whose: str, known: list[str], by_gradients: list[str]) -> str:
    told = ["layers are independent, and each one's Fisher matrix is a Kronecker product"]
    if known and whose:
        told.append(
            f"of layers that are kept dense ({', '.join(known)}) its eigenvectors are those of {whose}"
        )
    if by_gradients:
        told.append(
            f"of layers that are kept dense without moments ({', '.join(by_gradients)}) it "
            "is made of gradients, not of prefixes and suffixes"
        )
    return "; ".join(told)


def _some(kept: CoordinateRows | None, rows: slice, columns: slice) -> CoordinateRows | None:
    """Where to write the coordinates of some rows and of one piece of the gradient."""
    if kept is None or isinstance(kept, Tensor):
        return None if kept is None else kept[rows, columns]
    return kept.take(rows.start, rows.stop)


def _sums(
    piece: WeightBlock, form: AnyForm, memory_budget: float | str | None, *, row_space: bool
) -> MatrixMoments | VectorMoments:
    if not isinstance(piece, WeightMatrix):
        return VectorMoments(piece, form)
    limit = DEFAULT_BUDGET if memory_budget is None else parse_bytes(memory_budget)
    space = limit // 16 if row_space else 0
    return matrix_moments(piece, form, row_space=space)


def fisher_basis(sums: MatrixMoments | VectorMoments, layer: str) -> Basis:
    """The eigenbasis of a block's moments, with products of eigenvalues; sides without products stay."""
    try:
        if isinstance(sums, MatrixMoments):
            return _matrix_basis(sums.piece, *sums.eigen())
        moment = sums.mean()
        values, vectors = eigen_side(moment.unsqueeze(0))
        return VectorBasis(sums.piece, None if vectors is None else vectors[0], values[0])
    except ArithmeticError:
        raise _no_numbers(layer) from None


def _matrix_basis(piece: WeightMatrix, left: EigenSide, right: EigenSide) -> MatrixBasis:
    """The eigenbasis of both sides, with products of their eigenvalues."""
    (high, tops), (wide, sides) = left, right
    return MatrixBasis(piece, tops, sides, high.unsqueeze(2) * wide.unsqueeze(1))


def _no_numbers(layer: str) -> AttributionError:
    return AttributionError(
        f"gradients of layer {layer} are no numbers",
        found="NaN or infinity",
        fix="look for damaged or exploded gradients: gk.gradients(store, split=...).norms()",
    )
