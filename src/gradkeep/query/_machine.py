"""How fast this machine is: measured once in about a second, then kept in the user's cache folder."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import os
import platform
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from gradkeep._surroundings import cache_folder
from gradkeep.errors import QueryError
from gradkeep.factors._cost import MachineSpeeds

if TYPE_CHECKING:
    from collections.abc import Callable

VARIABLE = "GRADKEEP_MACHINE"
_HINDERED = 8.0
"""A speed so many times slower than a typical machine's, when most of the others are not, was measured beside
other work: threads that wait for each other on busy cores take hundreds of times as long."""
_AGAIN = 3600.0
"""Seconds after which such a measurement is made again."""
_RATES = ("flops", "batched", "convolution")
"""Operations a second; all others are seconds."""


def machine_speeds() -> MachineSpeeds:
    """This machine's speeds: read from the cache folder, or measured in about a second.

    The file is `gradkeep/machine-*.json` below `XDG_CACHE_HOME`, one for each torch version,
    processor and number of threads; the variable GRADKEEP_MACHINE names another one.
    """
    facts = (torch.__version__, _processor(), str(torch.get_num_threads()))
    return _known(facts, os.environ.get(VARIABLE))


@functools.lru_cache(maxsize=8)
def _known(facts: tuple[str, ...], chosen: str | None) -> MachineSpeeds:
    path = cache_folder() / f"machine-{_key(facts)}.json" if chosen is None else Path(chosen)
    if path.exists():
        try:
            found = read(path)
            if chosen is not None:
                return found
            believed = unhindered(found)
            if believed == found or time.time() - path.stat().st_mtime < _AGAIN:
                return believed
        except (QueryError, OSError):
            if chosen is not None:
                raise

    found = calibrate()
    write(found, path, facts)
    return found if chosen is not None else unhindered(found)


def unhindered(found: MachineSpeeds) -> MachineSpeeds:
    """The speeds without those that other work has hindered: these are typical ones of a machine so slow.

    >>> typical = MachineSpeeds()
    >>> unhindered(dataclasses.replace(typical, touch=300 * typical.touch)) == typical
    True
    """
    typical, own = dataclasses.asdict(MachineSpeeds()), dataclasses.asdict(found)
    slower = {
        name: typical[name] / own[name] if name in _RATES else own[name] / typical[name]
        for name in own
    }
    pace = max(1.0, sorted(slower.values())[len(slower) // 4])
    believed = {
        name: typical[name] / pace if name in _RATES else typical[name] * pace
        for name, times in slower.items()
        if times > _HINDERED * pace
    }
    return dataclasses.replace(found, **believed)


def read(path: Path) -> MachineSpeeds:
    """The speeds that a file holds."""
    names = [field.name for field in dataclasses.fields(MachineSpeeds)]
    try:
        speeds = json.loads(path.read_text())["speeds"]
        found = MachineSpeeds(**{name: float(speeds[name]) for name in names})
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


def write(found: MachineSpeeds, path: Path, facts: tuple[str, ...]) -> None:
    """Keeps the speeds, if the folder can be written to."""
    document: dict[str, Any] = {"facts": list(facts), "speeds": dataclasses.asdict(found)}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f"{path.name}.{os.getpid()}.part")
        part.write_text(json.dumps(document, indent=1) + "\n")
        part.replace(path)
    except OSError:
        return  # measured again next time: a second, not an error


def _key(facts: tuple[str, ...]) -> str:
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()[:12]


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


_EACH = 0.06
"""Seconds for one measurement."""


def calibrate() -> MachineSpeeds:
    """The speeds of operators like those of the algebra, each the best of several runs.

    >>> calibrate().flops > 1e8
    True
    """
    with torch.no_grad():
        call = _best(_small_call())
        flops = 2 * 512**3 / _best(_product(512, 512, 512))
        thin = _best(_product(512, 1024, 16))
        result = max(1e-11, thin - 2 * 512 * 1024 * 16 / flops) / (512 * 1024)
        flat = _best(_product(4, 8192, 512))
        operand = max(1e-11, flat - 2 * 4 * 8192 * 512 / flops) / (8192 * 512)
        tiny = _best(_batch(1000, 8, 8, 8))
        batch = _best(_batch(64, 32, 144, 64))
        matrix = max(1e-9, tiny / 1000)
        batched = 2 * 64 * 32 * 144 * 64 / max(batch - 64 * matrix, batch / 4)
        return MachineSpeeds(
            flops=flops,
            batched=batched,
            convolution=_convolution(),
            matrix=matrix,
            result=result,
            operand=operand,
            touch=_best(_multiply()) / (1 << 18),
            fold=_best(_fold()) / (1 << 19),
            write=_best(_write()) / (3 << 22),
            turn=_best(_turn()) / (1 << 19),
            run=_best(_runs()) / (1 << 17),
            call=call,
        )


def _best(work: Callable[[], object]) -> float:
    """Seconds of the fastest of as many runs as fit; other processes only ever slow one down."""
    work()
    found: list[float] = []
    begun = time.perf_counter()
    while len(found) < 3 or time.perf_counter() - begun < _EACH:
        start = time.perf_counter()
        work()
        found.append(time.perf_counter() - start)
    return min(found)


def _small_call() -> Callable[[], object]:
    values = torch.ones(8, 8)
    return lambda: values.narrow(0, 1, 4).mul_(values.narrow(0, 1, 4))


def _product(rows: int, columns: int, inner: int) -> Callable[[], object]:
    left, right = torch.ones(rows, inner), torch.ones(columns, inner)
    return lambda: left @ right.t()


def _batch(count: int, rows: int, columns: int, inner: int) -> Callable[[], object]:
    left, right = torch.ones(count, rows, inner), torch.ones(count, columns, inner)
    return lambda: torch.bmm(left, right.transpose(1, 2))


def _convolution() -> float:
    images, kernels = torch.ones(4, 64, 16, 16), torch.ones(64, 64, 3, 3)
    operations = 2 * 4 * 64 * 64 * 9 * 14 * 14
    return operations / _best(lambda: F.conv2d(images, kernels))


def _multiply() -> Callable[[], object]:
    left, right = torch.ones(1 << 18), torch.ones(1 << 18)
    return lambda: left.mul_(right)


def _fold() -> Callable[[], object]:
    values = torch.ones(16, 32, 1024)
    return lambda: values.sum(1)


def _write() -> Callable[[], object]:
    left, right = torch.ones(192, 256, 1), torch.ones(192, 1, 256)
    out = torch.empty(192, 256, 256)  # more than a cache holds
    return lambda: torch.mul(left, right, out=out)


def _turn() -> Callable[[], object]:
    values = torch.ones(64, 256, 32)
    return lambda: values.permute(2, 0, 1).contiguous()


def _runs() -> Callable[[], object]:
    values = torch.ones(1 << 15, 8)
    return lambda: values.as_strided((1 << 15, 4, 4), (8, 1, 1)).contiguous()
