"""The screen of memory budgets: what a smaller budget costs a recorded step, and what happens in it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gradkeep.errors import GradkeepError, RematError
from gradkeep.web._responses import ProblemView, problem_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from gradkeep.remat import Program
    from gradkeep.web._served import ServedStore

RATIOS = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.45, 0.4, 0.35, 0.3, 0.25, 0.2, 0.15, 0.1)
HEURISTICS = ("dtr-eq", "dtr-local", "lru", "largest")
LOGS = "remat"
"""The folder of a store in which recorded steps are looked for."""
_LIMIT = 4.0
_MOST_EVENTS = 1500


@dataclass(frozen=True, slots=True)
class LogView:
    """A recorded step."""

    name: str
    bytes: int


@dataclass(frozen=True, slots=True)
class BudgetCost:
    """What one budget costs by one heuristic."""

    ratio: float
    budget: int
    status: str
    overhead: float
    evictions: int
    recomputed: int
    peak: int


@dataclass(frozen=True, slots=True)
class CostCurve:
    """What every budget costs by one heuristic."""

    heuristic: str
    points: list[BudgetCost]


@dataclass(frozen=True, slots=True)
class MemoryView:
    """The curves of one recorded step."""

    log: str
    logs: list[LogView]
    operators: int
    peak: int
    """Bytes without a budget."""
    floor: int
    """No budget below this can work."""
    curves: list[CostCurve]
    problem: ProblemView | None = None


@dataclass(frozen=True, slots=True)
class TimelineView:
    """Bytes in memory over one step inside a budget."""

    log: str
    heuristic: str
    ratio: float
    budget: int
    peak: int
    sentence: str
    cost: BudgetCost
    clock: list[int]
    memory: list[int]
    evictions: list[int]
    """Clocks at which something was evicted, thinned out."""
    recomputes: list[int]
    total_evictions: int
    total_recomputes: int


def known_logs(served: ServedStore) -> dict[str, Path]:
    """The recorded steps that were given, and those that lie in the store's folder `remat`."""
    found = {path.name: path for path in served.logs}
    root = Path(served.location) / LOGS
    if root.is_dir():
        for path in sorted(root.glob("*.log"))[:50]:
            if path.is_file() and not path.is_symlink():
                found.setdefault(path.name, path)
    return found


def draw_curves(served: ServedStore, *, log: str) -> MemoryView:
    """The cost of every budget; the first recorded step if none is named."""
    logs = known_logs(served)
    views = [LogView(name, path.stat().st_size) for name, path in logs.items() if path.exists()]
    if not logs:
        return MemoryView("", [], 0, 0, 0, [])
    name = log or next(iter(logs))
    try:
        program = _program(served, name)
        return served.desk.ask(
            ("curves", name, _age(logs[name])),
            f"simulating {name} in smaller budgets",
            lambda report: _curves(name, views, program, report),
        )
    except GradkeepError as error:
        return MemoryView(name, views, 0, 0, 0, [], problem_of(error))


def draw_timeline(served: ServedStore, *, log: str, heuristic: str, ratio: float) -> TimelineView:
    """What happens in memory over one step in a budget."""
    program = _program(served, log)
    path = known_logs(served)[log]
    return served.desk.ask(
        ("timeline", log, _age(path), heuristic, ratio),
        f"running {log} in {ratio:.0%}",
        lambda _: _timeline(log, program, heuristic, ratio),
        size=lambda _: 64 << 10,
    )


def _program(served: ServedStore, log: str) -> Program:
    logs = known_logs(served)
    if log not in logs:
        raise RematError(
            f"no recorded step {log[:100]!r}",
            found=", ".join(logs) or "none",
            fix="gradkeep remat record SCRIPT, then gradkeep serve STORE --log FILE",
        )

    def make(_: Any) -> Program:
        from gradkeep.remat import read_log

        return read_log(logs[log])

    return served.desk.ask(
        ("log", log, _age(logs[log])),
        f"reading {log}",
        make,
        size=lambda _: 8 * logs[log].stat().st_size,
    )


def _curves(
    name: str, logs: list[LogView], program: Program, report: Callable[[int, int], None]
) -> MemoryView:
    from gradkeep.remat import simulate, unlimited_peak

    peak = unlimited_peak(program)
    total, done, curves = len(RATIOS) * len(HEURISTICS), 0, []
    for heuristic in HEURISTICS:
        points: list[BudgetCost] = []
        for ratio in RATIOS:
            # Where a budget is too small, a smaller one is too.
            if not points or points[-1].status == "ok":
                outcome = simulate(
                    program,
                    heuristic=heuristic,
                    budget=int(peak * ratio),
                    limit=_LIMIT,
                )
                points.append(_cost(ratio, outcome))
            done += 1
            report(done, total)
        curves.append(CostCurve(heuristic, points))
    floor = max(program.constant_bytes, program.bottleneck_bytes)
    return MemoryView(name, logs, len(program.ops), peak, floor, curves)


def _timeline(log: str, program: Program, heuristic: str, ratio: float) -> TimelineView:
    from gradkeep._budgets import format_bytes
    from gradkeep.remat import simulate, unlimited_peak
    from gradkeep.remat.simulator._simulate import Timeline

    peak = unlimited_peak(program)
    events = Timeline()
    outcome = simulate(
        program,
        heuristic=heuristic,
        budget=int(peak * ratio),
        limit=_LIMIT,
        timeline=events,
    )
    step = max(1, len(events.events) // _MOST_EVENTS)
    # Of every few events the one with the most bytes: a peak must not be thinned away.
    thinned = [
        max(events.events[at : at + step], key=lambda one: one.memory)
        for at in range(0, len(events.events), step)
    ]
    evicted = [one.clock for one in events.events if one.what == "evict"]
    again = [one.clock for one in events.events if one.what == "recompute"]
    words = {
        "ok": f"this step takes {outcome.overhead:.2f}x the time",
        "oom": "this step runs out of memory",
        "thrash": f"this step takes more than {_LIMIT:g}x the time",
    }
    sentence = (
        f"At {ratio:.0%} of its memory ({format_bytes(int(peak * ratio))} in place of "
        f"{format_bytes(peak)}) {words[outcome.status]}."
    )
    return TimelineView(
        log=log,
        heuristic=heuristic,
        ratio=ratio,
        budget=int(peak * ratio),
        peak=peak,
        sentence=sentence,
        cost=_cost(ratio, outcome),
        clock=[one.clock for one in thinned],
        memory=[one.memory for one in thinned],
        evictions=_thin(evicted),
        recomputes=_thin(again),
        total_evictions=len(evicted),
        total_recomputes=len(again),
    )


def _cost(ratio: float, outcome: Any) -> BudgetCost:
    return BudgetCost(
        ratio,
        int(outcome.budget),
        outcome.status,
        outcome.overhead,
        outcome.evictions,
        outcome.rematerializations,
        outcome.peak,
    )


def _thin(clocks: list[int]) -> list[int]:
    return clocks[:: max(1, len(clocks) // _MOST_EVENTS)]


def _age(path: Path) -> tuple[int, int]:
    facts = path.stat()
    return facts.st_size, facts.st_mtime_ns
