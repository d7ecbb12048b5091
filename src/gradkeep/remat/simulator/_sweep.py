"""Many simulations: every heuristic at every budget, in parallel, resumable."""

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

    from gradkeep.remat.simulator._core import Policy
    from gradkeep.remat.simulator._program import Program

MAIN_HEURISTICS = ("dtr", "dtr-eq", "dtr-local", "msps", "lru", "largest", "random")
RowSource = Literal["simulated", "optimum", "online", "planned", "checkpoint"]
"""How a row came about; the last three are measured on a live model."""
OPTIMUM = "optimum"
"""In the place of a heuristic: the integer program decides."""
RATIOS = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1)


@dataclass(frozen=True, slots=True)
class SweepCase:
    """One simulation to be done."""

    log: str
    heuristic: str
    ratio: float
    """Budget by the peak without one."""
    policy: Policy = "eager"
    limit: float = 2.0
    releases: bool = True
    """Without them nothing is ever told to be free."""
    seed: int = 0
    """Of random choices."""


@dataclass(frozen=True, slots=True)
class SweepRow:
    """One simulation or measurement done: a line of the table."""

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
        """What was simulated."""
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
    """Every combination, random choices with ten seeds each.

    Unknown heuristics and ratios that make no sense are refused here.
    """
    trials = {name: heuristic(name).trials for name in heuristics}
    for ratio in ratios:
        if not ratio > 0:
            raise RematError("a ratio is a share of the peak above 0", found=ratio)
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
    """The optimum at every ratio, of the logs that are small enough to find it."""
    small = [log for log in logs if len(Graph.of(read_log(log))) <= MAX_SWEEP_OPERATORS]
    return [SweepCase(os.fspath(log), OPTIMUM, float(ratio)) for log in small for ratio in ratios]


def sweep(
    cases: Iterable[SweepCase],
    table: str | os.PathLike[str],
    *,
    workers: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> list[SweepRow]:
    """Run the cases that the CSV `table` does not hold yet, adding each row as it is done.

    Interrupt it at any moment and run it again: what is in the table is not done twice. Cases of a
    heuristic that was registered here run in this process, all others on `workers` processes.
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
        _program(log)  # a log that cannot be read is told at once, not by a worker
    for number, row in enumerate(_rows_of(pending, workers), len(every) - len(pending) + 1):
        done[row.case] = row
        with path.open("a", newline="") as file:
            csv.writer(file).writerow(dataclasses.astuple(row))
        if progress is not None:
            progress(number, len(every))
    rows = [done[case] for case in every]
    # What earlier runs asked for and this one does not stays, after what this one asks for.
    write_table(path, {**{row.case: row for row in rows}, **done}.values())
    return rows


def _rows_of(cases: Sequence[SweepCase], workers: int | None) -> Iterator[SweepRow]:
    """The rows as they are done."""
    # Other processes do not know a heuristic that was registered in this one.
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
    """The rows of a table; a last line that was cut off by a kill is left out."""
    rows = []
    with Path(path).open(newline="") as file:
        for line in csv.DictReader(file):
            with contextlib.suppress(msgspec.ValidationError):
                rows.append(msgspec.convert(line, SweepRow, strict=False))
    return rows


def write_table(path: Path, rows: Iterable[SweepRow]) -> None:
    """Write a table: a reader sees all of it or nothing."""
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow([part.name for part in dataclasses.fields(SweepRow)])
    writer.writerows(dataclasses.astuple(row) for row in rows)
    replace_file(path, text.getvalue())


@dataclass(frozen=True, slots=True)
class TitledLog:
    """A log with what a picture calls it."""

    path: Path
    title: str


class _ManifestEntry(msgspec.Struct):
    log: str
    title: str = ""
    name: str = ""
    has_start: Literal[True] = True
    """A log is read from its annotation START on."""


class _Manifest(msgspec.Struct):
    models: list[_ManifestEntry]


def find_logs(
    places: Sequence[str | os.PathLike[str]],
) -> tuple[list[TitledLog], list[str]]:
    """The logs that files, folders and manifests name, each once, and notes of what was passed over.

    A folder stands for its `manifest.json`, or without one for all its `.log` files. A manifest lists
    its models under `models`, or per model as `simrd_config` of an experiment does; paths in it are
    taken from where it lies or from the folder above. What it names and is not there is passed over
    with a note, as the original does.
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
                "there is no such log", path=place, expected="logs, a folder of them, a manifest"
            )
        if not entries and not notes:
            raise RematError("no logs in here", path=place, expected="files named .log")
        for log in entries:
            logs.setdefault(log.path, log)
    if not logs:
        raise RematError("none of the logs is there", found="; ".join(notes))
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
            f"this is no manifest of logs: {str(error)[:200]}",
            path=manifest,
            expected='{"models": [{"name": ..., "log": ...}]}, or a list of such per model',
        ) from error
    for entry in entries:
        name = entry.title or entry.name or Path(entry.log).stem
        folder = manifest.parent
        options = (folder / entry.log, folder.parent / entry.log, folder / Path(entry.log).name)
        log = next((option for option in options if option.is_file()), None)
        if log is None:
            notes.append(f"{manifest}: {name!r} is passed over, {entry.log} is not there")
        else:
            yield TitledLog(log, name)


