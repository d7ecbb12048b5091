"""Sweeps: every heuristic at every budget, in parallel and resumable."""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import io
import math
import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec

from gradkeep.errors import RematError
from gradkeep.remat.simulator._heuristics import heuristic, registered_heuristics
from gradkeep.remat.simulator._optimal import MAX_SWEEP_OPERATORS, optimum_point
from gradkeep.remat.simulator._plots import FigureStyle
from gradkeep.remat.simulator._program import read_log, replace_file
from gradkeep.remat.simulator._schedule import Graph
from gradkeep.remat.simulator._simulate import simulate, unlimited_peak

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from gradkeep.remat._eviction_core import Policy
    from gradkeep.remat.simulator._program import Program

MAIN_HEURISTICS = ("dtr", "dtr-eq", "dtr-local", "msps", "lru", "largest", "random")
RowSource = Literal["simulated", "optimum", "online", "planned", "checkpoint"]
"""Origin of a row; the last three are measured on a live model."""
OPTIMUM = "optimum"
"""Replaces the heuristic's name in cases that the integer program solves."""
RATIOS = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1)


@dataclass(frozen=True, slots=True)
class SweepCase:
    """One simulation to run."""

    log: str
    heuristic: str
    ratio: float
    """Budget divided by the peak without one."""
    policy: Policy = "eager"
    limit: float = 2.0
    releases: bool = True
    """Simulate releases of references."""
    seed: int = 0
    """Seed of random choices."""


@dataclass(frozen=True, slots=True)
class SweepRow:
    """A finished simulation or measurement: a line of the table."""

    log: str
    heuristic: str
    ratio: float
    policy: str
    limit: float
    status: str
    overhead: float
    budget: int
    peak: int
    evictions: int = 0
    rematerializations: int = 0
    heuristic_evaluations: int = 0
    accesses: int = 0
    source: RowSource = "simulated"
    releases: bool = True
    seed: int = 0

    @property
    def case(self) -> SweepCase:
        """Return the case of the row."""
        names = (part.name for part in dataclasses.fields(SweepCase))
        return SweepCase(*(getattr(self, name) for name in names))


def sweep_cases(
    logs: Sequence[str | os.PathLike[str]],
    *,
    heuristics: Sequence[str] = MAIN_HEURISTICS,
    ratios: Sequence[float] = RATIOS,
    policies: Sequence[Policy] = ("eager",),
    limit: float = 2.0,
    releases: bool = True,
) -> list[SweepCase]:
    """Build every combination, with ten seeds for random choices.

    Raises `RematError` for unknown heuristics and invalid ratios.
    """
    trials = {name: heuristic(name).trials for name in heuristics}
    for ratio in ratios:
        if not ratio > 0:
            raise RematError(f"ratios must be above 0, got {ratio}", code="argument.invalid")
    return [
        SweepCase(os.fspath(log), name, float(ratio), policy, limit, releases, seed)
        for log in logs
        for policy in policies
        for name in heuristics
        for ratio in ratios
        for seed in range(trials[name])
    ]


def optimum_cases(
    logs: Sequence[str | os.PathLike[str]], *, ratios: Sequence[float] = RATIOS
) -> list[SweepCase]:
    """Build optimum cases at every ratio, for the logs that are small enough."""
    small = [log for log in logs if len(Graph.of(read_log(log))) <= MAX_SWEEP_OPERATORS]
    return [SweepCase(os.fspath(log), OPTIMUM, float(ratio)) for log in small for ratio in ratios]


