"""What a store knows, written for the boards where people watch their trainings."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from gradkeep import _arguments, remat
from gradkeep._annotations import checked
from gradkeep._surroundings import install_hint
from gradkeep.attribution._suspects import suspects
from gradkeep.errors import GradkeepError, MissingExtra, StoreError
from gradkeep.evaluate import evaluations
from gradkeep.store import open as open_store

if TYPE_CHECKING:
    import os

    from gradkeep.remat import MemoryBudget
    from gradkeep.store import Store

    Floats = np.ndarray[Any, np.dtype[np.float32]]


@dataclass(frozen=True, slots=True)
class LoggedScalar:
    """A number at a step."""

    tag: str
    value: float
    step: int


@dataclass(frozen=True, slots=True, eq=False)
class LoggedDistribution:
    """The numbers of all rows at a step."""

    tag: str
    values: Floats
    step: int


@dataclass(frozen=True, slots=True)
class LoggedTable:
    """Rows of texts and numbers."""

    tag: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Any, ...], ...]


@dataclass(frozen=True, slots=True)
class LoggedStore:
    """All that is written about a store."""

    scalars: tuple[LoggedScalar, ...]
    distributions: tuple[LoggedDistribution, ...]
    tables: tuple[LoggedTable, ...]


@checked(StoreError)
def write_tensorboard(
    store: Store | str | os.PathLike[str],
    folder: str | os.PathLike[str],
    *,
    suspected: int = 50,
    budget: MemoryBudget | None = None,
) -> int:
    """Write losses, accuracies, suspects, evaluations and a budget as TensorBoard's event files.

    Losses of every checkpoint and split stand at the step that its capture has written down, else at
    its place among the run's checkpoints, as a mean and as a distribution; the `suspected` most
    suspicious labels and all saved evaluations as tables. Returns how many things were written. Cost:
    reading the losses.
    """
    _check(suspected, budget)
    where = _arguments.file_path("folder", folder, error=StoreError)
    opened = open_store(store, create=False)
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise MissingExtra(
            "event files need tensorboard", fix=install_hint("tensorboard")
        ) from error
    found = logged(opened, suspected=suspected, budget=budget)
    try:
        writer: Any = SummaryWriter(where)
    except OSError as error:
        raise StoreError("event files cannot be written there", path=where, found=error) from None
    try:
        for scalar in found.scalars:
            writer.add_scalar(scalar.tag, scalar.value, scalar.step)
        for shown in found.distributions:
            writer.add_histogram(shown.tag, shown.values, shown.step)
        for table in found.tables:
            writer.add_text(table.tag, _markdown(table), 0)
    finally:
        writer.close()
    return len(found.scalars) + len(found.distributions) + len(found.tables)


@checked(StoreError)
def write_wandb(
    store: Store | str | os.PathLike[str],
    run: Any,
    *,
    suspected: int = 50,
    budget: MemoryBudget | None = None,
) -> int:
    """Write the same to a run of Weights & Biases: `write_wandb(store, wandb.init(...))`.

    Each step's numbers are one `run.log`, steps rising; tables are `wandb.Table`s.
    """
    _check(suspected, budget)
    if not callable(getattr(run, "log", None)) or not hasattr(run, "summary"):
        raise _arguments.refused("run", run, error=StoreError, expected="what wandb.init() returns")
    opened = open_store(store, create=False)
    try:
        wandb = importlib.import_module("wandb")
    except ImportError as error:
        raise MissingExtra("this needs wandb", fix=install_hint("wandb")) from error
    found = logged(opened, suspected=suspected, budget=budget)
    by_step: dict[int, dict[str, Any]] = {}
    for scalar in found.scalars:
        by_step.setdefault(scalar.step, {})[scalar.tag] = scalar.value
    for shown in found.distributions:
        by_step.setdefault(shown.step, {})[shown.tag] = wandb.Histogram(shown.values)
    for step, values in sorted(by_step.items()):
        run.log({"gradkeep/step": step, **values})
    if found.tables:
        run.log(
            {
                table.tag: wandb.Table(columns=list(table.columns), data=[*map(list, table.rows)])
                for table in found.tables
            }
        )
    return len(found.scalars) + len(found.distributions) + len(found.tables)


def _check(suspected: int, budget: MemoryBudget | None) -> None:
    _arguments.count("suspected", suspected, error=StoreError)
    optional, instance = _arguments.optional, _arguments.instance
    optional(instance, "budget", budget, kind=remat.MemoryBudget, error=StoreError)


def logged(store: Store, *, suspected: int, budget: MemoryBudget | None) -> LoggedStore:
    """What is told about a store: losses and accuracies, suspects, evaluations, a budget."""
    scalars: list[LoggedScalar] = []
    distributions: list[LoggedDistribution] = []
    tables: list[LoggedTable] = []
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
        name = "/".join(
            part
            for part, usual in ((key.run, "main"), (key.split, None), (key.capture, "main"))
            if part != usual
        )
        losses = np.asarray(block.column("loss"), np.float32)
        scalars.append(LoggedScalar(f"loss/{name}", float(losses.mean()), step))
        distributions.append(LoggedDistribution(f"losses/{name}", losses, step))
        if {"label", "predicted"} <= set(block.names):
            right = np.asarray(block.column("label")) == np.asarray(block.column("predicted"))
            scalars.append(LoggedScalar(f"accuracy/{name}", float(right.mean()), step))
    tables += _suspects_table(store, suspected) + _evaluations_table(store)
    if budget is not None:
        report = budget.report()
        told = {
            "budget": report.budget,
            "measured peak": report.measured_peak,
            "predicted peak": report.predicted_peak,
            "share of recomputation": report.recompute_share,
            "planned steps": report.planned,
        }
        scalars += [
            LoggedScalar(f"memory/{name}", float(value), 0)
            for name, value in told.items()
            if value is not None
        ]
    return LoggedStore(tuple(scalars), tuple(distributions), tuple(tables))


def _suspects_table(store: Store, count: int) -> list[LoggedTable]:
    if not count:
        return []
    try:
        found = suspects(store)
    except GradkeepError:
        return []  # no labels, or no training split: nothing to suspect
    ids, values = found.ids[:count].tolist(), np.asarray(found.values)[:count].tolist()
    return [LoggedTable("suspects", ("row", "suspicion"), tuple(zip(ids, values, strict=True)))]


def _evaluations_table(store: Store) -> list[LoggedTable]:
    rows = tuple(
        (name, one.metric, one.subject, one.value, *one.interval)
        for name, one in evaluations(store).items()
    )
    columns = ("name", "metric", "subject", "value", "low", "high")
    return [LoggedTable("evaluations", columns, rows)] if rows else []


def _markdown(table: LoggedTable) -> str:
    def line(cells: tuple[Any, ...]) -> str:
        shown = (f"{cell:.4g}" if isinstance(cell, float) else str(cell) for cell in cells)
        return f"| {' | '.join(cell.replace('|', '/') for cell in shown)} |"

    head = [line(table.columns), line(("---",) * len(table.columns))]
    return "\n".join([*head, *map(line, table.rows)])
