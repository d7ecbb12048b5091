"""What a rule makes of the calls of a layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from gradkeep.factors import AnyForm, Rows


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """The gradients of B samples for one layer, with the form they are in."""

    form: AnyForm
    rows: Rows
    source: torch.Tensor | None = None
    """The tensor that the prefix was read from, untouched: layers that read one share it."""
