"""An embedding whose table is also the last layer: both uses are kept, and add up."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from torch import nn

from gradkeep.capturing import _embedding, _linear
from gradkeep.capturing._piece import Piece
from gradkeep.factors import Lookup, LookupRows, Outer, OuterRows, Tied, TiedRows

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gradkeep.capturing._calls import Call
    from gradkeep.capturing._positions import Lay
    from gradkeep.capturing._units import Unit


def piece(unit: Unit, calls: Sequence[Call], *, rows: int, lay: Lay) -> Piece:
    """The tokens' vectors and the linear layer's positions of each sample."""
    looked = [call for call in calls if isinstance(call.module, nn.Embedding)]
    read = [call for call in calls if not isinstance(call.module, nn.Embedding)]
    weight = unit.parameters[:1]
    low = _embedding.piece(unit.name, looked[0].module, weight, looked, rows=rows, lay=lay)
    high = _linear.piece(unit.name, read[0].module, unit.parameters, read, rows=rows, lay=lay)
    assert isinstance(low.form, Lookup)
    assert isinstance(low.rows, LookupRows)
    assert isinstance(high.form, Outer)
    assert isinstance(high.rows, OuterRows)
    lookup = dataclasses.replace(
        low.form, prefix=f"{unit.name}.tokens", suffix=f"{unit.name}.token_suffix"
    )
    return Piece(Tied(unit.parameters, lookup, high.form), TiedRows(low.rows, high.rows))
