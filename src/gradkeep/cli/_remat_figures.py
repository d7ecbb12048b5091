"""`gradkeep remat pareto`, `ablate`, `accesses`, `banish`: sweeps and their pictures."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gradkeep._progress import progress
from gradkeep.cli._output import (
    JsonOption,
    print_json,
)
from gradkeep.cli._remat_experiments import tell_endings
from gradkeep.errors import RematError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gradkeep.remat._core import Policy
    from gradkeep.remat._experiment_config import Experiment
    from gradkeep.remat._picture import Look
    from gradkeep.remat._sweep import Case, Row

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
_LIVE_RATIOS = "0.9,0.8,0.7,0.6,0.5,0.4"
_FEWER = "0.9,0.7,0.5,0.3"


def pareto(
    logs: Annotated[
        list[Path] | None, typer.Argument(metavar="[LOG...]", help="Recorded steps.")
    ] = None,
    model: Annotated[
        list[str] | None,
        typer.Option("--model", help="A model of the zoo to train for real; may be repeated."),
    ] = None,
    size: Annotated[
        list[str] | None,
        typer.Option("--size", help="NAME=NUMBER, such as batch_size=16, of the models."),
    ] = None,
    out: OutOption = Path("pareto"),
    heuristics: Annotated[
        str | None, typer.Option("--heuristics", help="Names with commas; by default seven.")
    ] = None,
    ratios: RatiosOption = _RATIOS,
    live_heuristics: Annotated[
        str, typer.Option("--live-heuristics", help="Those that also decide on the live model.")
    ] = "dtr-eq",
    live_ratios: Annotated[
        str, typer.Option("--live-ratios", help="Budgets to train the live model in.")
    ] = _LIVE_RATIOS,
    placements: Annotated[
        str | None,
        typer.Option(
            "--placements", help="Of checkpoints, with commas: 4 segments, all, even, ..."
        ),
    ] = None,
    repeats: Annotated[
        int, typer.Option("--repeats", min=1, help="Timed steps per measurement.")
    ] = 5,
    limit: LimitOption = 2.0,
    workers: WorkersOption = None,
    json: JsonOption = False,
) -> None:
    """Draw the time that every budget costs, for every heuristic; one panel per log or model.

    A model is recorded and simulated, trained for real in each budget, online and by plan, and with
    torch.utils.checkpoint. Small graphs get their optimum. Writes pareto.csv, pareto.png, pareto.svg
    and a self-contained pareto.html.
    """
    from gradkeep.remat._experiment_pareto import pareto_experiment
    from gradkeep.remat._experiment_placements import PLACEMENTS
    from gradkeep.remat._picture import Look
    from gradkeep.remat._sweep import MAIN, optimum_cases

    if not logs and not model:
        raise RematError("nothing to draw", expected="recorded steps, or --model NAME")
    names = MAIN if heuristics is None else _names(heuristics)
    budgets = _numbers(ratios)
    measured: list[Row] = []
    if model:
        experiment = pareto_experiment(
            model,
            sizes=_sizes(size or []),
            heuristics=names,
            ratios=budgets,
            live_heuristics=_names(live_heuristics),
            live_ratios=_numbers(live_ratios),
            placements=_names(placements) if placements else PLACEMENTS,
            limit=limit,
            repeats=repeats,
        )
        measured = _trained(experiment, out / "trials", workers)
    look = Look("What a smaller memory budget costs")
    wanted = [
        *_cases(logs or [], names, budgets, limit),
        *optimum_cases(logs or [], ratios=budgets),
    ]
    _figure("pareto", look, wanted, out, workers, json=json, measured=measured)


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
    wanted = _cases(logs, names, _numbers(ratios), limit)
    _figure("ablate", look, wanted, out, workers, json=json)


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
    wanted = _cases(logs, names, _numbers(ratios), limit)
    _figure("accesses", look, wanted, out, workers, json=json)


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
    wanted = _cases(logs, names, _numbers(ratios), limit, policies)
    _figure("banish", look, wanted, out, workers, json=json)


def _cases(
    logs: Sequence[Path],
    heuristics: Sequence[str],
    ratios: Sequence[float],
    limit: float,
    policies: Sequence[Policy] = ("eager",),
) -> list[Case]:
    from gradkeep.remat._sweep import cases

    return cases(logs, heuristics=heuristics, ratios=ratios, policies=policies, limit=limit)


def _figure(
    name: str,
    look: Look,
    wanted: Sequence[Case],
    out: Path,
    workers: int | None,
    *,
    json: bool,
    measured: Sequence[Row] = (),
) -> None:
    from gradkeep.remat._picture import draw, sentences
    from gradkeep.remat._sweep import sweep, write_table

    table = out / f"{name}.csv"
    with progress(name, "simulations") as report:
        rows = sweep(wanted, table, workers=workers, progress=report)
    rows += measured
    if not rows:
        raise RematError("no trial gave anything that could be drawn")
    write_table(table, rows)
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


def _trained(experiment: Experiment, folder: Path, workers: int | None) -> list[Row]:
    """Run the trials of models; what went wrong is told and left out of the picture."""
    from gradkeep.remat._experiments import run_experiment

    for note in experiment.notes:
        print(f"note: {note}", file=sys.stderr)
    with progress("models", "trials") as told:
        report = run_experiment(experiment, folder, workers=workers, progress=told)
    tell_endings(report.results)
    return report.points


def _sizes(texts: Sequence[str]) -> dict[str, str]:
    pairs = [text.partition("=") for text in texts]
    wrong = [
        text for text, (_, sign, value) in zip(texts, pairs, strict=True) if not sign or not value
    ]
    if wrong:
        raise RematError("a size is NAME=NUMBER", found=wrong[0], expected="--size batch_size=16")
    return {name.strip(): value for name, _, value in pairs}


def _names(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(","))


def _numbers(text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",") if part.strip()]
    except ValueError as error:
        raise RematError(
            "ratios are numbers with commas between them", found=text, expected=_RATIOS
        ) from error
