"""Plain text and HTML tables, and sizes as people say them."""

from __future__ import annotations

import html
from datetime import UTC, datetime
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


def format_size(count: float) -> str:
    """Bytes in decimal units.

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
    """How many times smaller; a dash if that cannot be said.

    >>> format_ratio(23.61), format_ratio(None)
    ('23.6x', '-')
    """
    return "-" if ratio is None else f"{ratio:.1f}x"


def format_time(seconds: float) -> str:
    """A time in UTC, to the second; a dash if it is unknown.

    >>> format_time(0.0), format_time(1_700_000_000.5)
    ('-', '2023-11-14 22:13:20')
    """
    return "-" if not seconds else datetime.fromtimestamp(int(seconds), UTC).strftime("%F %T")


def text_table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, right: set[int]) -> str:
    """Aligned columns; those with a number in `right` are aligned to the right.

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
    """The same as HTML, everything escaped.

    >>> html_table(["a<b"], [["&"]], right=set())
    '<table><thead><tr><th>a&lt;b</th></tr></thead><tbody><tr><td>&amp;</td></tr></tbody></table>'
    """

    def line(tag: str, cells: Sequence[str]) -> str:
        def opened(at: int) -> str:
            return f'<{tag} style="text-align: right">' if at in right else f"<{tag}>"

        made = (f"{opened(at)}{html.escape(cell)}</{tag}>" for at, cell in enumerate(cells))
        return f"<tr>{''.join(made)}</tr>"

    body = "".join(line("td", row) for row in rows)
    return f"<table><thead>{line('th', columns)}</thead><tbody>{body}</tbody></table>"
