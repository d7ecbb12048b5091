"""Projections of a whole capture, read from the store some rows at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from gradkeep.attribution._projections._finite import require_finite
from gradkeep.attribution._projections._room import require_room
from gradkeep.attribution._projections._rows import add_rows
from gradkeep.attribution._projections._sketch import sketch_of
from gradkeep.attribution._projections._sum import Sum
from gradkeep.factors import CACHED, tiles
from gradkeep.query import memory_shares

if TYPE_CHECKING:
    from gradkeep.attribution._projections._projection import Projection
    from gradkeep.query import Gradients

_BUFFERS = 6
"""Arrays of k numbers that a row has while it is projected: room to wrap, spectra, the result."""


def project(
    gradients: Gradients,
    projection: Projection,
    *,
    model: object = 0,
    memory_budget: float | str | None = None,
) -> torch.Tensor:
    """The projections `[N, k]` of a capture's gradients, all layers in one, float32 on the CPU.

    Gradients of the loss are those of the output times the kept slopes. `model` names the
    projection beside its seed: projections of different models are independent. Cost: one read
    of the factors, and per row and layer the cheaper of a weight's values and two transforms of k
    numbers a position.

    >>> import gradkeep as gk, tempfile
    >>> from gradkeep.attribution._projections import Projection
    >>> store, net = gk.open(tempfile.mkdtemp()), torch.nn.Linear(4, 3)
    >>> data = [(torch.randn(5, 4), torch.tensor([0, 1, 2, 0, 1]))]
    >>> _ = gk.capture(store, net, data, task=gk.Classification(), split="train")
    >>> project(gk.gradients(store, split="train"), Projection(dim=64)).shape
    torch.Size([5, 64])
    """
    count, dim = len(gradients), projection.dim
    batch_rows, scratch = tiling(gradients, dim, memory_budget)
    sketch = sketch_of(projection, model)
    slopes = gradients.slopes()
    out = torch.empty(count, dim)
    for some in gradients.stream(batch_rows):
        factors = {name: rows.widened() for name, rows in some.factors.items()}
        kinds = {rows.example.dtype for rows in factors.values()}
        dtype = torch.float64 if torch.float64 in kinds else torch.float32
        # Sums that stay in the cache while all layers are added to them.
        for start, stop in tiles(some.stop - some.start, 4 * dim, dtype.itemsize, 2 * CACHED):
            into = Sum(stop - start, dim, dtype=dtype, device=torch.device("cpu"))
            for name, form in gradients.forms.items():
                taken = factors[name].take(start, stop)
                add_rows(sketch, into, form, taken, scratch=scratch)
            out[some.start + start : some.start + stop] = into.values()
        if slopes is not None:
            out[some.start : some.stop] *= slopes[some.start : some.stop].unsqueeze(1)
    return require_finite(out, gradients.ids)


def tiling(gradients: Gradients, dim: int, memory_budget: float | str | None) -> tuple[int, int]:
    """Rows at a time and bytes of temporaries, for k numbers a row."""
    require_room(
        len(gradients) * dim * 4,
        f"{len(gradients)} x {dim}, all projections at once,",
        fix="choose a smaller dimension",
    )
    probe = gradients.rows([0]) if len(gradients) else None
    row = sum(rows.nbytes for rows in probe.factors.values()) if probe else 0
    mapped = max((entry.bytes for entry in gradients.block.manifest.segments), default=0)
    split = memory_shares(
        memory_budget,
        answer=len(gradients) * dim * 4,
        mapped=mapped,
        query_row=0,
        train_row=row + _BUFFERS * dim * 4,
        queries=1,
        rows=len(gradients),
    )
    return split.train_rows, min(split.scratch, CACHED)
