"""Row sets of a folder: models, experiments, and files of scores."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash
from numpy.lib.format import open_memmap

import gradkeep.store as gs
from gradkeep._environment import replaced_file
from gradkeep.compat.trak._abstract_saver import ModelIDException
from gradkeep.compat.trak._rows import RowLog, first_rows
from gradkeep.errors import AttributionError, DamagedError, SchemaMismatchError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path


class ScoreFiles:
    """Finalized scores `[n, m]`, and rows that a script assigned but has not saved yet."""

    def __init__(self, store: gs.Store, folder: Path, *, count: int) -> None:
        self._store, self._folder, self._count = store, folder, count
        self._assigned: dict[str, RowLog] = {}

    def path(self, exp_name: str) -> Path:
        """Return the path of an experiment's scores."""
        return self._folder / f"{exp_name}.mmap"

    def finalized(self, exp_name: str) -> int:
        """Return how often scores of an experiment were committed."""
        return len(self._store.rows(f"trak.exp.{exp_name}").done())

    def assigned(self, exp_name: str, targets: int) -> RowLog:
        """Return the assigned rows of scores that are not committed yet."""
        if exp_name not in self._assigned:
            name = f"trak.assigned.scores.{exp_name}"
            log = RowLog(self._store, name, count=self._count, dim=targets, lazy=True)
            self._assigned[exp_name] = log
        return self._assigned[exp_name]

    def commit(self, exp_name: str, targets: int, compute: Callable[[Any], None]) -> None:
        """Replace the scores by what `compute` writes into zeros `[n, m]`."""
        path = self.path(exp_name)
        with replaced_file(path) as temp:
            values = open_memmap(temp, "w+", np.float32, (self._count, targets))
            compute(values)
            values.flush()
            del values
        rows = self._store.rows(f"trak.exp.{exp_name}")
        number = len(rows.done())
        if number >= rows.num_rows:
            rows.grow(2 * rows.num_rows)
        rows.put(number, {"digest": _digest(path).astype(np.int64)}, differing="keep")

    def commit_assigned(self, exp_name: str, targets: int) -> None:
        """Commit the assigned scores; every row must be complete."""
        assigned = self.assigned(exp_name, targets)
        below = self.read(exp_name) if self.finalized(exp_name) else None
        rows = np.flatnonzero(assigned.written)
        values = assigned.read(rows).numpy()
        lacking = set() if below is not None else set(range(self._count)) - set(rows.tolist())
        lacking |= set(rows[~np.isfinite(values).all(1)].tolist())
        if lacking:
            raise AttributionError(
                f"{len(lacking)} rows of the scores of {exp_name!r} are missing or not finite",
                code="compat.scores_incomplete",
                found=f"rows {first_rows(sorted(lacking))}",
                fix=f"Assign current_store['{exp_name}_scores'][rows], then save them.",
            )

        def fill(out: Any) -> None:
            if below is not None:
                out[:] = below
            out[rows] = values

        self.commit(exp_name, targets, fill)
        assigned.clear()

    def read(self, exp_name: str) -> Any:
        """Read finalized scores `[n, m]` after verifying their checksum."""
        path = self.path(exp_name)
        rows = self._store.rows(f"trak.exp.{exp_name}")
        known = rows.read(rows.done())["digest"] if path.exists() else []
        digest = _digest(path) if len(known) else 0
        if not any(np.array_equal(one, digest) for one in known):
            raise DamagedError(
                "the scores are not finalized, or differ from what was written",
                path=path,
                fix=f"Call finalize_scores({exp_name!r}) to compute them again.",
            )
        # Copy on write: changes stay in this process.
        return np.load(path, mmap_mode="c", allow_pickle=False)


def score_schema(num_targets: int) -> gs.Schema:
    """Return the schema of an experiment."""
    digest = gs.Array("digest", "int64", (16,), kind="data")
    return gs.Schema((digest,), rows_per_segment=1, fingerprints={"num_targets": str(num_targets)})


