"""Trials on a live model: steps within a budget next to plain steps, in one process.

Every step within a budget is paired with a plain one right before it. Overheads are medians
of ratios of CPU time, peaks are live bytes of tensors.

Checkpoints are placed by name. `K segments` cuts a chain of layers (`nn.Sequential`) into K pieces
and keeps the activations between them; the last piece is not checkpointed, because its backward pass comes
first. `all`, `even`, `odd`, `first half` and `last half` wrap parts of any model one by one.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from gradkeep.compat.dtr.experiments._trial import SEGMENTS
from gradkeep.compat.dtr.zoo import build
from gradkeep.errors import BudgetError, RematError
from gradkeep.remat import memory_budget, record
from gradkeep.remat.online._runtime import OnlineRuntime
from gradkeep.remat.simulator._heuristics import PoolSample

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from gradkeep.compat.dtr.experiments._trial import TrialWork
    from gradkeep.compat.dtr.zoo import Workload

    Step = Callable[[], object]


_RECORDINGS = 3
"""Number of recordings before planning."""


class _Spent(NamedTuple):
    """Duration of one step in seconds."""

    wall: float
    cpu: float


def measure(work: TrialWork) -> dict[str, Any]:
    """Run and time the plain step; one more run counts the bytes."""
    step = _build_workload(work).step
    for _ in range(work.warmup):
        step()
    times = _times([_timed(step) for _ in range(work.repeats)])
    return {"status": "ok", **times, "peak": _live_peak(step)}


def make_log(work: TrialWork, path: Path) -> dict[str, Any]:
    """Record the step; the log is written atomically."""
    step = _build_workload(work).step
    for _ in range(work.warmup):
        step()
    # A temporary file until all repeats are recorded: a log that exists is complete.
    recorder = record(path.with_suffix(f".part{os.getpid()}"))
    # A recording takes the least time of each operator; more repeats change little.
    for _ in range(min(work.repeats, 5)):
        with recorder:
            step()
    recorder.path.replace(path)
    return {"status": "ok", "peak": recorder.live_peak}


def measure_online(
    work: TrialWork,
    budget: float,
    *,
    heuristic: str,
    limit: float,
    sample: bool,
    skip_small: bool,
) -> dict[str, Any]:
    """Train with online eviction."""
    step = _build_workload(work).step
    step()
    peak = _live_peak(step)
    pool_sample = PoolSample(sample=sample, skip_small=skip_small)
    online = OnlineRuntime(
        budget, heuristic=heuristic, limit=max(limit - 1, 0.0), sample=pool_sample
    )
    reports = []

    def within() -> None:
        with online:
            step()
        reports.append(online.report())

    # Result sizes are unknown in the first step, which may exceed the budget.
    for _ in range(max(work.warmup, 1)):
        within()
    reports.clear()
    plain, spent = _time_pairs(step, within, work.repeats, go_on=lambda: not reports[-1].gave_up)
    over = max(one.over for one in reports)
    status, message = "ok", ""
    if any(one.exhausted for one in reports):
        # The simulator ends here, so later thrashing does not count.
        status = "over budget"
        message = f"out of memory by {over} bytes: no storage could be evicted"
    elif any(one.gave_up for one in reports):
        status, message = "gave up", f"recomputation took more than {limit:g} times the plain time"
    elif over:
        status, message = "over budget", f"by {over} bytes"
    if online.slow is not None:
        message = f"{message}; {online.slow}" if message else online.slow
    return {
        "status": status,
        "message": message,
        **_times(spent, plain),
        **{
            f"{part}_time": statistics.median(getattr(one, f"{part}_seconds") for one in reports)
            for part in ("base", "remat", "search", "copy")
        },
        "budget": _whole(budget),
        "peak": max(one.peak for one in reports),
        "unlimited_peak": peak,
        **{
            name: getattr(reports[-1], name)
            for name in ("operators", "evictions", "rematerializations")
        },
    }


def measure_planned(work: TrialWork, budget: float) -> dict[str, Any]:
    """Train by a plan made from recorded steps."""
    step = _build_workload(work).step
    step()
    base = memory_budget(1.0, recordings=_RECORDINGS)
    for _ in range(_RECORDINGS):
        with base.step():
            step()
    try:
        chosen = base if math.isinf(budget) else base.replan(int(budget))
    except BudgetError as error:
        about = base.explain()
        floor = f"the floor is {about.floor} bytes ({about.floor / max(about.peak, 1):.3f})"
        return {
            "status": "infeasible",
            "message": f"{error.message}: {floor}",
            "budget": _whole(budget),
            "unlimited_peak": about.peak,
            "floor": about.floor,
        }

    def within() -> None:
        with chosen.step():
            step()

    for _ in range(max(work.warmup, 1)):
        within()
    plain, spent = _time_pairs(step, within, work.repeats)
    explanation, done = chosen.explain(), chosen.report()
    status, message = "ok", ""
    if done.unplanned or done.undone:
        status, message = "gave up", "; ".join(dict.fromkeys(done.reasons[-3:]))
    elif (done.measured_peak or 0) > budget:
        status = "over budget"
    base_time = statistics.median(one.cpu for one in plain)
    return {
        "status": status,
        "message": message,
        **_times(spent, plain),
        "base_time": base_time,
        "remat_time": base_time * (done.recompute_share or 0.0),
        "search_time": 0.0,
        "copy_time": 0.0,
        "budget": _whole(budget),
        "peak": done.measured_peak,
        "unlimited_peak": explanation.peak,
        "floor": explanation.floor,
        "predicted_peak": explanation.predicted_peak,
        "predicted_overhead": explanation.predicted_slowdown,
        "planning_seconds": explanation.planning_seconds,
        "evictions": len(explanation.dropped),
    }


def measure_checkpoints(work: TrialWork, *, placement: str) -> dict[str, Any]:
    """Train with `torch.utils.checkpoint` at a placement."""
    load = _build_workload(work)
    step = load.step
    step()
    peak = _live_peak(step)

    def within() -> None:
        with place_checkpoints(load.model, placement):
            step()

    try:
        for _ in range(max(work.warmup, 1)):
            within()
        own_peak = _live_peak(within)
    except (RematError, RuntimeError) as error:
        # No such placement, or a piece that begins with an in-place operator.
        message = str(error).splitlines()[0]
        return {"status": "infeasible", "message": message, "unlimited_peak": peak}
    plain, spent = _time_pairs(step, within, work.repeats)
    return {
        "status": "ok",
        **_times(spent, plain),
        "base_time": statistics.median(one.cpu for one in plain),
        "peak": own_peak,
        "unlimited_peak": peak,
    }


def _time_pairs(
    plain: Step, other: Step, rounds: int, *, go_on: Callable[[], bool] = lambda: True
) -> tuple[list[_Spent], list[_Spent]]:
    """Time both steps alternately, `rounds` times or until `go_on` returns False."""
    one, two = [], []
    for _ in range(rounds):
        one.append(_timed(plain))
        two.append(_timed(other))
        if not go_on():
            break
    return one, two


def _times(spent: list[_Spent], plain: list[_Spent] | None = None) -> dict[str, float]:
    times = {
        "time": statistics.median(one.wall for one in spent),
        "least_time": min(one.wall for one in spent),
        "cpu_time": statistics.median(one.cpu for one in spent),
    }
    if plain is not None:
        pairs = zip(spent, plain, strict=True)
        times["plain_cpu_time"] = statistics.median(one.cpu for one in plain)
        times["overhead"] = statistics.median(a.cpu / max(b.cpu, 1e-9) for a, b in pairs)
    return times


def _timed(step: Step) -> _Spent:
    wall, cpu = time.perf_counter(), time.process_time()
    step()
    return _Spent(time.perf_counter() - wall, time.process_time() - cpu)


def _live_peak(step: Step) -> int:
    with tempfile.TemporaryDirectory() as folder:
        recorder = record(Path(folder) / "step.log")
        with recorder:
            step()
    return recorder.live_peak


def _whole(budget: float) -> int | None:
    return None if math.isinf(budget) else int(budget)


def _build_workload(work: TrialWork) -> Workload:
    torch.set_num_threads(work.threads)
    sizes: dict[str, Any] = dict(work.sizes)
    return build(work.name, seed=work.seed, **sizes)


@contextlib.contextmanager
def place_checkpoints(model: nn.Module, name: str) -> Iterator[None]:
    """Add checkpoints to the model inside `with`; raise `RematError` if the placement does not exist."""
    segments = SEGMENTS.fullmatch(name)
    if segments is not None:
        wrapped = [(model, _in_segments(model, int(segments[1])))]
    else:
        wrapped = [(part, _checkpointed(part)) for part in _chosen(model, name)]
    for module, forward in wrapped:
        module.forward = forward
    try:
        yield
    finally:
        for module, _ in wrapped:
            del module.forward


def _in_segments(model: nn.Module, count: int) -> Any:
    if not isinstance(model, nn.Sequential) or len(model) < count:
        raise RematError(
            "the model has no such placement of checkpoints",
            code="compat.no_segments",
            found=f"{count} segments of {type(model).__name__}",
            expected=f"a chain (nn.Sequential) of at least {count} layers",
            fix="Use all, even, odd, first half or last half for other models.",
        )
    edges = [round(part * len(model) / count) for part in range(count + 1)]
    pieces = [model[low:high] for low, high in itertools.pairwise(edges)]

    def forward(x: Any) -> Any:
        for piece in pieces[:-1]:
            x = checkpoint(piece, x, use_reentrant=False)
        return pieces[-1](x)

    return forward


def _checkpointed(part: nn.Module) -> Any:
    return functools.partial(checkpoint, part.forward, use_reentrant=False)


def _chosen(model: nn.Module, name: str) -> list[nn.Module]:
    """Return the parts with parameters, with lists opened, that a placement selects."""
    children: list[nn.Module] = []
    for child in model.children():
        children += list(child) if isinstance(child, nn.ModuleList) else [child]
    parts = [part for part in children if next(part.parameters(), None) is not None]
    half = len(parts) // 2
    chosen = {
        "all": parts,
        "even": parts[::2],
        "odd": parts[1::2],
        "first half": parts[:half],
        "last half": parts[half:],
    }[name]
    if not chosen:
        raise RematError(
            "the model has no such placement of checkpoints",
            code="compat.no_parts",
            found=f"{name!r} of {len(parts)} parts with parameters",
        )
    return chosen
