"""The base of savers as the released package has it."""

from __future__ import annotations

import json
import logging
import operator
import os
import re
import secrets
from abc import ABC, abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from gradkeep.errors import AttributionError

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy as np

    Ids = np.ndarray[Any, np.dtype[np.int64]]
    Mask = np.ndarray[Any, np.dtype[np.bool_]]


_ID = re.compile(r"id_(-?\d+)\.json")


class ModelIDException(Exception):
    """A model id that is unknown, taken, not complete or not finalized."""


class AbstractSaver(ABC):
    """What keeps results; subclass it to keep them elsewhere.

    A subclass fills `current_store` with arrays `grads` and `features` `[n, k]`, `out_to_loss`
    and `is_featurized` `[n, 1]`, `NAME_grads` `[m, k]` and `NAME_scores` `[n, m]`, which are
    assigned to. `save_dir` has `metadata.json`, `experiments.json` and an `id_N.json` per model id:
    the first two are made here, replaced as a whole, and read again on opening.
    """

    @abstractmethod
    def __init__(
        self,
        save_dir: str | Path,
        metadata: Mapping[str, Any],
        load_from_save_dir: bool,
        logging_level: int,
        use_half_precision: bool,
    ) -> None:
        self.metadata = dict(metadata)
        self.save_dir = Path(save_dir).resolve()
        self.load_from_save_dir = load_from_save_dir
        self.use_half_precision = use_half_precision
        self.logger = logging.getLogger("STORE")
        self.logger.setLevel(logging_level)
        self.metadata_file = self.save_dir / "metadata.json"
        self.experiments_file = self.save_dir / "experiments.json"
        self.model_ids: dict[int, dict[str, int]] = {}
        self.experiments: dict[str, dict[str, Any]] = {}
        self.current_model_id: int | None = None
        self.current_experiment_name: str | None = None
        self.current_store: Any = {"grads": None, "out_to_loss": None, "features": None}
        (self.save_dir / "scores").mkdir(parents=True, exist_ok=True)
        self._open_documents()
        if load_from_save_dir:
            self._tell()

    @abstractmethod
    def register_model_id(
        self, model_id: int, _allow_featurizing_already_registered: bool = False
    ) -> None:
        """Make room for a new model id."""

    @abstractmethod
    def serialize_current_model_id_metadata(self, already_exists: bool = True) -> None:
        """Commit what is known about the current model id."""

    @abstractmethod
    def init_store(self, model_id: int) -> None:
        """Make the arrays of a model id."""

    @abstractmethod
    def init_experiment(self, exp_name: str, num_targets: int, model_id: int) -> None:
        """Make or open the arrays of an experiment at a model id."""

    @abstractmethod
    def load_current_store(
        self,
        model_id: int,
        exp_name: str | None = None,
        exp_num_targets: int | None = -1,
        mode: str = "r+",
    ) -> None:
        """Make a model id, and an experiment, the current ones."""

    @abstractmethod
    def save_scores(self, exp_name: str) -> None:
        """Commit the scores of an experiment."""

    @abstractmethod
    def del_grads(self, model_id: int, target: bool = False) -> None:
        """Delete the gradients of a model id."""

    def _open_documents(self) -> None:
        """Check the settings against those that are there, and read ids and experiments."""
        known = self._document(self.metadata_file, cut_off="raise")
        told = {name: str(value) for name, value in self.metadata.items()}
        if known is None:
            _replace(self.metadata_file, self.metadata)
        elif (begun := {name: str(value) for name, value in known.items()}) != told:
            names = sorted(set(begun) | set(told))
            raise AttributionError(
                "the folder was begun with other settings",
                path=self.metadata_file,
                found="; ".join(
                    f"{name}: stored {begun.get(name)!r}, asked for {told.get(name)!r}"
                    for name in names
                    if begun.get(name) != told.get(name)
                ),
                fix="use the same settings, or another save_dir",
            )
        experiments = self._document(self.experiments_file)
        if experiments is None:
            _replace(self.experiments_file, {})
        if not self.load_from_save_dir:
            return
        self.experiments.update(experiments or {})
        for path in sorted(self.save_dir.glob("id_*.json")):
            if found := _ID.fullmatch(path.name):
                fresh = {"is_featurized": 0, "is_finalized": 0}
                state = (self._document(path) or {}).get(found[1], fresh)
                self.model_ids[int(found[1])] = dict(state)

    def _document(
        self, path: Path, *, cut_off: Literal["raise", "forget"] = "forget"
    ) -> dict[str, Any] | None:
        """What a document says; None if it is not there, or was being written in a crash."""
        try:
            text = path.read_text()
        except FileNotFoundError:
            return None
        try:
            said = json.loads(text)
        except ValueError:
            said = None
        if isinstance(said, dict):
            return said
        if cut_off == "raise":
            raise AttributionError(
                "the settings of these results cannot be read: no JSON object",
                path=path,
                fix="use another save_dir; or, if the settings are the same, delete this file",
            )
        # A saver that writes in place leaves half a document when it is killed. What it says is
        # told by the arrays again; what they hold is not touched.
        self.logger.warning("%s was cut off: going on without what it said", path)
        return None

    def _tell(self) -> None:
        ids = sorted(self.model_ids)
        finalized = [number for number in ids if self.model_ids[number]["is_finalized"]]
        self.logger.info("Existing model IDs in %s: %s", self.save_dir, ids or "none")
        self.logger.info("Model IDs that have been finalized: %s", finalized or "none")
        for name, about in self.experiments.items():
            self.logger.info("Existing TRAK scores: %s: %s", name, about.get("scores_path"))


def _replace(path: Path, said: Mapping[str, Any]) -> None:
    """Write a document that is there as a whole or not at all."""
    temp = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with temp.open("w") as file:
            json.dump(said, file, default=str)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temp, path)
    finally:
        temp.unlink(missing_ok=True)


class MissingTargetsError(AttributionError):
    """Targets of an experiment that were never scored at a model id."""

    def __init__(self, exp_name: str, model_id: int, missing: list[int]) -> None:
        some = ", ".join(map(str, missing[:8])) + (" ..." if len(missing) > 8 else "")
        super().__init__(
            f"{len(missing)} targets of experiment {exp_name!r} were not scored at model id "
            f"{model_id}",
            found=f"no gradients of targets {some}",
            fix="score them, or pass allow_skip=True to leave this model id out",
        )


_EXPERIMENT = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._+=@-]{0,59}")


def checked_experiment(exp_name: str) -> str:
    """The name, if it can be one."""
    if not isinstance(exp_name, str) or not _EXPERIMENT.fullmatch(exp_name):
        raise ValueError(
            f"{exp_name!r} cannot name an experiment: use 1 to 60 letters, digits or _ . + = @ -, "
            "not beginning with a dot or sign"
        )
    return exp_name


def checked_model_id(model_id: Any) -> int:
    """The id as a whole number."""
    try:
        return operator.index(model_id)
    except TypeError:
        raise TypeError(f"a model id must be a whole number, not {model_id!r}") from None
