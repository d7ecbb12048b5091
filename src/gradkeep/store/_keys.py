"""Names, keys and records: what is in a store, what it may be called, and where it lies."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import xxhash

from gradkeep._annotations import check_fields
from gradkeep._arguments import LARGEST, count, instance, number
from gradkeep.errors import StoreError

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._+=@-]{0,99}")

_SHOWN = 36
"""Letters of a long name that are shown in another one."""
_MOMENTS = re.compile(r"\.moments-[0-9a-f]{16}$")
_TRAIN = ".train"
"""What the name of the rows that scores are about ends in."""

BLOCKS = "blocks"
SCORES = "scores"
BASES = "bases"
EVALUATIONS = "evaluations"
DECISIONS = "decisions"
ROWS = "datamodels"
RUNS = "runs"
SHARED_ROWS = re.compile(r"shared-[0-9a-f]{16}-[0-9a-f]{8}")
"""The names of row sets that hold the parts of one piece of work; they go when it ends."""
HEADS = "heads"
CATALOG = "catalog.sqlite"


def is_name(name: str) -> bool:
    """Whether this can be a name in a store; other folders were not made by gradkeep."""
    return _NAME.fullmatch(name) is not None


def checked_name(what: str, name: str) -> str:
    """The name if it can be a file's name on every system, else a clear error."""
    if not isinstance(name, str) or not is_name(name):
        raise StoreError(
            f"{what} {name!r} cannot be a name in a store",
            expected="1 to 100 letters, digits or _ . + = @ -, not beginning with a dot or sign",
        )
    return name


@dataclass(frozen=True, slots=True, order=True)
class CaptureKey:
    """Which capture: one checkpoint of a run, replayed over one split.

    >>> CaptureKey(checkpoint="final", split="train").folder
    'blocks/main/final/train/main'
    """

    checkpoint: str
    split: str
    run: str = "main"
    capture: str = "main"

    def __post_init__(self) -> None:
        for what in ("run", "checkpoint", "split", "capture"):
            checked_name(what, getattr(self, what))

    @property
    def folder(self) -> str:
        """Where the capture lies in the store."""
        return f"{BLOCKS}/{self.run}/{self.checkpoint}/{self.split}/{self.capture}"

    @property
    def labels(self) -> dict[str, str]:
        """The columns that tell this capture's samples from those of others."""
        return {
            "run": self.run,
            "checkpoint": self.checkpoint,
            "split": self.split,
            "capture": self.capture,
        }

    @property
    def moments(self) -> BasisKey:
        """Where the moments lie that belong to the capture and go with it.

        >>> CaptureKey(checkpoint="final", split="train").moments.folder
        'bases/main/final/train.main.moments-6495e63d508d7c41'
        """
        return self.beside("moments")

    def beside(self, what: str) -> BasisKey:
        """Where something lies that belongs to the capture and goes with it."""
        name = f"{self._beginning}{what}{self._end}"
        return BasisKey(self.checkpoint, run=self.run, capture=name)

    def owns(self, basis: BasisKey) -> bool:
        """Whether that lies beside this capture.

        >>> key = CaptureKey(checkpoint="final", split="train")
        >>> key.owns(key.moments), key.owns(BasisKey("final"))
        (True, False)
        """
        same = (basis.run, basis.checkpoint) == (self.run, self.checkpoint)
        name = basis.capture
        return same and name.startswith(self._beginning) and name.endswith(self._end)

    @property
    def _beginning(self) -> str:
        return f"{self.split[:_SHOWN]}.{self.capture[:_SHOWN]}."

    @property
    def _end(self) -> str:
        return f"-{xxhash.xxh3_64_hexdigest(f'{self.split}/{self.capture}'.encode())}"


