"""Cutting the rank of a gradient: fewer positions that stand for all of them."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import torch

from gradkeep.query._factors import ConvRows, OuterRows
from gradkeep.query._forms import Conv, Outer
from gradkeep.query._patches import unfolded

if TYPE_CHECKING:
    from gradkeep.capturing._piece import Piece


def applies(piece: Piece) -> bool:
    """Linear layers with several positions, and convolutions with one group."""
    if isinstance(piece.form, Outer) and isinstance(piece.rows, OuterRows):
        return piece.rows.offsets is not None
    return (
        isinstance(piece.form, Conv)
        and piece.form.groups == 1
        and piece.form.bias != "wide"
        and piece.form.positions > 1
    )


def cut(name: str, piece: Piece, tolerance: float) -> tuple[Outer, OuterRows]:
    """The gradients with as few positions as keep the relative error within the tolerance.

    gradient = G^T X = Q_g (R_g R_x^T) Q_x^T; of the T x T core the largest r singular values are
    kept, with their roots on both sides: |error| <= tolerance * |gradient| for every sample, in
    r (d_in + d_out) values. Cost: two QR and one T x T SVD per sample.
    """
    form, rows = _as_outer(name, piece)
    count = len(rows)
    x, g = rows.x.reshape(count, -1, rows.x.shape[1]), rows.g.reshape(count, -1, rows.g.shape[1])
    if form.bias and not form.ones:
        x = torch.cat([x, x.new_ones(*x.shape[:2], 1)], 2)
    q_x, r_x = torch.linalg.qr(x.transpose(1, 2))
    q_g, r_g = torch.linalg.qr(g.transpose(1, 2))
    u, s, vh = torch.linalg.svd(r_g @ r_x.transpose(1, 2), full_matrices=False)
    tail = s.square().flip(1).cumsum(1).flip(1)
    keep = tail > tolerance**2 * tail[:, :1]
    roots = s.sqrt().unsqueeze(2)
    left = roots * (q_g @ u).transpose(1, 2)
    right = roots * (vh @ q_x.transpose(1, 2))
    ranks = keep.sum(1).cpu()
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), ranks.cumsum(0)])
    form = dataclasses.replace(form, ones=form.bias, error=tolerance)
    return form, OuterRows(right[keep], left[keep], offsets)


def _as_outer(name: str, piece: Piece) -> tuple[Outer, OuterRows]:
    if isinstance(piece.form, Outer):
        assert isinstance(piece.rows, OuterRows)
        return piece.form, piece.rows
    assert isinstance(piece.form, Conv)
    assert isinstance(piece.rows, ConvRows)
    linear, parts = unfolded(piece.form, piece.rows)
    form = dataclasses.replace(
        linear,
        parameters=piece.form.parameters,
        prefix=f"{name}.prefix",
        suffix=f"{name}.suffix",
    )
    return form, parts[0]
