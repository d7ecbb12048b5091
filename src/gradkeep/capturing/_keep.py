"""Bytes of a row's gradient that are kept, and as what."""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass
from typing import Literal

from gradkeep._arguments import check_fields, count, number, one_of, optional
from gradkeep._budgets import format_bytes, parse_bytes
from gradkeep.errors import BudgetError, CaptureError
from gradkeep.factors._bits import MOST_IN_GROUP, BitWidth

CoordinateKind = Literal["eigen", "random", "sketch"]
"""Whitened coordinates in eigenbases; both sides of every weight by normal matrices (LoGra); or by
sparse random signs."""
QUERIES = "queries"
"""What `keep` is for rows that will be asked about: the coordinates of the store's basis, unrounded."""
OVERHEAD = 80
"""Bytes of a row that are not its coordinates: id, fingerprint, loss, length, scale, and its share of
the header and the checksums of a file of a few hundred rows."""
LEAST = 192
_ROWS, _MOST_ROWS, _POSITIONS = 64, 2048, 4096


@dataclass(frozen=True, slots=True)
class Keep:
    """So many bytes a row, everything included: `keep="4KiB"` is `keep=gk.Keep("4KiB")`.

    Of each layer's gradient, the coordinates in the eigenbasis of its Kronecker-factored Fisher matrix
    are whitened, z = u^T G v / sqrt(lambda + damping * mean lambda), and of all layers together those with
    the largest lambda / (the layer's mean) are taken. A byte says which of up to `group` of them is the
    largest, and its sign; in small models, or with other `bits`, up to `fold` of them are added up with
    random signs, and `bits` kept of each sum. Products of such rows are EK-FAC influence.

    >>> Keep("4KiB").room, Keep("4KiB").group
    (4016, 128)
    """

    bytes: int | str
    bits: BitWidth = 1
    coordinates: CoordinateKind = "eigen"
    group: int | None = None
    """Coordinates that share a byte, at most 128; 0: each is kept with `bits`; None: 128 for one bit."""
    fold: int = 4
    """Coordinates that are added up, with random signs, to one that is kept; groups are not folded."""
    damping: float = 0.1
    """Added to eigenvalues, times the layer's mean one."""
    rows: int | None = None
    """Rows that the basis is found with; None: 64, more of rows with few positions. Of few rows only
    one in two is taken, if they have positions enough."""
    seed: int = 0
    basis: str | None = None
    """The checkpoint whose basis is used; None: that of the captured checkpoint itself."""

    def __post_init__(self) -> None:
        check_fields(self, CaptureError)
        one_of("bits", self.bits, (1, 4, 8, 16, 32), error=CaptureError)
        one_of("coordinates", self.coordinates, ("eigen", "random", "sketch"), error=CaptureError)
        count("fold", self.fold, error=CaptureError, least=1, most=1024)
        if self.group is not None:
            count("group", self.group, error=CaptureError, most=MOST_IN_GROUP)
            if self.group and (self.bits != 1 or not self.whitened):
                raise CaptureError(
                    "only whitened coordinates without bits of their own share a byte",
                    found=f"group={self.group}, bits={self.bits}, coordinates={self.coordinates!r}",
                    fix="pass group=0, or leave bits and coordinates out",
                )
        number("damping", self.damping, error=CaptureError, least=1e-12, most=1e12)
        optional(count, "rows", self.rows, error=CaptureError, least=2)
        count("seed", self.seed, error=CaptureError)
        object.__setattr__(self, "bytes", _bytes(self.bytes))
        if self.group is None:
            grouped = self.bits == 1 and self.whitened
            object.__setattr__(self, "group", MOST_IN_GROUP if grouped else 0)
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
    def room(self) -> int:
        """Bytes of the coordinates of all layers together."""
        return self.row_bytes - OVERHEAD

    @property
    def sums(self) -> int:
        """How many coordinates, or sums of some, have bits of their own."""
        return 8 * self.room // self.bits

    @property
    def most(self) -> int:
        """The most coordinates that can be made use of."""
        return self.room * self.group if self.group else self.sums * self.fold

    def sample(self, positions: float, there: int | None = None) -> int:
        """How many rows of so many positions a basis is found with: moments are sums over positions.

        Of the rows that are `there` at most one in two, or a pass over them would cost as much as the
        capture; but so many that there are positions enough.

        >>> Keep("4KiB").sample(128), Keep("4KiB").sample(1)
        (64, 2048)
        >>> [Keep("4KiB").sample(512, there) for there in (20, 64, 100, 1000)]
        [20, 32, 50, 64]
        """
        enough = math.ceil(_POSITIONS / max(1.0, positions))
        wanted = min(_MOST_ROWS, max(_ROWS, enough)) if self.rows is None else self.rows
        if there is None:
            return wanted
        return min(wanted, max(there // 2, min(there, max(_ROWS // 2, enough))))

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
