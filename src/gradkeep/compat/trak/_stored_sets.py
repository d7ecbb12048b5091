"""The sets of rows that a `save_dir` has in its store, by model id and experiment."""

from __future__ import annotations

from typing import TYPE_CHECKING

import gradkeep.store as gs
from gradkeep.compat.trak._abstract_saver import ModelIDException
from gradkeep.compat.trak._assigned_rows import AssignedRows, OverlaidRows
from gradkeep.compat.trak._kept_rows import KeptGradients, delete_rows
from gradkeep.compat.trak._model_rows import ModelRows
from gradkeep.errors import SchemaMismatch

if TYPE_CHECKING:
    from collections.abc import Mapping

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
