"""`gradkeep metastore sweep`: MetaStore's experiments, from its own configuration file."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gradkeep._arguments import short_repr
from gradkeep.cli._errors import INCOMPLETE
from gradkeep.cli._files import MAX_COUNT, input_file, output_folder
from gradkeep.cli._options import JsonOption, print_json, split_words
from gradkeep.errors import CaptureError

if TYPE_CHECKING:
    from gradkeep.compat.metastore.experiment_run import SweptMethod


def sweep(
    config: Annotated[
        Path, typer.Option("--config", help="MetaStore's configuration file.")
    ] = Path("config.yaml"),
    data: Annotated[
        str, typer.Option("--data", help="Data sets, comma-separated; each has its model.")
    ] = "cifar10,AGNews,imagenet",
    methods: Annotated[
        str, typer.Option("--methods", help="Methods, comma-separated.")
    ] = "ted,half,recon,naive",
    samples: Annotated[str, typer.Option("--samples", help="Numbers, comma-separated.")] = "5000",
    queries: Annotated[str, typer.Option("--queries", help="Numbers, comma-separated.")] = "50",
    name: Annotated[
        str | None, typer.Option("--name", help="Name of the stored gradients.")
    ] = None,
    biases: Annotated[
        bool, typer.Option("--biases", help="Include biases, which MetaStore leaves out.")
    ] = False,
    out: Annotated[Path, typer.Option("--out", help="Folder for the table and the plots.")] = Path(
        "sweep"
    ),
    json: JsonOption = False,
) -> None:
    """Run MetaStore's four methods on its three data sets: a table and plots of time and bytes.

    Does what `experiment_run.sh` does, in one process. Stored gradients are reused. Failures are
    listed in their row; the exit code is then 3.
    """
    from gradkeep.compat.metastore import experiment_run as experiments

    input_file(config, error=CaptureError)
    output_folder(out, error=CaptureError)
    plan = experiments.MethodSweep(
        str(config),
        split_words(data),
        split_words(methods),
        _numbers("samples", samples),
        _numbers("queries", queries),
        name,
        weights_only=not biases,
    )
    rows: list[SweptMethod] = []
    with contextlib.redirect_stdout(sys.stderr):  # output of the experiments
        for row in experiments.sweep(plan):
            rows.append(row)
            experiments.write_table(rows, out)  # after each row, so that an interrupt loses none
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


def _numbers(flag: str, text: str) -> tuple[int, ...]:
    words = split_words(text)
    if not words or not all(
        w.isdecimal() and len(w) < 11 and 1 <= int(w) <= MAX_COUNT for w in words
    ):
        raise CaptureError(
            f"--{flag} cannot be {short_repr(text)}",
            code="cli.not_numbers",
            expected="comma-separated whole numbers from 1",
            fix=f"for example --{flag} 1000,5000",
        )
    return tuple(int(word) for word in words)
