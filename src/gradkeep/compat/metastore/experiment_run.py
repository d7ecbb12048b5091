"""MetaStore's `experiment_run.sh`: every method on every data set, as one table of time and bytes."""

from __future__ import annotations

import csv
from dataclasses import asdict, dataclass, fields, replace
from itertools import product
from typing import TYPE_CHECKING

from gradkeep._display import format_size, text_table
from gradkeep.compat.metastore._config import read
from gradkeep.errors import CaptureError, GradkeepError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from gradkeep.compat.metastore._config import MetaStoreExperiment

PAIRS = {"cifar10": "VGG16", "AGNews": "Bert", "imagenet": "ResNet50"}
"""Which model MetaStore asks about each data set."""
SWEPT_METHODS = ("ted", "half", "recon", "naive")


@dataclass(frozen=True, slots=True)
class MethodSweep:
    """Which experiments are run, one after the other."""

    config: str
    data: Sequence[str] = tuple(PAIRS)
    methods: Sequence[str] = SWEPT_METHODS
    samples: Sequence[int] = (5000,)
    queries: Sequence[int] = (50,)
    name: str | None = None
    weights_only: bool = True

    def __post_init__(self) -> None:
        for what, given, known in (
            ("data", self.data, PAIRS),
            ("methods", self.methods, SWEPT_METHODS),
        ):
            wrong = [word for word in given if word not in known]
            if wrong or not given:
                raise CaptureError(
                    f"--{what}: there is no {wrong[0]!r}" if wrong else f"--{what} names nothing",
                    expected=", ".join(known),
                    fix="name some of them, with commas",
                )


@dataclass(frozen=True, slots=True)
class SweptMethod:
    """What one method took on one data set; the numbers are None where it could not be run."""

    data: str
    model: str
    samples: int
    queries: int
    method: str
    collect_seconds: float | None = None
    """None also where the gradients were kept before, as ted, half and recon share theirs."""
    load_seconds: float | None = None
    compute_seconds: float | None = None
    query_seconds: float | None = None
    """From the first byte read to the last product, for every query by itself."""
    mean_query_seconds: float | None = None
    """The same for one product with the mean query, which is what MetaStore asks half and recon."""
    train_bytes: int | None = None
    error: str = ""


def sweep(plan: MethodSweep) -> Iterator[SweptMethod]:
    """Run everything; what fails is told in its row, and the rest goes on.

    What is wrong with the configuration itself is an error before anything runs.
    """
    from gradkeep.compat.metastore._run import measure

    for case, experiment in _experiments(plan):
        try:
            found = measure(experiment)[1]
        except GradkeepError as error:
            yield replace(case, error=str(error))
            continue
        yield replace(
            case,
            collect_seconds=found.collect["train"],
            load_seconds=found.load,
            compute_seconds=found.compute,
            query_seconds=found.query_seconds,
            mean_query_seconds=found.mean_seconds,
            train_bytes=found.bytes["train"],
        )


def _experiments(plan: MethodSweep) -> list[tuple[SweptMethod, MetaStoreExperiment]]:
    found = []
    for data, samples, queries, method in product(
        plan.data, plan.samples, plan.queries, plan.methods
    ):
        experiment = read(
            plan.config,
            method=method,
            target_model=PAIRS[data],
            data=data,
            num_analyzed_samples=samples,
            num_query=queries,
            name=plan.name,
            weights_only=plan.weights_only,
        )
        found.append((SweptMethod(data, PAIRS[data], samples, queries, method), experiment))
    return found


def sweep_table(rows: Sequence[SweptMethod]) -> str:
    """The rows for people."""

    def seconds(value: float | None, missing: str) -> str:
        return missing if value is None else f"{value:.3f}"

    head = (
        *("data", "model", "N", "Q", "method", "collect s", "load s", "compute s", "mean query s"),
        *("bytes", ""),
    )
    cells = [
        (
            *(row.data, row.model, str(row.samples), str(row.queries), row.method),
            seconds(row.collect_seconds, "-" if row.error else "kept"),
            seconds(row.load_seconds, "-"),
            seconds(row.compute_seconds, "-"),
            seconds(row.mean_query_seconds, "-"),
            "-" if row.train_bytes is None else format_size(row.train_bytes),
            row.error.partition("\n")[0],
        )
        for row in rows
    ]
    return text_table(head, cells, right={2, 3, 5, 6, 7, 8, 9})


def write_table(rows: Sequence[SweptMethod], folder: Path) -> Path:
    """Write `sweep.csv` and return it."""
    folder.mkdir(parents=True, exist_ok=True)
    table = folder / "sweep.csv"
    with open(table, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, [part.name for part in fields(SweptMethod)])
        writer.writeheader()
        writer.writerows(asdict(row) for row in rows)
    return table


def write_pictures(rows: Sequence[SweptMethod], folder: Path) -> list[Path]:
    """Write `sweep.png` and `sweep.svg` and return them; nothing where no method could be run."""
    from gradkeep.compat.metastore._results import draw_sweep

    return draw_sweep(rows, folder)
