"""Write the contents of a store to experiment trackers."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from gradkeep import _arguments, remat
from gradkeep._arguments import checked
from gradkeep._environment import import_extra
from gradkeep.attribution._suspects import suspects
from gradkeep.errors import GradkeepError, StoreError
from gradkeep.evaluate import evaluations
from gradkeep.store import open as open_store

if TYPE_CHECKING:
    import os

    from gradkeep.remat import MemoryBudget
    from gradkeep.store import Store

    Floats = np.ndarray[Any, np.dtype[np.float32]]


@dataclass(slots=True, eq=False)
class LoggedStore:
    """Scalars and distributions of a store by step, and tables."""

    scalars: list[tuple[str, float, int]] = field(default_factory=list)
    """Tag, value and step."""
    distributions: list[tuple[str, Floats, int]] = field(default_factory=list)
    """Tag, values of all rows, and step."""
    tables: dict[str, tuple[tuple[str, ...], list[tuple[Any, ...]]]] = field(default_factory=dict)
    """Columns and rows, by tag."""

    def __len__(self) -> int:
        return len(self.scalars) + len(self.distributions) + len(self.tables)


@checked(StoreError)
def write_tensorboard(
    store: Store | str | os.PathLike[str],
    folder: str | os.PathLike[str],
    *,
    suspected: int = 50,
    budget: MemoryBudget | None = None,
) -> int:
    """Write losses, accuracies, suspects, evaluations and a budget as TensorBoard event files.

    Losses of every checkpoint and split are written as a mean and as a distribution, at the step stored with
    the capture, else at the checkpoint's position in the run. Cost: reading the losses.

    Args:
        store: Store to read, or its path.
        folder: Folder of the event files.
        suspected: Number of most suspicious labels to write as a table; 0 for none.
        budget: Memory budget whose report is written too.

    Returns:
        Number of scalars, distributions and tables written.

    Raises:
        StoreError: If the store cannot be read or the files cannot be written.
        MissingExtraError: If tensorboard is not installed.
    """
    _check(suspected, budget)
    where = _arguments.file_path("folder", folder, error=StoreError)
    opened = open_store(store, create=False)
    tensorboard = import_extra(
        "torch.utils.tensorboard", extra="tensorboard", what="write_tensorboard"
    )
    log = collect_log(opened, suspected=suspected, budget=budget)
    try:
        writer: Any = tensorboard.SummaryWriter(where)
    except OSError as error:
        raise StoreError(
            "event files cannot be written",
            code="store.events_not_written",
            path=where,
            found=error,
        ) from None
    with contextlib.closing(writer):
        for tag, value, step in log.scalars:
            writer.add_scalar(tag, value, step)
        for tag, values, step in log.distributions:
            writer.add_histogram(tag, values, step)
        for tag, (columns, rows) in log.tables.items():
            lines = [columns, ("---",) * len(columns), *rows]
            writer.add_text(tag, "\n".join(_markdown(line) for line in lines), 0)
    return len(log)


@checked(StoreError)
def write_wandb(
    store: Store | str | os.PathLike[str],
    run: Any,
    *,
    suspected: int = 50,
    budget: MemoryBudget | None = None,
) -> int:
    """Write losses, accuracies, suspects, evaluations and a budget to a run of Weights & Biases.

    The contents are those of `write_tensorboard`. Each step is one `run.log`, in rising order; tables are
    `wandb.Table`s.

    Args:
        store: Store to read, or its path.
        run: Run returned by `wandb.init()`.
        suspected: Number of most suspicious labels to write as a table; 0 for none.
        budget: Memory budget whose report is written too.

    Returns:
        Number of scalars, distributions and tables written.

    Raises:
        StoreError: If the store cannot be read or an argument is invalid.
        MissingExtraError: If wandb is not installed.
    """
    _check(suspected, budget)
    if not callable(getattr(run, "log", None)) or not hasattr(run, "summary"):
        raise _arguments.argument_error(
            "run", run, error=StoreError, expected="what wandb.init() returns"
        )
    opened = open_store(store, create=False)
    wandb = import_extra("wandb", extra="wandb", what="write_wandb")
    log = collect_log(opened, suspected=suspected, budget=budget)
    by_step: dict[int, dict[str, Any]] = {}
    for tag, value, step in log.scalars:
        by_step.setdefault(step, {})[tag] = value
    for tag, values, step in log.distributions:
        by_step.setdefault(step, {})[tag] = wandb.Histogram(values)
    for step, logged_values in sorted(by_step.items()):
        run.log({"gradkeep/step": step, **logged_values})
    if log.tables:
        run.log(
            {
                tag: wandb.Table(columns=list(columns), data=[*map(list, rows)])
                for tag, (columns, rows) in log.tables.items()
            }
        )
    return len(log)


def _check(suspected: int, budget: MemoryBudget | None) -> None:
    _arguments.count("suspected", suspected, error=StoreError)
    optional, instance = _arguments.optional, _arguments.instance
    optional(instance, "budget", budget, kind=remat.MemoryBudget, error=StoreError)


def collect_log(store: Store, *, suspected: int, budget: MemoryBudget | None) -> LoggedStore:
    """Collect losses, accuracies, suspects, evaluations and a budget of a store."""
    log = LoggedStore()
    steps = {
        (run, known.name): place if known.step is None else known.step
        for run in {key.run for key in store.captures()}
        for place, known in enumerate(store.checkpoints(run))
    }
    for key in store.captures():
        block = store.read(key, live=True)
        if "loss" not in block.names or not len(block):
            continue
        step = steps.get((key.run, key.checkpoint), 0)
        parts = ((key.run, "main"), (key.split, None), (key.capture, "main"))
        name = "/".join(part for part, usual in parts if part != usual)
        losses = np.asarray(block.column("loss"), np.float32)
        log.scalars.append((f"loss/{name}", float(losses.mean()), step))
        log.distributions.append((f"losses/{name}", losses, step))
        if {"label", "predicted"} <= set(block.names):
            right = np.asarray(block.column("label")) == np.asarray(block.column("predicted"))
            log.scalars.append((f"accuracy/{name}", float(right.mean()), step))
    # Suspects need labels and a training split.
    with contextlib.suppress(GradkeepError):
        suspected_rows = suspects(store) if suspected else None
        if suspected_rows is not None:
            ids, values = (
                suspected_rows.ids[:suspected],
                np.asarray(suspected_rows.values)[:suspected],
            )
            rows = list(zip(ids.tolist(), values.tolist(), strict=True))
            log.tables["suspects"] = ("row", "suspicion"), rows
    evaluation_rows = [
        (name, one.metric, one.subject, one.value, *(one.interval or (None, None)))
        for name, one in evaluations(store).items()
    ]
    if evaluation_rows:
        columns = ("name", "metric", "subject", "value", "low", "high")
        log.tables["evaluations"] = columns, evaluation_rows
    if budget is not None:
        report = budget.report()
        figures = {
            "budget": report.budget,
            "measured peak": report.measured_peak,
            "predicted peak": report.predicted_peak,
            "share of recomputation": report.recompute_share,
            "planned steps": report.planned,
        }
        for name, figure in figures.items():
            if figure is not None:
                log.scalars.append((f"memory/{name}", float(figure), 0))
    return log


def _markdown(cells: tuple[Any, ...]) -> str:
    shown = (f"{cell:.4g}" if isinstance(cell, float) else str(cell) for cell in cells)
    return f"| {' | '.join(cell.replace('|', '/') for cell in shown)} |"
