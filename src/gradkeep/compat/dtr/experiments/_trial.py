"""One trial of an experiment: the question it asks, and the file that its answer is kept in."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from pathlib import Path

    from gradkeep.remat.simulator._core import Policy

Type = Literal["baseline", "simrd", "optimal", "dtr", "planned", "checkpoint"]
TYPES: tuple[Type, ...] = ("baseline", "simrd", "optimal", "dtr", "planned", "checkpoint")
"""Plain training; simulated, or the optimum, on its recorded step; on the live model, decided as it
runs, by plan, or with `torch.utils.checkpoint`."""
SIMULATED = ("simrd", "optimal")
FAILED = ("error", "timeout")
"""What ends without an answer; all other endings are answers."""
LIVE = ("dtr", "planned", "checkpoint")
PLACEMENTS = (
    *("2 segments", "3 segments", "4 segments", "8 segments"),
    *("all", "even", "odd", "first half", "last half"),
)
SEGMENTS = re.compile(r"([1-9]\d*) segments?")
"""Where `torch.utils.checkpoint` can be placed in a model, by name."""
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
    log: str | None = None
    """Simulate this log in place of one that is recorded; a ratio is one of its own peak."""
    log_mark: str = ""
    """What the log held when the configuration was read."""
    save_log: bool = False
    """Put the log of its step where the configuration says."""

    @property
    def key(self) -> str:
        """The same for the same question, however it was asked for."""
        if self.type == "baseline":
            return f"baseline-{self.work.key}"
        work = dataclasses.asdict(self.work)
        of = [work] if self.log is None else [self.log, self.log_mark]
        question = digest([*of, self.asked, self.ratio, str(self.budget)])
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


def known_placement(name: str) -> bool:
    """Whether a name means something, whatever the model.

    >>> known_placement("5 segments"), known_placement("everywhere")
    (True, False)
    """
    return name in PLACEMENTS or SEGMENTS.fullmatch(name) is not None
