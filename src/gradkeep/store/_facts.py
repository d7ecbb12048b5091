"""What a scan of the files finds out about each thing in a store."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from gradkeep.store._names import BLOCKS, ROWS, SCORES

if TYPE_CHECKING:
    from collections.abc import Mapping

    from gradkeep.store._schema import Array

Kind = Literal["capture", "scores", "rows"]
State = Literal["sealed", "open", "unreadable"]


@dataclass(frozen=True, slots=True)
class Place:
    """Which block: a capture, saved scores, or a set of rows."""

    kind: Kind
    name: str
    run: str | None = None
    checkpoint: str | None = None
    split: str | None = None

    @property
    def folder(self) -> str:
        """Where it lies in the store.

        >>> Place("capture", "main", run="main", checkpoint="final", split="train").folder
        'blocks/main/final/train/main'
        """
        if self.kind == "capture":
            return f"{BLOCKS}/{self.run}/{self.checkpoint}/{self.split}/{self.name}"
        return f"{SCORES if self.kind == 'scores' else ROWS}/{self.name}"


@dataclass(frozen=True, slots=True)
class SegmentFacts:
    """One segment that holds rows of a block."""

    file: str
    """Its key below the block's folder."""
    rows: int
    bytes: int
    xxh3: str
    sealed: bool
    """Whether the newest version names it; else it was committed since."""
    modified: float


@dataclass(frozen=True, slots=True)
class LayerFacts:
    """One captured layer, and what its arrays take."""

    name: str
    type: str
    parameters: int
    row_bytes: float
    """Bytes per row on disk; of ragged or compressed arrays, those of the first segment."""

    @property
    def dense_row_bytes(self) -> int:
        """Bytes of one row's dense float32 gradient."""
        return 4 * self.parameters


@dataclass(frozen=True, slots=True)
class BlockFacts:
    """A block as its files show it.

    `rows`, `num_segments` and `data_bytes` are those of the newest version, or of everything that
    is committed if nothing was sealed yet.
    """

    place: Place
    state: State
    problem: str | None
    """What cannot be read, and where."""
    version: int | None
    rows: int
    num_rows: int | None
    """How many rows it is meant to have."""
    unsealed_rows: int
    """Rows committed after the newest version."""
    num_segments: int
    data_bytes: int
    bytes: int
    """Bytes of all its files, older versions included."""
    modified: float
    """When its newest file came, in seconds since the epoch; 0 where the place does not know."""
    schema_hash: str | None
    fingerprints: Mapping[str, str | int | float | bool | None]
    layers: tuple[LayerFacts, ...]
    arrays: tuple[Array, ...]

    @property
    def dense_bytes(self) -> int:
        """Bytes of the dense float32 gradients of these rows."""
        return self.rows * sum(layer.dense_row_bytes for layer in self.layers)

    @property
    def ratio(self) -> float | None:
        """How many times smaller than dense gradients; None where there is nothing to compare."""
        if not self.dense_bytes or not self.data_bytes:
            return None
        return self.dense_bytes / self.data_bytes


@dataclass(frozen=True, slots=True)
class RunFacts:
    """A recorded run; without its fields if the record cannot be read."""

    name: str
    config: Mapping[str, object] | None = None
    code: str | None = None
    data: str | None = None
    problem: str | None = None


@dataclass(frozen=True, slots=True)
class CheckpointFacts:
    """A recorded checkpoint; without its fields if the record cannot be read."""

    run: str
    name: str
    weights: str | None = None
    step: int | None = None
    lr: float | None = None
    parent: str | None = None
    problem: str | None = None


@dataclass(frozen=True, slots=True)
class Scanned:
    """One block and its segments."""

    facts: BlockFacts
    segments: tuple[SegmentFacts, ...]