def _digest(path: Path) -> Any:
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while part := file.read(1 << 24):
            digest.update(part)
    return np.frombuffer(digest.digest(), np.uint8)


FINALIZATIONS = 1000
"""Initial capacity of finalizations of a model id or an experiment."""


class StoredSets:
    """Open each set once; sets created with other settings or weights are refused."""

    def __init__(
        self, store: gs.Store, *, count: int, dim: int, half: bool, marks: Mapping[str, str]
    ) -> None:
        self.store, self._count, self._dim, self._half = store, count, dim, half
        self._marks = dict(marks)
        self._logs: dict[str, RowLog] = {}
        self._finals: dict[int, gs.Rows] = {}

    def has_model(self, model_id: int) -> bool:
        """Return True if a model id is registered."""
        return self._has(f"{_id(model_id)}.train")

    def model(self, model_id: int, weights: str | None = None) -> RowLog:
        """Return the training rows of a model id with these weights; None for any."""
        name = f"{_id(model_id)}.train"
        if weights is None and name not in self._logs:
            weights = str(self.store.rows(name).schema.fingerprints.get("weights", ""))
        return self._open(name, self._count, weights)

    def has_targets(self, exp_name: str, model_id: int) -> bool:
        """Return True if an experiment was opened at a model id."""
        return self._has(f"{_id(model_id)}.exp.{exp_name}")

    def targets(self, exp_name: str, model_id: int, count: int) -> RowLog:
        """Return the gradients of an experiment's targets, with the weights of the model id."""
        name = f"{_id(model_id)}.exp.{exp_name}"
        return self._open(name, count, self.model(model_id).mark)

    def features(self, model_id: int, number: int) -> RowLog:
        """Return the features of one finalization of a model id, with the weights of its rows."""
        return self._open(f"{_id(model_id)}.features.{number}", self._count, None)

    def assigned_features(self, model_id: int) -> RowLog:
        """Return assigned features that no finalization has used yet."""
        name = f"{_id(model_id)}.assigned.features"
        if name not in self._logs:
            log = RowLog(self.store, name, count=self._count, dim=self._dim, lazy=True)
            self._logs[name] = log
        return self._logs[name]

    def finals(self, model_id: int) -> gs.Rows:
        """Return the finalizations of a model id; the last one counts."""
        if model_id not in self._finals:
            arrays = (
                gs.Array("lambda_reg", "float64", kind="data", nan="keep"),
                gs.Array("features", "int64", kind="data"),
            )
            schema = gs.Schema(arrays, rows_per_segment=1)
            name = f"{_id(model_id)}.final"
            self._finals[model_id] = self.store.rows(name, schema, num_rows=FINALIZATIONS)
        return self._finals[model_id]

    def refresh(self) -> None:
        """Read entries that other processes have written to the open sets."""
        for log in self._logs.values():
            log.refresh()

    def delete(self, model_id: int) -> None:
        """Delete everything of a model id."""
        prefix = f"{_id(model_id)}."
        for name in self.store.row_sets():
            if name.startswith(prefix):
                self.store.delete_rows(name)
        self._logs = {name: log for name, log in self._logs.items() if not name.startswith(prefix)}
        self._finals.pop(model_id, None)

    def _has(self, name: str) -> bool:
        return name in self._logs or name in self.store.row_sets()

    def _open(self, name: str, count: int, weights: str | None) -> RowLog:
        """Open rows of gradients; their description must match."""
        if name in self._logs and weights in (None, self._logs[name].mark):
            return self._logs[name]
        marks = self._marks if weights is None else {**self._marks, "weights": weights}
        try:
            log = RowLog(
                self.store, name, count=count, dim=self._dim, half=self._half, fingerprints=marks
            )
        except SchemaMismatchError as error:
            raise ModelIDException(str(error)) from error
        self._logs[name] = log
        return log


def _id(model_id: int) -> str:
    return f"trak.id_{model_id}"
