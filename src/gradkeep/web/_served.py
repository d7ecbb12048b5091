"""The store that is served, and its rows as the page shows them."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from gradkeep._preview import row_from_texts
from gradkeep.errors import MissingRows
from gradkeep.store import CaptureKey, Store, standing
from gradkeep.store import open as open_store
from gradkeep.web._background import Desk

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from gradkeep._preview import Preview, ShownRow
    from gradkeep.evaluate import Recipe
    from gradkeep.store import Block, Decision
    from gradkeep.store.catalog._info import StoreInfo

    AnyArray = np.ndarray[Any, np.dtype[Any]]


_FACTS = ("label", "predicted", "loss", "output")
ANY_SPLIT = "*"
AS_LABEL = "-as-"
"""Between the name of a split and the label that its rows were captured with."""


@dataclass(frozen=True, slots=True, eq=False)
class RowTable:
    """The small columns of one capture, by the position of its rows."""

    key: CaptureKey
    block: Block
    ids: AnyArray
    columns: Mapping[str, AnyArray]
    """`label`, `predicted`, `loss`, `output`, as far as they were kept, each `[N]`"""
    probability: AnyArray | None
    """`[N]`: what the model gave to the row's label"""
    texts: tuple[str, ...]
    """The names of kept texts."""
    order: AnyArray
    """Positions by growing id."""

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""
        arrays = [self.ids, self.order, *self.columns.values()]
        return sum(one.nbytes for one in arrays) + 64

    def positions(self, ids: AnyArray) -> AnyArray:
        """Where rows with these ids are, -1 for those that are not there."""
        if not len(self.ids):
            return np.full(len(ids), -1)
        sorted_ids = self.ids[self.order]
        at = np.minimum(np.searchsorted(sorted_ids, ids), len(sorted_ids) - 1)
        return np.where(sorted_ids[at] == ids, self.order[at], -1)


@dataclass(slots=True, eq=False)
class ServedStore:
    """A store that is looked at; opened when it is first asked, again if that failed."""

    location: str
    previews: Mapping[str, Preview] = field(default_factory=dict)
    """By split; `*` is for every split."""
    recipe: Recipe | None = None
    logs: tuple[Path, ...] = ()
    desk: Desk = field(default_factory=Desk)
    _opened: Store | None = None
    _info: tuple[float, StoreInfo] | None = None
    _decided: dict[str, list[Decision]] = field(default_factory=dict)
    _lock: threading.RLock = field(default_factory=threading.RLock)

    @property
    def store(self) -> Store:
        """The store; raises what `gk.open` raises."""
        if self._opened is None:
            self._opened = open_store(self.location, create=False)
        return self._opened

    def info(self) -> StoreInfo:
        """What the store holds now, or did half a second ago."""
        with self._lock:
            now = time.monotonic()
            # Seconds for which what a store holds is not looked up again.
            if self._info is None or now - self._info[0] > 0.5:
                self._info = (now, self.store.info())
            return self._info[1]

    def preview(self, split: str) -> Preview | None:
        """How rows of a split are shown, if that was given."""
        known = (split, split.partition(AS_LABEL)[0], ANY_SPLIT)
        return next((self.previews[name] for name in known if name in self.previews), None)

    def decisions(self, split: str) -> list[Decision]:
        """The log of decisions about a split; what was read of it is not read again."""
        with self._lock:
            known = self._decided.setdefault(split, [])
            known += self.store.decisions(split, start=len(known))
            return list(known)

    def standing_decisions(self, table: RowTable) -> dict[int, Decision]:
        """The standing decisions about a capture's rows.

        A decision about another label than the row has now, as after a capture with corrected
        labels, no longer counts.
        """
        decided = standing(self.decisions(table.key.split))
        labels = table.columns.get("label")
        places = table.positions(np.fromiter(decided, np.int64, len(decided)))
        return {
            row: one
            for (row, one), at in zip(decided.items(), places.tolist(), strict=True)
            if labels is None or one.before is None or (at >= 0 and labels[at] == one.before)
        }

    def sealed(self, run: str, name: str) -> tuple[tuple[str, str, str], ...]:
        """The finished captures of a run: checkpoint, split and what tells versions apart."""
        return tuple(
            (
                str(one.address.checkpoint),
                str(one.address.split),
                f"{one.version} {one.schema_hash} {one.modified}",
            )
            for one in self.info().captures
            if one.address.run == run and one.address.name == name and one.version is not None
        )

    def checkpoints(self, run: str, name: str, *splits: str) -> list[str]:
        """The checkpoints at which all these splits are finished, in the order of their steps."""
        there = {(checkpoint, split) for checkpoint, split, _ in self.sealed(run, name)}
        return [
            one.name
            for known in self.info().runs
            if known.name == run
            for one in known.checkpoints
            if all((one.name, split) in there for split in splits)
        ]

    def table(self, run: str, split: str, name: str, checkpoint: str | None = None) -> RowTable:
        """The small columns of a capture, at the last checkpoint unless one is named."""
        known = self.checkpoints(run, name, split)
        if not known or (checkpoint is not None and checkpoint not in known):
            unfinished = [
                one
                for one in self.info().captures
                if (one.address.run, one.address.split, one.address.name) == (run, split, name)
            ]
            where = "" if checkpoint is None else f" at {checkpoint}"
            raise MissingRows(
                f"there is no finished capture of {split!r} in run {run!r}{where}",
                path=self.location,
                found=", ".join(
                    f"{one.address.checkpoint}: {one.problem or one.state}" for one in unfinished
                )
                or ", ".join(sorted({f"{r.name}" for r in self.info().runs}))
                or "no runs",
                fix=f"gk.capture(store, model, loader, task=task, split={split!r})",
            )
        key = CaptureKey(checkpoint or known[-1], split, run, name)
        versions = {(c, s): v for c, s, v in self.sealed(run, name)}
        version = versions[key.checkpoint, split]
        return self.desk.ask(
            ("table", key, version),
            f"reading {split}",
            lambda _: self._read_table(key),
            size=lambda table: table.nbytes,
            patience=5.0,
        )

    def _read_table(self, key: CaptureKey) -> RowTable:
        block = self.store.read(key)
        columns = {
            name: np.asarray(block.column(name))
            for name in _FACTS
            if name in block.names and block.schema.array(name).shape == ()
        }
        told = str(block.schema.fingerprints.get("task", ""))
        probability = None
        if "loss" in columns and "label" in columns and "Classification" in told:
            probability = np.exp(-columns["loss"].astype(np.float64))
        texts = tuple(array.name for array in block.schema.arrays if array.is_text)
        ids = np.asarray(block.ids)
        return RowTable(
            key, block, ids, columns, probability, texts, np.argsort(ids, kind="stable")
        )


