"""The sets of rows of a folder: models, experiments, and files of scores."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

import gradkeep.store as gs
from gradkeep.compat.trak._abstract_saver import ModelIDException
from gradkeep.compat.trak._rows import (
    AssignedRows,
    KeptGradients,
    OverlaidRows,
    delete_rows,
    file_digest,
    mapped_file,
    replaced_file,
)
from gradkeep.errors import AttributionError, Damaged, SchemaMismatch

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping
    from pathlib import Path

    from torch import Tensor

    from gradkeep.store import Store

    Mask = np.ndarray[Any, np.dtype[np.bool_]]
    Ids = np.ndarray[Any, np.dtype[np.int64]]


class ModelRows:
    """Gradients, weights and which of them are done; what a script assigned goes before."""

    def __init__(self, store: Store, prefix: str, kept: KeptGradients) -> None:
        def assigned(name: str, dim: int) -> AssignedRows:
            return AssignedRows(store, f"{prefix}.assigned.{name}", count=kept.count, dim=dim)

        self.kept = kept
        self.grads = OverlaidRows(kept, assigned("grads", kept.dim), weights=False)
        self.weights = OverlaidRows(kept, assigned("weights", 1), weights=True)
        self.flags = assigned("flags", 1)
        self.features = assigned("features", kept.dim)
        self.look(store.row_sets())

    @property
    def done(self) -> Mask:
        """Which rows are done `[n]`, as far as was seen."""
        found = self.kept.done
        told = np.flatnonzero(self.flags.there)
        if len(told):
            found[told] = self.flags.read(told)[:, 0].numpy() == 1
        return found

    @property
    def version(self) -> tuple[int, int]:
        """What changes when a row is done, or is no longer."""
        return self.kept.version, self.flags.version

    @property
    def plain(self) -> bool:
        """Whether nothing was assigned, so that the kept gradients are all there is."""
        over = (self.grads.assigned, self.weights.assigned, self.flags)
        return not any(one.version for one in over)

    def look(self, names: Collection[str]) -> None:
        """See what other processes have put or assigned; `names` are the store's sets of rows."""
        self.kept.refresh()
        for one in (self.grads.assigned, self.weights.assigned, self.flags, self.features):
            one.look(names)

    def refresh(self) -> None:
        """See what was put, and what was assigned since anything was."""
        self.kept.refresh()
        for one in (self.grads.assigned, self.weights.assigned, self.flags, self.features):
            one.refresh()

    def put(self, ids: Ids, grads: Tensor, weights: Tensor) -> None:
        """Keep rows; returns when they are durable."""
        if self.plain:
            self.kept.put(ids, grads, weights)
            return
        # What is assigned goes before what is put: rows that come later must be assigned too.
        self.grads.assigned.assign(ids, grads.detach().cpu().numpy())
        self.weights.assigned.assign(ids, weights.detach().cpu().numpy())
        self.flags.assign(ids, np.ones(len(ids)))

    def flag(self, ids: Ids, values: Any) -> None:
        """Say that rows are done (1), or are not (0); those without gradients cannot be."""
        wanted = np.asarray(values).reshape(-1)
        if not np.isin(wanted, (0, 1)).all():
            raise AttributionError("is_featurized takes 0 and 1", found=wanted[:5].tolist())
        done = ids[wanted == 1]
        for name, rows in (("grads", self.grads), ("out_to_loss", self.weights)):
            lacking = rows.missing(done)
            if len(lacking):
                some = ", ".join(map(str, lacking[:5])) + (" ..." if len(lacking) > 5 else "")
                raise AttributionError(
                    f"{len(lacking)} rows cannot be flagged as featurized: their {name!r} were "
                    "not written, or are not all numbers",
                    found=f"rows {some}",
                    fix=f"assign current_store[{name!r}][rows] first",
                )
        self.flags.assign(ids, wanted)

    def drop(self) -> None:
        """Delete gradients and weights."""
        self.flags.clear()  # first: a flag without its row would be a lie
        self.kept.drop()
        self.grads.assigned.clear()
        self.weights.assigned.clear()


