"""The screen Memory: the cost of smaller budgets for a recorded training step."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from gradkeep._display import pick_fields
from gradkeep.errors import GradkeepError, RematError
from gradkeep.web._http import LogName, Ratio, error_problem

if TYPE_CHECKING:
    from collections.abc import Callable

    from gradkeep.remat import Program
    from gradkeep.web._served import ServedStore

HEURISTICS = ("dtr-eq", "dtr-local", "lru", "largest")
_RATIOS = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.45, 0.4, 0.35, 0.3, 0.25, 0.2, 0.15, 0.1)
_MAX_SLOWDOWN = 4.0


def show_budgets(served: ServedStore, log: LogName = "") -> dict[str, Any]:
    """Return the cost of every budget by every heuristic, by default for the first log."""
    logs = _find_logs(served)
    name = log or next(iter(logs), "")
    view: dict[str, Any] = {
        "log": name,
        "logs": [
            {"name": one, "bytes": path.stat().st_size}
            for one, path in logs.items()
            if path.exists()
        ],
        "curves": [],
        "problem": None,
        **dict.fromkeys(("operators", "peak", "floor"), 0),
    }
    if not logs:
        return view
    try:
        program = _load_program(served, name)
        return view | served.tasks.get(
            ("curves", name, _version(logs[name])),
            f"simulating {name} in smaller budgets",
            lambda report: _simulate_budgets(program, report),
        )
    except GradkeepError as error:
        return view | {"problem": error_problem(error)}


def show_timeline(
    served: ServedStore,
    log: LogName,
    heuristic: Literal["dtr-eq", "dtr-local", "lru", "largest"] = "dtr-eq",
    ratio: Ratio = 0.5,
) -> dict[str, Any]:
    """Return memory, evictions and recomputations over one step inside a budget."""
    ratio = round(ratio, 3)
    program = _load_program(served, log)
    return served.tasks.get(
        ("timeline", log, _version(_find_logs(served)[log]), heuristic, ratio),
        f"simulating {log} at {ratio:.0%}",
        lambda _: _simulate_timeline(log, program, heuristic, ratio),
        size=lambda _: 64 << 10,
    )


def _find_logs(served: ServedStore) -> dict[str, Path]:
    """Return the logs passed by the user and those in the store's folder `remat`, by name."""
    logs = {path.name: path for path in served.logs}
    folder = Path(served.location) / "remat"
    if folder.is_dir():
        for path in sorted(folder.glob("*.log"))[:50]:
            if path.is_file() and not path.is_symlink():
                logs.setdefault(path.name, path)
    return logs


def _load_program(served: ServedStore, log: str) -> Program:
    logs = _find_logs(served)
    if log not in logs:
        raise RematError(
            f"no recorded step {log[:100]!r}",
            code="web.unknown_log",
            found=", ".join(logs) or "none",
            fix="gradkeep remat record SCRIPT, then gradkeep serve STORE --log FILE",
        )

    def compute(_: Any) -> Program:
        from gradkeep.remat import read_log

        return read_log(logs[log])

    return served.tasks.get(
        ("log", log, _version(logs[log])),
        f"reading {log}",
        compute,
        size=lambda _: 8 * logs[log].stat().st_size,
    )


def _simulate_budgets(program: Program, report: Callable[[int, int], None]) -> dict[str, Any]:
    from gradkeep.remat import simulate, unlimited_peak

    peak = unlimited_peak(program)
    total, done, curves = len(_RATIOS) * len(HEURISTICS), 0, []
    for heuristic in HEURISTICS:
        points: list[dict[str, Any]] = []
        for ratio in _RATIOS:
            # A smaller budget than one that is too small is too small.
            if not points or points[-1]["status"] == "ok":
                outcome = simulate(
                    program, heuristic=heuristic, budget=int(peak * ratio), limit=_MAX_SLOWDOWN
                )
                points.append(_cost_view(ratio, outcome))
            done += 1
            report(done, total)
        curves.append({"heuristic": heuristic, "points": points})
    floor = max(program.constant_bytes, program.bottleneck_bytes)
    return {"operators": len(program.ops), "peak": peak, "floor": floor, "curves": curves}


def _simulate_timeline(log: str, program: Program, heuristic: str, ratio: float) -> dict[str, Any]:
    from gradkeep._budgets import format_bytes
    from gradkeep.remat import simulate, unlimited_peak
    from gradkeep.remat.simulator._simulate import Timeline

    peak = unlimited_peak(program)
    budget, timeline = int(peak * ratio), Timeline()
    outcome = simulate(
        program, heuristic=heuristic, budget=budget, limit=_MAX_SLOWDOWN, timeline=timeline
    )
    events = timeline.events
    most = 1500  # events that the page draws
    step = max(1, len(events) // most)
    # Keep the largest of every few events, so that peaks are not lost.
    thinned = [
        max(events[at : at + step], key=lambda event: event.memory)
        for at in range(0, len(events), step)
    ]
    evictions = [event.clock for event in events if event.what == "evict"]
    recomputes = [event.clock for event in events if event.what == "recompute"]
    results = {
        "ok": f"takes {outcome.overhead:.2f}x the time",
        "oom": "runs out of memory",
        "thrash": f"takes more than {_MAX_SLOWDOWN:g}x the time",
    }
    return {
        "log": log,
        "heuristic": heuristic,
        "ratio": ratio,
        "budget": budget,
        "peak": peak,
        "sentence": f"At {ratio:.0%} of its memory ({format_bytes(budget)} instead of "
        f"{format_bytes(peak)}) this step {results[outcome.status]}.",
        "cost": _cost_view(ratio, outcome),
        "clock": [event.clock for event in thinned],
        "memory": [event.memory for event in thinned],
        "evictions": evictions[:: max(1, len(evictions) // most)],
        "recomputes": recomputes[:: max(1, len(recomputes) // most)],
        "total_evictions": len(evictions),
        "total_recomputes": len(recomputes),
    }


def _cost_view(ratio: float, outcome: Any) -> dict[str, Any]:
    return {
        "ratio": ratio,
        "budget": int(outcome.budget),
        "recomputed": outcome.rematerializations,
        **pick_fields(outcome, "status", "overhead", "evictions", "peak"),
    }


def _version(path: Path) -> tuple[int, int]:
    stat = path.stat()
    return stat.st_size, stat.st_mtime_ns
