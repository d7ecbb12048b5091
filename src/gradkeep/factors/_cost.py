"""Estimated cost of products of gradients, from shapes alone.

Rates are those of one core of a server in float32. Only their ratios matter for the choice of a formula.
"""

from __future__ import annotations

from dataclasses import dataclass

VALUE = 4
"""Bytes of a float32."""
SCRATCH = 1 << 28
"""Bytes of temporaries, where nobody sets a bound."""
FLOPS = 75e9
"""Operations a second of a large matrix product."""
TOUCH, FOLD, WRITE, TURN, RUN = 1e-10, 2e-10, 4e-10, 1e-9, 7e-9
"""Seconds for a value passed over in the cache, summed there, written to memory, copied transposed, and
for each contiguous run of a copy made of short ones."""
_CALL = 3e-6
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
    """Seconds, operations, and bytes of temporaries that live at once.

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
    """`[rows, inner] @ [inner, columns]`."""
    flops = 2.0 * rows * columns * inner
    # Seconds for each value of a matrix product's operands, read from memory.
    moved = rows * columns * WRITE + (rows + columns) * inner * 3e-10
    return Cost(flops / FLOPS + moved + _CALL, flops)


def batched_products(count: float, rows: float, columns: float, inner: float) -> Cost:
    """One call for `count` small matrix products; narrow results fill few lanes."""
    flops = 2.0 * count * rows * columns * inner
    # Operations a second of many small matrix products in one call.
    rate = min(FLOPS, 1.5 * 40e9 * columns / (columns + 64))
    # Seconds for each matrix of a batch.
    return Cost(flops / rate + count * (rows * columns * WRITE + 5e-7) + _CALL, flops)


def elementwise(values: float, seconds: float) -> Cost:
    """One pass over values that takes so long for each."""
    return Cost(values * seconds, values)


def calls(count: float) -> Cost:
    """Operators that do next to nothing."""
    return Cost(count * _CALL)


def temporaries(values: float) -> Cost:
    """Float32 values that are held at once."""
    return Cost(scratch=values * VALUE)
