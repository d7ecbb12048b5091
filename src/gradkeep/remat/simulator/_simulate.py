"""Run a program in a budget and tell what it cost, and what happened to memory on the way."""

from __future__ import annotations

import csv
import dataclasses
import math
import numbers
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from gradkeep import _arguments
from gradkeep._arguments import file_to_write
from gradkeep.errors import RematError
from gradkeep.remat.simulator._core import (
    EvictionCore,
    OutOfMemoryError,
    Policy,
    ThrashingError,
    run_program,
)
from gradkeep.remat.simulator._heuristics import PoolSample, RandomChoice
from gradkeep.remat.simulator._heuristics import heuristic as heuristic_named
from gradkeep.remat.simulator._neighborhoods import Heuristic

if TYPE_CHECKING:
    import os

    from gradkeep.remat.simulator._core import Storage
    from gradkeep.remat.simulator._program import Op, Program


@dataclass(frozen=True, slots=True)
class SimulationResult:
    """What happened; where the run did not finish, the counters are those at that point."""

    status: Literal["ok", "oom", "thrash"]
    heuristic: str
    policy: Policy
    budget: float
    """Bytes."""
    overhead: float
    """Time taken by the time of running every operator once."""
    peak: int
    """Bytes."""
    compute: int
    """Time taken, recomputation included."""
    base_compute: int
    """Time of running every operator once."""
    remat_compute: int
    evictions: int
    rematerializations: int
    ops_run: int
    heuristic_evaluations: int
    accesses: int
    """How many storages were looked at, as the original counts."""


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
    """Run the program in `budget` bytes; it counts as thrashing beyond `limit` times the base cost.

    `skip_small` and `sample` let the heuristic look at fewer storages; `timeline` collects what
    happens; `seed` is that of random choices. Accesses are counted as the original counts them.

    >>> from gradkeep.remat import chain
    >>> simulate(chain(10, size=1, cost=1), budget=5).status
    'ok'
    """
    if policy not in ("ignore", "eager", "banish"):
        raise RematError("unknown policy", found=policy, expected="'ignore', 'eager' or 'banish'")
    real = isinstance(budget, numbers.Real) and not isinstance(budget, bool)
    if not real or math.isnan(budget) or budget < 0:
        raise RematError("a budget is a number of bytes", found=repr(budget)[:60])
    if limit < 1:
        raise RematError("the limit is a factor of at least 1", found=limit)
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


@_arguments.checked(RematError)
def unlimited_peak(program: Program) -> int:
    """Bytes that the program needs at once if nothing is ever recomputed.

    What nothing refers to any more is gone for good (the policy `banish`); ratios of a budget are
    taken of this.
    """
    return simulate(program, heuristic=Heuristic(), policy="banish").peak


@dataclass(frozen=True, slots=True)
class MemoryEvent:
    """One operator that ran or one storage that was evicted."""

    clock: int
    what: Literal["run", "recompute", "evict"]
    name: str
    memory: int
    """Bytes in memory after the event."""


@dataclass(slots=True)
class Timeline:
    """Collects events while a core runs."""

    events: list[MemoryEvent] = field(default_factory=list)

    def write(self, path: str | os.PathLike[str]) -> None:
        """The events as CSV, one line each, for a picture of bytes over time."""
        with Path(file_to_write(path, error=RematError)).open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow([part.name for part in dataclasses.fields(MemoryEvent)])
            writer.writerows(dataclasses.astuple(event) for event in self.events)

    def ran(self, core: EvictionCore, op: Op, *, recompute: bool) -> None:
        """An operator ran."""
        what: Literal["run", "recompute"] = "recompute" if recompute else "run"
        self.events.append(MemoryEvent(core.clock, what, op.name, core.memory))

    def evicted(self, core: EvictionCore, storage: Storage) -> None:
        """A storage left memory."""
        name = storage.tensors[0].op.name
        self.events.append(MemoryEvent(core.clock, "evict", name, core.memory))
