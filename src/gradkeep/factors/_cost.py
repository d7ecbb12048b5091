"""What products of gradients cost before they are computed: operations, bytes, calls, seconds.

The steps and tiles that forms count are those of their algebra; a change there is a change here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


VALUE = 4
"""Bytes of a float32."""
SCRATCH = 1 << 28
"""Bytes of temporaries, where nobody sets a bound."""


@dataclass(frozen=True, slots=True)
class MachineSpeeds:
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


@dataclass(frozen=True, slots=True)
class ProductSize:
    """How many rows meet how many, and how many positions they have on average."""

    n_train: int
    n_query: int
    t_train: float = 1.0
    t_query: float = 1.0
    scratch: int = SCRATCH
    """Bytes that temporaries may take."""


@dataclass(frozen=True, slots=True)
class Cost:
    """What one way of multiplying needs."""

    flops: float
    traffic: float
    """Bytes that are read and written."""
    calls: float
    scratch: int
    """Bytes of temporaries."""
    seconds: float

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            self.flops + other.flops,
            self.traffic + other.traffic,
            self.calls + other.calls,
            max(self.scratch, other.scratch),
            self.seconds + other.seconds,
        )


@dataclass(slots=True)
class CostCounter:
    """Adds up the steps of one way on one machine."""

    machine: MachineSpeeds
    flops: float = 0.0
    values: float = 0.0
    calls: float = 0.0
    seconds: float = 0.0
    scratch: float = 0.0

    def product(self, rows: float, columns: float, inner: float, times: float = 1) -> None:
        """Matrix products `[rows, inner] @ [inner, columns]`."""
        speeds = self.machine
        operations = 2.0 * rows * columns * inner
        operands, results = (rows + columns) * inner, rows * columns
        seconds = operations / speeds.flops + results * speeds.result + operands * speeds.operand
        self._add(times * operations, times * (operands + results), times, times * seconds)

    def batch(self, count: float, rows: float, columns: float, inner: float) -> None:
        """One call for `count` small matrix products, whose results go to memory."""
        speeds = self.machine
        operations, results = 2.0 * count * rows * columns * inner, count * rows * columns
        seconds = operations / _rate(speeds, columns) + results * speeds.write
        values = count * (rows + columns) * inner + results
        self._add(operations, values, 1, seconds + count * speeds.matrix)

    def convolve(self, operations: float, results: float, channels: float) -> None:
        """A convolution; few channels fill few lanes of the processor."""
        rate = self.machine.convolution * min(1.0, channels / (channels + 3))
        self._add(operations, results, 1, operations / rate + results * self.machine.result)

    def touch(self, values: float, passes: float = 1, run: float = 1e9) -> None:
        """Elementwise passes in the cache over runs of neighbours."""
        speeds = self.machine
        seconds = values * passes * (speeds.touch + speeds.run / max(1.0, run))
        self._add(values * passes, 2 * values * passes, passes, seconds)

    def fold(self, values: float) -> None:
        """A sum in the cache."""
        self._add(values, values, 1, values * self.machine.fold)

    def write(self, values: float) -> None:
        """Values to memory."""
        self._add(values, values, 1, values * self.machine.write)

    def copy(self, values: float, run: float) -> None:
        """A copy made of short runs."""
        speeds = self.machine
        seconds = values * speeds.touch + values / max(1.0, run) * speeds.run
        self._add(0, 2 * values, 1, seconds)

    def turn(self, values: float) -> None:
        """A transposed copy."""
        self._add(0, 2 * values, 1, values * self.machine.turn)

    def call(self, count: float) -> None:
        """Operators that do next to nothing."""
        self._add(0, 0, count, 0)

    def repeat(self, times: float, steps: Callable[[CostCounter], None]) -> None:
        """The same steps several times, while what is held so far stays."""
        part = CostCounter(self.machine)
        steps(part)
        self._add(*(times * x for x in (part.flops, part.values, part.calls, part.seconds)))
        self.scratch += part.scratch

    def hold(self, values: float) -> None:
        """Temporaries that live at once."""
        self.scratch = max(self.scratch, values * VALUE)

    def cost(self) -> Cost:
        """The sum so far."""
        seconds = self.seconds + self.calls * self.machine.call
        return Cost(self.flops, self.values * VALUE, self.calls, int(self.scratch), seconds)

    def _add(self, flops: float, values: float, calls: float, seconds: float) -> None:
        self.flops += flops
        self.values += values
        self.calls += calls
        self.seconds += seconds


def _rate(speeds: MachineSpeeds, columns: float) -> float:
    """Operations a second of one of many products: narrow results fill few lanes."""
    narrow, known = columns / (columns + 64), 144 / (144 + 64)  # measured at 144 columns
    return min(max(speeds.flops, speeds.batched), speeds.batched * narrow / known)