class ScoreFiles:
    """Finalized scores `[n, m]`, and over them what a script assigned before it saves them."""

    def __init__(self, store: gs.Store, folder: Path, *, count: int) -> None:
        self._store, self._folder, self._count = store, folder, count
        self._assigned: dict[str, AssignedRows] = {}

    def path(self, exp_name: str) -> Path:
        """Where the scores of an experiment are."""
        return self._folder / f"{exp_name}.mmap"

    def finalized(self, exp_name: str) -> int:
        """How often scores of an experiment were committed."""
        return len(self._store.rows(f"trak.exp.{exp_name}").done())

    def assigned(self, exp_name: str, targets: int) -> AssignedRows:
        """What was assigned to rows of scores and not yet committed."""
        if exp_name not in self._assigned:
            name = f"trak.assigned.scores.{exp_name}"
            found = AssignedRows(self._store, name, count=self._count, dim=targets)
            found.look(self._store.row_sets())
            self._assigned[exp_name] = found
        return self._assigned[exp_name]

    def commit(self, exp_name: str, targets: int, made: Callable[[Any], None]) -> None:
        """Replace the scores with what `made` writes into zeros `[n, m]`."""
        path = self.path(exp_name)
        with replaced_file(path, (self._count, targets)) as values:
            made(values)
        rows = self._store.rows(f"trak.exp.{exp_name}")
        number = len(rows.done())
        if number >= rows.num_rows:
            rows.grow(2 * rows.num_rows)
        rows.put(number, {"digest": _digest(path).astype(np.int64)}, differing="keep")

    def commit_assigned(self, exp_name: str, targets: int) -> None:
        """Make what was assigned the scores; every row must have all of its numbers by now."""
        assigned = self.assigned(exp_name, targets)
        below = self.read(exp_name) if self.finalized(exp_name) else None
        rows = np.flatnonzero(assigned.there)
        values = assigned.read(rows).numpy()
        lacking = set() if below is not None else set(range(self._count)) - set(rows.tolist())
        lacking |= set(rows[~np.isfinite(values).all(1)].tolist())
        if lacking:
            some = ", ".join(map(str, sorted(lacking)[:5])) + (" ..." if len(lacking) > 5 else "")
            raise AttributionError(
                f"the scores of {exp_name!r} lack {len(lacking)} rows, or have values there that "
                "are not numbers",
                found=f"rows {some}",
                fix=f"assign current_store['{exp_name}_scores'][rows], then save them",
            )

        def made(out: Any) -> None:
            if below is not None:
                out[:] = below
            out[rows] = values

        self.commit(exp_name, targets, made)
        assigned.clear()

    def read(self, exp_name: str) -> Any:
        """Finalized scores `[n, m]`, once their bytes are seen to be those that were written."""
        path = self.path(exp_name)
        rows = self._store.rows(f"trak.exp.{exp_name}")
        known = rows.read(rows.done())["digest"] if path.exists() else []
        digest = _digest(path) if len(known) else 0
        if not any(np.array_equal(one, digest) for one in known):
            raise Damaged(
                "these scores are not finalized, or not as they were written",
                path=path,
                fix=f"finalize_scores({exp_name!r}) makes them again",
            )
        return mapped_file(path)


def score_schema(num_targets: int) -> gs.Schema:
    """What an experiment is begun with."""
    digest = gs.Array("digest", "int64", (16,), kind="data")
    return gs.Schema((digest,), rows_per_segment=1, fingerprints={"num_targets": str(num_targets)})


def _digest(path: Path) -> Any:
    return np.frombuffer(bytes.fromhex(file_digest(path)), np.uint8)


FINALIZATIONS = 1000
"""How often a model id or an experiment can be finalized, at first."""


