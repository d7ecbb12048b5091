"""`gradkeep remat pareto`, `figures`, `ablate`, `accesses`, `banish`, `experiments`: sweeps, pictures."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gradkeep._arguments import shown
from gradkeep._display import progress
from gradkeep.cli._files import MAX_WORKERS, input_file, output_folder
from gradkeep.cli._options import JsonOption, print_json
from gradkeep.cli._remat import LimitOption  # noqa: TC001 - typer reads it
from gradkeep.errors import RematError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from gradkeep.compat.dtr.experiments._config import DtrExperiment
    from gradkeep.remat.simulator._picture import PictureStyle
    from gradkeep.remat.simulator._sweep import PaperFigure, SweepCase, SweepRow

LogsArgument = Annotated[list[Path], typer.Argument(metavar="LOG...", help="Recorded steps.")]
OutOption = Annotated[
    Path, typer.Option("--out", help="Folder for the table and the pictures; a rerun resumes.")
]
RatiosOption = Annotated[
    str, typer.Option("--ratios", help="Budgets as shares of the peak, with commas.")
]
WorkersOption = Annotated[
    int | None,
    typer.Option(
        "--workers", min=1, max=MAX_WORKERS, help="How many processes; by default one per core."
    ),
]
_RATIOS = "1.0,0.9,0.8,0.7,0.6,0.5,0.4,0.3,0.2,0.1"
_LIVE_RATIOS = "0.9,0.8,0.7,0.6,0.5,0.4"


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
        int, typer.Option("--repeats", min=1, max=10_000, help="Timed steps per measurement.")
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
    from gradkeep.compat.dtr.experiments._config import pareto_experiment
    from gradkeep.compat.dtr.experiments._trial import PLACEMENTS
    from gradkeep.remat.simulator._picture import PictureStyle
    from gradkeep.remat.simulator._sweep import MAIN_HEURISTICS, optimum_cases, sweep_cases

    if not logs and not model:
        raise RematError("nothing to draw", expected="recorded steps, or --model NAME")
    names = MAIN_HEURISTICS if heuristics is None else _names(heuristics)
    budgets = _numbers(ratios)
    measured: list[SweepRow] = []
    if model:
        output_folder(out, error=RematError)
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
    look = PictureStyle("What a smaller memory budget costs")
    for log in logs or []:
        input_file(log, error=RematError)
    wanted = [
        *sweep_cases(logs or [], heuristics=names, ratios=budgets, limit=limit),
        *optimum_cases(logs or [], ratios=budgets),
    ]
    _figure("pareto", look, wanted, out, workers, json=json, measured=measured)


def ablate(
    logs: LogsArgument,
    out: OutOption = Path("ablate"),
    ratios: RatiosOption = "0.9,0.7,0.5,0.3",
    limit: LimitOption = 2.0,
    workers: WorkersOption = None,
    json: JsonOption = False,
) -> None:
    """Which parts of the heuristic matter: its neighbourhood, its size, its staleness."""
    from gradkeep.remat.simulator._sweep import ABLATE

    _simulated(ABLATE, logs, out, ratios, limit, workers, json=json)


def accesses(
    logs: LogsArgument,
    out: OutOption = Path("accesses"),
    ratios: RatiosOption = _RATIOS,
    limit: LimitOption = 2.0,
    workers: WorkersOption = None,
    json: JsonOption = False,
) -> None:
    """How many storages each heuristic looks at to make its choices."""
    from gradkeep.remat.simulator._sweep import ACCESSES

    _simulated(ACCESSES, logs, out, ratios, limit, workers, json=json)


def banish(
    logs: LogsArgument,
    out: OutOption = Path("banish"),
    ratios: RatiosOption = _RATIOS,
    limit: LimitOption = 2.0,
    workers: WorkersOption = None,
    json: JsonOption = False,
) -> None:
    """What to do with storages nobody refers to: drop them for ever, evict them at once, or nothing.

    The curves are the paper's: dtr-union that banishes, dtr that evicts at once, dtr without releases.
    """
    from gradkeep.remat.simulator._sweep import BANISH

    _simulated(BANISH, logs, out, ratios, limit, workers, json=json)


def figures(
    logs: Annotated[
        list[Path],
        typer.Argument(metavar="LOGS...", help="A folder of logs, a manifest, or logs."),
    ],
    out: OutOption = Path("figures"),
    ratios: RatiosOption = _RATIOS,
    limit: LimitOption = 2.0,
    workers: WorkersOption = None,
    json: JsonOption = False,
) -> None:
    """All simulated figures of the paper: pareto, banishing, ablation in four parts, accesses.

    Random choices are drawn as mean and range of ten seeds, accesses are counted as the original
    counts them. Writes figures.csv and one picture each as .png, .svg and .html.
    """
    from gradkeep.remat.simulator._picture import draw_sweep
    from gradkeep.remat.simulator._sweep import PAPER_FIGURES, find_logs, sweep

    found, notes = find_logs(logs)
    _show_notes(notes)
    paths = [log.path for log in found]
    titles = tuple((str(log.path), log.title) for log in found)
    shares = _numbers(ratios)
    cases = [case for one in PAPER_FIGURES for case in one.cases(paths, ratios=shares, limit=limit)]
    table = output_folder(out, error=RematError) / "figures.csv"
    with progress("figures", "simulations") as report:
        rows = sweep(cases, table, workers=workers, progress=report)
    files = [table]
    for one in PAPER_FIGURES:
        look = dataclasses.replace(one.look, titles=titles)
        files += draw_sweep(one.rows(rows), out, one.name, look)
    _show_files(rows, files, json=json, logs=len(found), notes=notes)


def experiments(
    config: Annotated[
        Path, typer.Argument(metavar="CONFIG", help="JSON or YAML: commands per model.")
    ],
    out: Annotated[
        Path, typer.Option("--out", help="Folder for everything; a rerun resumes.")
    ] = Path("experiments"),
    workers: WorkersOption = None,
    retry_failed: Annotated[
        bool, typer.Option("--retry-failed", help="Run trials again that failed before.")
    ] = False,
    json: JsonOption = False,
) -> None:
    """Run the trials of a configuration: training steps, plain and in budgets, live and simulated.

    Writes results/, logs/, summary/ and graphs/. Measurements run one at a time. Interrupt it at any
    moment and run it again: what is done stays done. Exit code 3 if trials failed.
    """
    from gradkeep.compat.dtr.experiments._config import read_experiment
    from gradkeep.compat.dtr.experiments._run import run_experiment
    from gradkeep.remat.simulator._picture import sweep_sentences

    input_file(config, error=RematError)
    output_folder(out, error=RematError)
    experiment = read_experiment(config)
    _show_notes(experiment.notes)
    with progress("experiments", "trials") as told:
        report = run_experiment(
            experiment, out, workers=workers, retry_failed=retry_failed, progress=told
        )
    _show_notes(report.notes)
    if json:
        counts = {"trials": len(report.results), "ran": report.ran, "reused": report.reused}
        files = [str(path) for path in report.files]
        notes = [*experiment.notes, *report.notes]
        told_all = {"failed": report.failed, "results": report.results, "files": files}
        print_json({**counts, **told_all, "notes": notes})
    else:
        print(f"{report.ran} trials run, {report.reused} were there already")
        for line in sweep_sentences(report.points):
            print(line)
        for path in report.files:
            print(f"wrote {path}")
    show_endings(report.results)
    if report.failed:
        print(f"{report.failed} failed; --retry-failed runs them again", file=sys.stderr)
        raise typer.Exit(3)


def show_endings(results: Iterable[dict[str, Any]]) -> None:
    """Say why trials have no result, and why live ones did not stay within their budget."""
    lines = dict.fromkeys(line for result in results if (line := _ending(result)) is not None)
    for line in lines:
        print(line, file=sys.stderr)


def _ending(result: dict[str, Any]) -> str | None:
    from gradkeep.compat.dtr.experiments._trial import FAILED

    kind, status = result["type"], result["status"]
    said = (str(result.get("message", "")).splitlines() or [""])[-1]
    if status in FAILED:
        which = f" {result['key']}"
    elif status == "too large":
        which = ""
    # A placement that a model does not have is no news; that a budget is too small is.
    elif kind in ("dtr", "planned") and (status != "ok" or said):
        which = f" {result['ratio'] or result['budget']}"
    else:
        return None
    return f"{result['model']} {kind}{which}: {status}: {said}"


def _show_notes(notes: Iterable[str]) -> None:
    for note in notes:
        print(f"note: {note}", file=sys.stderr)


def _simulated(
    figure: PaperFigure,
    logs: Sequence[Path],
    out: Path,
    ratios: str,
    limit: float,
    workers: int | None,
    *,
    json: bool,
) -> None:
    for log in logs:
        input_file(log, error=RematError)
    cases = figure.cases(logs, ratios=_numbers(ratios), limit=limit)
    _figure(figure.name, figure.look, cases, out, workers, json=json)


def _figure(
    name: str,
    look: PictureStyle,
    wanted: Sequence[SweepCase],
    out: Path,
    workers: int | None,
    *,
    json: bool,
    measured: Sequence[SweepRow] = (),
) -> None:
    from gradkeep.remat.simulator._picture import draw_sweep, sweep_sentences
    from gradkeep.remat.simulator._sweep import sweep, write_table

    table = output_folder(out, error=RematError) / f"{name}.csv"
    with progress(name, "simulations") as report:
        rows = sweep(wanted, table, workers=workers, progress=report)
    rows += measured
    if not rows:
        raise RematError("no trial gave anything that could be drawn")
    write_table(table, rows)
    files = [table, *draw_sweep(rows, out, name, look)]
    for line in () if json else sweep_sentences(rows):
        print(line)
    _show_files(rows, files, json=json)


def _show_files(
    rows: Sequence[SweepRow], files: Sequence[Path], *, json: bool, **more: Any
) -> None:
    if json:
        failed = sum(row.status != "ok" for row in rows)
        told = {"rows": len(rows), "not_ok": failed, "files": [str(path) for path in files]}
        print_json({**told, **more})
        return
    for path in files:
        print(f"wrote {path}")


def _trained(experiment: DtrExperiment, folder: Path, workers: int | None) -> list[SweepRow]:
    """Run the trials of models; what went wrong is told and left out of the picture."""
    from gradkeep.compat.dtr.experiments._run import run_experiment

    _show_notes(experiment.notes)
    with progress("models", "trials") as told:
        report = run_experiment(experiment, folder, workers=workers, progress=told)
    show_endings(report.results)
    return report.points


def _sizes(texts: Sequence[str]) -> dict[str, str]:
    sizes = {}
    for text in texts:
        name, _, value = text.partition("=")
        if not value:
            raise RematError("a size is NAME=NUMBER", found=text, expected="--size batch_size=16")
        sizes[name.strip()] = value
    return sizes


def _names(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(","))


def _numbers(text: str) -> list[float]:
    """Shares of the peak: one or more, each above 0."""
    try:
        found = [float(part) for part in text.split(",") if part.strip()]
    except ValueError:
        found = []
    if not found or not all(0 < ratio <= 1000 for ratio in found):
        raise RematError(
            "ratios are numbers above 0 with commas between them",
            found=shown(text),
            expected=_RATIOS,
        )
    return found