def sweep(
    cases: Iterable[SweepCase],
    table: str | os.PathLike[str],
    *,
    workers: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> list[SweepRow]:
    """Run the cases that are not in the CSV `table` yet, appending each finished row.

    Safe to interrupt and run again: rows in the table are not recomputed. Cases of a
    heuristic registered in this process run here, all others on `workers` processes.
    """
    path = Path(table)
    every = list(dict.fromkeys(cases))
    there = read_table(path) if path.exists() else []
    done = {row.case: row for row in there if row.source in ("simulated", "optimum")}
    pending = [case for case in every if case not in done]
    write_table(path, done.values())
    if progress is not None:
        progress(len(every) - len(pending), len(every))
    for log in dict.fromkeys(case.log for case in pending):
        _program(log)  # fail early if a log cannot be read
    for number, row in enumerate(_rows_of(pending, workers), len(every) - len(pending) + 1):
        done[row.case] = row
        with path.open("a", newline="") as file:
            csv.writer(file).writerow(dataclasses.astuple(row))
        if progress is not None:
            progress(number, len(every))
    rows = [done[case] for case in every]
    # Rows of earlier sweeps stay, after the rows of this one.
    write_table(path, {**{row.case: row for row in rows}, **done}.values())
    return rows


def _rows_of(cases: Sequence[SweepCase], workers: int | None) -> Iterator[SweepRow]:
    """Yield the rows as they finish."""
    # Heuristics registered in this process do not exist in others.
    own = registered_heuristics()
    elsewhere = [case for case in cases if case.heuristic not in own]
    count = max(1, min(len(elsewhere), workers or os.cpu_count() or 1))
    if elsewhere:
        with ProcessPoolExecutor(count, mp_context=multiprocessing.get_context("spawn")) as pool:
            futures = [pool.submit(run_case, case) for case in elsewhere]
            for future in as_completed(futures):
                yield future.result()
    for case in cases:
        if case.heuristic in own:
            yield run_case(case)


def run_case(case: SweepCase) -> SweepRow:
    """Simulate one case, or find its optimum."""
    program, peak = _program(case.log)
    budget = int(peak * case.ratio)
    fields = dataclasses.asdict(case)
    if case.heuristic == OPTIMUM:
        best = optimum_point(program, budget, time_limit=20.0)
        overhead = math.nan if best.overhead is None else best.overhead
        return SweepRow(
            **fields,
            status=best.status,
            overhead=overhead,
            budget=budget,
            peak=best.peak,
            source="optimum",
        )
    outcome = simulate(
        program if case.releases else program.without_releases(),
        heuristic=case.heuristic,
        budget=budget,
        policy=case.policy,
        limit=case.limit,
        seed=case.seed,
    )
    own = {part.name for part in dataclasses.fields(SweepRow)} - fields.keys() - {"source"}
    return SweepRow(**fields, **{name: getattr(outcome, name) for name in own})


@lru_cache(maxsize=16)
def _program(log: str) -> tuple[Program, int]:
    program = read_log(log)
    return program, unlimited_peak(program)


def read_table(path: str | os.PathLike[str]) -> list[SweepRow]:
    """Read the rows of a table; skip a last line that was cut off by a kill."""
    rows = []
    with Path(path).open(newline="") as file:
        for line in csv.DictReader(file):
            with contextlib.suppress(msgspec.ValidationError):
                rows.append(msgspec.convert(line, SweepRow, strict=False))
    return rows


def write_table(path: Path, rows: Iterable[SweepRow]) -> None:
    """Write a table atomically."""
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow([part.name for part in dataclasses.fields(SweepRow)])
    writer.writerows(dataclasses.astuple(row) for row in rows)
    replace_file(path, text.getvalue())


@dataclass(frozen=True, slots=True)
class TitledLog:
    """A log with its title in figures."""

    path: Path
    title: str


class _ManifestEntry(msgspec.Struct):
    log: str
    title: str = ""
    name: str = ""
    has_start: Literal[True] = True
    """Logs are read from their annotation START on."""


class _Manifest(msgspec.Struct):
    models: list[_ManifestEntry]


def find_logs(
    places: Sequence[str | os.PathLike[str]],
) -> tuple[list[TitledLog], list[str]]:
    """Find the logs named by files, folders and manifests, each once; also return notes on skipped ones.

    A folder is read through its `manifest.json`, or without one all its `.log` files. A manifest lists
    its models under `models`, or per model as `simrd_config` of an experiment does; its paths are
    relative to its folder or the folder above. Missing logs of a manifest are skipped with a note, as in
    the original.
    """
    logs: dict[Path, TitledLog] = {}
    notes: list[str] = []
    for place in map(Path, places):
        manifest = place / "manifest.json" if place.is_dir() else place
        if manifest.suffix == ".json" and manifest.is_file():
            entries = list(_read_manifest(manifest, notes))
        elif place.is_dir() or place.is_file():
            files = sorted(place.glob("*.log")) if place.is_dir() else [place]
            entries = [TitledLog(file, file.name.split("-")[0]) for file in files]
        else:
            raise RematError(
                "no such log",
                code="remat.log_not_found",
                path=place,
                expected="a log, a folder of logs or a manifest",
            )
        if not entries and not notes:
            raise RematError(
                "the folder has no logs",
                code="remat.no_logs",
                path=place,
                expected="files named *.log",
            )
        for log in entries:
            logs.setdefault(log.path, log)
    if not logs:
        raise RematError("all logs are missing", code="remat.logs_missing", found="; ".join(notes))
    return list(logs.values()), notes


def _read_manifest(manifest: Path, notes: list[str]) -> Iterator[TitledLog]:
    try:
        content = manifest.read_bytes()
        try:
            entries = msgspec.json.decode(content, type=_Manifest).models
        except msgspec.ValidationError:
            per_model = msgspec.json.decode(content, type=dict[str, list[_ManifestEntry]])
            entries = [entry for part in per_model.values() for entry in part]
    except (OSError, ValueError, RecursionError) as error:
        raise RematError(
            "the file is not a manifest of logs",
            code="remat.manifest_invalid",
            path=manifest,
            found=str(error)[:200],
            expected='{"models": [{"name": ..., "log": ...}]}, or a list of such per model',
        ) from error
    for entry in entries:
        name = entry.title or entry.name or Path(entry.log).stem
        folder = manifest.parent
        options = (folder / entry.log, folder.parent / entry.log, folder / Path(entry.log).name)
        log = next((option for option in options if option.is_file()), None)
        if log is None:
            notes.append(f"{manifest}: {name!r} is skipped, {entry.log} does not exist")
        else:
            yield TitledLog(log, name)


@dataclass(frozen=True, slots=True)
class Curve:
    """One line of a figure."""

    heuristic: str
    policy: Policy = "eager"
    releases: bool = True
    shown: str = ""
    """Name in the figure, if different."""


@dataclass(frozen=True, slots=True)
class PaperFigure:
    """One figure: a panel per log with these curves."""

    name: str
    style: FigureStyle
    curves: tuple[Curve, ...]

    def cases(
        self,
        logs: Sequence[str | os.PathLike[str]],
        *,
        ratios: Sequence[float] = RATIOS,
        limit: float = 2.0,
    ) -> list[SweepCase]:
        """Build the cases to simulate."""
        return [
            case
            for curve in self.curves
            for case in sweep_cases(
                logs,
                heuristics=(curve.heuristic,),
                ratios=ratios,
                policies=(curve.policy,),
                limit=limit,
                releases=curve.releases,
            )
        ]

    def rows(self, done: Sequence[SweepRow]) -> list[SweepRow]:
        """Select its rows of a finished sweep, under the names in the figure."""
        return [
            dataclasses.replace(row, heuristic=curve.shown or curve.heuristic)
            for curve in self.curves
            for row in done
            if (row.heuristic, row.policy, row.releases)
            == (curve.heuristic, curve.policy, curve.releases)
        ]


_EQUIVALENT = {
    "ab-exact-size-stale": "dtr",
    "ab-eq-size-stale": "dtr-eq",
    "ab-local-size-stale": "dtr-local",
    "ab-none-size": "largest",
    "ab-none": "random",
}
"""Heuristics of the ablation that equal one of another figure: simulated once."""
_ABLATION = {
    "exact": "the exact neighborhood",
    "eq": "equivalence classes",
    "local": "its own cost",
    "none": "no cost",
}


def _ablation_names(part: str) -> list[str]:
    return [f"ab-{part}{rest}" for rest in ("-size-stale", "-size", "-stale", "")]


_accesses = PaperFigure(
    "accesses",
    FigureStyle(
        "Metadata accesses of the heuristic",
        "accesses",
        "storages accessed, counted as in the original",
        logarithmic=True,
    ),
    tuple(map(Curve, ("dtr", "dtr-eq", "dtr-local"))),
)
# Banishing maintains no neighborhoods, hence another heuristic.
_banishing = PaperFigure(
    "banishing",
    FigureStyle("Deallocation policies", by_policy=True),
    (Curve("dtr-union", "banish"), Curve("dtr"), Curve("dtr", releases=False)),
)
PAPER_FIGURES = (
    PaperFigure(
        "pareto",
        FigureStyle("Time against memory budget"),
        tuple(map(Curve, MAIN_HEURISTICS)),
    ),
    _banishing,
    *(
        PaperFigure(
            f"ablation-{part}",
            FigureStyle(f"Ablation of size and staleness with {words}"),
            tuple(Curve(_EQUIVALENT.get(name, name), shown=name) for name in _ablation_names(part)),
        )
        for part, words in _ABLATION.items()
    ),
    _accesses,
)
"""Budgets against time, deallocation policies, the ablation in four parts, accesses."""
ABLATE = PaperFigure(
    "ablate",
    FigureStyle("Ablation of the heuristic"),
    tuple(Curve(name) for part in _ABLATION for name in _ablation_names(part)),
)
ACCESSES = dataclasses.replace(_accesses, curves=(*_accesses.curves, Curve("dtr-union")))
BANISH = dataclasses.replace(_banishing, name="banish")
