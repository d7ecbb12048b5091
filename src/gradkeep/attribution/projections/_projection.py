"""What a projection is told, and what it refuses."""

from __future__ import annotations

import difflib
import math
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

from gradkeep import _arguments
from gradkeep._budgets import format_bytes
from gradkeep.errors import AttributionError

if TYPE_CHECKING:
    from torch import Tensor

ProjectionKind = Literal[
    "auto", "tensor-sketch", "fold", "sjlt", "count-sketch", "srht", "rademacher", "normal"
]
KINDS: tuple[str, ...] = get_args(ProjectionKind)
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

    kind: ProjectionKind = "auto"
    dim: int = 2048
    seed: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.kind, str) or self.kind not in KINDS:
            near = difflib.get_close_matches(str(self.kind), KINDS, n=2, cutoff=0.3)
            raise AttributionError(
                f"no projection {_arguments.shown(self.kind)}",
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
    least = -_arguments.LARGEST
    return _arguments.count(
        f"the {name} of a projection", value, error=AttributionError, least=least
    )


def require_finite(values: Tensor, ids: Any = None) -> Tensor:
    """The values `[B, k]`, if all are finite; else an error that names the first rows."""
    # What is not finite leaves no sum finite: one pass, and a closer look only if it must be.
    if bool(values.sum().isfinite()):
        return values
    good = values.isfinite().all(1)
    if bool(good.all()):
        return values
    bad = (~good).nonzero()[:, 0].tolist()
    named = bad if ids is None else [int(ids[row]) for row in bad]
    raise AttributionError(
        f"{len(bad)} gradients are infinite or not a number",
        found=f"{'rows' if ids is None else 'ids'} {', '.join(map(str, named[:5]))}"
        + (" ..." if len(bad) > 5 else ""),
        fix="look at the inputs and losses of these rows, or leave them out",
    )


def require_room(needed: int, what: str, *, fix: str) -> None:
    """Raise if so many bytes are more than the machine has.

    >>> require_room(1 << 60, "a matrix", fix="make it smaller")
    Traceback (most recent call last):
    gradkeep.errors.AttributionError: a matrix does not fit into memory...
    """
    there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > there:
        raise AttributionError(
            f"{what} does not fit into memory",
            found=f"{format_bytes(needed)} needed",
            expected=f"less than the machine's {format_bytes(there)}",
            fix=fix,
        )
