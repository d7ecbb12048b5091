"""Many simulations: every heuristic at every budget, in parallel, resumable."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import math
import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from gradkeep.errors import RematError
from gradkeep.remat.simulator._heuristics import heuristic, own_heuristics
from gradkeep.remat.simulator._optimal import SMALL_ENOUGH, optimum_point
from gradkeep.remat.simulator._picture import PictureStyle
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
    small = [log for log in logs if len(Graph.of(read_log(log))) <= SMALL_ENOUGH]
    return [SweepCase(os.fspath(log), OPTIMUM, float(ratio)) for log in small for ratio in ratios]


def sweep(
    wanted: Iterable[SweepCase],
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
    every = list(dict.fromkeys(wanted))
    there = read_table(path) if path.exists() else []
    done = {row.case: row for row in there if row.source in ("simulated", "optimum")}
    left = [case for case in every if case not in done]
    write_table(path, done.values())
    if progress is not None:
        progress(len(every) - len(left), len(every))
    for log in dict.fromkeys(case.log for case in left):
        _program(log)  # a log that cannot be read is told at once, not by a worker
    for number, row in enumerate(_rows_of(left, workers), len(every) - len(left) + 1):
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
    own = own_heuristics()
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
    if case.heuristic == OPTIMUM:
        best = optimum_point(program, budget, time_limit=20.0)
        overhead = math.nan if best.overhead is None else best.overhead
        return SweepRow(
            **dataclasses.asdict(case),
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
    return SweepRow(
        **dataclasses.asdict(case),
        status=outcome.status,
        overhead=outcome.overhead,
        budget=budget,
        peak=outcome.peak,
        evictions=outcome.evictions,
        rematerializations=outcome.rematerializations,
        heuristic_evaluations=outcome.heuristic_evaluations,
        accesses=outcome.accesses,
    )


@lru_cache(maxsize=16)
def _program(log: str) -> tuple[Program, int]:
    program = read_log(log)
    return program, unlimited_peak(program)


def read_table(path: str | os.PathLike[str]) -> list[SweepRow]:
    """The rows of a table; a last line that was cut off by a kill is left out."""
    rows = []
    fields = dataclasses.fields(SweepRow)
    kinds: dict[str, Callable[[str], Any]] = {
        "float": float,
        "int": int,
        "bool": lambda text: {"True": True, "False": False}[text],
    }
    with Path(path).open(newline="") as file:
        for line in list(csv.reader(file))[1:]:
            if len(line) != len(fields):
                continue
            try:
                values = [
                    kinds.get(str(part.type), str)(text)
                    for part, text in zip(fields, line, strict=True)
                ]
            except (ValueError, KeyError):
                continue
            rows.append(SweepRow(*values))
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


def find_logs(
    places: Sequence[str | os.PathLike[str]],
) -> tuple[list[TitledLog], list[str]]:
    """The logs that files, folders and manifests name, each once, and notes of what was passed over.

    A folder stands for its `manifest.json`, or without one for all its `.log` files. A manifest lists
    its models under `models`, or per model as `simrd_config` of an experiment does; paths in it are
    taken from where it lies or from the folder above. What it names and is not there is passed over
    with a note, as the original does.
    """
    found: dict[Path, TitledLog] = {}
    notes: list[str] = []
    for place in map(Path, places):
        if place.is_dir():
            manifest = place / "manifest.json"
            logs = (
                _listed(manifest, notes)
                if manifest.is_file()
                else map(_titled, sorted(place.glob("*.log")))
            )
        elif place.suffix == ".json":
            logs = _listed(place, notes)
        elif place.is_file():
            logs = iter([_titled(place)])
        else:
            raise RematError(
                "there is no such log", path=place, expected="logs, a folder of them, a manifest"
            )
        before = len(found)
        for log in logs:
            found.setdefault(log.path, log)
        if len(found) == before and not any(notes):
            raise RematError("no logs in here", path=place, expected="files named .log")
    if not found:
        raise RematError("none of the logs is there", found="; ".join(notes))
    return list(found.values()), notes


def _titled(path: Path) -> TitledLog:
    return TitledLog(path, path.name.split("-")[0])


def _listed(manifest: Path, notes: list[str]) -> Iterator[TitledLog]:
    try:
        content = json.loads(manifest.read_text())
    except (OSError, ValueError) as error:
        raise RematError(
            "the manifest cannot be read", path=manifest, found=str(error).splitlines()[0]
        ) from error
    for at, entry in enumerate(_entries(manifest, content), 1):
        if not isinstance(entry, dict) or not isinstance(entry.get("log"), str):
            raise RematError(
                f"model {at} of the manifest names no log",
                path=manifest,
                found=repr(entry)[:80],
                expected='{"name": ..., "log": "logs/a.log"}',
            )
        name = str(entry.get("title") or entry.get("name") or Path(entry["log"]).stem)
        if entry.get("has_start") is False:
            raise RematError(
                f"has_start of {name!r} is false: a log is read from its annotation START on",
                path=manifest,
                fix='add {"INSTRUCTION": "ANNOTATE", "ANNOTATION": "START"} as its first line',
            )
        log = _placed(manifest, entry["log"])
        if log is None:
            notes.append(f"{manifest}: {name!r} is passed over, {entry['log']} is not there")
            continue
        yield TitledLog(log, name)


def _entries(manifest: Path, content: Any) -> list[Any]:
    models = content.get("models") if isinstance(content, dict) else None
    if isinstance(models, list):
        return models
    if isinstance(content, dict) and all(isinstance(part, list) for part in content.values()):
        return [entry for part in content.values() for entry in part]
    raise RematError(
        "this is no manifest of logs",
        path=manifest,
        found=type(content).__name__,
        expected='{"models": [{"name": ..., "log": ...}]}, or a list of such per model',
    )


def _placed(manifest: Path, log: str) -> Path | None:
    places = (manifest.parent / log, manifest.parent.parent / log, manifest.parent / Path(log).name)
    return next((place for place in places if place.is_file()), None)


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
    look: PictureStyle
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


_SAME = {
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


def _ablated(part: str) -> list[str]:
    return [f"ab-{part}{rest}" for rest in ("-size-stale", "-size", "-stale", "")]


_accesses = PaperFigure(
    "accesses",
    PictureStyle(
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
    PictureStyle("What happens to storages that nobody refers to", by_policy=True),
    (Curve("dtr-union", "banish"), Curve("dtr"), Curve("dtr", releases=False)),
)
PAPER_FIGURES = (
    PaperFigure(
        "pareto",
        PictureStyle("What a smaller memory budget costs"),
        tuple(map(Curve, MAIN_HEURISTICS)),
    ),
    _banishing,
    *(
        PaperFigure(
            f"ablation-{part}",
            PictureStyle(f"What size and staleness are worth with {words}"),
            tuple(Curve(_SAME.get(name, name), shown=name) for name in _ablated(part)),
        )
        for part, words in _ABLATION.items()
    ),
    _accesses,
)
"""Budgets against time, what to do with dead storages, the ablation in four parts, accesses."""
ABLATE = PaperFigure(
    "ablate",
    PictureStyle("What each part of the heuristic is worth"),
    tuple(Curve(name) for part in _ABLATION for name in _ablated(part)),
)
ACCESSES = dataclasses.replace(_accesses, curves=(*_accesses.curves, Curve("dtr-union")))
BANISH = dataclasses.replace(_banishing, name="banish")
