"""`gradkeep remat pareto`, `figures`, `ablate`, `accesses`, `banish`, `experiments`: sweeps and plots."""

from __future__ import annotations

import dataclasses
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gradkeep._arguments import short_repr
from gradkeep._display import progress
from gradkeep.cli._inputs import input_file, output_folder
from gradkeep.cli._options import MAX_WORKERS, JsonOption, parse_pairs, print_json, split_words
from gradkeep.cli._remat import LimitOption  # noqa: TC001 - typer reads it
from gradkeep.errors import RematError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from gradkeep.compat.dtr.experiments._config import DtrExperiment
    from gradkeep.remat.simulator._plots import FigureStyle
    from gradkeep.remat.simulator._sweep import PaperFigure, SweepCase, SweepRow

LogsArgument = Annotated[list[Path], typer.Argument(metavar="LOG...", help="Recorded steps.")]
OutOption = Annotated[
    Path, typer.Option("--out", help="Folder for tables and plots; a rerun resumes.")
]
RatiosOption = Annotated[
    str, typer.Option("--ratios", help="Budgets as shares of the peak, comma-separated.")
]
WorkersOption = Annotated[
    int | None,
    typer.Option("--workers", min=1, max=MAX_WORKERS, help="Processes; default: one per core."),
]


@dataclass(frozen=True, slots=True)
class SweepOptions:
    """How the simulations of a figure run."""

    limit: LimitOption = 2.0
    workers: WorkersOption = None
    json: JsonOption = False


_RATIOS = "1.0,0.9,0.8,0.7,0.6,0.5,0.4,0.3,0.2,0.1"
_LIVE_RATIOS = "0.9,0.8,0.7,0.6,0.5,0.4"


def pareto(
    logs: Annotated[list[Path] | None, typer.Argument(metavar="[LOG...]")] = None,
    model: list[str] | None = None,
    size: list[str] | None = None,
    out: OutOption = Path("pareto"),
    heuristics: str | None = None,
    ratios: RatiosOption = _RATIOS,
    live_heuristics: str = "dtr-eq",
    live_ratios: str = _LIVE_RATIOS,
    placements: str | None = None,
    repeats: Annotated[int, typer.Option(min=1, max=10_000)] = 5,
    *,
    sweeping: SweepOptions,
) -> None:
    """Plot slowdown against budget for every heuristic, one panel per log or model.

    A model is recorded and simulated, and trained in each budget: online, planned, and with
    torch.utils.checkpoint. Small graphs also get the optimum. Writes pareto.csv, pareto.png,
    pareto.svg and a self-contained pareto.html.

    Options:
        logs: Recorded steps.
        model: A reference model to train; repeatable.
        size: Size of the models: batch_size=16; repeatable.
        heuristics: Comma-separated names; default: seven.
        live_heuristics: Heuristics to train the live model with.
        live_ratios: Budgets to train the live model in.
        placements: Checkpoint placements: 4 segments, all, even, ...
        repeats: Timed steps per measurement.
    """
    from gradkeep.compat.dtr.experiments._config import pareto_experiment
    from gradkeep.compat.dtr.experiments._trial import PLACEMENTS
    from gradkeep.remat.simulator._plots import FigureStyle
    from gradkeep.remat.simulator._sweep import MAIN_HEURISTICS, optimum_cases, sweep_cases

    if not logs and not model:
        raise RematError(
            "nothing to plot",
            code="cli.nothing_to_plot",
            fix="Pass recorded steps, or --model NAME.",
        )
    names = MAIN_HEURISTICS if heuristics is None else split_words(heuristics)
    budgets = _numbers(ratios)
    measured: list[SweepRow] = []
    if model:
        output_folder(out, error=RematError)
        experiment = pareto_experiment(
            model,
            sizes=parse_pairs(size or [], example="batch_size=16"),
            heuristics=names,
            ratios=budgets,
            live_heuristics=split_words(live_heuristics),
            live_ratios=_numbers(live_ratios),
            placements=split_words(placements) if placements else PLACEMENTS,
            limit=sweeping.limit,
            repeats=repeats,
        )
        measured = _trained(experiment, out / "trials", sweeping.workers)
    look = FigureStyle("Time against memory budget")
    for log in logs or []:
        input_file(log, error=RematError)
    cases = [
        *sweep_cases(logs or [], heuristics=names, ratios=budgets, limit=sweeping.limit),
        *optimum_cases(logs or [], ratios=budgets),
    ]
    _figure("pareto", look, cases, out, sweeping, measured)


