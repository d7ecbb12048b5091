"""Making the Fisher matrix of a capture's gradients, one layer after the other."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gradkeep._budgets import parse_bytes
from gradkeep.attribution.kronecker._coordinates import coordinate_squares
from gradkeep.attribution.kronecker._fisher import KroneckerFisher, LayerFisher, bytes_kept
from gradkeep.attribution.kronecker._kept_coordinates import empty_rows, room_for_rows
from gradkeep.attribution.kronecker._row_parts import row_parts
from gradkeep.errors import AttributionError
from gradkeep.factors import WeightMatrix
from gradkeep.factors.kronecker import (
    MatrixBasis,
    MatrixMoments,
    VectorBasis,
    VectorMoments,
    eigen,
    matrix_moments,
)
from gradkeep.query import DEFAULT_BUDGET, KeptMoments

if TYPE_CHECKING:
    from gradkeep.attribution.kronecker._fisher import CoordinateRows
    from gradkeep.factors import AnyForm, WeightBlock
    from gradkeep.factors.kronecker import Basis
    from gradkeep.query import Gradients, SideMoments


def fisher(
    gradients: Gradients,
    *,
    corrected: bool,
    memory_budget: float | str | None = None,
    keep_rows: bool = False,
) -> KroneckerFisher:
    """The mean of g g^T over all rows, as Kronecker products layer by layer.

    Of a weight: left moments of suffixes x right moments of prefixes (K-FAC), of layers that are
    kept dense those of the capture's first rows, or, where none are known, those of the gradient
    matrices; `corrected` measures the eigenvalues anew in their eigenbasis, of all rows (EK-FAC).
    Small blocks without moments and norm layers of up to 512 values have their whole matrix,
    longer vectors its diagonal. Cost: one pass over the rows, S (R^2 + C^2)
    products and an eigendecomposition of each side; the correction is a second pass, of which
    `keep_rows` keeps the rows' coordinates where they are dear and there is room.
    """
    layers: dict[str, LayerFisher] = {}
    dense = [
        name
        for name, form in gradients.forms.items()
        if form.storage == "dense" and any(len(part.shape) > 1 for part in form.parameters)
    ]
    kept = KeptMoments.of(gradients) if dense else None
    known = [name for name in dense if kept is not None and name in kept.layers]
    held, room = 0, room_for_rows(memory_budget) if keep_rows else 0
    for name in gradients.forms:
        one = _layer(
            gradients,
            name,
            memory_budget,
            kept.layers[name] if kept is not None and name in known else None,
            corrected=corrected,
            held=held,
            room=room,
        )
        layers[name] = one
        held += one.nbytes
        room -= bytes_kept(one.rows)
    if not any(layer.mean > 0 for layer in layers.values()):
        raise AttributionError(
            f"all gradients of {gradients.key.split} at {gradients.key.checkpoint} are zero",
            fix="capture a checkpoint that does not fit its data perfectly, or other layers",
        )
    first = 0 if kept is None else kept.rows
    return KroneckerFisher(
        layers,
        by_first_rows=tuple(known) if first < len(gradients) else (),
        first_rows=first,
        by_gradients=tuple(name for name in dense if name not in known),
    )


def _layer(
    gradients: Gradients,
    name: str,
    memory_budget: float | str | None,
    moments: SideMoments | None,
    *,
    corrected: bool,
    held: int,
    room: int,
) -> LayerFisher:
    form = gradients.forms[name]
    pieces = (form if moments is None else moments.form).weight_blocks()
    known: list[Basis] = []
    if moments is not None and isinstance(pieces[0], WeightMatrix):
        known = [_matrix_basis(pieces[0], moments.left.double(), moments.right.double(), name)]
        held += 24 * (moments.left.numel() + moments.right.numel() + pieces[0].size)
    sums = [_sums(piece, form, memory_budget) for piece in pieces[len(known) :]]
    held += 3 * sum(one.nbytes for one in sums)
    for part in row_parts(gradients, name, memory_budget, held=held) if sums else ():
        for one in sums:
            one.add(part.factors, part.slopes)
    bases = known + [fisher_basis(one, name) for one in sums]
    del sums
    if not corrected:
        return LayerFisher(tuple(bases))
    # A budget that is enough without kept rows must stay enough: half of it is left alone.
    limit = DEFAULT_BUDGET if memory_budget is None else parse_bytes(memory_budget)
    mapped = max((entry.bytes for entry in gradients.block.manifest.segments), default=0)
    kept = empty_rows(gradients, name, min(room, limit // 2 - held - mapped))
    held += bytes_kept(kept)
    squared = [torch.zeros_like(basis.values) for basis in bases]
    for part in row_parts(gradients, name, memory_budget, held=held):
        at = 0
        for basis, into in zip(bases, squared, strict=True):
            end = at + basis.piece.size
            keep = _some(kept, slice(part.start, part.stop), slice(at, end))
            into += coordinate_squares(basis, form, part.factors, part.slopes, keep=keep)
            at = end
    count = max(1, len(gradients))
    bases = [
        dataclasses.replace(basis, values=into / count)
        for basis, into in zip(bases, squared, strict=True)
    ]
    return LayerFisher(tuple(bases), kept)


def _some(kept: CoordinateRows | None, rows: slice, columns: slice) -> CoordinateRows | None:
    """Where to write the coordinates of some rows and of one piece of the gradient."""
    if kept is None or isinstance(kept, Tensor):
        return None if kept is None else kept[rows, columns]
    return kept.take(rows.start, rows.stop)


def _sums(
    piece: WeightBlock, form: AnyForm, memory_budget: float | str | None
) -> MatrixMoments | VectorMoments:
    if not isinstance(piece, WeightMatrix):
        return VectorMoments(piece, form)
    limit = DEFAULT_BUDGET if memory_budget is None else parse_bytes(memory_budget)
    return matrix_moments(piece, form, room=limit // 32)


def fisher_basis(sums: MatrixMoments | VectorMoments, layer: str) -> Basis:
    """The eigenbasis of a block's moments, with products of eigenvalues; sides without products stay."""
    if isinstance(sums, VectorMoments):
        moment = _finite(sums.mean(), layer)
        values, vectors = (moment, None) if moment.dim() == 1 else eigen(moment)
        return VectorBasis(sums.piece, vectors, values)
    return _matrix_basis(sums.piece, *sums.sides(), layer)


def _matrix_basis(piece: WeightMatrix, left: Tensor, right: Tensor, layer: str) -> MatrixBasis:
    """The eigenbasis of both sides' moments, `[G, d, d]` or their diagonals `[G, d]`."""
    left, right = _finite(left, layer), _finite(right, layer)
    high, tops = (left, None) if left.dim() == 2 else eigen(left)
    wide, sides = (right, None) if right.dim() == 2 else eigen(right)
    return MatrixBasis(piece, tops, sides, high.unsqueeze(2) * wide.unsqueeze(1))


def _finite(moment: Tensor, layer: str) -> Tensor:
    if not bool(moment.isfinite().all()):
        raise AttributionError(
            f"gradients of layer {layer} are no numbers",
            found="NaN or infinity",
            fix="look for damaged or exploded gradients: gk.gradients(store, split=...).norms()",
        )
    return moment
