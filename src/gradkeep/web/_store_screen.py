"""The screens of runs and of the store: what is there, how large, how far, how sound."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from gradkeep.errors import GradkeepError

if TYPE_CHECKING:
    from gradkeep.store import Verdict
    from gradkeep.store.catalog._scan import BlockFacts
    from gradkeep.web._served import ServedStore


@dataclass(frozen=True, slots=True)
class LayerView:
    """One captured layer."""

    name: str
    type: str
    parameters: int
    row_bytes: float
    dense_row_bytes: int


@dataclass(frozen=True, slots=True)
class BlockView:
    """A capture, its moments, saved scores, a set of rows, a basis or an evaluation."""

    kind: str
    name: str
    run: str | None
    checkpoint: str | None
    split: str | None
    state: str
    problem: str | None
    rows: int
    wanted: int | None
    """Rows that it is meant to have."""
    bytes: int
    dense_bytes: int
    ratio: float | None
    modified: float
    keep: str | None
    layers: list[LayerView]


@dataclass(frozen=True, slots=True)
class RowSetView:
    """A set of rows that many processes write."""

    name: str
    done: int
    leased: int
    failed: int
    pending: int
    bytes: int
    problem: str | None


@dataclass(frozen=True, slots=True)
class StoreView:
    """All that the store holds."""

    location: str
    uuid: str
    bytes: int
    dense_bytes: int
    ratio: float | None
    blocks: list[BlockView]
    row_sets: list[RowSetView]


@dataclass(frozen=True, slots=True)
class DamageView:
    """One thing that is not as it was written."""

    path: str
    what: str


@dataclass(frozen=True, slots=True)
class HealthView:
    """What a check of every byte found."""

    healthy: bool
    files: int
    bytes: int
    damage: list[DamageView]
    damaged: int
    orphans: int
    unknown: int


@dataclass(frozen=True, slots=True)
class CheckpointPoint:
    """How good the model was on one split at one checkpoint."""

    checkpoint: str
    step: int | None
    split: str
    rows: int
    loss: float | None
    accuracy: float | None


@dataclass(frozen=True, slots=True)
class RunView:
    """One training, as far as it was captured."""

    name: str
    captures: list[str]
    """The names of captures."""
    splits: list[str]
    checkpoints: int
    rows: dict[str, int]
    bytes: int
    ratio: float | None
    modified: float
    config: dict[str, Any]
    model: str | None
    task: str | None
    unfinished: int
    points: list[CheckpointPoint]
    queries: str | None
    train: str | None
    problem: str | None


@dataclass(frozen=True, slots=True)
class RunsView:
    """All runs of a store."""

    runs: list[RunView]


def look_at_store(served: ServedStore) -> StoreView:
    """What the store holds, with sizes and ratios."""
    info = served.info()
    blocks = (*info.captures, *info.moments, *info.bases, *info.scores, *info.evaluations)
    return StoreView(
        location=info.location,
        uuid=info.uuid,
        bytes=info.bytes,
        dense_bytes=info.dense_bytes,
        ratio=info.ratio,
        blocks=[_block(one) for one in blocks],
        row_sets=[
            RowSetView(
                one.facts.address.name,
                one.done,
                one.leased,
                one.failed,
                one.pending,
                one.facts.data_bytes,
                one.facts.problem,
            )
            for one in info.row_sets
        ],
    )


def check_health(served: ServedStore, *, begin: bool) -> HealthView:
    """What `gradkeep verify` finds; with `begin` it is looked once more."""
    if begin:
        served.desk.forget("verify")

    def make(report: Any) -> Verdict:
        from gradkeep.store import verify

        return verify(served.location, progress=report)

    found = served.desk.ask(
        "verify", "reading every byte of the store", make, lane="long", begin=begin
    )
    return HealthView(
        found.healthy,
        found.files,
        found.bytes,
        [DamageView(one.path, one.what) for one in found.damage[:200]],
        len(found.damage),
        len(found.orphans),
        len(found.unknown),
    )


def list_runs(served: ServedStore) -> RunsView:
    """Every run with its checkpoints, sizes, losses and accuracies."""
    found = []
    for run in served.info().runs:
        captures = [one for checkpoint in run.checkpoints for one in checkpoint.captures]
        names = sorted(
            {one.address.name for one in captures}, key=lambda name: (name != "main", name)
        )
        splits = sorted({str(one.address.split) for one in captures}, key=_split_order)
        rows = {
            split: max(one.rows for one in captures if one.address.split == split)
            for split in splits
        }
        dense = sum(one.dense_bytes for one in captures if one.ratio is not None)
        kept = sum(one.data_bytes for one in captures if one.ratio is not None)
        problem = None if run.record is None else run.record.problem
        told = next((one.fingerprints for one in captures if one.fingerprints), {})
        found.append(
            RunView(
                name=run.name,
                captures=names,
                splits=splits,
                checkpoints=len(run.checkpoints),
                rows=rows,
                bytes=sum(one.bytes for one in captures),
                ratio=dense / kept if kept else None,
                modified=max((one.modified for one in captures), default=0.0),
                config=dict(run.record.config or {}) if run.record is not None else {},
                model=None if told.get("model") is None else str(told.get("model")),
                task=None if told.get("task") is None else str(told.get("task")),
                unfinished=sum(one.state != "sealed" for one in captures),
                points=_points(served, run.name, names, splits),
                queries=next((one for one in splits if one != "train"), None),
                train="train" if "train" in splits else next(iter(splits), None),
                problem=problem,
            )
        )
    return RunsView(found)


def _points(
    served: ServedStore, run: str, names: list[str], splits: list[str]
) -> list[CheckpointPoint]:
    if not names:
        return []
    steps = {
        (known.name, one.name): None if one.record is None else one.record.step
        for known in served.info().runs
        for one in known.checkpoints
    }
    found = []
    for split in splits:
        for checkpoint in served.checkpoints(run, names[0], split):
            try:
                table = served.table(run, split, names[0], checkpoint)
            except GradkeepError:
                continue  # the screen of the store tells of it
            columns = table.columns
            loss = float(np.mean(columns["loss"])) if len(columns.get("loss", ())) else None
            accuracy = None
            if "label" in columns and "predicted" in columns and len(table.ids):
                accuracy = float(np.mean(columns["label"] == columns["predicted"]))
            step = steps.get((run, checkpoint))
            found.append(CheckpointPoint(checkpoint, step, split, len(table.ids), loss, accuracy))
    return found


def _block(one: BlockFacts) -> BlockView:
    address = one.address
    told = one.fingerprints
    return BlockView(
        kind=address.word,
        name=address.name,
        run=address.run,
        checkpoint=address.checkpoint,
        split=address.split,
        state=one.state,
        problem=one.problem,
        rows=one.rows + one.unsealed_rows,
        wanted=one.num_rows,
        bytes=one.bytes,
        dense_bytes=one.dense_bytes,
        ratio=one.ratio,
        modified=one.modified,
        keep=None if told.get("kept") is None else str(told.get("kept")),
        layers=[
            LayerView(
                layer.name, layer.type, layer.parameters, layer.row_bytes, layer.dense_row_bytes
            )
            for layer in one.layers
        ],
    )


def _split_order(split: str) -> tuple[bool, bool, str]:
    """Training rows first, then what is usually asked about."""
    return split != "train", split not in ("test", "valid", "validation", "queries"), split