def ablate(
    logs: LogsArgument,
    out: OutOption = Path("ablate"),
    ratios: RatiosOption = "0.9,0.7,0.5,0.3",
    *,
    sweeping: SweepOptions,
) -> None:
    """Compare the parts of the heuristic: neighborhood, size and staleness."""
    from gradkeep.remat.simulator._sweep import ABLATE

    _simulated(ABLATE, logs, out, ratios, sweeping)


def accesses(
    logs: LogsArgument,
    out: OutOption = Path("accesses"),
    ratios: RatiosOption = _RATIOS,
    *,
    sweeping: SweepOptions,
) -> None:
    """Count the storages that each heuristic accesses to make its choices."""
    from gradkeep.remat.simulator._sweep import ACCESSES

    _simulated(ACCESSES, logs, out, ratios, sweeping)


def banish(
    logs: LogsArgument,
    out: OutOption = Path("banish"),
    ratios: RatiosOption = _RATIOS,
    *,
    sweeping: SweepOptions,
) -> None:
    """Compare deallocation policies: banish unreferenced storages, evict them at once, or ignore them.

    The curves are the paper's: dtr-union with banishing, dtr with eager eviction, dtr without releases.
    """
    from gradkeep.remat.simulator._sweep import BANISH

    _simulated(BANISH, logs, out, ratios, sweeping)


def figures(
    logs: Annotated[list[Path], typer.Argument(metavar="LOGS...")],
    out: OutOption = Path("figures"),
    ratios: RatiosOption = _RATIOS,
    *,
    sweeping: SweepOptions,
) -> None:
    """Plot all simulated figures of the DTR paper: pareto, banishing, ablation, accesses.

    Random choices are shown as mean and range of ten seeds; accesses are counted as in the original.
    Writes figures.csv and each plot as .png, .svg and .html.

    Options:
        logs: A folder of logs, a manifest, or logs.
    """
    from gradkeep.remat.simulator._plots import draw_sweep
    from gradkeep.remat.simulator._sweep import PAPER_FIGURES, find_logs, sweep

    found_logs, notes = find_logs(logs)
    _show_notes(notes)
    paths = [log.path for log in found_logs]
    titles = tuple((str(log.path), log.title) for log in found_logs)
    shares, limit = _numbers(ratios), sweeping.limit
    cases = [case for one in PAPER_FIGURES for case in one.cases(paths, ratios=shares, limit=limit)]
    table = output_folder(out, error=RematError) / "figures.csv"
    with progress("figures", "simulations") as report:
        rows = sweep(cases, table, workers=sweeping.workers, progress=report)
    files = [table]
    for one in PAPER_FIGURES:
        look = dataclasses.replace(one.style, titles=titles)
        files += draw_sweep(one.rows(rows), out, one.name, look)
    _show_files(rows, files, json=sweeping.json, logs=len(found_logs), notes=notes)


def experiments(
    config: Annotated[Path, typer.Argument(metavar="CONFIG")],
    out: Path = Path("experiments"),
    workers: WorkersOption = None,
    retry_failed: bool = False,
    json: JsonOption = False,
) -> None:
    """Run the trials of a configuration: training steps, plain and in budgets, live and simulated.

    Writes results/, logs/, summary/ and graphs/. Measurements run one at a time. An interrupted run
    resumes. Exit code 3 if trials failed.

    Options:
        config: JSON or YAML: commands per model.
        out: Output folder; a rerun resumes.
        retry_failed: Run failed trials again.
    """
    from gradkeep.compat.dtr.experiments._config import read_experiment
    from gradkeep.compat.dtr.experiments._run import run_experiment
    from gradkeep.remat.simulator._plots import summarize_sweep

    input_file(config, error=RematError)
    output_folder(out, error=RematError)
    experiment = read_experiment(config)
    _show_notes(experiment.notes)
    with progress("experiments", "trials") as update:
        report = run_experiment(
            experiment, out, workers=workers, retry_failed=retry_failed, progress=update
        )
    _show_notes(report.notes)
    if json:
        counts = {"trials": len(report.results), "ran": report.ran, "reused": report.reused}
        files = [str(path) for path in report.files]
        notes = [*experiment.notes, *report.notes]
        results = {"failed": report.failed, "results": report.results, "files": files}
        print_json({**counts, **results, "notes": notes})
    else:
        print(f"{report.ran} trials run, {report.reused} reused")
        for line in summarize_sweep(report.points):
            print(line)
        for path in report.files:
            print(f"wrote {path}")
    show_endings(report.results)
    if report.failed:
        print(f"{report.failed} failed; --retry-failed runs them again", file=sys.stderr)
        raise typer.Exit(3)


