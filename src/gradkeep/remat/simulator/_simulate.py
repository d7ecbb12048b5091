"""Run a program within a budget and measure its cost and memory over time."""

from __future__ import annotations

import csv
import dataclasses
import gc
import math
import numbers
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from gradkeep import _arguments
from gradkeep._arguments import file_to_write
from gradkeep.errors import RematError
from gradkeep.remat._eviction_core import (
    EvictionCore,
    OutOfMemoryError,
    Policy,
    ThrashingError,
)
from gradkeep.remat.simulator._heuristics import PoolSample, RandomChoice
from gradkeep.remat.simulator._heuristics import heuristic as heuristic_named
from gradkeep.remat.simulator._neighborhoods import Heuristic
from gradkeep.remat.simulator._program import StepKind

if TYPE_CHECKING:
    import os

    from gradkeep.remat._eviction_core import Storage
    from gradkeep.remat.simulator._program import Op, Program


@dataclass(frozen=True, slots=True)
class SimulationResult:
    """Outcome of a simulation; if the run did not finish, the counters at that point.

    Attributes:
        status: `"ok"`, `"oom"` (no storage could be evicted) or `"thrash"` (recomputation over the limit).
        heuristic: Name of the heuristic.
        policy: Deallocation policy.
        budget: Bytes.
        overhead: Time taken divided by the time of running every operator once.
        peak: Largest number of bytes in memory.
        compute: Time taken, recomputation included.
        base_compute: Time of running every operator once.
        remat_compute: Time of recomputation.
        evictions: Number of evicted storages.
        rematerializations: Number of operators run again.
        ops_run: Number of operators run, recomputation included.
        heuristic_evaluations: Number of computed scores.
        accesses: Number of storages accessed by the heuristic, counted as in the original.
    """

    status: Literal["ok", "oom", "thrash"]
    heuristic: str
    policy: Policy
    budget: float
    overhead: float
    peak: int
    compute: int
    base_compute: int
    remat_compute: int
    evictions: int
    rematerializations: int
    ops_run: int
    heuristic_evaluations: int
    accesses: int


@_arguments.checked(RematError)
def simulate(
    program: Program,
    *,
    heuristic: str | Heuristic = "dtr-eq",
    budget: float = math.inf,
    policy: Policy = "eager",
    limit: float = math.inf,
    skip_small: bool = False,
    sample: bool = False,
    seed: int = 0,
    timeline: Timeline | None = None,
) -> SimulationResult:
    """Simulate a program within a budget.

    Args:
        program: A recorded step.
        heuristic: Name of a heuristic, or a new `Heuristic`.
        budget: Bytes; unlimited by default.
        policy: What happens to storages without references: `"ignore"`, `"eager"` (evict at once) or
            `"banish"` (free permanently).
        limit: Stop as thrashing when the time exceeds this multiple of the base cost.
        skip_small: Skip storages below 1 % of the mean size.
        sample: Score only about 2 sqrt(n) of n storages.
        seed: Seed of random choices.
        timeline: Collects memory events.

    Returns:
        Status, times and counts; accesses are counted as in the original.

    Raises:
        RematError: If an argument is invalid.

    Example:
        >>> from gradkeep.remat import chain
        >>> simulate(chain(10, size=1, cost=1), budget=5).status
        'ok'
    """
    if policy not in ("ignore", "eager", "banish"):
        raise RematError(
            f"policy must be 'ignore', 'eager' or 'banish', got {policy!r}", code="argument.invalid"
        )
    real = isinstance(budget, numbers.Real) and not isinstance(budget, bool)
    if not real or math.isnan(budget) or budget < 0:
        raise RematError(
            f"budget must be a number of bytes, got {repr(budget)[:60]}", code="argument.invalid"
        )
    if limit < 1:
        raise RematError(f"limit must be at least 1, got {limit}", code="argument.invalid")
    chooser = heuristic_named(heuristic) if isinstance(heuristic, str) else heuristic
    if isinstance(heuristic, str) and isinstance(chooser, RandomChoice):
        chooser.reseed(seed)
    core = EvictionCore(
        chooser,
        budget=budget - program.output_bytes,
        policy=policy,
        remat_limit=program.compute * (limit - 1),
        sample=PoolSample(skip_small=skip_small, sample=sample, seed=seed),
        timeline=timeline,
    )
    status: Literal["ok", "oom", "thrash"] = "ok"
    try:
        run_program(core, program)
    except OutOfMemoryError:
        status = "oom"
    except ThrashingError:
        status = "thrash"
    return SimulationResult(
        status=status,
        heuristic=chooser.name,
        policy=policy,
        budget=budget,
        overhead=core.clock / program.compute if program.compute else 1.0,
        peak=core.peak + program.output_bytes,
        compute=core.clock,
        base_compute=program.compute,
        remat_compute=core.remat_compute,
        evictions=core.evictions,
        rematerializations=core.rematerializations,
        ops_run=core.ops_run,
        heuristic_evaluations=chooser.evaluations,
        accesses=chooser.accesses,
    )


def run_program(core: EvictionCore, program: Program) -> None:
    """Drive the core through a program; raise `OutOfMemoryError` or `ThrashingError` if it ends early."""
    # A run makes many objects with reference cycles that live until its end; garbage collection
    # would take a third of the time.
    collecting = gc.isenabled()
    gc.disable()
    try:
        _drive(core, program)
    finally:
        if collecting:
            gc.enable()


def _drive(core: EvictionCore, program: Program) -> None:
    # Filled as operators run: a step only names tensors of earlier operators.
    tensors: list[Any] = [None] * len(program.tensors)
    ops, run, release = program.ops, StepKind.RUN, StepKind.RELEASE
    for step in program.steps:
        kind, index = step.kind, step.index
        if kind is run:
            op = ops[index]
            results = core.compute(op, [tensors[number] for number in op.args])
            for number, tensor in zip(op.results, results, strict=True):
                tensors[number] = tensor
        elif kind is release:
            core.release(tensors[index])
        elif kind is StepKind.GET:
            core.get(tensors[index])
        else:
            core.pin(tensors[index])


@_arguments.checked(RematError)
def unlimited_peak(program: Program) -> int:
    """Compute the bytes that a program needs if nothing is recomputed.

    Storages without references are freed permanently (the policy `banish`). Budget ratios are relative
    to this peak.

    Args:
        program: A recorded step.

    Returns:
        Bytes.
    """
    return simulate(program, heuristic=Heuristic(), policy="banish").peak


@dataclass(frozen=True, slots=True)
class MemoryEvent:
    """A run of an operator or an eviction."""

    clock: int
    what: Literal["run", "recompute", "evict"]
    name: str
    memory: int
    """Bytes in memory after the event."""


@dataclass(slots=True)
class Timeline:
    """Memory events of a run."""

    events: list[MemoryEvent] = field(default_factory=list)

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write the events as CSV, one line each."""
        with Path(file_to_write(path, error=RematError)).open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow([part.name for part in dataclasses.fields(MemoryEvent)])
            writer.writerows(dataclasses.astuple(event) for event in self.events)

    def ran(self, core: EvictionCore, op: Op, *, recompute: bool) -> None:
        """Add a run of an operator."""
        what: Literal["run", "recompute"] = "recompute" if recompute else "run"
        self.events.append(MemoryEvent(core.clock, what, op.name, core.memory))

    def evicted(self, core: EvictionCore, storage: Storage) -> None:
        """Add an eviction."""
        name = storage.tensors[0].op.name
        self.events.append(MemoryEvent(core.clock, "evict", name, core.memory))
