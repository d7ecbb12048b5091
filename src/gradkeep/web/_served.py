"""The store behind the page: cached captures, decisions, and rows as the page shows them."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from gradkeep._preview import row_from_texts
from gradkeep.errors import MissingRowsError
from gradkeep.store import CaptureKey, Store, current_decisions
from gradkeep.store import open as open_store
from gradkeep.web._background import TaskCache
from gradkeep.web._http import Name, Rows  # noqa: TC001 - FastAPI reads them

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from gradkeep._preview import Preview
    from gradkeep.evaluate import Recipe
    from gradkeep.store import Block, Decision
    from gradkeep.store.catalog._info import StoreInfo

    AnyArray = np.ndarray[Any, np.dtype[Any]]

ANY_SPLIT = "*"
RELABELED_SPLIT = "-as-"
"""Separates a split's name from the label its rows were captured with: `test-as-3`."""


@dataclass(frozen=True, slots=True, eq=False)
class RowTable:
    """The scalar columns of one capture, by the position of its rows."""

    key: CaptureKey
    block: Block
    ids: AnyArray
    columns: Mapping[str, AnyArray]
    """Those of `label`, `predicted`, `loss` and `output` that were captured, each `[N]`."""
    probability: AnyArray | None
    """The model's probability of each row's label, `[N]`."""
    texts: tuple[str, ...]
    """Names of the text columns."""
    order: AnyArray
    """Positions sorted by id."""

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""
        return sum(array.nbytes for array in (self.ids, self.order, *self.columns.values())) + 64

    def positions(self, ids: Sequence[int] | AnyArray) -> AnyArray:
        """Return the positions of rows by id, -1 for unknown ids."""
        ids = np.asarray(ids, np.int64)
        if not len(self.ids):
            return np.full(len(ids), -1)
        sorted_ids = self.ids[self.order]
        at = np.minimum(np.searchsorted(sorted_ids, ids), len(sorted_ids) - 1)
        return np.where(sorted_ids[at] == ids, self.order[at], -1)


@dataclass(slots=True, eq=False)
class ServedStore:
    """A store with the caches of the page; it is opened by the first request."""

    location: str
    previews: Mapping[str, Preview] = field(default_factory=dict)
    """By split; `*` is used for every other split."""
    recipe: Recipe | None = None
    logs: tuple[Path, ...] = ()
    tasks: TaskCache = field(default_factory=TaskCache)
    _store: Store | None = None
    _info: tuple[float, StoreInfo] | None = None
    _decisions: dict[str, list[Decision]] = field(default_factory=dict)
    _lock: threading.RLock = field(default_factory=threading.RLock)

    @property
    def store(self) -> Store:
        """The store; raises what `gk.open` raises."""
        if self._store is None:
            self._store = open_store(self.location, create=False)
        return self._store

    def info(self) -> StoreInfo:
        """Return the contents of the store, cached for half a second."""
        with self._lock:
            now = time.monotonic()
            if self._info is None or now - self._info[0] > 0.5:
                self._info = (now, self.store.info())
            return self._info[1]

    def preview(self, split: str) -> Preview | None:
        """Return the preview of a split, if there is one."""
        names = (split, split.partition(RELABELED_SPLIT)[0], ANY_SPLIT)
        return next((self.previews[name] for name in names if name in self.previews), None)

    def class_names(self, split: str) -> list[str] | None:
        """Return the names of a split's labels, if its preview has them."""
        preview = self.preview(split)
        return None if preview is None or preview.classes is None else list(preview.classes)

    def label_name(self, split: str, label: Any) -> str | None:
        """Return the name of one label."""
        preview = self.preview(split)
        return preview.name_of(label) if preview is not None and isinstance(label, int) else None

    def decisions(self, split: str) -> list[Decision]:
        """Return the log of decisions about a split; only new entries are read."""
        with self._lock:
            log = self._decisions.setdefault(split, [])
            log += self.store.decisions(split, start=len(log))
            return list(log)

    def standing_decisions(self, table: RowTable) -> dict[int, Decision]:
        """Return the standing decisions about the rows of a capture.

        A decision about a label that the row no longer has (after a capture with corrected labels)
        does not count.
        """
        decisions = current_decisions(self.decisions(table.key.split))
        labels = table.columns.get("label")
        positions = table.positions(np.fromiter(decisions, np.int64, len(decisions)))
        return {
            row: decision
            for (row, decision), at in zip(decisions.items(), positions.tolist(), strict=True)
            if labels is None
            or decision.before is None
            or (at >= 0 and labels[at] == decision.before)
        }

    def sealed(self, run: str, name: str) -> tuple[tuple[str, str, str], ...]:
        """Return (checkpoint, split, version) of each sealed capture of a run."""
        return tuple(
            (
                str(block.address.checkpoint),
                str(block.address.split),
                f"{block.version} {block.schema_hash} {block.modified}",
            )
            for block in self.info().captures
            if (block.address.run, block.address.name) == (run, name) and block.version is not None
        )

    def checkpoints(self, run: str, name: str, *splits: str) -> list[str]:
        """Return the checkpoints at which all these splits are sealed, ordered by step."""
        sealed = {(checkpoint, split) for checkpoint, split, _ in self.sealed(run, name)}
        return [
            checkpoint.name
            for known in self.info().runs
            if known.name == run
            for checkpoint in known.checkpoints
            if all((checkpoint.name, split) in sealed for split in splits)
        ]

    def table(self, run: str, split: str, name: str, checkpoint: str | None = None) -> RowTable:
        """Return the scalar columns of a capture, by default at the last checkpoint."""
        known = self.checkpoints(run, name, split)
        if not known or (checkpoint is not None and checkpoint not in known):
            unsealed = [
                f"{block.address.checkpoint}: {block.problem or block.state}"
                for block in self.info().captures
                if (block.address.run, block.address.split, block.address.name)
                == (run, split, name)
            ]
            runs = sorted({one.name for one in self.info().runs})
            where = "" if checkpoint is None else f" at {checkpoint}"
            raise MissingRowsError(
                f"run {run!r} has no sealed capture of {split!r}{where}",
                code="web.no_capture",
                path=self.location,
                found=", ".join(unsealed or runs) or "no runs",
                fix=f"gk.capture(store, model, loader, task=task, split={split!r})",
            )
        key = CaptureKey(checkpoint or known[-1], split, run, name)
        versions = {(c, s): version for c, s, version in self.sealed(run, name)}
        return self.tasks.get(
            ("table", key, versions[key.checkpoint, split]),
            f"reading {split}",
            lambda _: _read_table(self.store, key),
            size=lambda table: table.nbytes,
            timeout=5.0,
        )


