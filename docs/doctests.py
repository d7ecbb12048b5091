"""An extension of griffe: examples in docstrings are shown as code, not run together as text."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import griffe

if TYPE_CHECKING:
    from collections.abc import Iterator


class Doctests(griffe.Extension):
    """Puts a fence around everything from a `>>>` to the next empty line."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Called for everything that was read."""
        if obj.docstring is not None:
            obj.docstring.value = "\n".join(fenced(obj.docstring.value.splitlines()))


def fenced(lines: list[str]) -> Iterator[str]:
    """The lines with examples as blocks of code.

    >>> list(fenced(["Adds.", "", ">>> 1 + 1", "2"]))
    ['Adds.', '', '```pycon', '>>> 1 + 1', '2', '```']
    """
    inside = False
    for line in lines:
        if not inside and line.startswith(">>>"):
            inside = True
            yield "```pycon"
        elif inside and not line.strip():
            inside = False
            yield "```"
        yield line
    if inside:
        yield "```"
