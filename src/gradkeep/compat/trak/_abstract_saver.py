"""The base class of savers, as in the released package."""

from __future__ import annotations

import json
import logging
import operator
import re
from abc import ABC, abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from gradkeep._environment import replaced_file
from gradkeep.errors import AttributionError

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy as np

    Ids = np.ndarray[Any, np.dtype[np.int64]]
    Mask = np.ndarray[Any, np.dtype[np.bool_]]


_ID = re.compile(r"id_(-?\d+)\.json")


class ModelIDException(Exception):
    """A model id is unknown, taken, incomplete or not finalized."""


class AbstractSaver(ABC):
    """Base class of savers; subclass it to store results elsewhere.

    A subclass fills `current_store` with arrays `grads` and `features` `[n, k]`, `out_to_loss`
    and `is_featurized` `[n, 1]`, `NAME_grads` `[m, k]` and `NAME_scores` `[n, m]`, which are
    assigned to. `save_dir` has `metadata.json`, `experiments.json` and an `id_N.json` per model id:
    the first two are written here, atomically, and read again on opening.
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
            self._log_contents()

    @abstractmethod
    def register_model_id(
        self, model_id: int, _allow_featurizing_already_registered: bool = False
    ) -> None:
        """Register a new model id."""

    @abstractmethod
    def serialize_current_model_id_metadata(self, already_exists: bool = True) -> None:
        """Commit the state of the current model id."""

    @abstractmethod
    def init_store(self, model_id: int) -> None:
        """Create the arrays of a model id."""

    @abstractmethod
    def init_experiment(self, exp_name: str, num_targets: int, model_id: int) -> None:
        """Create or open the arrays of an experiment at a model id."""

    @abstractmethod
    def load_current_store(
        self,
        model_id: int,
        exp_name: str | None = None,
        exp_num_targets: int | None = -1,
        mode: str = "r+",
    ) -> None:
        """Set the current model id and experiment."""

    @abstractmethod
    def save_scores(self, exp_name: str) -> None:
        """Commit the scores of an experiment."""

    @abstractmethod
    def del_grads(self, model_id: int, target: bool = False) -> None:
        """Delete the gradients of a model id."""

    def _open_documents(self) -> None:
        """Compare the settings with the stored ones, and read ids and experiments."""
        known = self._document(self.metadata_file, cut_off="raise")
        settings = {name: str(value) for name, value in self.metadata.items()}
        if known is None:
            _replace(self.metadata_file, self.metadata)
        elif (stored := {name: str(value) for name, value in known.items()}) != settings:
            names = sorted(set(stored) | set(settings))
            raise AttributionError(
                "the folder was created with other settings",
                code="compat.other_settings",
                path=self.metadata_file,
                found="; ".join(
                    f"{name}: stored {stored.get(name)!r}, requested {settings.get(name)!r}"
                    for name in names
                    if stored.get(name) != settings.get(name)
                ),
                fix="Use the same settings, or another save_dir.",
            )
        experiments = self._document(self.experiments_file)
        if experiments is None:
            _replace(self.experiments_file, {})
        if not self.load_from_save_dir:
            return
        self.experiments.update(experiments or {})
        for path in sorted(self.save_dir.glob("id_*.json")):
            if match := _ID.fullmatch(path.name):
                fresh = {"is_featurized": 0, "is_finalized": 0}
                state = (self._document(path) or {}).get(match[1], fresh)
                self.model_ids[int(match[1])] = dict(state)

    def _document(
        self, path: Path, *, cut_off: Literal["raise", "forget"] = "forget"
    ) -> dict[str, Any] | None:
        """Read a document; return None if it is missing or was truncated by a crash."""
        try:
            text = path.read_text()
        except FileNotFoundError:
            return None
        try:
            content = json.loads(text)
        except ValueError:
            content = None
        if isinstance(content, dict):
            return content
        if cut_off == "raise":
            raise AttributionError(
                "the settings of the results are not a JSON object",
                code="compat.settings_unreadable",
                path=path,
                fix="Use another save_dir or, if the settings are the same, delete this file.",
            )
        # A saver that writes in place leaves a truncated document when it is killed. Its contents
        # are recovered from the arrays, which are intact.
        self.logger.warning("%s is truncated and ignored", path)
        return None

    def _log_contents(self) -> None:
        ids = sorted(self.model_ids)
        finalized = [number for number in ids if self.model_ids[number]["is_finalized"]]
        self.logger.info("Existing model IDs in %s: %s", self.save_dir, ids or "none")
        self.logger.info("Model IDs that have been finalized: %s", finalized or "none")
        for name, about in self.experiments.items():
            self.logger.info("Existing TRAK scores: %s: %s", name, about.get("scores_path"))


def _replace(path: Path, content: Mapping[str, Any]) -> None:
    with replaced_file(path) as temp:
        temp.write_text(json.dumps(content, default=str))


class MissingTargetsError(AttributionError):
    """Targets of an experiment were not scored at a model id."""

    def __init__(self, exp_name: str, model_id: int, missing: list[int]) -> None:
        some = ", ".join(map(str, missing[:8])) + (" ..." if len(missing) > 8 else "")
        super().__init__(
            f"{len(missing)} targets of experiment {exp_name!r} were not scored at model id "
            f"{model_id}",
            code="compat.missing_targets",
            found=f"no gradients of targets {some}",
            fix="Score them, or pass allow_skip=True to skip this model id.",
        )


_EXPERIMENT = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._+=@-]{0,59}")


def validate_experiment(exp_name: str) -> str:
    """Return the name, or raise `ValueError`."""
    if not isinstance(exp_name, str) or not _EXPERIMENT.fullmatch(exp_name):
        raise ValueError(
            f"{exp_name!r} cannot name an experiment: use 1 to 60 letters, digits or _ . + = @ -, "
            "not beginning with a dot or sign"
        )
    return exp_name


def validate_model_id(model_id: Any) -> int:
    """Return the id as an integer, or raise `TypeError`."""
    try:
        return operator.index(model_id)
    except TypeError:
        raise TypeError(f"model_id must be an integer, got {model_id!r}") from None
