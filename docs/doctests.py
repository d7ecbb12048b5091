"""griffe extension: fence the doctests of docstrings, so that they render as code."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import griffe

if TYPE_CHECKING:
    from collections.abc import Iterator


class Doctests(griffe.Extension):
    """Fence everything from a `>>>` to the next empty line."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Fence the doctests of an object."""
        if obj.docstring is not None:
            obj.docstring.value = "\n".join(fenced(obj.docstring.value.splitlines()))


def fenced(lines: list[str]) -> Iterator[str]:
    """Yield the lines with a fence around each doctest, at its indentation.

    >>> list(fenced(["Add.", "", "    >>> 1 + 1", "    2"]))
    ['Add.', '', '    ```pycon', '    >>> 1 + 1', '    2', '    ```']
    """
    indent: str | None = None
    for line in lines:
        text = line.lstrip()
        if indent is None and text.startswith(">>>"):
            indent = line[: len(line) - len(text)]
            yield f"{indent}```pycon"
        elif indent is not None and not text:
            yield f"{indent}```"
            indent = None
        yield line
    if indent is not None:
        yield f"{indent}```"
