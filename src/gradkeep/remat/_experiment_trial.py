"""One trial of an experiment, and the process of its own that runs it.

`python -m gradkeep.remat._experiment_trial JOB`: the job is JSON; what comes out is a JSON file that
is there whole or not at all.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
import statistics
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from gradkeep.remat._core import Policy

RECORDED_REPEATS = 5
"""A recording takes the least time of each operator; more repeats change little."""


@dataclass(frozen=True, slots=True)
class Workplan:
    """What is trained: everything that a recording or a measurement depends on."""

    name: str
    """In the zoo."""
    sizes: tuple[tuple[str, float], ...]
    seed: int = 0
    repeats: int = 5
    warmup: int = 1
    threads: int = 1
    """More than one pays for large sizes; on a busy machine its times mean little."""

    @property
    def key(self) -> str:
        """The same for the same work."""
        return f"{self.name}-{digest(dataclasses.asdict(self))}"


@dataclass(frozen=True, slots=True)
class Trial:
    """One measurement, or one simulation."""

    model: str
    """As the configuration says it."""
    type: Literal["baseline", "dtr", "simrd"]
    kind: Literal["fixed", "ratio", "param_sweep"]
    work: Workplan
    budget: float = math.inf
    """Bytes; of a ratio, infinite until the baseline is known."""
    ratio: float | None = None
    heuristic: str = "dtr-eq"
    policy: Policy = "eager"
    limit: float = 10.0
    timeout: float = 600.0
    retries: int = 0
    """How often a trial that failed is tried again."""

    @property
    def key(self) -> str:
        """The same for the same question, however it was asked for."""
        if self.type == "baseline":
            return f"baseline-{self.work.key}"
        asked = [self.heuristic, self.policy, self.limit, self.ratio]
        return f"dtr-{self.work.name}-{digest([dataclasses.asdict(self.work), *asked, str(self.budget)])}"

    @property
    def baseline(self) -> Trial:
        """The measurement that a ratio refers to."""
        plain = Trial(self.model, "baseline", "fixed", self.work)
        return dataclasses.replace(plain, timeout=self.timeout, retries=self.retries)


def digest(value: Any) -> str:
    """A short name for a value of JSON's types."""
    text = json.dumps(value, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def write_result(path: Path, result: dict[str, Any]) -> None:
    """Write a result: a reader sees all of it or nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps(result, indent=1) + "\n")
    temporary.replace(path)


def read_result(path: Path) -> dict[str, Any] | None:
    """A result that is there and whole."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) and "status" in found else None


def measure(work: Workplan) -> dict[str, Any]:
    """Run and time the plain step; one more run counts the bytes."""
    import tempfile

    from gradkeep.remat import record

    step = _step(work)
    for _ in range(work.warmup):
        step()
    times = []
    for _ in range(work.repeats):
        start = time.perf_counter()
        step()
        times.append(time.perf_counter() - start)
    with tempfile.TemporaryDirectory() as folder:
        recorder = record(Path(folder) / "step.log")
        with recorder:
            step()
    return {
        "status": "ok",
        "time": statistics.median(times),
        "least_time": min(times),
        "peak": recorder.live_peak,
    }


def make_log(work: Workplan, path: Path) -> dict[str, Any]:
    """Record the step; the log is there whole or not at all."""
    from gradkeep.remat import record

    step = _step(work)
    for _ in range(work.warmup):
        step()
    # Beside the log until all repeats are in it: a log that exists is finished.
    recorder = record(path.with_suffix(f".part{os.getpid()}"))
    for _ in range(min(work.repeats, RECORDED_REPEATS)):
        with recorder:
            step()
    recorder.path.replace(path)
    return {"status": "ok", "peak": recorder.live_peak}


def simulate_trial(log: Path, budget: float, asked: dict[str, Any]) -> dict[str, Any]:
    """Run the recorded step in the budget."""
    from gradkeep.remat import read_log, simulate, unlimited_peak

    program = read_log(log)
    start = time.perf_counter()
    outcome = simulate(program, budget=budget, **asked)
    spent = time.perf_counter() - start
    return {
        "status": outcome.status,
        "time": outcome.compute / 1e9,
        "base_time": outcome.base_compute / 1e9,
        "remat_time": outcome.remat_compute / 1e9,
        "overhead": outcome.overhead,
        "budget": None if math.isinf(budget) else int(budget),
        "peak": outcome.peak,
        "unlimited_peak": unlimited_peak(program),
        "constant_bytes": program.constant_bytes,
        "operators": len(program.ops),
        "evictions": outcome.evictions,
        "rematerializations": outcome.rematerializations,
        "heuristic_evaluations": outcome.heuristic_evaluations,
        "accesses": outcome.accesses,
        "simulation_seconds": spent,
    }


def _step(work: Workplan) -> Any:
    import torch

    from gradkeep.data import build

    torch.set_num_threads(work.threads)
    sizes: dict[str, Any] = dict(work.sizes)
    return build(work.name, seed=work.seed, **sizes).step


def _end_with(parent: int) -> None:
    """Do not go on for nobody: when the experiment is killed, so are its trials."""
    while os.getppid() == parent:
        time.sleep(0.3)
    os._exit(1)


def main(text: str) -> int:
    """Do one job: `measure`, `record` or `simulate`."""
    from gradkeep._errors import GradkeepError

    job = json.loads(text)
    threading.Thread(target=_end_with, args=(job["parent"],), daemon=True).start()
    try:
        if job["do"] == "simulate":
            budget = math.inf if job["budget"] is None else job["budget"]
            result = simulate_trial(Path(job["log"]), budget, job["asked"])
        else:
            sizes = tuple((key, value) for key, value in job["work"].pop("sizes"))
            work = Workplan(**job["work"], sizes=sizes)
            result = measure(work) if job["do"] == "measure" else make_log(work, Path(job["log"]))
    except GradkeepError as error:
        print(error, file=sys.stderr)
        return 1
    write_result(Path(job["out"]), {**job["about"], **result})
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
