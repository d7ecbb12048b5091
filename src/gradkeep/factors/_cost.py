"""Estimated cost of products of gradients, from shapes alone.

Rates are those of one core of a server in float32. Only their ratios matter for the choice of a formula.
"""

from __future__ import annotations

from dataclasses import dataclass

VALUE = 4
"""Bytes of a float32."""
SCRATCH = 1 << 28
"""Default bytes of temporaries."""
FLOPS = 75e9
"""Operations per second of a large matrix product."""
TOUCH, FOLD, WRITE, TURN, RUN = 1e-10, 2e-10, 4e-10, 1e-9, 7e-9
"""Seconds to read a value in the cache, to sum it there, to write it to memory, to copy it
transposed, and per contiguous run of a copy of short runs."""
_CALL = 3e-6
"""Seconds of an operator on an empty tensor."""


@dataclass(frozen=True, slots=True)
class ProductSize:
    """Number of rows on both sides, and their mean number of positions."""

    n_train: int
    n_query: int
    t_train: float = 1.0
    t_query: float = 1.0
    scratch: int = SCRATCH
    """Bytes that temporaries may take."""

    @property
    def query_positions(self) -> float:
        """Positions of all queries."""
        return self.n_query * self.t_query

    @property
    def train_positions(self) -> float:
        """Positions of all training rows."""
        return self.n_train * self.t_train


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds, operations, and bytes of simultaneous temporaries.

    >>> (Cost(1.0, scratch=8) + Cost(2.0, scratch=4)).scratch
    8
    """

    seconds: float = 0.0
    flops: float = 0.0
    scratch: float = 0.0

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            self.seconds + other.seconds,
            self.flops + other.flops,
            max(self.scratch, other.scratch),
        )

    def __mul__(self, times: float) -> Cost:
        return Cost(self.seconds * times, self.flops * times, self.scratch)


def matrix_product(rows: float, columns: float, inner: float) -> Cost:
    """Cost of `[rows, inner] @ [inner, columns]`."""
    flops = 2.0 * rows * columns * inner
    # 3e-10 seconds per value of the operands, read from memory.
    moved = rows * columns * WRITE + (rows + columns) * inner * 3e-10
    return Cost(flops / FLOPS + moved + _CALL, flops)


def batched_products(count: float, rows: float, columns: float, inner: float) -> Cost:
    """Cost of one call for `count` small matrix products; narrow results fill few lanes."""
    flops = 2.0 * count * rows * columns * inner
    # Operations per second of many small matrix products in one call.
    rate = min(FLOPS, 1.5 * 40e9 * columns / (columns + 64))
    # 5e-7 seconds per matrix of a batch.
    return Cost(flops / rate + count * (rows * columns * WRITE + 5e-7) + _CALL, flops)


def elementwise(values: float, seconds: float) -> Cost:
    """Cost of one pass over values that takes this many seconds per value."""
    return Cost(values * seconds, values)


def calls(count: float) -> Cost:
    """Cost of operators that do almost nothing."""
    return Cost(count * _CALL)


def temporaries(values: float) -> Cost:
    """Cost of float32 values that are held at once."""
    return Cost(scratch=values * VALUE)