@dataclass(frozen=True, slots=True)
class RowView:
    """A row: its id, what was kept of it, what it looks like."""

    id: int
    label: int | float | None = None
    label_name: str | None = None
    predicted: int | float | None = None
    predicted_name: str | None = None
    loss: float | None = None
    probability: float | None = None
    """What the model gave to the label."""
    shown: ShownRow | None = None
    known: bool = True
    """False: the capture has no such row."""


def row_views(served: ServedStore, table: RowTable, ids: Sequence[int]) -> list[RowView]:
    """Rows by their ids; one that the capture does not have is shown as unknown."""
    wanted = np.asarray(ids, np.int64)
    at = table.positions(wanted)
    split = table.key.split
    preview = served.preview(split)
    kept = _kept_texts(table, wanted[at >= 0])
    found = []
    for row, place in zip(wanted.tolist(), at.tolist(), strict=True):
        shown = None if preview is None else preview.show(row)
        if place < 0:
            found.append(RowView(row, shown=shown, known=False))
            continue
        facts: dict[str, Any] = {
            name: table.columns[name][place].item()
            for name in ("label", "predicted", "loss")
            if name in table.columns
        }
        if table.probability is not None:
            facts["probability"] = float(table.probability[place])
        if preview is not None:
            for name in ("label", "predicted"):
                facts[f"{name}_name"] = preview.name_of(facts.get(name))
        if shown is None or shown.empty:
            shown = row_from_texts(kept.get(row, {}))
        found.append(RowView(row, shown=shown, **facts))
    return found


def _kept_texts(table: RowTable, ids: AnyArray) -> dict[int, dict[str, str]]:
    """The texts that were captured with some rows."""
    if not table.texts or not len(ids):
        return {}
    batch = table.block.read(ids, list(table.texts))
    told = {name: batch[name].texts() for name in table.texts}
    return {
        row: {name: told[name][place] for name in table.texts}
        for place, row in enumerate(ids.tolist())
    }
