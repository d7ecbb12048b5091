"""Measures how fast this machine is, in about a second."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from gradkeep.query._machine import Machine

if TYPE_CHECKING:
    from collections.abc import Callable

_EACH = 0.06
"""Seconds for one measurement."""


def calibrate() -> Machine:
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
        return Machine(
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