@dataclass(frozen=True, slots=True, order=True)
class ScoresKey:
    """Which saved scores.

    >>> ScoresKey("digits-kernel").folder
    'scores/digits-kernel'
    """

    name: str

    def __post_init__(self) -> None:
        checked_name("scores", self.name)

    @property
    def folder(self) -> str:
        """Where the scores lie in the store."""
        return f"{SCORES}/{self.name}"

    @property
    def train(self) -> ScoresKey:
        """Where the training rows are named that these scores are about.

        >>> key = ScoresKey("digits-kernel")
        >>> key.train.name, key.owns(key.train), key.train.names_rows
        ('digits-kernel.train', True, True)
        """
        return ScoresKey(f"{self.name}{_TRAIN}")

    @property
    def names_rows(self) -> bool:
        """Whether these are no scores, but the names of the rows that some are about."""
        return self.name.endswith(_TRAIN)

    def owns(self, other: ScoresKey) -> bool:
        """Whether that names the rows of these scores."""
        return other.name == f"{self.name}{_TRAIN}"

    @property
    def labels(self) -> dict[str, str]:
        """The columns that tell these scores from others."""
        return {"scores": self.name}


@dataclass(frozen=True, slots=True, order=True)
class BasisKey:
    """Which basis: what the coordinates of compressed captures of one checkpoint are.

    >>> BasisKey("final").folder
    'bases/main/final/main'
    """

    checkpoint: str
    run: str = "main"
    capture: str = "main"
    """The name of the captures that are kept in it."""

    def __post_init__(self) -> None:
        for what in ("run", "checkpoint", "capture"):
            checked_name(what, getattr(self, what))

    @property
    def folder(self) -> str:
        """Where the basis lies in the store."""
        return f"{BASES}/{self.run}/{self.checkpoint}/{self.capture}"

    @property
    def of_moments(self) -> bool:
        """Whether moments lie there that belong to a capture.

        >>> CaptureKey("final", "train").moments.of_moments, BasisKey("final").of_moments
        (True, False)
        """
        return _MOMENTS.search(self.capture) is not None

    @property
    def labels(self) -> dict[str, str]:
        """The columns that tell this basis from others."""
        return {"run": self.run, "checkpoint": self.checkpoint, "capture": self.capture}


@dataclass(frozen=True, slots=True, order=True)
class EvaluationKey:
    """Which evaluation of an attribution.

    >>> EvaluationKey("lds-kernel").folder
    'evaluations/lds-kernel'
    """

    name: str

    def __post_init__(self) -> None:
        checked_name("evaluation", self.name)

    @property
    def folder(self) -> str:
        """Where the evaluation lies in the store."""
        return f"{EVALUATIONS}/{self.name}"

    @property
    def labels(self) -> dict[str, str]:
        """The columns that tell this evaluation from others."""
        return {"evaluation": self.name}


BlockKey = CaptureKey | ScoresKey | BasisKey | EvaluationKey
"""What names a block: a capture, saved scores, a basis, or an evaluation."""


@dataclass(frozen=True, slots=True)
class Run:
    """One training: what it was made with."""

    name: str
    config: Mapping[str, Any] = field(default_factory=dict)
    code: str | None = None
    """The version of the code, for example a commit."""
    data: str | None = None
    """The fingerprint of the data set."""

    def __post_init__(self) -> None:
        checked_name("run", self.name)
        instance("config", self.config, Mapping, error=StoreError)
        for name in ("code", "data"):
            # Whatever text it is: documents keep any.
            instance(name, getattr(self, name), (str, type(None)), error=StoreError)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """One state of the weights of a run."""

    run: str
    name: str
    weights: str
    """The fingerprint of the weights."""
    step: int | None = None
    lr: float | None = None
    parent: str | None = None
    function: str | None = None
    """The fingerprint of the function that the model computes with the weights."""

    def __post_init__(self) -> None:
        check_fields(self, StoreError)
        checked_name("run", self.run)
        checked_name("checkpoint", self.name)
        if self.step is not None:
            step = count("step", self.step, error=StoreError, least=-LARGEST, most=LARGEST)
            object.__setattr__(self, "step", step)
        if self.lr is not None:
            object.__setattr__(self, "lr", number("lr", self.lr, error=StoreError))