def _read_table(store: Store, key: CaptureKey) -> RowTable:
    block = store.read(key)
    columns: dict[str, AnyArray] = {
        name: np.asarray(block.column(name))
        for name in ("label", "predicted", "loss", "output")
        if name in block.names and block.schema.array(name).shape == ()
    }
    probability = None
    is_classification = "Classification" in str(block.schema.fingerprints.get("task", ""))
    if is_classification and "loss" in columns and "label" in columns:
        probability = np.exp(-columns["loss"].astype(np.float64))
    texts = tuple(array.name for array in block.schema.arrays if array.is_text)
    ids = np.asarray(block.ids)
    order = np.argsort(ids, kind="stable")
    return RowTable(key, block, ids, columns, probability, texts, order)


def show_rows(
    served: ServedStore,
    row: Rows,
    run: Name = "main",
    split: Name = "train",
    name: Name = "main",
) -> list[dict[str, Any]]:
    """Return some rows of a capture as the page shows them."""
    return row_views(served, served.table(run, split, name), row)


def row_views(served: ServedStore, table: RowTable, ids: Sequence[int]) -> list[dict[str, Any]]:
    """Return rows by id: label, prediction, loss, probability and preview.

    `known` is False for an id that the capture does not have.
    """
    names = np.asarray(ids, np.int64)
    positions = table.positions(names)
    split = table.key.split
    preview = served.preview(split)
    texts = _read_texts(table, names[positions >= 0])
    views: list[dict[str, Any]] = []
    for row, at in zip(names.tolist(), positions.tolist(), strict=True):
        view: dict[str, Any] = {
            "id": row,
            **dict.fromkeys(("label", "label_name", "predicted", "predicted_name", "loss")),
            "probability": None,
            "shown": None if preview is None else preview.show(row),
            "known": at >= 0,
        }
        views.append(view)
        if at < 0:
            continue
        for name in ("label", "predicted", "loss"):
            if name in table.columns:
                view[name] = table.columns[name][at].item()
        if table.probability is not None:
            view["probability"] = float(table.probability[at])
        for name in ("label", "predicted"):
            view[f"{name}_name"] = served.label_name(split, view[name])
        if view["shown"] is None or view["shown"].empty:
            view["shown"] = row_from_texts(texts.get(row, {}))
    return views


def _read_texts(table: RowTable, ids: AnyArray) -> dict[int, dict[str, str]]:
    """Read the captured texts of some rows, by id and column."""
    if not table.texts or not len(ids):
        return {}
    batch = table.block.read(ids, list(table.texts))
    columns = {name: batch[name].texts() for name in table.texts}
    return {
        row: {name: column[at] for name, column in columns.items()}
        for at, row in enumerate(ids.tolist())
    }