class StoredSets:
    """Opens each set once; what was begun with other settings or weights is refused."""

    def __init__(
        self, store: gs.Store, *, count: int, dim: int, half: bool, marks: Mapping[str, str]
    ) -> None:
        self.store, self._count, self._dim, self._half = store, count, dim, half
        self._marks = dict(marks)
        self._kept: dict[str, KeptGradients] = {}
        self._models: dict[int, ModelRows] = {}
        self._targets: dict[tuple[str, int], OverlaidRows] = {}
        self._finals: dict[int, gs.Rows] = {}

    def has_model(self, model_id: int) -> bool:
        """Whether a model id is registered."""
        return model_id in self._models or f"{_id(model_id)}.train" in self.store.row_sets()

    def model(self, model_id: int, weights: str | None = None) -> ModelRows:
        """The training rows of a model id, begun with these weights; None: with whatever."""
        name = f"{_id(model_id)}.train"
        if model_id in self._models and weights in (None, self._models[model_id].kept.mark):
            return self._models[model_id]
        if weights is None:
            weights = str(self.store.rows(name).schema.fingerprints.get("weights", ""))
        kept = self._open(name, self._count, weights)
        self._models[model_id] = found = ModelRows(self.store, _id(model_id), kept)
        return found

    def has_targets(self, exp_name: str, model_id: int) -> bool:
        """Whether an experiment was begun at a model id."""
        known = (exp_name, model_id) in self._targets
        return known or _targets(exp_name, model_id) in self.store.row_sets()

    def targets(self, exp_name: str, model_id: int, count: int) -> OverlaidRows:
        """The gradients of an experiment's targets, begun with the weights of the model id."""
        key = (exp_name, model_id)
        if key not in self._targets:
            kept = self._open(_targets(*key), count, self.model(model_id).kept.mark)
            name = f"{_id(model_id)}.assigned.targets.{exp_name}"
            assigned = AssignedRows(self.store, name, count=count, dim=self._dim)
            assigned.look(self.store.row_sets())
            self._targets[key] = OverlaidRows(kept, assigned, weights=False)
        return self._targets[key]

    def features(self, model_id: int, number: int) -> KeptGradients:
        """The features of one finalization of a model id, with the weights of its rows."""
        return self._open(f"{_id(model_id)}.features.{number}", self._count, None)

    def finals(self, model_id: int) -> gs.Rows:
        """The finalizations of a model id, the last of which counts."""
        if model_id not in self._finals:
            arrays = (
                gs.Array("lambda_reg", "float64", kind="data", nan="keep"),
                gs.Array("features", "int64", kind="data"),
            )
            schema = gs.Schema(arrays, rows_per_segment=1)
            name = f"{_id(model_id)}.final"
            self._finals[model_id] = self.store.rows(name, schema, num_rows=FINALIZATIONS)
        return self._finals[model_id]

    def look(self) -> None:
        """See what other processes have put or assigned to the sets that are open."""
        names = self.store.row_sets()
        for model in self._models.values():
            model.look(names)
        for targets in self._targets.values():
            targets.kept.refresh()
            targets.assigned.look(names)

    def delete(self, model_id: int) -> None:
        """Delete all that belongs to a model id."""
        prefix = f"{_id(model_id)}."
        for name in self.store.row_sets():
            if name.startswith(prefix):
                delete_rows(self.store, name)
        self._kept = {
            name: kept for name, kept in self._kept.items() if not name.startswith(prefix)
        }
        self._targets = {key: kept for key, kept in self._targets.items() if key[1] != model_id}
        self._models.pop(model_id, None)
        self._finals.pop(model_id, None)

    def _open(self, name: str, count: int, weights: str | None) -> KeptGradients:
        """Rows of gradients, whose description must be the one that they were begun with."""
        if name in self._kept and (weights is None or self._kept[name].mark == weights):
            return self._kept[name]
        marks = self._marks if weights is None else {**self._marks, "weights": weights}
        try:
            kept = KeptGradients(
                self.store, name, count=count, dim=self._dim, half=self._half, fingerprints=marks
            )
        except SchemaMismatch as error:
            raise ModelIDException(str(error)) from error
        self._kept[name] = kept
        return kept


def _id(model_id: int) -> str:
    return f"trak.id_{model_id}"


def _targets(exp_name: str, model_id: int) -> str:
    return f"{_id(model_id)}.exp.{exp_name}"
