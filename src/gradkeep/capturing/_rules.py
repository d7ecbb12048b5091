"""From the calls of a unit to its gradients, by the unit's rule."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gradkeep.capturing import _convolution, _embedding, _linear, _module, _norms, _tied

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gradkeep.capturing._calls import Call
    from gradkeep.capturing._piece import Piece
    from gradkeep.capturing._units import Unit

_BY_WAY = {
    "linear": _linear.piece,
    "convolution": _convolution.piece,
    "embedding": _embedding.piece,
    "norm": _norms.piece,
}


def piece_of(unit: Unit, calls: Sequence[Call], *, rows: int) -> Piece:
    """The gradients of B samples for a unit whose modules made these calls."""
    if unit.way == "tied":
        found = _tied.piece(unit, calls, rows=rows, lay=unit.lay)
    elif unit.way in ("module", "one by one"):
        found = _module.pieces([unit], calls, rows=rows)[unit]
    else:
        rule = _BY_WAY[unit.way]
        module = unit.modules[0]
        found = rule(unit.name, module, unit.parameters, calls, rows=rows, lay=unit.lay)
    if found.form.gradient_size != unit.size:
        raise ValueError("the rule covers another number of values than the layer has")
    return found
