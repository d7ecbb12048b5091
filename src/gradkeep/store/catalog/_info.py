"""Summary of a store as a tree: runs, checkpoints, captures; scores; row sets."""

from __future__ import annotations

import dataclasses
import html
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, get_args

from gradkeep._display import (
    format_ratio,
    format_size,
    format_time,
    html_table,
    text_table,
)
from gradkeep.errors import GradkeepError
from gradkeep.store.catalog._scan import (
    BlockFacts,
    BlockKind,
    scan_blocks,
    scan_checkpoints,
    scan_runs,
)
from gradkeep.store.rows._rows import Rows

if TYPE_CHECKING:
    from gradkeep.store._store import Store
    from gradkeep.store.catalog._scan import CheckpointFacts, RunFacts

_COLUMNS = ("kind", "name", "rows", "size", "dense", "ratio", "state", "modified (UTC)")
_RIGHT = {2, 3, 4, 5}
_ROW_STATES = ("done", "leased", "failed", "pending")


@dataclass(frozen=True, slots=True)
class CheckpointInfo:
    """A checkpoint and its captures."""

    name: str
    record: CheckpointFacts | None
    """Recorded checkpoint, if any."""
    captures: tuple[BlockFacts, ...]


@dataclass(frozen=True, slots=True)
class RunInfo:
    """A run and its checkpoints."""

    name: str
    record: RunFacts | None
    """Recorded run, if any."""
    checkpoints: tuple[CheckpointInfo, ...]


@dataclass(frozen=True, slots=True)
class RowSetInfo:
    """A set of rows that many processes write, and their current progress."""

    facts: BlockFacts
    done: int = 0
    leased: int = 0
    failed: int = 0
    pending: int = 0


@dataclass(frozen=True, slots=True)
class StoreInfo:
    """Contents of a store; prints as a table."""

    location: str
    uuid: str
    runs: tuple[RunInfo, ...]
    scores: tuple[BlockFacts, ...]
    row_sets: tuple[RowSetInfo, ...]
    bases: tuple[BlockFacts, ...] = ()
    moments: tuple[BlockFacts, ...] = ()
    """Moments of captures that keep layers dense."""
    evaluations: tuple[BlockFacts, ...] = ()

    @property
    def captures(self) -> tuple[BlockFacts, ...]:
        """All captures of all runs."""
        return tuple(
            capture
            for run in self.runs
            for checkpoint in run.checkpoints
            for capture in checkpoint.captures
        )

    @property
    def blocks(self) -> tuple[BlockFacts, ...]:
        """All blocks and row sets."""
        row_sets = (item.facts for item in self.row_sets)
        beside = (*self.moments, *self.bases, *self.scores)
        return (*self.captures, *beside, *row_sets, *self.evaluations)

    @property
    def bytes(self) -> int:
        """Bytes of all blocks, older versions included."""
        return sum(block.bytes for block in self.blocks)

    @property
    def dense_bytes(self) -> int:
        """Bytes of the dense gradients of all captures."""
        return sum(block.dense_bytes for block in self.captures)

    @property
    def ratio(self) -> float | None:
        """Size of dense gradients divided by the size of all captures."""
        compared = [block for block in self.captures if block.ratio is not None]
        stored = sum(block.data_bytes for block in compared)
        return sum(block.dense_bytes for block in compared) / stored if stored else None

    @property
    def title(self) -> str:
        """One line: location, number of blocks, size."""
        counts = [
            _count(len(self.captures), "capture", "captures"),
            _count(len(self.scores), "scores", "scores"),
            _count(len(self.row_sets), "row set", "row sets"),
        ]
        for blocks, one, many in (
            (self.moments, "set of moments", "sets of moments"),
            (self.bases, "basis", "bases"),
            (self.evaluations, "evaluation", "evaluations"),
        ):
            counts += [_count(len(blocks), one, many)] if blocks else []
        return f"Store {self.location!r}: {', '.join(counts)}, {format_size(self.bytes)}"

    def __repr__(self) -> str:
        if not self.blocks:
            return self.title
        return f"{self.title}\n{text_table(_COLUMNS, self._lines(), right=_RIGHT)}"

    def _repr_html_(self) -> str:
        title = f"<p>{html.escape(self.title)}</p>"
        return title + html_table(_COLUMNS, self._lines(), right=_RIGHT) if self.blocks else title

    def _lines(self) -> list[list[str]]:
        return [
            [
                block.address.word,
                block.address.folder.partition("/")[2],
                block.rows_text,
                format_size(block.data_bytes),
                format_size(block.dense_bytes) if block.dense_bytes else "-",
                format_ratio(block.ratio),
                block.state_text,
                format_time(block.modified),
            ]
            for block in self.blocks
        ]

    def to_fields(self) -> dict[str, Any]:
        """Return the tree as JSON fields."""
        sizes = {name: getattr(self, name) for name in ("bytes", "dense_bytes", "ratio")}
        return {"location": self.location, "uuid": self.uuid, **sizes, **_to_fields(self)}


