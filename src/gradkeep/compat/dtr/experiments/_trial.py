"""One trial of an experiment, and the process of its own that runs it.

`python -m gradkeep.compat.dtr.experiments._trial JOB`: the job is JSON; what comes out is a JSON file that
is there whole or not at all.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from gradkeep.remat.simulator import Policy

Type = Literal["baseline", "simrd", "optimal", "dtr", "planned", "checkpoint"]
TYPES: tuple[Type, ...] = ("baseline", "simrd", "optimal", "dtr", "planned", "checkpoint")
"""Plain training; simulated, or the optimum, on its recorded step; on the live model, decided as it
runs, by plan, or with `torch.utils.checkpoint`."""
SIMULATED = ("simrd", "optimal")
FAILED = ("error", "timeout")
"""What ends without an answer; all other endings are answers."""
LIVE = ("dtr", "planned", "checkpoint")
_ASKED = {
    "baseline": (),
    "simrd": ("heuristic", "policy", "limit", "sample", "skip_small"),
    "optimal": ("time_limit",),
    "dtr": ("heuristic", "limit", "sample", "skip_small"),
    "planned": (),
    "checkpoint": ("placement",),
}


@dataclass(frozen=True, slots=True)
class TrialWork:
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
    type: Type
    kind: Literal["fixed", "ratio", "param_sweep"]
    work: TrialWork
    budget: float = math.inf
    """Bytes; of a ratio, infinite until the baseline is known."""
    ratio: float | None = None
    heuristic: str = "dtr-eq"
    policy: Policy = "eager"
    limit: float = 10.0
    """More than so many times the plain time is thrashing."""
    sample: bool = False
    """Look at about 2 sqrt(n) storages of the pool only."""
    skip_small: bool = False
    """Pass over storages below 1 % of the mean size."""
    placement: str | None = None
    """Where checkpoints are."""
    time_limit: float = 20.0
    """Seconds for the integer program."""
    timeout: float = 600.0
    retries: int = 0
    """How often a trial that failed is tried again."""

    @property
    def key(self) -> str:
        """The same for the same question, however it was asked for."""
        if self.type == "baseline":
            return f"baseline-{self.work.key}"
        work = dataclasses.asdict(self.work)
        question = digest([work, self.asked, self.ratio, str(self.budget)])
        return f"{self.type}-{self.work.name}-{question}"

    @property
    def asked(self) -> dict[str, Any]:
        """What this type of trial depends on besides the work and the budget."""
        return {name: getattr(self, name) for name in _ASKED[self.type]}

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


def _end_with(parent: int) -> None:
    """Do not go on for nobody: when the experiment is killed, so are its trials."""
    while os.getppid() == parent:
        time.sleep(0.3)
    os._exit(1)


def main(text: str) -> int:
    """Do one job: record a step, or run a trial of some type."""
    from gradkeep.errors import GradkeepError

    job = json.loads(text)
    threading.Thread(target=_end_with, args=(job["parent"],), daemon=True).start()
    try:
        result = _result(job)
    except GradkeepError as error:
        print(error, file=sys.stderr)
        return 1
    write_result(Path(job["out"]), {**job["about"], **result})
    return 0


def _result(job: dict[str, Any]) -> dict[str, Any]:
    asked, budget = job.get("asked", {}), job.get("budget")
    room = math.inf if budget is None else budget
    if job["do"] in SIMULATED:
        from gradkeep.compat.dtr.experiments import _simulated as simulated

        log = Path(job["log"])
        if job["do"] == "optimal":
            return simulated.optimal_trial(log, room, **asked)
        return simulated.simulate_trial(log, room, asked)
    # Loads torch, which simulating does without.
    from gradkeep.compat.dtr.experiments import _live as live

    sizes = tuple((key, value) for key, value in job["work"].pop("sizes"))
    work = TrialWork(**job["work"], sizes=sizes)
    if job["do"] == "record":
        return live.make_log(work, Path(job["log"]))
    if job["do"] == "baseline":
        return live.measure(work)
    if job["do"] == "dtr":
        return live.measure_online(work, room, **asked)
    if job["do"] == "planned":
        return live.measure_planned(work, room)
    return live.measure_checkpoints(work, **asked)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
