"""Figures of a sweep.

Simulated lines are thin, measured ones thick: dashed for the online runtime, solid for plans.
Checkpoints are points without a line, because each placement has one peak; the optimum is dotted,
with stars.
"""

from __future__ import annotations

import html
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gradkeep._environment import install_hint
from gradkeep.errors import MissingExtraError

if TYPE_CHECKING:
    import os
    from collections.abc import Sequence

    from gradkeep.remat.simulator._sweep import RowSource, SweepRow

_COLORS = (
    *("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#999999"),
    *("#8c510a", "#5e3c99", "#1b7837", "#b2182b", "#2166ac", "#bf812d", "#762a83", "#35978f"),
)
MARKERS = "o^svPX<>hd8p1"  # plans use the diamond
_STYLES: dict[RowSource, dict[str, Any]] = {
    "simulated": {"linewidth": 1.2, "markersize": 4},
    "online": {"linewidth": 2.4, "linestyle": "--", "markersize": 8, "markerfacecolor": "white"},
    "planned": {"linewidth": 3.0, "marker": "D", "markersize": 8, "markerfacecolor": "white"},
    "checkpoint": {"linestyle": "none", "marker": "$C$", "markersize": 8},
    "optimum": {"linewidth": 1.6, "linestyle": ":", "marker": "*", "markersize": 10},
}
_FIXED_COLORS = {"planned": "#b2182b", "checkpoint": "#444444", "optimum": "#000000"}
_LABELS: dict[RowSource, str] = {
    "simulated": "{}, simulated",
    "online": "{}, online, measured",
    "planned": "planned, measured",
    "checkpoint": "torch.utils.checkpoint, measured",
    "optimum": "optimum, integer program",
}
_ENDED = {"$T$": ("thrash", "gave up"), "$M$": ("oom", "over budget", "infeasible")}


@dataclass(frozen=True, slots=True)
class FigureStyle:
    """Titles and axes of a figure of a sweep."""

    title: str
    measure: str = "overhead"
    """Column of the vertical axis."""
    label: str = "time, as a multiple of training with enough memory"
    logarithmic: bool = False
    by_policy: bool = False
    """Draw one line per heuristic and policy instead of per heuristic."""
    titles: tuple[tuple[str, str], ...] = ()
    """Titles of the panels by log; others get the first part of the log's name."""


def draw_sweep(
    rows: Sequence[SweepRow], folder: str | os.PathLike[str], name: str, style: FigureStyle
) -> list[Path]:
    """Write `name.png`, `name.svg` and a self-contained `name.html` into the folder."""
    paths = save_figure(_figure(rows, style), Path(folder), name)
    page = Path(folder) / f"{name}.html"
    page.write_text(_page(rows, style, paths[1].read_text()))
    return [*paths, page]


def new_figure(width: float, height: float) -> Any:
    """Create an empty matplotlib figure, in inches."""
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingExtraError("figures need matplotlib", fix=install_hint("remat")) from error
    # A fixed salt, and no date: the same rows give the same file.
    mpl.rcParams["svg.hashsalt"] = "gradkeep"
    return Figure(figsize=(width, height), layout="constrained")


