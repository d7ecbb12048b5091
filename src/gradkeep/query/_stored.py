"""In which form a row takes the fewest values."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from gradkeep.query._forms import Conv, Dense, Lookup, Outer, Tied, size_of

if TYPE_CHECKING:
    from gradkeep.query._forms import Form

_ID = 2
"""Values of 4 bytes that an id takes."""


@dataclass(frozen=True, slots=True)
class Stored:
    """A way to keep a row, and how many values of 4 bytes it takes."""

    kind: Literal["factors", "dense", "low rank"]
    values: float


def stored_values(form: Form, t: float = 1.0, *, rank: int | None = None) -> float:
    """Values of the factors of a row with `t` positions, or of rank `rank` instead.

    Outer: `t (d_in + d_out)`, or `rank (d_in + d_out)`, with one more for a bias; convolutions
    count raw pixels, whatever their `t`.

    >>> from gradkeep.query._forms import Outer, Parameter
    >>> form = Outer((Parameter("w", (768, 768)),), "x", "g", d_in=768, d_out=768)
    >>> stored_values(form, 32), stored_values(form, 32, rank=4)
    (49152, 6144)
    """
    match form:
        case Outer():
            if rank is not None:
                return rank * (form.d_in + form.d_out + int(form.bias))
            return t * (form.d_in + form.d_out + int(form.ones))
        case Conv():
            return form.channels * math.prod(form.size) + form.filters * form.positions
        case Lookup():
            return t * (form.width + _ID)
        case Tied():
            return stored_values(form.lookup, t) + stored_values(form.outer, t, rank=rank)
        case Dense():
            return form.size


def smallest(form: Form, t: float = 1.0, *, rank: int | None = None) -> Stored:
    """The smallest way to keep a row: its factors, the dense gradient, or rank `rank` if given.

    Equal sizes keep the factors, which can be multiplied in more ways.

    >>> from gradkeep.query._forms import Outer, Parameter
    >>> form = Outer((Parameter("w", (10, 20)),), "x", "g", d_in=20, d_out=10)
    >>> smallest(form, 3).kind, smallest(form, 30).kind, smallest(form, 30, rank=2).kind
    ('factors', 'dense', 'low rank')
    """
    ways = [Stored("factors", stored_values(form, t)), Stored("dense", size_of(form))]
    if rank is not None and isinstance(form, Outer):
        ways.append(Stored("low rank", stored_values(form, t, rank=rank)))
    return min(ways, key=lambda way: way.values)
