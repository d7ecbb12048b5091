"""`gradkeep metastore sweep`: MetaStore's experiments, from its own configuration file."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gradkeep._arguments import shown
from gradkeep.cli._errors import INCOMPLETE
from gradkeep.cli._files import MAX_COUNT, input_file, output_folder
from gradkeep.cli._options import JsonOption, print_json
from gradkeep.errors import CaptureError

if TYPE_CHECKING:
    from gradkeep.compat.metastore.experiment_run import SweptMethod


def sweep(
    config: Annotated[
        Path, typer.Option("--config", help="MetaStore's configuration file.")
    ] = Path("config.yaml"),
    data: Annotated[
        str, typer.Option("--data", help="Data sets with commas; each has its model.")
    ] = "cifar10,AGNews,imagenet",
    methods: Annotated[
        str, typer.Option("--methods", help="Methods with commas.")
    ] = "ted,half,recon,naive",
    samples: Annotated[str, typer.Option("--samples", help="Numbers with commas.")] = "5000",
    queries: Annotated[str, typer.Option("--queries", help="Numbers with commas.")] = "50",
    name: Annotated[
        str | None, typer.Option("--name", help="Keeps gradients apart from those of other names.")
    ] = None,
    biases: Annotated[
        bool, typer.Option("--biases", help="Gradients of biases too, which MetaStore leaves out.")
    ] = False,
    out: Annotated[
        Path, typer.Option("--out", help="Folder for the table and the pictures.")
    ] = Path("sweep"),
    json: JsonOption = False,
) -> None:
    """Run MetaStore's four methods on its three data sets: a table and plots of time and bytes.

    What `experiment_run.sh` does, in one process. Gradients that are kept are not collected again.
    What cannot be run is told in its row, and ends the command with code 3.
    """
    from gradkeep.compat.metastore import experiment_run as experiments

    input_file(config, error=CaptureError)
    output_folder(out, error=CaptureError)
    plan = experiments.MethodSweep(
        str(config),
        _words(data),
        _words(methods),
        _numbers("samples", samples),
        _numbers("queries", queries),
        name,
        weights_only=not biases,
    )
    rows: list[SweptMethod] = []
    with contextlib.redirect_stdout(sys.stderr):  # what each experiment tells as it goes
        for row in experiments.sweep(plan):
            rows.append(row)
            experiments.write_table(rows, out)  # now: an interrupt loses none
            if row.error:
                print(f"{row.data}, {row.method}: {row.error}")
    pictures = experiments.write_pictures(rows, out)
    if json:
        print_json([dataclasses.asdict(row) for row in rows])
    else:
        print(experiments.sweep_table(rows))
        print(f"written: {', '.join(map(str, [out / 'sweep.csv', *pictures]))}")
    if any(row.error for row in rows):
        raise typer.Exit(INCOMPLETE)


def _words(text: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in text.split(",") if word.strip())


def _numbers(flag: str, text: str) -> tuple[int, ...]:
    words = _words(text)
    if not words or not all(
        w.isdecimal() and len(w) < 11 and 1 <= int(w) <= MAX_COUNT for w in words
    ):
        raise CaptureError(
            f"--{flag} cannot be {shown(text)}",
            expected="whole numbers from 1, with commas",
            fix=f"for example --{flag} 1000,5000",
        )
    return tuple(int(word) for word in words)
