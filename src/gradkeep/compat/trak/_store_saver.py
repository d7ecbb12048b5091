"""The default saver: everything in a gradkeep store.

`save_dir/store` holds everything but the score matrices, which are .npy files in
`save_dir/scores`. Any number of processes may open it at the same time.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

import gradkeep.store as gs
from gradkeep.compat.trak._abstract_saver import (
    AbstractSaver,
    MissingTargetsError,
    ModelIDException,
    validate_experiment,
)
from gradkeep.compat.trak._current_arrays import CurrentArrays
from gradkeep.compat.trak._features import Ridge, iter_features
from gradkeep.compat.trak._rows import RowLog
from gradkeep.compat.trak._stored_sets import FINALIZATIONS, ScoreFiles, StoredSets, score_schema
from gradkeep.compat.trak.projectors import SKETCHES
from gradkeep.errors import AttributionError, SchemaMismatchError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from torch import Tensor

    from gradkeep.compat.trak._abstract_saver import Ids, Mask
    from gradkeep.curvature._cholesky import StreamedRows

_SHARED = ("JL dimension", "JL matrix type", "train set size")
_TRAIN = re.compile(r"trak\.id_(-?\d+)\.train")
_EXP = re.compile(r"trak\.exp\.(.+)")


class MmapSaver(AbstractSaver):
    """Store everything in a gradkeep store, in spite of its name.

    Gradients are durable, with checksums, when `featurize` and `score` return, and when
    `current_store["grads"][rows] = values` returns. A model id belongs to the weights, seed, task,
    parameters and precision that it was created with: anything else raises.

    >>> import tempfile
    >>> about = {"JL dimension": 3, "JL matrix type": "normal", "train set size": 2}
    >>> saver = MmapSaver(tempfile.mkdtemp(), about, 2, 3, True, 40, False)
    >>> saver.register_model_id(0, False)
    >>> saver.current_store["grads"][:] = 1
    >>> saver.current_store["out_to_loss"][:] = 0.5
    >>> saver.current_store["is_featurized"][:] = 1
    >>> saver.serialize_current_model_id_metadata()
    >>> saver.model_ids
    {0: {'is_featurized': 1, 'is_finalized': 0}}
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
        self.train_set_size, self.proj_dim = train_set_size, proj_dim
        super().__init__(save_dir, metadata, load_from_save_dir, logging_level, use_half_precision)
        self.current_store = CurrentArrays(self)

    def _open_documents(self) -> None:
        """Open the store, which replaces the documents of other savers."""
        if self.metadata_file.exists() and not (self.save_dir / "store").exists():
            raise AttributionError(
                "the folder has results of the released TRAK package",
                code="compat.released_results",
                path=self.save_dir,
                fix="Import them with gradkeep.compat.trak.import_save_dir(DIR, STORE), and use another "
                "save_dir for new results.",
            )
        self.store = gs.open(self.save_dir / "store")
        shared = {name: str(self.metadata[name]) for name in _SHARED if name in self.metadata}
        nothing = gs.Array("nothing", kind="data")
        self._require("trak", gs.Schema((nothing,), rows_per_segment=1, fingerprints=shared))
        self.sets = StoredSets(
            self.store,
            count=self.train_set_size,
            dim=self.proj_dim,
            half=self.use_half_precision,
            marks={key: str(value) for key, value in self.metadata.items()},
        )
        self.score_files = ScoreFiles(
            self.store, self.save_dir / "scores", count=self.train_set_size
        )
        self._weights: str | None = None
        """Fingerprint of the current weights, while `TRAKer` opens something."""
        if self.load_from_save_dir:
            self.refresh()

    def refresh(self) -> None:
        """Read model ids, rows and experiments that other processes have created."""
        for name in self.store.row_sets():
            if match := _TRAIN.fullmatch(name):
                self.model_ids.setdefault(int(match[1]), _new())
            elif match := _EXP.fullmatch(name):
                rows = self.store.rows(name)
                self._add_experiment(match[1], int(str(rows.schema.fingerprints["num_targets"])))
        self.sets.refresh()
        for model_id, state in self.model_ids.items():
            state["is_featurized"] = int(self.is_finalized(model_id) or self._done(model_id).all())

    # The released interface, which scripts call and subclasses may override.

    def register_model_id(
        self, model_id: int, _allow_featurizing_already_registered: bool = False
    ) -> None:
        """Register a new model id; replace an existing one only if allowed."""
        if self.sets.has_model(model_id):
            if not _allow_featurizing_already_registered:
                raise ModelIDException(
                    f"model id {model_id} is already registered in {self.save_dir}: load it with "
                    "load_current_store (TRAKer: open the folder with load_from_save_dir=True), or "
                    "pass _allow_featurizing_already_registered=True to delete what is there"
                )
            self.sets.delete(model_id)
        self.model_ids[model_id] = _new()
        self.init_store(model_id)
        self.serialize_current_model_id_metadata(already_exists=False)

    def init_store(self, model_id: int) -> None:
        """Create a model id, and make it the current one."""
        self.sets.model(model_id, self._weights or "")
        self.model_ids.setdefault(model_id, _new())
        self.load_current_store(model_id)

    def load_current_store(
        self,
        model_id: int,
        exp_name: str | None = None,
        exp_num_targets: int | None = -1,
        mode: str = "r+",
    ) -> None:
        """Set the current model id and experiment."""
        if model_id not in self.model_ids:
            raise ModelIDException(f"model id {model_id} is not registered in {self.save_dir}")
        self.sets.model(model_id, self._expected(model_id))
        self.current_model_id = model_id
        if exp_name is not None:
            self.current_experiment_name = exp_name

    def serialize_current_model_id_metadata(self, already_exists: bool = True) -> None:
        """Update the state of the current model id, and commit assigned features once it is finalized.

        Rows themselves were committed when they were put or assigned.
        """
        assert self.current_model_id is not None
        model_id, state = self.current_model_id, self.model_ids[self.current_model_id]
        state["is_featurized"] = int(self._done(model_id).all())
        if state["is_finalized"]:
            self._finalize_assigned(model_id)

    def init_experiment(self, exp_name: str, num_targets: int, model_id: int) -> None:
        """Create or open an experiment at a model id; finalized scores stay until there are new ones."""
        name = validate_experiment(exp_name)
        if not self.sets.has_model(model_id):
            raise ModelIDException(
                f"model ID {model_id} does not exist in {self.save_dir}, cannot start scoring"
            )
        # Opened with the current weights: they must be those of the training rows.
        self.sets.model(model_id, self._expected(model_id))
        self._require(f"trak.exp.{name}", score_schema(num_targets))
        self.sets.targets(name, model_id, num_targets)
        self.model_ids.setdefault(model_id, _new())
        self._add_experiment(name, num_targets)
        self.load_current_store(model_id, name, num_targets)

    def save_scores(self, exp_name: str) -> None:
        """Commit assigned scores; those of `finalize_scores` are already committed."""
        targets = int(self.experiments[exp_name]["num_targets"])
        if self.score_files.assigned(exp_name, targets).written.any():
            self.score_files.commit_assigned(exp_name, targets)
        elif not self.score_files.finalized(exp_name):
            raise AttributionError(
                f"there are no scores of {exp_name!r} to save",
                code="compat.no_scores",
                fix=f"Assign current_store['{exp_name}_scores'][:], or call finalize_scores.",
            )
        self._add_experiment(exp_name, targets)

    def del_grads(self, model_id: int, target: bool = False) -> None:
        """Delete the gradients of the training rows, or of the current experiment's targets.

        If the model id is finalized, its features are stored instead.
        """
        if target:
            assert self.current_experiment_name is not None
            self._targets(self.current_experiment_name, model_id).clear()
            return
        final = self.finalized(model_id)
        if isinstance(final, Ridge):
            self.finalize(model_id, final, iter_features(self.train(model_id), final))
        self.sets.model(model_id).clear()
        self.model_ids[model_id]["is_featurized"] = int(self._done(model_id).all())

    # The interface of TRAKer.

    def open_model(self, model_id: int, *, weights: str, overwrite: bool = False) -> None:
        """Make a model id the current one, new or existing with the same weights."""
        self._weights = weights
        try:
            # Another process may have registered it in the meantime.
            if self.load_from_save_dir and self.sets.has_model(model_id):
                self.model_ids.setdefault(model_id, _new())
            if model_id in self.model_ids:
                self.load_current_store(model_id)
                self.serialize_current_model_id_metadata()
            else:
                self.register_model_id(model_id, overwrite)
        finally:
            self._weights = None

    def done(self) -> Mask:
        """Return which training rows of the current model id are done `[n]`."""
        assert self.current_model_id is not None
        return self._done(self.current_model_id)

    def put(self, ids: Ids, grads: Tensor, weights: Tensor) -> None:
        """Store projected gradients and weights of training rows durably."""
        assert self.current_model_id is not None
        self.sets.model(self.current_model_id).put(ids, grads, weights)
        self.serialize_current_model_id_metadata()

    def train(self, model_id: int) -> StreamedRows:
        """Return the projected gradients of the training rows."""
        model = self.sets.model(model_id)
        model.refresh()
        done = model.done
        if not done.all():
            if self.finalized(model_id) is not None:
                raise ModelIDException(f"the gradients of model id {model_id} were deleted")
            raise ModelIDException(
                f"Model ID {model_id} not fully featurized, not ready for finalizing: "
                f"{int(done.sum())} of {len(done)} rows are there"
            )
        return model

    def train_weights(self, model_id: int) -> Any:
        """Return the weights of the training rows `[n]`."""
        final = self.finalized(model_id)
        if isinstance(final, RowLog):
            return final.weight
        self.train(model_id)
        return self.sets.model(model_id).weight

    def finalize(
        self, model_id: int, ridge: Ridge, features: Iterator[tuple[Ids, Tensor]] | None
    ) -> None:
        """Record that a model id is finalized, with its features if they are to be stored."""
        finals = self.sets.finals(model_id)
        number = len(finals.done())
        if number >= finals.num_rows:
            finals.grow(2 * finals.num_rows)
        if features is not None:
            weights = torch.from_numpy(self.train_weights(model_id))
            log = self.sets.features(model_id, number)
            for ids, part in features:
                log.put(ids, part, weights[ids])
        absolute = np.nan if ridge.absolute is None else ridge.absolute
        row = {"lambda_reg": absolute, "features": int(features is not None)}
        finals.put(number, row, differing="keep")
        self.sets.assigned_features(model_id).clear()
        self.model_ids[model_id]["is_finalized"] = 1
        before = self.current_model_id
        self.current_model_id = model_id
        self.serialize_current_model_id_metadata()
        self.current_model_id = before

    def is_finalized(self, model_id: int) -> bool:
        """Return True if a model id is finalized, by this or another process."""
        # A finalized id stays finalized: only look up the others.
        state = self.model_ids[model_id]
        state["is_finalized"] = state["is_finalized"] or int(self.finalized(model_id) is not None)
        return bool(state["is_finalized"])

    def finalized(self, model_id: int) -> Ridge | RowLog | None:
        """Return the ridge of a finalized model id, or its features; None if it is not finalized."""
        finals = self.sets.finals(model_id)
        numbers = finals.done()
        if not len(numbers):
            return None
        last = finals.read([numbers[-1]])
        if int(last["features"][0]):
            return self.sets.features(model_id, int(numbers[-1]))
        absolute = float(last["lambda_reg"][0])
        return Ridge(None if np.isnan(absolute) else absolute)

    def open_experiment(
        self, exp_name: str, num_targets: int, model_id: int, *, weights: str
    ) -> None:
        """Make an experiment the current one, at a model id with these weights."""
        self._weights = weights
        try:
            self.init_experiment(exp_name, num_targets, model_id)
        finally:
            self._weights = None

    def put_targets(self, ids: Ids, grads: Tensor) -> None:
        """Store projected gradients of targets durably."""
        assert self.current_experiment_name is not None
        assert self.current_model_id is not None
        self._targets(self.current_experiment_name, self.current_model_id).put(ids, grads, None)

    def targets_done(self) -> Mask:
        """Return which targets of the current experiment and model id are done `[m]`."""
        assert self.current_experiment_name is not None
        assert self.current_model_id is not None
        targets = self._targets(self.current_experiment_name, self.current_model_id)
        done = np.ones(targets.count, np.bool_)
        done[targets.missing()] = False
        return done

    def targets(self, exp_name: str, model_id: int) -> StreamedRows:
        """Return the projected gradients of all targets; raise `MissingTargetsError` if some are missing."""
        if not self.sets.has_targets(exp_name, model_id):
            count = self.experiments[exp_name]["num_targets"]
            raise MissingTargetsError(exp_name, model_id, list(range(count)))
        targets = self._targets(exp_name, model_id)
        targets.refresh()
        missing = targets.missing()
        if len(missing):
            raise MissingTargetsError(exp_name, model_id, missing.tolist())
        return targets

    def put_scores(self, exp_name: str, compute: Any) -> Any:
        """Compute and commit the scores `[n, m]`, and return them."""
        targets = int(self.experiments[exp_name]["num_targets"])
        self.score_files.assigned(exp_name, targets).clear()
        self.score_files.commit(exp_name, targets, compute)
        self.save_scores(exp_name)
        return self.scores(exp_name)

    def scores(self, exp_name: str) -> Any:
        """Read finalized scores `[n, m]` after verifying their checksum."""
        return self.score_files.read(exp_name)

    def _done(self, model_id: int) -> Mask:
        if self.finalized(model_id) is not None:
            # Gradients may be deleted, features are not.
            return np.ones(self.train_set_size, np.bool_)
        return self.sets.model(model_id).done

    def _finalize_assigned(self, model_id: int) -> None:
        """Commit features that a script assigned before it marked the id as finalized."""
        assigned = self.sets.assigned_features(model_id)
        if not assigned.written.any() and self.finalized(model_id) is not None:
            return
        self.model_ids[model_id]["is_finalized"] = 0  # until it is true
        rows = np.flatnonzero(assigned.written)
        whole = bool(assigned.read(rows).isfinite().all())
        if len(rows) < self.train_set_size or not whole:
            raise ModelIDException(
                f"model id {model_id} cannot be finalized: current_store['features'] has "
                f"{len(rows)} of {self.train_set_size} rows"
                + ("" if whole else ", and values that are not finite")
            )
        self.finalize(model_id, Ridge(), iter([(rows, assigned.read(rows))]))

    def _targets(self, exp_name: str, model_id: int) -> RowLog:
        return self.sets.targets(exp_name, model_id, int(self.experiments[exp_name]["num_targets"]))

    def _expected(self, model_id: int) -> str | None:
        """Return the weights that a model id must have; None if it was registered without any."""
        return self._weights if self.sets.model(model_id).mark else None

    def _add_experiment(self, exp_name: str, num_targets: int) -> None:
        self.experiments[exp_name] = {
            "num_targets": num_targets,
            "scores_path": str(self.score_files.path(exp_name)),
            "scores_finalized": int(self.score_files.finalized(exp_name) > 0),
        }

    def _require(self, name: str, schema: gs.Schema) -> None:
        try:
            self.store.rows(name, schema, num_rows=FINALIZATIONS)
        except SchemaMismatchError as error:
            raise AttributionError(
                "the folder was created with other settings",
                code="compat.other_settings",
                path=self.save_dir,
                found=error.found,
                fix="Use the same settings, or another save_dir.",
            ) from error


def find_stored_sketch(save_dir: Path) -> str | None:
    """Return the kind of sketch that a folder was created with, or None."""
    if not (save_dir / "store").exists():
        return None
    store = gs.open(save_dir / "store")
    if "trak" not in store.row_sets():
        return None
    kind = store.rows("trak").schema.fingerprints.get("JL matrix type")
    return str(kind) if kind in SKETCHES else None


def _new() -> dict[str, int]:
    return {"is_featurized": 0, "is_finalized": 0}