def store_info(store: Store) -> StoreInfo:
    """Summarize the files of a store and the progress of workers on row sets."""
    of_kind: dict[str, list[BlockFacts]] = {kind: [] for kind in get_args(BlockKind)}
    for block in scan_blocks(store.backend):
        of_kind[block.kind].append(block)
    captures, bases = of_kind["capture"], of_kind["basis"]
    runs = {run.name: run for run in scan_runs(store.backend)}
    checkpoints = scan_checkpoints(store.backend)
    names = dict.fromkeys([*runs, *(str(capture.address.run) for capture in captures)])
    return StoreInfo(
        location=store.location,
        uuid=store.uuid,
        runs=tuple(
            RunInfo(
                name,
                runs.get(name),
                _checkpoints(
                    [x for x in checkpoints if x.run == name],
                    [x for x in captures if x.address.run == name],
                ),
            )
            for name in sorted(names)
        ),
        scores=tuple(of_kind["scores"]),
        row_sets=tuple(_row_set(store, facts) for facts in of_kind["rows"]),
        bases=tuple(one for one in bases if one.address.word == "basis"),
        evaluations=tuple(of_kind["evaluation"]),
        moments=tuple(one for one in bases if one.address.word == "moments"),
    )


def _checkpoints(
    records: list[CheckpointFacts], captures: list[BlockFacts]
) -> tuple[CheckpointInfo, ...]:
    """Group captures by checkpoint in the order of steps; unrecorded checkpoints last."""
    recorded = {record.name: record for record in records}
    of: dict[str, list[BlockFacts]] = {name: [] for name in recorded}
    for capture in captures:
        of.setdefault(str(capture.address.checkpoint), []).append(capture)
    return tuple(CheckpointInfo(name, recorded.get(name), tuple(of[name])) for name in of)


def _row_set(store: Store, facts: BlockFacts) -> RowSetInfo:
    if facts.state == "unreadable":
        return RowSetInfo(facts)
    try:
        counts = Rows(store.backend, facts.address.folder).counts()
    except (GradkeepError, FileNotFoundError) as error:
        problem = (
            error.message if isinstance(error, GradkeepError) else f"{error.filename} is missing"
        )
        return RowSetInfo(dataclasses.replace(facts, state="unreadable", problem=problem))
    return RowSetInfo(facts, counts.done, counts.leased, counts.failed, counts.pending)


def _count(number: int, one: str, many: str) -> str:
    return f"{number} {one if number == 1 else many}"


def _to_fields(value: Any) -> Any:
    """Convert a tree of dataclasses to JSON fields; blocks include derived sizes."""
    if isinstance(value, RowSetInfo):
        counts = {state: getattr(value, state) for state in _ROW_STATES}
        return {**_to_fields(value.facts), **counts}
    if isinstance(value, BlockFacts):
        fields = dataclasses.asdict(value)
        derived = {"dense_bytes": value.dense_bytes, "ratio": value.ratio}
        return {**fields.pop("address"), "folder": value.address.folder, **fields, **derived}
    if isinstance(value, tuple):
        return [_to_fields(item) for item in value]
    if dataclasses.is_dataclass(value):
        names = [part.name for part in dataclasses.fields(value)]
        return {name: _to_fields(getattr(value, name)) for name in names}
    return value
