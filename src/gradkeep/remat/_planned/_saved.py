"""Plans on disk: decisions by the digest of the step that they are for.

A plan is tied to a step by what the step does, not by where it ran: a loaded plan is used as soon as
the step has been recorded twice and proves to be the same.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gradkeep.errors import RematError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from gradkeep.remat._planned._cache import Plan
    from gradkeep.remat._planned._trace import Trace

FORMAT = 1


@dataclass(frozen=True, slots=True)
class SavedPlan:
    """The decisions for one step."""

    digest: str
    budget: int
    peak: int
    states: tuple[int, ...]


def digest_of(trace: Trace) -> str:
    """The same for steps that save and compute the same things in the same order."""
    told: list[Any] = [
        [operation.name, sorted(operation.reads), [list(map(str, m)) for m in operation.makes]]
        for operation in trace.operations
    ]
    told += [[slot.value, list(map(str, slot.geometry))] for slot in trace.slots]
    told += [list(trace.order), [stored.size for stored in trace.storages]]
    return hashlib.sha256(json.dumps(told).encode()).hexdigest()[:32]


def write_plans(path: str | os.PathLike[str], plans: Iterable[Plan]) -> None:
    """Write plans; a reader sees all of them or nothing."""
    target = Path(path)
    entries = [
        {
            "digest": digest_of(plan.compiled.trace),
            "budget": plan.budget,
            "peak": plan.compiled.evaluation.peak,
            "states": list(map(int, plan.compiled.states)),
        }
        for plan in plans
    ]
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name}.{os.getpid()}")
    temporary.write_text(json.dumps({"format": FORMAT, "plans": entries}, indent=1) + "\n")
    temporary.replace(target)


def read_plans(path: str | os.PathLike[str]) -> list[SavedPlan]:
    """Read plans; a file that holds none is refused by name."""
    try:
        held = json.loads(Path(path).read_text())
        if held["format"] != FORMAT:
            raise RematError("written by another version", path=path, found=held["format"])
        return [
            SavedPlan(
                str(entry["digest"]),
                int(entry["budget"]),
                int(entry["peak"]),
                tuple(int(state) for state in entry["states"]),
            )
            for entry in held["plans"]
        ]
    except OSError as error:
        raise RematError("the plans cannot be read", path=path, found=error.strerror) from error
    except (ValueError, KeyError, TypeError) as error:
        if isinstance(error, RematError):
            raise
        raise RematError("these are not saved plans", path=path, found=repr(error)[:100]) from error
