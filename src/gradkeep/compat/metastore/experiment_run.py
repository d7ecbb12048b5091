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
"""Model of each data set in MetaStore's experiments."""
SWEPT_METHODS = ("ted", "half", "recon", "naive")


@dataclass(frozen=True, slots=True)
class MethodSweep:
    """Experiments to run, one after the other."""

    config: str
    data: Sequence[str] = tuple(PAIRS)
    methods: Sequence[str] = SWEPT_METHODS
    samples: Sequence[int] = (5000,)
    queries: Sequence[int] = (50,)
    name: str | None = None
    weights_only: bool = True

    def __post_init__(self) -> None:
        for what, names, known in (
            ("data", self.data, PAIRS),
            ("methods", self.methods, SWEPT_METHODS),
        ):
            wrong = [word for word in names if word not in known]
            if wrong or not names:
                raise CaptureError(
                    f"--{what}: unknown name {wrong[0]!r}" if wrong else f"--{what} is empty",
                    code="compat.unknown_name" if wrong else "compat.empty_list",
                    expected=", ".join(known),
                    fix="Pass some of them, separated by commas.",
                )


@dataclass(frozen=True, slots=True)
class SweptMethod:
    """Costs of one method on one data set; numbers are None if it could not run."""

    data: str
    model: str
    samples: int
    queries: int
    method: str
    collect_seconds: float | None = None
    """None also if the gradients were stored before: ted, half and recon share them."""
    load_seconds: float | None = None
    compute_seconds: float | None = None
    query_seconds: float | None = None
    """From the first byte read to the last product, for all queries one by one."""
    mean_query_seconds: float | None = None
    """The same for one product with the mean query, which MetaStore uses for half and recon."""
    train_bytes: int | None = None
    error: str = ""


def sweep(plan: MethodSweep) -> Iterator[SweptMethod]:
    """Run everything; a failure is reported in its row, and the rest continues.

    Errors of the configuration itself are raised before anything runs.
    """
    from gradkeep.compat.metastore._run import measure

    for case, experiment in _experiments(plan):
        try:
            result = measure(experiment)[1]
        except GradkeepError as error:
            yield replace(case, error=str(error))
            continue
        yield replace(
            case,
            collect_seconds=result.collect["train"],
            load_seconds=result.load,
            compute_seconds=result.compute,
            query_seconds=result.query_seconds,
            mean_query_seconds=result.mean_seconds,
            train_bytes=result.bytes["train"],
        )


def _experiments(plan: MethodSweep) -> list[tuple[SweptMethod, MetaStoreExperiment]]:
    experiments = []
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
        experiments.append((SweptMethod(data, PAIRS[data], samples, queries, method), experiment))
    return experiments


def sweep_table(rows: Sequence[SweptMethod]) -> str:
    """Format the rows as a text table."""

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
    """Write `sweep.png` and `sweep.svg` and return them; nothing if no method ran."""
    from gradkeep.compat.metastore._results import draw_sweep

    return draw_sweep(rows, folder)
