"""A griffe extension that shows doctests in docstrings as code."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import griffe

if TYPE_CHECKING:
    from collections.abc import Iterator


class Doctests(griffe.Extension):
    """Fence everything from a `>>>` to the next empty line, also inside of an `Example:` section."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrite the docstring of an object."""
        if obj.docstring is not None:
            obj.docstring.value = "\n".join(fenced(obj.docstring.value.splitlines()))


def fenced(lines: list[str]) -> Iterator[str]:
    """Yield the lines with doctests as fenced blocks of code.

    >>> list(fenced(["Add.", "", "    >>> 1 + 1", "    2"]))
    ['Add.', '', '    ```pycon', '    >>> 1 + 1', '    2', '    ```']
    """
    indent: str | None = None
    for line in lines:
        if indent is None and line.lstrip().startswith(">>>"):
            indent = line[: len(line) - len(line.lstrip())]
            yield f"{indent}```pycon"
        elif indent is not None and not line.strip():
            yield f"{indent}```"
            indent = None
        yield line
    if indent is not None:
        yield f"{indent}```"