def save_figure(figure: Any, folder: Path, name: str) -> list[Path]:
    """Write `name.png` and `name.svg` into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{name}.png", folder / f"{name}.svg"]
    figure.savefig(paths[0], dpi=110)
    figure.savefig(paths[1], metadata={"Date": None})
    return paths


def _figure(rows: Sequence[SweepRow], style: FigureStyle) -> Any:
    logs = list(dict.fromkeys(row.log for row in rows))
    # Simulated lines first, so that measured ones are drawn on top.
    keys = dict.fromkeys(_line_key(row, style) for row in rows)
    lines = sorted(keys, key=lambda line: list(_STYLES).index(line[1]))
    across = min(3, len(logs))
    down = -(-len(logs) // across)
    figure = new_figure(4.6 * across + 2.9, 3.6 * down + 0.9)
    axes = list(figure.subplots(down, across, squeeze=False).flat)
    for axis, log in zip(axes, logs, strict=False):
        _panel(axis, [row for row in rows if row.log == log], lines, style)
        axis.set_title(dict(style.titles).get(log, Path(log).name.split("-")[0]), fontsize=11)
    for axis in axes[len(logs) :]:
        axis.set_visible(False)
    first = figure.axes[0]
    handles, labels = first.get_legend_handles_labels()
    if handles:
        figure.legend(handles, labels, loc="outside right center", frameon=False, fontsize=9)
    # A heuristic can beat this optimum, because it may keep one result of several.
    merged = "\n(the optimum merges all results of an operator)"
    if not any(source == "optimum" for _, source in lines):
        merged = ""
    figure.suptitle(style.title, fontsize=12)
    figure.supxlabel(
        "memory budget, as a share of the peak without one\n"
        "(T: thrashes from here on; M: does not fit from here on)" + merged,
        fontsize=10,
    )
    figure.supylabel(style.label, fontsize=10)
    return figure


def _panel(
    axis: Any, rows: Sequence[SweepRow], lines: Sequence[tuple[str, RowSource]], style: FigureStyle
) -> None:
    good = [value for row in rows if row.status == "ok" and (value := getattr(row, style.measure))]
    top = max(good, default=1.0)
    # With large overheads, small differences stay visible on a logarithmic axis.
    steep = style.logarithmic or (style.measure == "overhead" and top > 4)
    failed_at = top * (1.6 if steep else 1.06)
    for number, line in enumerate(lines):
        label, source = line
        color = _FIXED_COLORS.get(source, _COLORS[number % len(_COLORS)])
        line_style = {"color": color, "marker": MARKERS[number % len(MARKERS)], **_STYLES[source]}
        mine = sorted((r for r in rows if _line_key(r, style) == line), key=lambda row: row.ratio)
        # Only budgets in which all seeds finished, as in the original.
        seeds: dict[float, list[SweepRow]] = {}
        for row in mine:
            seeds.setdefault(row.ratio, []).append(row)
        values = {
            ratio: [getattr(row, style.measure) for row in same]
            for ratio, same in seeds.items()
            if all(row.status == "ok" for row in same)
        }
        means = [sum(several) / len(several) for several in values.values()]
        axis.plot(list(values), means, label=label, **line_style)
        low, high = list(map(min, values.values())), list(map(max, values.values()))
        if low != high:
            axis.fill_between(list(values), low, high, color=color, alpha=0.2, linewidth=0)
        # Mark the largest budget at which it fails, in the color of the line.
        for sign, statuses in _ENDED.items():
            ended = [row.ratio for row in mine if row.status in statuses]
            if ended:
                height = failed_at + (top - min(good, default=1.0)) * 0.045 * number
                axis.plot([max(ended)], [height], marker=sign, color=color, linestyle="none")
    if steep:
        axis.set_yscale("log")
        if not style.logarithmic:
            axis.yaxis.set_major_formatter("{x:g}")
            axis.yaxis.set_minor_formatter("{x:g}")
    axis.set_xlim(1.03, 0.05)
    axis.grid(alpha=0.25)


def _line_key(row: SweepRow, style: FigureStyle) -> tuple[str, RowSource]:
    """Return the label and source that identify a line."""
    policy = row.policy if row.releases else "no releases"
    name = f"{row.heuristic}, {policy}" if style.by_policy else row.heuristic
    return _LABELS[row.source].format(name), row.source


def summarize_sweep(rows: Sequence[SweepRow]) -> list[str]:
    """Summarize a table: per log and source the fastest at half of the memory, and the smallest budget."""
    sentences = []
    for log, source in dict.fromkeys((row.log, row.source) for row in rows):
        mine = [row for row in rows if (row.log, row.source) == (log, source)]
        # A budget above the peak has no effect.
        good = [row for row in mine if row.status == "ok" and row.ratio <= 1]
        name = Path(log).name.split("-")[0]
        # Exclude heuristics with several seeds: the best one would be luck.
        chosen = {row.heuristic for row in good if row.seed}
        good = [row for row in good if row.heuristic not in chosen]
        at_half = [row for row in good if row.ratio == 0.5]
        if at_half:
            best = min(at_half, key=lambda row: row.overhead)
            sentences.append(
                f"At 50% of its memory {name} takes {best.overhead:.2f}x the time ({_method_label(best)})."
            )
        if good:
            least = min(good, key=lambda row: (row.ratio, row.overhead))
            sentences.append(
                f"{name} still runs at {least.ratio:.0%}: {least.overhead:.2f}x ({_method_label(least)})."
            )
    return sentences


def _method_label(row: SweepRow) -> str:
    if row.source == "checkpoint":
        return f"{_LABELS[row.source]}, {row.heuristic}"
    return _LABELS[row.source].format(row.heuristic)


def _page(rows: Sequence[SweepRow], style: FigureStyle, svg: str) -> str:
    sentences = "".join(f"<li>{html.escape(line)}</li>" for line in summarize_sweep(rows))
    head = (
        *("log", "source", "heuristic", "policy", "ratio", "budget", "peak", "status", "overhead"),
        *("evictions", "accesses"),
    )
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
        f"<title>{html.escape(style.title)}</title><link rel=icon href='data:,'>"
        "<style>body{font:15px system-ui;margin:2rem;max-width:80rem}svg{max-width:100%;height:auto}"
        "table{border-collapse:collapse;font-size:13px}td,th{padding:.15rem .6rem;text-align:left;"
        "border-bottom:1px solid #ddd}</style>"
        f"<h1>{html.escape(style.title)}</h1><ul>{sentences}</ul>{drawing}"
        f"<details><summary>All {len(rows)} points</summary><table><tr>{titles}</tr>{body}"
        "</table></details></html>\n"
    )


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return Path(value).name.split("-")[0] if isinstance(value, str) and "/" in value else str(value)
