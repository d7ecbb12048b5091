"""The methods by name."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING

from gradkeep.attribution._methods import ALL
from gradkeep.errors import AttributionError

if TYPE_CHECKING:
    from gradkeep.attribution._method import Method


def methods() -> tuple[Method, ...]:
    """All methods that `gk.attribute` knows.

    >>> [method.name for method in methods()][:3]
    ['kernel', 'trak', 'dot']
    """
    return ALL


def method_named(name: str) -> Method:
    """The method of that name; the nearest ones are offered if there is none."""
    for method in ALL:
        if method.name == name:
            return method
    names = [method.name for method in ALL]
    near = difflib.get_close_matches(name, names, n=2, cutoff=0.3)
    raise AttributionError(
        f"no method {name!r}",
        expected=", ".join(names),
        fix=f"did you mean {' or '.join(near)}?" if near else "gk.methods() lists them",
    )
