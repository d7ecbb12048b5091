"""Which projection: its kind, its dimension and its seed."""

from __future__ import annotations

import difflib
import math
import operator
from dataclasses import dataclass
from typing import Literal, get_args

from gradkeep.errors import AttributionError

Kind = Literal[
    "auto", "tensor-sketch", "fold", "sjlt", "count-sketch", "srht", "rademacher", "normal"
]
KINDS: tuple[str, ...] = get_args(Kind)
PARTS = 4
"""Of an SJLT: each value is added to so many of the k numbers."""


@dataclass(frozen=True, slots=True)
class Projection:
    """A random linear map of gradients to `dim` numbers, the same for the same seed everywhere.

    - `tensor-sketch`: straight from factors; value (r, c) of a weight `[R, C]` is added, with a
      random sign for r and one for c, at a random place for r moved by c;
    - `fold`: blocks of k values, each shifted at random, with random signs;
    - `sjlt`: four folds of k / 4, divided by 2;
    - `count-sketch`: every value at a random place with a random sign;
    - `srht`: signs, a Walsh-Hadamard transform, k of its values;
    - `rademacher`, `normal`: a dense random matrix / sqrt(k);
    - `auto`: `tensor-sketch` where parameters are known by name, `fold` for flat gradients.

    >>> Projection(dim=1024).expected_error
    0.03125
    """

    kind: Kind = "auto"
    dim: int = 2048
    seed: int = 0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            near = difflib.get_close_matches(str(self.kind), KINDS, n=2, cutoff=0.3)
            raise AttributionError(
                f"no projection {self.kind!r}",
                expected=", ".join(KINDS),
                fix=f"did you mean {' or '.join(near)}?" if near else None,
            )
        object.__setattr__(self, "dim", whole("dim", self.dim))
        object.__setattr__(self, "seed", whole("seed", self.seed))
        least = PARTS if self.kind == "sjlt" else 1
        if self.dim < least:
            raise AttributionError(
                "a projection needs a positive dimension"
                if least == 1
                else f"an SJLT needs at least {least} dimensions",
                found=f"dim={self.dim}",
                fix="512 to 4096 are usual",
            )

    @property
    def expected_error(self) -> float:
        """The standard deviation of (estimate - true) / (|x| |y|) to expect: 1 / sqrt(k)."""
        return 1 / math.sqrt(self.dim)


def whole(name: str, value: object) -> int:
    """A whole number of any kind, as Python's own."""
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise AttributionError(
            f"the {name} of a projection must be a whole number", found=repr(value)
        ) from None
