"""Influence in eigencoordinates that were kept when the eigenvalues were corrected."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from gradkeep._budgets import parse_bytes
from gradkeep.attribution.kronecker._coordinates import coordinates
from gradkeep.attribution.kronecker._row_parts import only_layer
from gradkeep.attribution.kronecker._single_position import has_single_position
from gradkeep.factors._arithmetic import pairwise
from gradkeep.factors._outer import OuterRows
from gradkeep.query._engine import DEFAULT_BUDGET

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from gradkeep.attribution.kronecker._fisher import CoordinateRows, Damping, LayerFisher
    from gradkeep.factors.kronecker._basis import Basis
    from gradkeep.query import Gradients


def room_for_rows(memory_budget: float | str | None) -> int:
    """Bytes that the rows of one layer and their coordinates may take: half of the budget.

    A budget that is enough without kept rows must stay enough: the other half is left alone.
    """
    return (DEFAULT_BUDGET if memory_budget is None else parse_bytes(memory_budget)) // 2


def empty_rows(
    gradients: Gradients,
    layer: str,
    bases: Sequence[Basis],
    room: int,
    spare: Tensor | None = None,
) -> CoordinateRows | None:
    """Where to keep the coordinates of a layer's rows; None where they do not fit into the room.

    Those of an embedding are as many as its table has values, most of them zero: never kept. What
    is `spare` is written over where it is large enough: new memory costs as much as what fills it.
    """
    form, count = gradients.forms[layer], len(gradients)
    if has_single_position(gradients, layer):
        _, high, wide = bases[0].values.shape
        if 4 * count * (high + wide) > room:
            return None
        return OuterRows(torch.empty(count, wide), torch.empty(count, high))
    size = sum(basis.values.numel() for basis in bases)
    if form.sparse or 4 * count * size > room:
        return None
    if spare is not None and len(spare) >= count * size:
        return spare[: count * size].view(count, size)
    return torch.empty(count, size)


@dataclass(frozen=True, slots=True, eq=False)
class KeptCoordinates:
    """A layer whose training rows are held as coordinates `[N, P]`."""

    layer: str
    fisher: LayerFisher
    rows: Tensor
    added: float
    """The damping."""

    def scores(self, asked: Gradients, positions: list[int]) -> Tensor:
        """Products `[b, N]` of some queries with all training rows; 2 P operations a pair."""
        factors = only_layer(asked, self.layer).rows(positions).factors[self.layer].widened()
        slopes = asked.slopes()
        some = None if slopes is None else slopes[positions]
        weighed = torch.empty(len(positions), self.rows.shape[1])
        at = 0
        for basis in self.fisher.bases:
            into = weighed[:, at : at + basis.values.numel()]
            weights = (1 / (basis.values + self.added)).float()
            for start, stop, found in coordinates(basis, asked.forms[self.layer], factors, some):
                into[start:stop] = (found * weights).flatten(1)
            at += basis.values.numel()
        return pairwise(weighed, self.rows)


def kept_coordinates(layer: str, fisher: LayerFisher, damping: Damping) -> KeptCoordinates | None:
    """The layer in the coordinates that were kept, if they were and mean something."""
    added = damping.of(fisher.mean)
    if not isinstance(fisher.rows, torch.Tensor) or added <= 0:
        return None
    return KeptCoordinates(layer, fisher, fisher.rows, added)