def show_endings(results: Iterable[dict[str, Any]]) -> None:
    """Print why trials have no result, and why live ones exceeded their budget."""
    lines = dict.fromkeys(line for result in results if (line := _ending(result)) is not None)
    for line in lines:
        print(line, file=sys.stderr)


def _ending(result: dict[str, Any]) -> str | None:
    from gradkeep.compat.dtr.experiments._trial import FAILED

    kind, status = result["type"], result["status"]
    text = (str(result.get("message", "")).splitlines() or [""])[-1]
    if status in FAILED:
        which = f" {result['key']}"
    elif status == "too large":
        which = ""
    # A budget that is too small is reported; a placement that a model does not have is not.
    elif kind in ("dtr", "planned") and (status != "ok" or text):
        which = f" {result['ratio'] or result['budget']}"
    else:
        return None
    return f"{result['model']} {kind}{which}: {status}: {text}"


def _show_notes(notes: Iterable[str]) -> None:
    for note in notes:
        print(f"note: {note}", file=sys.stderr)


def _simulated(
    figure: PaperFigure,
    logs: Sequence[Path],
    out: Path,
    ratios: str,
    sweeping: SweepOptions,
) -> None:
    for log in logs:
        input_file(log, error=RematError)
    cases = figure.cases(logs, ratios=_numbers(ratios), limit=sweeping.limit)
    _figure(figure.name, figure.style, cases, out, sweeping)


def _figure(
    name: str,
    look: FigureStyle,
    cases: Sequence[SweepCase],
    out: Path,
    sweeping: SweepOptions,
    measured: Sequence[SweepRow] = (),
) -> None:
    from gradkeep.remat.simulator._plots import draw_sweep, summarize_sweep
    from gradkeep.remat.simulator._sweep import sweep, write_table

    table = output_folder(out, error=RematError) / f"{name}.csv"
    with progress(name, "simulations") as report:
        rows = sweep(cases, table, workers=sweeping.workers, progress=report)
    rows += measured
    if not rows:
        raise RematError("no trial has a result to plot", code="cli.nothing_to_plot")
    write_table(table, rows)
    files = [table, *draw_sweep(rows, out, name, look)]
    for line in () if sweeping.json else summarize_sweep(rows):
        print(line)
    _show_files(rows, files, json=sweeping.json)


def _show_files(
    rows: Sequence[SweepRow], files: Sequence[Path], *, json: bool, **more: Any
) -> None:
    if json:
        failed = sum(row.status != "ok" for row in rows)
        paths = [str(path) for path in files]
        print_json({"rows": len(rows), "not_ok": failed, "files": paths, **more})
        return
    for path in files:
        print(f"wrote {path}")


def _trained(experiment: DtrExperiment, folder: Path, workers: int | None) -> list[SweepRow]:
    """Run the trials of models; failures are printed and left out of the plot."""
    from gradkeep.compat.dtr.experiments._run import run_experiment

    _show_notes(experiment.notes)
    with progress("models", "trials") as update:
        report = run_experiment(experiment, folder, workers=workers, progress=update)
    show_endings(report.results)
    return report.points


def _numbers(text: str) -> list[float]:
    """Parse shares of the peak: one or more, each above 0."""
    try:
        ratios = [float(word) for word in split_words(text)]
    except ValueError:
        ratios = []
    if not ratios or not all(0 < ratio <= 1000 for ratio in ratios):
        raise RematError(
            "ratios must be comma-separated numbers above 0",
            code="cli.not_numbers",
            found=short_repr(text),
            expected=_RATIOS,
        )
    return ratios
