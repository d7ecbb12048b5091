"""What a capture did: how each layer is kept, bytes, time, and what is worth knowing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from gradkeep._budgets import format_bytes

if TYPE_CHECKING:
    from gradkeep.capturing._storing import Keeping
    from gradkeep.factors import Storage
    from gradkeep.store import CaptureKey


class CaptureWarning(UserWarning):
    """Something about a capture that its user should look at."""


@dataclass(frozen=True, slots=True)
class KeptLayer:
    """How one layer is kept."""

    name: str
    type: str
    parameters: int
    positions: float
    """T, the mean number of positions of a sample."""
    factor_bytes: float
    """Bytes of a sample's factors in float32."""
    dense_bytes: int
    """Bytes of a sample's dense gradient in float32."""
    storage: Storage
    row_bytes: float
    """Bytes that a sample takes as it is kept."""


def kept_layer(keeping: Keeping) -> KeptLayer:
    """The facts of a layer for people."""
    return KeptLayer(
        name=keeping.unit.name,
        type=keeping.unit.type,
        parameters=keeping.unit.size,
        positions=keeping.positions,
        factor_bytes=keeping.factor_bytes,
        dense_bytes=keeping.dense_bytes,
        storage=keeping.storage,
        row_bytes=keeping.row_bytes,
    )


@dataclass(frozen=True, slots=True)
class Captured:
    """One finished capture."""

    key: CaptureKey
    rows: int
    reused_rows: int
    """Rows that an earlier run had written already."""
    bytes: int
    layers: tuple[KeptLayer, ...]
    seconds: float
    cpu_seconds: float
    notes: tuple[str, ...] = ()
    """What was skipped, unused, or looks wrong."""

    @property
    def dense_bytes(self) -> int:
        """What the dense gradients of all rows would take in float32."""
        return self.rows * sum(layer.dense_bytes for layer in self.layers)

    def __str__(self) -> str:
        ratio = self.dense_bytes / self.bytes if self.bytes else 0.0
        new = self.rows - self.reused_rows
        pace = f"{new / self.seconds:.0f} rows/s" if self.seconds > 0 and new else "nothing to do"
        lines = [
            (
                f"{self.key.split} at {self.key.checkpoint}: {self.rows} rows of {len(self.layers)} "
                f"layers in {format_bytes(self.bytes)}, {ratio:.1f}x smaller than dense; "
                f"{self.seconds:.1f} s ({pace}, {self.cpu_seconds:.1f} s of CPU time)"
            )
        ]
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])
