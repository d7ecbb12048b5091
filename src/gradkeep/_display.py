"""Text and HTML of results: tables, sizes, states, JSON, and progress bars."""

from __future__ import annotations

import dataclasses
import html
import math
import sys
import time
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


def format_size(count: float) -> str:
    """Format bytes in decimal units.

    >>> format_size(999), format_size(7_030_000), format_size(165_900_000_000)
    ('999 B', '7.0 MB', '165.9 GB')
    """
    if count < 1000:
        return f"{count:.0f} B" if float(count).is_integer() else f"{count:.1f} B"
    for unit in ("kB", "MB", "GB", "TB"):
        count /= 1000
        if count < 999.95:
            return f"{count:.1f} {unit}"
    return f"{count / 1000:.1f} PB"


def format_ratio(ratio: float | None) -> str:
    """Format a compression ratio; a dash if it is unknown.

    >>> format_ratio(23.61), format_ratio(None)
    ('23.6x', '-')
    """
    return "-" if ratio is None else f"{ratio:.1f}x"


def format_time(seconds: float) -> str:
    """Format a time in UTC, to the second; a dash if it is unknown.

    >>> format_time(0.0), format_time(1_700_000_000.5)
    ('-', '2023-11-14 22:13:20')
    """
    return "-" if not seconds else datetime.fromtimestamp(int(seconds), UTC).strftime("%F %T")


def head_and_tail(text: str, most: int = 64 << 10) -> str:
    """Shorten a text to at most `most` characters, keeping its beginning and end.

    >>> head_and_tail("a" * 1000 + "b" * 1000, 60)
    'aaaaaaaaa ... (about 1940 characters left out) ... bbbbbbbbb'
    """
    if len(text) <= most:
        return text
    gap = f" ... (about {len(text) - most} characters left out) ... "
    head = max(0, most - len(gap)) // 2
    return f"{text[:head]}{gap}{text[len(text) - head :]}"[:most]


def text_table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, right: set[int]) -> str:
    """Align columns; those with a number in `right` to the right.

    >>> print(text_table(["name", "rows"], [["train", "1437"], ["test", "360"]], right={1}))
    name   rows
    train  1437
    test    360
    """
    lines = [list(columns), *(list(row) for row in rows)]
    widths = [max(len(line[at]) for line in lines) for at in range(len(columns))]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if at in right else cell.ljust(width)
            for at, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def html_table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, right: set[int]) -> str:
    """Build the same table as HTML, everything escaped.

    >>> html_table(["a<b"], [["&"]], right=set())
    '<table><thead><tr><th>a&lt;b</th></tr></thead><tbody><tr><td>&amp;</td></tr></tbody></table>'
    """

    def line(tag: str, cells: Sequence[str]) -> str:
        def opened(at: int) -> str:
            return f'<{tag} style="text-align: right">' if at in right else f"<{tag}>"

        parts = (f"{opened(at)}{html.escape(cell)}</{tag}>" for at, cell in enumerate(cells))
        return f"<tr>{''.join(parts)}</tr>"

    body = "".join(line("td", row) for row in rows)
    return f"<table><thead>{line('th', columns)}</thead><tbody>{body}</tbody></table>"


@dataclasses.dataclass(frozen=True, slots=True)
class ResultTable:
    """A result as a table: a caption and at most ten rows."""

    caption: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    right: frozenset[int] = frozenset()
    """Columns aligned to the right."""

    def to_text(self) -> str:
        """Return at most 12 lines of text."""
        lines = [self.caption]
        if self.rows:
            lines.append(text_table(self.columns, self.rows, right=set(self.right)))
        return "\n".join(lines)

    def to_html(self) -> str:
        """Return an HTML table with its caption."""
        caption = f"<p>{html.escape(self.caption)}</p>"
        if not self.rows:
            return caption
        return caption + html_table(self.columns, self.rows, right=set(self.right))


class TableDisplay:
    """Mixin that prints a result as a short table and renders it in notebooks.

    >>> class Example(TableDisplay):
    ...     def _table(self):
    ...         return ResultTable("1 row", ["id", "loss"], [["7", "0.5"]], frozenset({0, 1}))
    >>> Example()
    1 row
    id  loss
     7   0.5
    """

    __slots__ = ()

    def _table(self) -> ResultTable:
        raise NotImplementedError

    def __repr__(self) -> str:
        return self._table().to_text()

    def _repr_html_(self) -> str:
        return self._table().to_html()


class TextDisplay:
    """Mixin that prints `__str__` everywhere, also in notebooks."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"


def pick_fields(value: object, *names: str) -> dict[str, Any]:
    """Return some attributes of an object by name.

    >>> pick_fields(1j, "real", "imag")
    {'real': 0.0, 'imag': 1.0}
    """
    return {name: getattr(value, name) for name in names}


def to_json_types(value: Any) -> Any:
    """Convert dataclasses, arrays and numbers to the types of JSON; NaN and infinity become None.

    >>> to_json_types({"a": (1, float("nan"))})
    {'a': [1, None]}
    """
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if hasattr(value, "tolist"):  # an array of numpy, or one of its numbers
        return to_json_types(value.tolist())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = dataclasses.fields(value)
        return {field.name: to_json_types(getattr(value, field.name)) for field in fields}
    if isinstance(value, dict):
        return {str(name): to_json_types(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_json_types(item) for item in value]
    return value.hex() if isinstance(value, bytes) else str(value)


class ProgressReport(Protocol):
    """Progress callback of a long operation."""

    def __call__(self, done: int, total: int, doing: str = "") -> None:
        """Report that `done` of `total` are done; `doing` describes the current step."""


@contextmanager
def progress(title: str, unit: str) -> Iterator[ProgressReport]:
    """Show progress on stderr; yields the callback."""
    if not sys.stderr.isatty():
        yield _lines(title, unit)
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
    from rich.progress import TimeRemainingColumn as Remaining

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    console = Console(stderr=True)
    with Progress(*columns, TextColumn(unit), Remaining(), console=console) as bar:
        task = bar.add_task(title)

        def update(done: int, total: int, doing: str = "") -> None:
            text = f"{title}: {doing}" if doing else title
            bar.update(task, completed=done, total=total, description=text)

        yield update


def _lines(title: str, unit: str) -> ProgressReport:
    last = time.monotonic()

    def report(done: int, total: int, doing: str = "") -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= 10:  # seconds between lines
            last = now
            at = f" ({doing})" if doing else ""
            print(f"{title}: {done} of {total} {unit}{at}", file=sys.stderr, flush=True)

    return report
