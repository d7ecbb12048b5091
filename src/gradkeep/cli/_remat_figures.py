"""`gradkeep remat pareto`, `ablate`, `accesses`, `banish`: sweeps and their pictures."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gradkeep._errors import RematError
from gradkeep._progress import progress
from gradkeep.cli._options import JsonOption  # noqa: TC001 - typer reads it
from gradkeep.cli._output import print_json

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gradkeep.remat._core import Policy
    from gradkeep.remat._picture import Look

LogsArgument = Annotated[list[Path], typer.Argument(metavar="LOG...", help="Recorded steps.")]
OutOption = Annotated[
    Path, typer.Option("--out", help="Folder for the table and the pictures; a rerun resumes.")
]
RatiosOption = Annotated[
    str, typer.Option("--ratios", help="Budgets as shares of the peak, with commas.")
]
LimitOption = Annotated[
    float, typer.Option("--limit", help="More than so many times the base cost is thrashing.")
]
WorkersOption = Annotated[
    int | None, typer.Option("--workers", help="How many processes; by default one per core.")
]
_RATIOS = "1.0,0.9,0.8,0.7,0.6,0.5,0.4,0.3,0.2,0.1"
_FEWER = "0.9,0.7,0.5,0.3"


def pareto(
    logs: LogsArgument,
    out: OutOption = Path("pareto"),
    heuristics: Annotated[
        str | None, typer.Option("--heuristics", help="Names with commas; by default seven.")
    ] = None,
    ratios: RatiosOption = _RATIOS,
    limit: LimitOption = 2.0,
    workers: WorkersOption = None,
    json: JsonOption = False,
) -> None:
    """Draw the time that every budget costs, for every heuristic; one panel per log.

    Writes pareto.csv, pareto.png, pareto.svg and a self-contained pareto.html.
    """
    from gradkeep.remat._picture import Look
    from gradkeep.remat._sweep import MAIN

    names = MAIN if heuristics is None else tuple(heuristics.split(","))
    look = Look("What a smaller memory budget costs")
    _figure("pareto", look, logs, out, names, ratios, limit, workers, json=json)


def ablate(
    logs: LogsArgument,
    out: OutOption = Path("ablate"),
    ratios: RatiosOption = _FEWER,
    limit: LimitOption = 2.0,
    workers: WorkersOption = None,
    json: JsonOption = False,
) -> None:
    """Which parts of the heuristic matter: its neighbourhood, its size, its staleness."""
    from gradkeep.remat import heuristics
    from gradkeep.remat._picture import Look

    names = [name for name in heuristics() if name.startswith("ab-")]
    look = Look("What each part of the heuristic is worth")
    _figure("ablate", look, logs, out, names, ratios, limit, workers, json=json)


def accesses(
    logs: LogsArgument,
    out: OutOption = Path("accesses"),
    ratios: RatiosOption = _RATIOS,
    limit: LimitOption = 2.0,
    workers: WorkersOption = None,
    json: JsonOption = False,
) -> None:
    """How many storages each heuristic looks at to make its choices."""
    from gradkeep.remat._picture import Look

    look = Look(
        "How much looking around choosing takes", "accesses", "storages looked at", logarithmic=True
    )
    names = ("dtr", "dtr-eq", "dtr-local", "dtr-union")
    _figure("accesses", look, logs, out, names, ratios, limit, workers, json=json)


def banish(
    logs: LogsArgument,
    out: OutOption = Path("banish"),
    ratios: RatiosOption = _RATIOS,
    limit: LimitOption = 2.0,
    workers: WorkersOption = None,
    json: JsonOption = False,
) -> None:
    """What to do with storages nobody refers to: ignore it, evict them at once, or for ever."""
    from gradkeep.remat._picture import Look

    look = Look("What happens to storages that nobody refers to", by_policy=True)
    names = ("dtr-union", "dtr-local")
    policies: tuple[Policy, ...] = ("ignore", "eager", "banish")
    _figure("banish", look, logs, out, names, ratios, limit, workers, json=json, policies=policies)


def _figure(
    name: str,
    look: Look,
    logs: Sequence[Path],
    out: Path,
    heuristics: Sequence[str],
    ratios: str,
    limit: float,
    workers: int | None,
    *,
    json: bool,
    policies: Sequence[Policy] = ("eager",),
) -> None:
    from gradkeep.remat._picture import draw, sentences
    from gradkeep.remat._sweep import cases, sweep

    wanted = cases(
        logs, heuristics=heuristics, ratios=_numbers(ratios), policies=policies, limit=limit
    )
    table = out / f"{name}.csv"
    with progress(name, "simulations") as report:
        rows = sweep(wanted, table, workers=workers, progress=report)
    pictures = draw(rows, out, name, look)
    if json:
        failed = sum(row.status != "ok" for row in rows)
        files = [str(path) for path in (table, *pictures)]
        print_json({"rows": len(rows), "not_ok": failed, "files": files})
        return
    for line in sentences(rows):
        print(line)
    for path in (table, *pictures):
        print(f"wrote {path}")


def _numbers(text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",") if part.strip()]
    except ValueError as error:
        raise RematError(
            "ratios are numbers with commas between them", found=text, expected=_RATIOS
        ) from error
