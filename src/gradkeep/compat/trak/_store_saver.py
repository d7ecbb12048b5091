"""The saver: everything in a gradkeep store.

`save_dir/store` holds everything but the score matrices, which are .npy files in
`save_dir/scores`. Any number of processes may open it at the same time.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import numpy as np

import gradkeep.store as gs
from gradkeep.compat.trak._abstract_saver import (
    AbstractSaver,
    MissingTargets,
    ModelIDException,
    checked_experiment,
)
from gradkeep.compat.trak._features import CurrentArrays, Ridge
from gradkeep.compat.trak._kept_rows import (
    KeptGradients,
    delete_rows,
    file_digest,
    mapped_file,
    replaced_file,
)
from gradkeep.errors import AttributionError, Damaged, SchemaMismatch

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from torch import Tensor

    from gradkeep.compat.trak._abstract_saver import Ids, Mask

_SHARED = ("JL dimension", "JL matrix type", "train set size")
_TRAIN = re.compile(r"trak\.id_(-?\d+)\.train")
_EXP = re.compile(r"trak\.exp\.(.+)")
_FINALIZATIONS = 1000


class MmapSaver(AbstractSaver):
    """Keeps everything in a gradkeep store, whatever its name says.

    Gradients are durable, with checksums, when `featurize` and `score` return. A model id belongs
    to the weights, seed, task, parameters and precision that it was begun with: anything else
    raises.
    """

    def __init__(
        self,
        save_dir: str | Path,
        metadata: Mapping[str, Any],
        train_set_size: int,
        proj_dim: int,
        load_from_save_dir: bool,
        logging_level: int,
        use_half_precision: bool,
    ) -> None:
        super().__init__(save_dir, metadata, load_from_save_dir, logging_level, use_half_precision)
        self.train_set_size, self.proj_dim = train_set_size, proj_dim
        self._refuse_released()
        self.store = gs.open(self.save_dir / "store")
        shared = {name: str(self.metadata[name]) for name in _SHARED if name in self.metadata}
        nothing = gs.Array("nothing", kind="data")
        self._require("trak", gs.Schema((nothing,), rows_per_segment=1, fingerprints=shared))
        self._kept: dict[str, KeptGradients] = {}
        self._opened: dict[str, gs.Rows] = {}
        self._weights = ""
        self.current_store = CurrentArrays(self)
        if load_from_save_dir:
            self.refresh()
            self._tell()

    def refresh(self) -> None:
        """See the model ids and experiments that other processes have made."""
        for name in self.store.row_sets():
            if found := _TRAIN.fullmatch(name):
                self.model_ids.setdefault(int(found[1]), {"is_featurized": 0, "is_finalized": 0})
            elif found := _EXP.fullmatch(name):
                rows = self.store.rows(name)
                self._know(found[1], int(str(rows.schema.fingerprints["num_targets"])))
        for model_id, state in self.model_ids.items():
            complete = self.is_finalized(model_id) or self._train(model_id).complete
            state["is_featurized"] = int(complete)

    def register_model_id(
        self, model_id: int, _allow_featurizing_already_registered: bool = False
    ) -> None:
        """Make room for a new model id; one that is there is replaced only if that is allowed."""
        self.open_model(model_id, weights="", overwrite=_allow_featurizing_already_registered)

    def open_model(self, model_id: int, *, weights: str, overwrite: bool = False) -> None:
        """Make a model id the current one: new, or as it was left with the same weights."""
        there = f"{_id(model_id)}.train" in self.store.row_sets()
        if there and not self.load_from_save_dir and model_id not in self.model_ids:
            if not overwrite:
                raise ModelIDException(
                    f"model id {model_id} is in {self.save_dir} already: open it with "
                    "load_from_save_dir=True, or pass _allow_featurizing_already_registered=True "
                    "to delete what is there"
                )
            self._delete(model_id)
        self._weights = weights
        kept = self._open(f"{_id(model_id)}.train", self.train_set_size, weights)
        state = self.model_ids.setdefault(model_id, {"is_featurized": 0, "is_finalized": 0})
        state["is_featurized"] = int(self.is_finalized(model_id) or kept.complete)
        self.current_model_id = model_id

    def init_store(self, model_id: int) -> None:
        """Make room for a model id."""
        self.open_model(model_id, weights=self._weights)

    def serialize_current_model_id_metadata(self, already_exists: bool = True) -> None:
        """Nothing is left to do: every row was committed when it was put."""

    def load_current_store(
        self,
        model_id: int,
        exp_name: str | None = None,
        exp_num_targets: int | None = -1,
        mode: str = "r+",
    ) -> None:
        """Make a model id, and an experiment, the current ones."""
        if model_id not in self.model_ids:
            raise ModelIDException(f"model id {model_id} is not registered in {self.save_dir}")
        self.current_model_id = model_id
        if exp_name is not None:
            self.current_experiment_name = exp_name

    def done(self) -> Mask:
        """Which training rows of the current model id are there `[n]`."""
        assert self.current_model_id is not None
        kept = self._train(self.current_model_id)
        if self.is_finalized(self.current_model_id):
            return np.ones(kept.count, bool)  # their gradients may be deleted, their features not
        return kept.done

    def put(self, ids: Ids, grads: Tensor, weights: Tensor) -> None:
        """Keep projected gradients and weights of training rows; returns when they are durable."""
        assert self.current_model_id is not None
        kept = self._train(self.current_model_id)
        kept.put(ids, grads, weights)
        self.model_ids[self.current_model_id]["is_featurized"] = int(kept.complete)

    def train(self, model_id: int) -> KeptGradients:
        """The projected gradients of the training rows."""
        kept = self._train(model_id)
        kept.refresh()
        if not kept.complete:
            if self.finalized(model_id) is not None:
                raise ModelIDException(f"the gradients of model id {model_id} were deleted")
            raise ModelIDException(
                f"Model ID {model_id} not fully featurized, not ready for finalizing: "
                f"{int(kept.done.sum())} of {kept.count} rows are there"
            )
        return kept

    def train_weights(self, model_id: int) -> Any:
        """The weights of the training rows `[n]`."""
        found = self.finalized(model_id)
        source = found if isinstance(found, KeptGradients) else self.train(model_id)
        return source.weights().numpy()

    def finalize(
        self, model_id: int, ridge: Ridge, features: Iterator[tuple[Ids, Tensor]] | None
    ) -> None:
        """Record that a model id is finalized, with its features where they are to be kept."""
        number = len(self._finals(model_id).done())
        if features is not None:
            weights = self.train(model_id).weights()
            kept = self._open(f"{_id(model_id)}.features.{number}", self.train_set_size, None)
            for ids, part in features:
                kept.put(ids, part, weights[ids])
        absolute = np.nan if ridge.absolute is None else ridge.absolute
        row = {"lambda_reg": absolute, "features": int(features is not None)}
        self._finals(model_id).put(number, row, differing="keep")
        self.model_ids[model_id]["is_finalized"] = 1

    def is_finalized(self, model_id: int) -> bool:
        """Whether a model id is finalized, by this process or by another."""
        # What was finalized once stays so: the store is asked only about the others.
        state = self.model_ids[model_id]
        state["is_finalized"] = state["is_finalized"] or int(self.finalized(model_id) is not None)
        return bool(state["is_finalized"])

    def finalized(self, model_id: int) -> Ridge | KeptGradients | None:
        """With which ridge a model id was finalized, or its features; None if it is not."""
        finals = self._finals(model_id)
        numbers = finals.done()
        if not len(numbers):
            return None
        last = finals.read([numbers[-1]])
        if int(last["features"][0]):
            return self._open(f"{_id(model_id)}.features.{numbers[-1]}", self.train_set_size, None)
        absolute = float(last["lambda_reg"][0])
        return Ridge(None if np.isnan(absolute) else absolute)

    def init_experiment(self, exp_name: str, num_targets: int, model_id: int) -> None:
        """Make or open an experiment at a model id."""
        self.open_experiment(exp_name, num_targets, model_id, weights=self._weights)

    def open_experiment(
        self, exp_name: str, num_targets: int, model_id: int, *, weights: str
    ) -> None:
        """Make an experiment the current one; finalized scores stay until there are new ones."""
        name = checked_experiment(exp_name)
        if f"{_id(model_id)}.train" not in self.store.row_sets():
            raise ModelIDException(
                f"model ID {model_id} does not exist in {self.save_dir}, cannot start scoring"
            )
        # Opened with the weights at hand: others than those of the training rows are refused.
        self._open(f"{_id(model_id)}.train", self.train_set_size, weights)
        schema = _score_schema(num_targets)
        self._require(f"trak.exp.{name}", schema)
        self._open(f"{_id(model_id)}.exp.{name}", num_targets, weights)
        self.model_ids.setdefault(model_id, {"is_featurized": 0, "is_finalized": 0})
        self._know(name, num_targets)
        self._weights = weights
        self.current_model_id, self.current_experiment_name = model_id, name

    def put_targets(self, ids: Ids, grads: Tensor) -> None:
        """Keep projected gradients of targets; returns when they are durable."""
        self._targets(self.current_experiment_name, self.current_model_id).put(ids, grads, None)

    def targets_done(self) -> Mask:
        """Which targets of the current experiment and model id are there `[m]`."""
        return self._targets(self.current_experiment_name, self.current_model_id).done

    def targets(self, exp_name: str, model_id: int) -> KeptGradients:
        """The projected gradients of all targets; an error that names those that are missing."""
        if f"{_id(model_id)}.exp.{exp_name}" not in self.store.row_sets():
            count = self.experiments[exp_name]["num_targets"]
            raise MissingTargets(exp_name, model_id, list(range(count)))
        kept = self._targets(exp_name, model_id)
        kept.refresh()
        if not kept.complete:
            raise MissingTargets(exp_name, model_id, np.flatnonzero(~kept.done).tolist())
        return kept

    def put_scores(self, exp_name: str, made: Any) -> Any:
        """Fill and commit the scores `[n, m]` with what `made` writes; gives them to read."""
        shape = (self.train_set_size, int(self.experiments[exp_name]["num_targets"]))
        path = self._scores_path(exp_name)
        with replaced_file(path, shape) as values:
            made(values)
        rows = self.store.rows(f"trak.exp.{exp_name}")
        digest = np.frombuffer(bytes.fromhex(file_digest(path)), np.uint8)
        number = len(rows.done())
        if number >= rows.num_rows:
            rows.grow(2 * rows.num_rows)
        rows.put(number, {"digest": digest.astype(np.int64)}, differing="keep")
        self._know(exp_name, shape[1])
        return mapped_file(path)

    def scores(self, exp_name: str) -> Any:
        """Finalized scores `[n, m]`, once their bytes are seen to be those that were written."""
        path = self._scores_path(exp_name)
        rows = self.store.rows(f"trak.exp.{exp_name}")
        known = rows.read(rows.done())["digest"] if path.exists() else []
        digest = np.frombuffer(bytes.fromhex(file_digest(path)), np.uint8) if len(known) else 0
        if not any(np.array_equal(one, digest) for one in known):
            raise Damaged(
                "these scores are not finalized, or not as they were written",
                path=path,
                fix=f"finalize_scores({exp_name!r}) makes them again",
            )
        return mapped_file(path)

    def save_scores(self, exp_name: str) -> None:
        """Nothing is left to do: scores are committed when they are made."""

    def del_grads(self, model_id: int, target: bool = False) -> None:
        """Delete the gradients of the training rows, or of the current experiment's targets.

        Those of training rows only when their features are kept.
        """
        if target:
            self._targets(self.current_experiment_name, model_id).drop()
            return
        if not isinstance(self.finalized(model_id), KeptGradients):
            raise ModelIDException(
                f"model id {model_id} has no features: finalize_features(del_grads=True) keeps them"
            )
        self._train(model_id).drop()

    def _open(self, name: str, count: int, weights: str | None) -> KeptGradients:
        """Rows of gradients, whose description must be the one that they were begun with."""
        marks = {key: str(value) for key, value in self.metadata.items()}
        if weights is not None:
            marks["weights"] = weights
        if name in self._kept and (weights is None or self._kept[name].mark == weights):
            return self._kept[name]
        try:
            kept = KeptGradients(
                self.store,
                name,
                count=count,
                dim=self.proj_dim,
                half=self.use_half_precision,
                fingerprints=marks,
            )
        except SchemaMismatch as error:
            raise ModelIDException(str(error)) from error
        self._kept[name] = kept
        return kept

    def _train(self, model_id: int) -> KeptGradients:
        return self._known(f"{_id(model_id)}.train", self.train_set_size)

    def _targets(self, exp_name: str | None, model_id: int | None) -> KeptGradients:
        assert exp_name is not None
        assert model_id is not None
        count = int(self.experiments[exp_name]["num_targets"])
        return self._known(f"{_id(model_id)}.exp.{exp_name}", count)

    def _known(self, name: str, count: int) -> KeptGradients:
        """Rows that are there, with whatever weights they were begun with."""
        if name not in self._kept:
            weights = self.store.rows(name).schema.fingerprints.get("weights")
            self._open(name, count, None if weights is None else str(weights))
        return self._kept[name]

    def _finals(self, model_id: int) -> gs.Rows:
        arrays = (
            gs.Array("lambda_reg", "float64", kind="data", nan="keep"),
            gs.Array("features", "int64", kind="data"),
        )
        name = f"{_id(model_id)}.final"
        if name not in self._opened:
            schema = gs.Schema(arrays, rows_per_segment=1)
            self._opened[name] = self.store.rows(name, schema, num_rows=_FINALIZATIONS)
        return self._opened[name]

    def _delete(self, model_id: int) -> None:
        """Delete all that belongs to a model id."""
        prefix = f"{_id(model_id)}."
        for name in self.store.row_sets():
            if name.startswith(prefix):
                delete_rows(self.store, name)
        self._kept = {n: kept for n, kept in self._kept.items() if not n.startswith(prefix)}
        self._opened = {n: rows for n, rows in self._opened.items() if not n.startswith(prefix)}

    def _know(self, exp_name: str, num_targets: int) -> None:
        finalized = len(self.store.rows(f"trak.exp.{exp_name}").done())
        self.experiments[exp_name] = {
            "num_targets": num_targets,
            "scores_path": str(self._scores_path(exp_name)),
            "scores_finalized": int(finalized > 0),
        }

    def _scores_path(self, exp_name: str) -> Path:
        return self.save_dir / "scores" / f"{exp_name}.mmap"

    def _require(self, name: str, schema: gs.Schema) -> None:
        try:
            self.store.rows(name, schema, num_rows=_FINALIZATIONS)
        except SchemaMismatch as error:
            raise AttributionError(
                f"{self.save_dir} was begun with other settings",
                found=error.found,
                fix="use the same settings, or another save_dir",
            ) from error

    def _refuse_released(self) -> None:
        if (self.save_dir / "metadata.json").exists() and not (self.save_dir / "store").exists():
            raise AttributionError(
                "these are results of the released TRAK package",
                path=self.save_dir,
                fix="gradkeep.compat.trak.import_save_dir(DIR, STORE) reads them; give new results "
                "another save_dir",
            )

    def _tell(self) -> None:
        ids = sorted(self.model_ids)
        finalized = [number for number in ids if self.model_ids[number]["is_finalized"]]
        self.logger.info("Existing model IDs in %s: %s", self.save_dir, ids or "none")
        self.logger.info("Model IDs that have been finalized: %s", finalized or "none")
        for name, about in self.experiments.items():
            self.logger.info("Existing TRAK scores: %s: %s", name, about["scores_path"])


def _id(model_id: int) -> str:
    return f"trak.id_{model_id}"


def _score_schema(num_targets: int) -> gs.Schema:
    digest = gs.Array("digest", "int64", (16,), kind="data")
    return gs.Schema((digest,), rows_per_segment=1, fingerprints={"num_targets": str(num_targets)})
