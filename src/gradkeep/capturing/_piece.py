"""What a rule makes of the calls of a layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from gradkeep.query._factors import Factors
    from gradkeep.query._forms import Form


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """The gradients of B samples for one layer, with the form they are in."""

    form: Form
    rows: Factors
    source: torch.Tensor | None = None
    """The tensor that the prefix was read from, untouched: layers that read one share it."""
