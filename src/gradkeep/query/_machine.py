"""How fast this machine is: measured once, then kept in the user's cache folder."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import os
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradkeep.errors import QueryError

VARIABLE = "GRADKEEP_MACHINE"


@dataclass(frozen=True, slots=True)
class Machine:
    """Speeds in float32, from which the time of an operator is predicted.

    The defaults are those of one core of a server; only their ratios matter for a choice.
    """

    flops: float = 75e9
    """Operations a second of a large matrix product."""
    batched: float = 40e9
    """Operations a second of many small matrix products in one call."""
    convolution: float = 65e9
    """Operations a second of a convolution."""
    matrix: float = 5e-7
    """Seconds for each matrix of such a batch."""
    result: float = 4e-10
    """Seconds for each value of a matrix product's result, beside its operations."""
    operand: float = 3e-10
    """Seconds for each value of a matrix product's operands, read from memory."""
    touch: float = 1e-10
    """Seconds for each value that an operator passes over in the cache."""
    fold: float = 2e-10
    """Seconds for each value that is summed in the cache."""
    write: float = 4e-10
    """Seconds for each value written to memory."""
    turn: float = 1e-9
    """Seconds for each value of a transposed copy."""
    run: float = 7e-9
    """Seconds for each contiguous run of a copy made of short ones."""
    call: float = 3e-6
    """Seconds for an operator on nothing."""


def machine() -> Machine:
    """This machine's speeds: read from the cache folder, or measured in about a second.

    The file is `gradkeep/machine-*.json` below `XDG_CACHE_HOME`, one for each torch version,
    processor and number of threads; the variable GRADKEEP_MACHINE names another one.
    """
    import torch

    facts = (torch.__version__, _processor(), str(torch.get_num_threads()))
    return _known(facts, os.environ.get(VARIABLE))


@functools.lru_cache(maxsize=8)
def _known(facts: tuple[str, ...], chosen: str | None) -> Machine:
    path = _folder() / f"machine-{_key(facts)}.json" if chosen is None else Path(chosen)
    if path.exists():
        try:
            return read(path)
        except QueryError:
            if chosen is not None:
                raise
    from gradkeep.query._calibrate import calibrate

    found = calibrate()
    write(found, path, facts)
    return found


def read(path: Path) -> Machine:
    """The speeds that a file holds."""
    names = [field.name for field in dataclasses.fields(Machine)]
    try:
        speeds = json.loads(path.read_text())["speeds"]
        found = Machine(**{name: float(speeds[name]) for name in names})
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise QueryError(
            "the file does not hold the speeds of a machine",
            path=path,
            found=f"{type(error).__name__}: {error}",
            expected=f"JSON with {', '.join(names)} under 'speeds'",
            fix="remove the file; it is measured anew",
        ) from error
    if not all(0 < value < float("inf") for value in dataclasses.astuple(found)):
        raise QueryError(
            "the file holds impossible speeds",
            path=path,
            found=dataclasses.asdict(found),
            expected="positive numbers",
            fix="remove the file; it is measured anew",
        )
    return found


def write(found: Machine, path: Path, facts: tuple[str, ...]) -> None:
    """Keeps the speeds, if the folder can be written to."""
    document: dict[str, Any] = {"facts": list(facts), "speeds": dataclasses.asdict(found)}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f"{path.name}.{os.getpid()}.part")
        part.write_text(json.dumps(document, indent=1) + "\n")
        part.replace(path)
    except OSError:
        return  # measured again next time: a second, not an error


def _folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "gradkeep"


def _key(facts: tuple[str, ...]) -> str:
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()[:12]


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