@dataclass(frozen=True, slots=True)
class Curve:
    """One line of a figure."""

    heuristic: str
    policy: Policy = "eager"
    releases: bool = True
    shown: str = ""
    """Its name in the picture, where that is another."""


@dataclass(frozen=True, slots=True)
class PaperFigure:
    """One figure: a panel per log, and in each these curves."""

    name: str
    look: FigureStyle
    curves: tuple[Curve, ...]

    def cases(
        self,
        logs: Sequence[str | os.PathLike[str]],
        *,
        ratios: Sequence[float] = RATIOS,
        limit: float = 2.0,
    ) -> list[SweepCase]:
        """What has to be simulated for it."""
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
        """Its part of a finished sweep, under the names that it shows."""
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
"""Heuristics of the ablation that another figure has too: simulated once."""
_ABLATION = {
    "exact": "the exact neighbourhood",
    "eq": "equivalence classes",
    "local": "its own cost",
    "none": "no cost",
}


def _ablation_names(part: str) -> list[str]:
    return [f"ab-{part}{rest}" for rest in ("-size-stale", "-size", "-stale", "")]


_accesses = PaperFigure(
    "accesses",
    FigureStyle(
        "How much looking around choosing takes",
        "accesses",
        "storages looked at, as the original counts",
        logarithmic=True,
    ),
    tuple(map(Curve, ("dtr", "dtr-eq", "dtr-local"))),
)
# For ever, at once, never: banishing has no neighbourhoods that are kept, hence another heuristic.
_banishing = PaperFigure(
    "banishing",
    FigureStyle("What happens to storages that nobody refers to", by_policy=True),
    (Curve("dtr-union", "banish"), Curve("dtr"), Curve("dtr", releases=False)),
)
PAPER_FIGURES = (
    PaperFigure(
        "pareto",
        FigureStyle("What a smaller memory budget costs"),
        tuple(map(Curve, MAIN_HEURISTICS)),
    ),
    _banishing,
    *(
        PaperFigure(
            f"ablation-{part}",
            FigureStyle(f"What size and staleness are worth with {words}"),
            tuple(Curve(_EQUIVALENT.get(name, name), shown=name) for name in _ablation_names(part)),
        )
        for part, words in _ABLATION.items()
    ),
    _accesses,
)
"""Budgets against time, what to do with dead storages, the ablation in four parts, accesses."""
ABLATE = PaperFigure(
    "ablate",
    FigureStyle("What each part of the heuristic is worth"),
    tuple(Curve(name) for part in _ABLATION for name in _ablation_names(part)),
)
ACCESSES = dataclasses.replace(_accesses, curves=(*_accesses.curves, Curve("dtr-union")))
BANISH = dataclasses.replace(_banishing, name="banish")
