"""How many bytes of a row's gradient are kept, and as what."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Literal

from gradkeep._annotations import check_fields
from gradkeep._arguments import count, number, one_of
from gradkeep._budgets import format_bytes, parse_bytes
from gradkeep.errors import BudgetError, CaptureError
from gradkeep.factors import BitWidth  # noqa: TC001 - checked when one is made

CoordinateKind = Literal["eigen", "random", "sketch"]
"""Whitened coordinates in eigenbases; both sides of every weight by normal matrices (LoGra); or by
sparse random signs."""
QUERIES = "queries"
"""What `keep` is for rows that will be asked about: the coordinates of the store's basis, unrounded."""
OVERHEAD = 64
"""Bytes of a row that are not its coordinates: id, fingerprint, loss, length, scale and a checksum's
share."""
LEAST = 192


@dataclass(frozen=True, slots=True)
class Keep:
    """So many bytes a row, everything included: `keep="4KiB"` is `keep=gk.Keep("4KiB")`.

    Of each layer's gradient, the coordinates in the eigenbasis of its Kronecker-factored Fisher matrix
    are whitened, z = u^T G v / sqrt(lambda + damping * mean lambda); of all layers together, those with the
    largest lambda / (the layer's mean) are taken, `fold` of them added up with random signs, and
    `bits` kept of each sum. Products of such rows are EK-FAC influence.

    >>> Keep("4KiB").size
    32256
    """

    bytes: int | str
    bits: BitWidth = 1
    coordinates: CoordinateKind = "eigen"
    fold: int = 4
    """Coordinates that are added up, with random signs, to one that is kept."""
    damping: float = 0.1
    """Added to eigenvalues, times the layer's mean one."""
    rows: int = 96
    """Rows that the basis is found with."""
    seed: int = 0
    basis: str | None = None
    """The checkpoint whose basis is used; None: that of the captured checkpoint itself."""

    def __post_init__(self) -> None:
        check_fields(self, CaptureError)
        one_of("bits", self.bits, (1, 4, 8, 16, 32), error=CaptureError)
        one_of("coordinates", self.coordinates, ("eigen", "random", "sketch"), error=CaptureError)
        count("fold", self.fold, error=CaptureError, least=1, most=1024)
        number("damping", self.damping, error=CaptureError, least=1e-12, most=1e12)
        count("rows", self.rows, error=CaptureError, least=2)
        count("seed", self.seed, error=CaptureError)
        object.__setattr__(self, "bytes", _bytes(self.bytes))
        if self.row_bytes < LEAST:
            raise CaptureError(
                "too few bytes to keep anything of a row",
                found=f"keep={format_bytes(self.row_bytes)}",
                expected=f"at least {format_bytes(LEAST)}: id, fingerprint, loss and scale take "
                f"{OVERHEAD} B",
                fix="keep='1KiB' or more; keep='losses' keeps no gradients at all",
            )

    @property
    def row_bytes(self) -> int:
        """Bytes of a row, everything included."""
        assert isinstance(self.bytes, int)
        return self.bytes

    @property
    def size(self) -> int:
        """The number of coordinates of all layers together."""
        return 8 * (self.row_bytes - OVERHEAD) // self.bits

    @property
    def whitened(self) -> bool:
        """Whether coordinates are divided by the roots of eigenvalues."""
        return self.coordinates == "eigen"

    def described(self) -> str:
        """All that its coordinates depend on, as JSON."""
        fields = dataclasses.asdict(self)
        del fields["basis"]
        return json.dumps(fields, sort_keys=True)


def parse_keep(keep: object) -> Keep | None:
    """What asks for a number of bytes; None: anything else, such as the name of a storage."""
    if isinstance(keep, Keep):
        return keep
    if isinstance(keep, int) and not isinstance(keep, bool):
        return Keep(keep)
    if isinstance(keep, str) and keep[:1].isdigit():
        return Keep(keep)
    return None


def _bytes(given: int | str) -> int:
    try:
        return parse_bytes(given)
    except BudgetError as error:
        raise CaptureError(
            "keep is a number of bytes a row", found=repr(given), expected="such as '4KiB'"
        ) from error
