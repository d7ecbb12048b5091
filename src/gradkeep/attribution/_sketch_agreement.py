"""How well the ranks of projected gradients agree with exact ones, measured on some rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from gradkeep._ranks import column_correlations
from gradkeep.attribution._solve import dual
from gradkeep.query._engine import GradientPair, ProductEngine

if TYPE_CHECKING:
    from torch import Tensor

    from gradkeep.attribution._kept_rows import KeptRows
    from gradkeep.attribution._kernel_weights import LossSlopes
    from gradkeep.attribution._question import CheckpointView
    from gradkeep.query import Gradients

_ROWS, _QUERIES = 1000, 16
"""Training rows and queries that are solved both ways."""


def sketch_agreement(
    at: CheckpointView, found: LossSlopes, x: KeptRows, g: Tensor, damping: float
) -> str:
    """The mean rank correlation of both ways on some rows and queries, in words.

    The damping of some rows is a share of that of all, so that as many directions count as among
    all rows.
    """
    train, asked, question = at.train(found.of), at.queries(found.of), at.question
    draws = torch.Generator().manual_seed(0)
    rows = torch.randperm(len(train), generator=draws)[:_ROWS].sort().values
    places = torch.randperm(len(g), generator=draws)[:_QUERIES].sort().values
    queries = question.positions[places.numpy()].tolist()
    share = damping * len(rows) / len(train)
    weight, pull = found.weight[rows], found.pull[rows]
    some = x.read(rows.numpy())
    scores = []
    for kernel, products in (
        (_products(train, train, rows.tolist(), rows), _products(asked, train, queries, rows)),
        (some @ some.T, g[places] @ some.T),
    ):
        solve = dual(kernel, weight=weight, pull=pull, damping=share)
        scores.append(solve(products).T.numpy())
    agreement = float(np.nan_to_num(column_correlations(*scores)).mean())
    return f"whose ranks agree {agreement:.2f} with exact ones on {len(rows)} rows and {len(queries)} queries"


def _products(queries: Gradients, train: Gradients, positions: list[int], rows: Tensor) -> Tensor:
    engine = ProductEngine(
        [GradientPair(queries, train)], answer=0, positions=positions, rows=rows.tolist()
    )
    out = torch.empty(len(positions), len(rows))
    for tile in engine.tiles():
        part = tile.values[0]
        here = slice(tile.query_start, tile.query_start + len(part))
        out[here, tile.train_start : tile.train_start + part.shape[1]] = part
    return out
