"""`gradkeep remat experiments`: what a configuration asks for, with tables and pictures."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gradkeep._progress import progress
from gradkeep.cli._output import (
    JsonOption,
    print_json,
)
from gradkeep.remat._experiment_trial import FAILED

if TYPE_CHECKING:
    from collections.abc import Iterable


def experiments(
    config: Annotated[
        Path, typer.Argument(metavar="CONFIG", help="JSON or YAML: commands per model.")
    ],
    out: Annotated[
        Path, typer.Option("--out", help="Folder for everything; a rerun resumes.")
    ] = Path("experiments"),
    workers: Annotated[
        int | None,
        typer.Option("--workers", min=1, help="Simulations at a time; by default one per core."),
    ] = None,
    retry_failed: Annotated[
        bool, typer.Option("--retry-failed", help="Run trials again that failed before.")
    ] = False,
    json: JsonOption = False,
) -> None:
    """Run the trials of a configuration: training steps, plain and in budgets, live and simulated.

    Writes results/, logs/, summary/ and graphs/. Measurements run one at a time. Interrupt it at any
    moment and run it again: what is done stays done. Exit code 3 if trials failed.
    """
    from gradkeep.remat._experiment_config import read_experiment
    from gradkeep.remat._experiments import run_experiment
    from gradkeep.remat._picture import sentences

    experiment = read_experiment(config)
    for note in experiment.notes:
        print(f"note: {note}", file=sys.stderr)
    with progress("experiments", "trials") as told:
        report = run_experiment(
            experiment, out, workers=workers, retry_failed=retry_failed, progress=told
        )
    for note in report.notes:
        print(f"note: {note}", file=sys.stderr)
    if json:
        print_json(
            {
                "trials": len(report.results),
                "ran": report.ran,
                "reused": report.reused,
                "failed": report.failed,
                "results": report.results,
                "files": [str(path) for path in report.files],
                "notes": [*experiment.notes, *report.notes],
            }
        )
    else:
        print(f"{report.ran} trials run, {report.reused} were there already")
        for line in sentences(report.points):
            print(line)
        for path in report.files:
            print(f"wrote {path}")
    tell_endings(report.results)
    if report.failed:
        print(f"{report.failed} failed; --retry-failed runs them again", file=sys.stderr)
        raise typer.Exit(3)


def tell_endings(results: Iterable[dict[str, Any]]) -> None:
    """Say why trials have no result, and why live ones did not stay within their budget."""
    lines = dict.fromkeys(line for result in results if (line := _ending(result)) is not None)
    for line in lines:
        print(line, file=sys.stderr)


def _ending(result: dict[str, Any]) -> str | None:
    kind, status = result["type"], result["status"]
    said = (str(result.get("message", "")).splitlines() or [""])[-1]
    told = f"{status}: {said}"
    if status in FAILED:
        return f"{result['model']} {kind} {result['key']}: {told}"
    if status == "too large":
        return f"{result['model']} {kind}: {told}"
    # A placement that a model does not have is no news; that a budget is too small is.
    if kind in ("dtr", "planned") and status != "ok":
        return f"{result['model']} {kind} {result['ratio'] or result['budget']}: {told}"
    return None
