"""Names, keys and records: what is in a store, what it may be called, and where it lies."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import xxhash

from gradkeep._arguments import LARGEST, check_fields, count, instance, number
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


def _named(*fields: str) -> dict[str, str]:
    return dict(zip(fields, fields, strict=True))


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


class _Key:
    """The name of a block: its parts are the folders below a root that it lies in."""

    __slots__ = ()
    root: ClassVar[str]
    parts: ClassVar[dict[str, str]]
    """The fields in the order of folders, and what each is called in tables and errors."""

    def __post_init__(self) -> None:
        for name, value in self.labels.items():
            checked_name(name, value)

    @property
    def folder(self) -> str:
        """Where the block lies in the store."""
        return "/".join((self.root, *self.labels.values()))

    @property
    def labels(self) -> dict[str, str]:
        """The columns that tell the rows of this block from those of others."""
        return {label: getattr(self, field) for field, label in self.parts.items()}


@dataclass(frozen=True, slots=True, order=True)
class CaptureKey(_Key):
    """Which capture: one checkpoint of a run, replayed over one split.

    >>> CaptureKey(checkpoint="final", split="train").folder
    'blocks/main/final/train/main'
    """

    root: ClassVar[str] = BLOCKS
    parts: ClassVar[dict[str, str]] = _named("run", "checkpoint", "split", "capture")
    checkpoint: str
    split: str
    run: str = "main"
    capture: str = "main"

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
class ScoresKey(_Key):
    """Which saved scores.

    >>> ScoresKey("digits-kernel").folder
    'scores/digits-kernel'
    """

    root: ClassVar[str] = SCORES
    parts: ClassVar[dict[str, str]] = {"name": "scores"}
    name: str

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


@dataclass(frozen=True, slots=True, order=True)
class BasisKey(_Key):
    """Which basis: what the coordinates of compressed captures of one checkpoint are.

    >>> BasisKey("final").folder
    'bases/main/final/main'
    """

    root: ClassVar[str] = BASES
    parts: ClassVar[dict[str, str]] = _named("run", "checkpoint", "capture")
    checkpoint: str
    run: str = "main"
    capture: str = "main"
    """The name of the captures that are kept in it."""

    @property
    def of_moments(self) -> bool:
        """Whether moments lie there that belong to a capture.

        >>> CaptureKey("final", "train").moments.of_moments, BasisKey("final").of_moments
        (True, False)
        """
        return _MOMENTS.search(self.capture) is not None


@dataclass(frozen=True, slots=True, order=True)
class EvaluationKey(_Key):
    """Which evaluation of an attribution.

    >>> EvaluationKey("lds-kernel").folder
    'evaluations/lds-kernel'
    """

    root: ClassVar[str] = EVALUATIONS
    parts: ClassVar[dict[str, str]] = {"name": "evaluation"}
    name: str


BlockKey = CaptureKey | ScoresKey | BasisKey | EvaluationKey
"""What names a block: a capture, saved scores, a basis, or an evaluation."""


def key_of(folder: str) -> BlockKey:
    """The key of the block that lies in a folder.

    >>> key_of("scores/dot")
    ScoresKey(name='dot')
    """
    root, *names = folder.split("/")
    kinds: tuple[type[BlockKey], ...] = (CaptureKey, ScoresKey, BasisKey, EvaluationKey)
    kind = next(kind for kind in kinds if kind.root == root)
    return kind(**dict(zip(kind.parts, names, strict=True)))


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


_N = _NAME.pattern
_SIX = r"(?:\d{6}|[1-9]\d{6,17})"  # a number, padded to six digits
_ONE = r"(?:0|[1-9]\d{0,17})"
_HEX = r"[0-9a-f]{32}"
_BLOCK = rf"(?:{BLOCKS}/{_N}/{_N}/{_N}/{_N}|(?:{SCORES}|{EVALUATIONS})/{_N}|{BASES}/{_N}/{_N}/{_N})"
_SET = rf"{ROWS}/{_N}"
_RUN = rf"{RUNS}/{_N}"
_TOP = "|".join((BASES, BLOCKS, DECISIONS, EVALUATIONS, SCORES, ROWS, RUNS))
_PATTERNS = {
    "identity": r"(?P<folder>)STORE\.json",
    "run": rf"(?P<folder>{_RUN})/run\.json",
    "checkpoint": rf"(?P<folder>{_RUN}/ckpt/{_N})/ckpt\.json",
    "schema": rf"(?P<folder>{_BLOCK}|{_SET})/schema\.json",
    "manifest": rf"(?P<folder>{_BLOCK}|{_SET})/manifest/(?P<number>{_SIX})\.json",
    "segment": rf"(?P<folder>{_BLOCK})/seg/(?:(?P<number>{_SIX})|without-{_HEX})\.safetensors",
    "packed": rf"(?P<folder>{_SET})/packed/(?P<number>{_SIX})\.safetensors",
    "row": rf"(?P<folder>{_SET})/rows/{_SIX}/(?P<number>{_ONE})\.safetensors",
    "samples": rf"(?P<folder>{_BLOCK})/samples-(?P<number>{_SIX})-([0-9a-f]{{16}}-)?{_HEX}\.parquet",
    "lease": rf"(?P<folder>{_SET})/claims/{_SIX}/(?P<number>{_ONE})-{_SIX}\.json",
    "failure": rf"(?P<folder>{_SET})/failed/{_SIX}/(?P<number>{_ONE})-[0-9a-f]+\.json",
    "size": rf"(?P<folder>{_SET})/size/(?P<number>\d{{12}}|[1-9]\d{{12,17}})\.json",
    "head": rf"{HEADS}/(?P<folder>{_BLOCK}|{_SET}(?:/size)?|{_RUN}(?:/ckpt/{_N})?)"
    rf"/(?P<number>{_SIX})-{_HEX}\.json",
    "row record": rf"{HEADS}/(?P<folder>{_SET}/(?:rows|failed)/{_SIX})/(?P<number>{_SIX})-{_HEX}",
    "decision": rf"(?P<folder>{DECISIONS}/{_N})/(?P<number>{_SIX})\.json",
}
_FILES = [(kind, re.compile(pattern)) for kind, pattern in _PATTERNS.items()]
_FOLDERS = re.compile(
    rf"{_TOP}|{HEADS}|quarantine|{_BLOCK}/(?:seg|manifest)"
    rf"|{_SET}/(?:manifest|packed|size|(?:rows|claims|failed)(?:/{_SIX})?)|{_RUN}/ckpt"
    rf"|{HEADS}/(?:{_TOP})(?:/.*)?"
)
_ABOVE = re.compile(
    rf"(?:{BLOCKS}(?:/{_N}){{1,4}}|{BASES}(?:/{_N}){{1,3}}|(?:{SCORES}|{EVALUATIONS}|{ROWS}|{RUNS}|{DECISIONS})/{_N}"
    rf"|{_RUN}/ckpt/{_N})"
)
_OURS = (".json", ".safetensors")


@dataclass(frozen=True, slots=True)
class KnownFile:
    """What a name in a store says."""

    kind: str
    """One of those of `_PATTERNS`."""
    folder: str
    """The block, row set, run or checkpoint it belongs to; of a record, what it tells of."""
    number: int
    """The version, segment, row or size in the name; -1 where there is none."""


def known_file(key: str) -> KnownFile | None:
    """What a key is the name of; None if gradkeep gives no such name.

    >>> known_file("scores/dot/seg/000002.safetensors")
    KnownFile(kind='segment', folder='scores/dot', number=2)
    >>> known_file("scores/dot/notes.txt")
    """
    for kind, pattern in _FILES:
        match = pattern.fullmatch(key)
        if match is not None:
            number = match.groupdict().get("number")
            return KnownFile(kind, match["folder"], -1 if number is None else int(number))
    return None


def is_folder_name(key: str) -> bool:
    """Whether gradkeep gives this name to folders only."""
    return _FOLDERS.fullmatch(key) is not None


def may_be_folder_name(key: str) -> bool:
    """Whether a folder of gradkeep can have this name: of a run, a capture, a set of rows."""
    return _ABOVE.fullmatch(key) is not None


def looks_like_ours(key: str) -> bool:
    """Whether a file that is not in its place was probably put there by gradkeep, or in its name."""
    name = key.rpartition("/")[2]
    return name.endswith(_OURS) or (name.startswith("samples-") and name.endswith(".parquet"))


def recorded_file(head: KnownFile) -> str:
    """The file that a record under `heads/` tells of."""
    folder, number = head.folder, head.number
    if folder.startswith(f"{RUNS}/"):
        return f"{folder}/{'ckpt.json' if '/ckpt/' in folder else 'run.json'}"
    if folder.startswith(f"{ROWS}/") and folder.endswith("/size") and folder.count("/") == 2:
        return f"{folder}/{number:012d}.json"
    return f"{folder}/manifest/{number:06d}.json"


def row_part(file: KnownFile) -> str | None:
    """Below which part of a row set's records a row or a failed attempt is recorded."""
    parts = {"row": "rows", "failure": "failed"}
    return parts.get(file.kind)


def record_folder(file: KnownFile) -> str | None:
    """Below which folder of `heads/` a file is recorded; None if it is not."""
    if file.kind == "size":
        return f"{file.folder}/size"
    return file.folder if file.kind in ("run", "checkpoint", "manifest") else None


def is_recorded_step(key: str) -> bool:
    """Whether people put it there for the page: a step that was recorded, as `remat/NAME.log`.

    >>> is_recorded_step("remat/step.log"), is_recorded_step("remat/a/step.log")
    (True, False)
    """
    return re.fullmatch(rf"remat/{_N}\.log", key) is not None
