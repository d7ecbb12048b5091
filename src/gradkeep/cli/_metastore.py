"""`gradkeep metastore sweep`: MetaStore's experiments, from its own configuration file."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from gradkeep.cli._errors import INCOMPLETE
from gradkeep.cli._inputs import input_file, output_folder
from gradkeep.cli._options import JsonOption, parse_numbers, print_json, split_words
from gradkeep.errors import CaptureError

if TYPE_CHECKING:
    from gradkeep.compat.metastore.experiment_run import SweptMethod


def sweep(
    config: Path = Path("config.yaml"),
    data: str = "cifar10,AGNews,imagenet",
    methods: str = "ted,half,recon,naive",
    samples: str = "5000",
    queries: str = "50",
    name: str | None = None,
    biases: bool = False,
    out: Path = Path("sweep"),
    json: JsonOption = False,
) -> None:
    """Run MetaStore's four methods on its three data sets: a table and plots of time and bytes.

    Does what `experiment_run.sh` does, in one process. Stored gradients are reused. Failures are
    listed in their row; the exit code is then 3.

    Options:
        config: MetaStore's configuration file.
        data: Data sets, comma-separated; each has its model.
        methods: Methods, comma-separated.
        samples: Numbers, comma-separated.
        queries: Numbers, comma-separated.
        name: Name of the stored gradients.
        biases: Include biases, which MetaStore leaves out.
        out: Folder for the table and the plots.
    """
    from gradkeep.compat.metastore import experiment_run as experiments

    input_file(config, error=CaptureError)
    output_folder(out, error=CaptureError)
    plan = experiments.MethodSweep(
        str(config),
        split_words(data),
        split_words(methods),
        tuple(parse_numbers("samples", samples, error=CaptureError, least=1)),
        tuple(parse_numbers("queries", queries, error=CaptureError, least=1)),
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
