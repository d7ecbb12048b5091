"""One picture of a sweep that a person understands at a glance."""

from __future__ import annotations

import html
import io
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gradkeep._errors import MissingExtra

if TYPE_CHECKING:
    import os
    from collections.abc import Sequence

    from gradkeep.remat._sweep import Row

_COLOURS = (
    *("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#999999"),
    *("#8c510a", "#5e3c99", "#1b7837", "#b2182b", "#2166ac", "#bf812d", "#762a83", "#35978f"),
)
_MARKERS = "o^sDvP*X<>hd8p1"


@dataclass(frozen=True, slots=True)
class Look:
    """What a picture of a sweep shows."""

    title: str
    measure: str = "overhead"
    """The column on the vertical axis."""
    label: str = "time, as a multiple of training with enough memory"
    logarithmic: bool = False
    by_policy: bool = False
    """Tell lines apart by heuristic and policy instead of by heuristic alone."""


def draw(rows: Sequence[Row], folder: str | os.PathLike[str], name: str, look: Look) -> list[Path]:
    """Write `name.png`, `name.svg` and a self-contained `name.html` into the folder."""
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    figure = _figure(rows, look)
    paths = [target / f"{name}.{ending}" for ending in ("png", "svg", "html")]
    figure.savefig(paths[0], dpi=110)
    # A fixed salt and no date: the same rows give the same file.
    figure.savefig(paths[1], metadata={"Date": None})
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    paths[2].write_text(_page(rows, look, buffer.getvalue()))
    return paths


def _figure(rows: Sequence[Row], look: Look) -> Any:
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingExtra(
            "pictures need matplotlib", fix='pip install "gradkeep[remat]"'
        ) from error
    mpl.rcParams["svg.hashsalt"] = "gradkeep"
    logs = list(dict.fromkeys(row.log for row in rows))
    lines = list(dict.fromkeys(_line_of(row, look) for row in rows))
    across = min(3, len(logs))
    down = -(-len(logs) // across)
    figure = Figure(figsize=(4.6 * across + 1.8, 3.6 * down + 0.9), layout="constrained")
    axes = list(figure.subplots(down, across, squeeze=False).flat)
    for axis, log in zip(axes, logs, strict=False):
        _panel(axis, [row for row in rows if row.log == log], lines, look)
        axis.set_title(Path(log).name.split("-")[0], fontsize=11)
    for axis in axes[len(logs) :]:
        axis.set_visible(False)
    first = figure.axes[0]
    handles, labels = first.get_legend_handles_labels()
    if handles:
        figure.legend(handles, labels, loc="outside right upper", frameon=False, fontsize=9)
    figure.suptitle(look.title, fontsize=12)
    figure.supxlabel(
        "memory budget, as a share of the peak without one\n"
        "(T: from here on it thrashes; M: from here on it runs out of memory)",
        fontsize=10,
    )
    figure.supylabel(look.label, fontsize=10)
    return figure


def _panel(axis: Any, rows: Sequence[Row], lines: Sequence[str], look: Look) -> None:
    good = [getattr(row, look.measure) for row in rows if row.status == "ok"]
    top = max(good, default=1.0)
    failed_at = top * (1.6 if look.logarithmic else 1.06)
    for number, line in enumerate(lines):
        colour, marker = _COLOURS[number % len(_COLOURS)], _MARKERS[number % len(_MARKERS)]
        mine = sorted((r for r in rows if _line_of(r, look) == line), key=lambda row: row.ratio)
        points = [(row.ratio, getattr(row, look.measure)) for row in mine if row.status == "ok"]
        axis.plot(
            [x for x, _ in points],
            [y for _, y in points],
            marker=marker,
            markersize=4,
            linewidth=1.4,
            color=colour,
            label=line,
        )
        # Where a heuristic gives up: its own mark, in its own colour, just below where it still ran.
        for status, sign in (("thrash", "$T$"), ("oom", "$M$")):
            ended = [row.ratio for row in mine if row.status == status]
            if ended:
                height = failed_at + (top - min(good, default=1.0)) * 0.045 * number
                axis.plot([max(ended)], [height], marker=sign, color=colour, linestyle="none")
    if look.logarithmic:
        axis.set_yscale("log")
    axis.set_xlim(1.03, 0.05)
    axis.grid(alpha=0.25)


def _line_of(row: Row, look: Look) -> str:
    return f"{row.heuristic}, {row.policy}" if look.by_policy else row.heuristic


def sentences(rows: Sequence[Row]) -> list[str]:
    """What the table says, in words: the cheapest heuristic at half of the memory, per log."""
    found = []
    for log in dict.fromkeys(row.log for row in rows):
        name = Path(log).name.split("-")[0]
        at_half = [r for r in rows if r.log == log and r.ratio == 0.5 and r.status == "ok"]
        good = [row for row in rows if row.log == log and row.status == "ok"]
        if at_half:
            best = min(at_half, key=lambda row: row.overhead)
            found.append(
                f"At 50% of its memory {name} takes {best.overhead:.2f}x the time ({best.heuristic})."
            )
        if good:
            least = min(good, key=lambda row: (row.ratio, row.overhead))
            found.append(
                f"{name} still runs at {least.ratio:.0%}: {least.overhead:.2f}x ({least.heuristic})."
            )
    return found


def _page(rows: Sequence[Row], look: Look, svg: str) -> str:
    said = "".join(f"<li>{html.escape(line)}</li>" for line in sentences(rows))
    head = ("log", "heuristic", "policy", "ratio", "status", "overhead", "evictions", "accesses")
    body = "".join(
        "<tr>"
        + "".join(f"<td>{html.escape(_cell(getattr(row, name)))}</td>" for name in head)
        + "</tr>"
        for row in rows
    )
    titles = "".join(f"<th>{name}</th>" for name in head)
    drawing = svg[svg.index("<svg") :]
    return (
        "<!doctype html><html lang=en><meta charset=utf-8>"
        f"<title>{html.escape(look.title)}</title><link rel=icon href='data:,'>"
        "<style>body{font:15px system-ui;margin:2rem;max-width:80rem}svg{max-width:100%;height:auto}"
        "table{border-collapse:collapse;font-size:13px}td,th{padding:.15rem .6rem;text-align:left;"
        "border-bottom:1px solid #ddd}</style>"
        f"<h1>{html.escape(look.title)}</h1><ul>{said}</ul>{drawing}"
        f"<details><summary>All {len(rows)} simulations</summary><table><tr>{titles}</tr>{body}"
        "</table></details></html>\n"
    )


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return Path(value).name.split("-")[0] if isinstance(value, str) and "/" in value else str(value)
