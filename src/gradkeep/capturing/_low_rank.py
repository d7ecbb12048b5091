"""Cutting the rank of a gradient: fewer positions that stand for all of them."""

from __future__ import annotations

import dataclasses

import torch

from gradkeep.factors import Outer, OuterRows


def cut_rank(form: Outer, rows: OuterRows, tolerance: float) -> tuple[Outer, OuterRows]:
    """The gradients with as few positions as keep the relative error within the tolerance.

    gradient = G^T X = Q_g (R_g R_x^T) Q_x^T; of the T x T core the largest r singular values are
    kept, with their roots on both sides: |error| <= tolerance * |gradient| for every sample, in
    r (d_in + d_out) values. Cost: two QR and one T x T SVD per sample.
    """
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
