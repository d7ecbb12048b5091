"""Keys of blocks, and the file names of a store."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import ClassVar

import xxhash

from gradkeep.errors import StoreError

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._+=@-]{0,99}")

_SHOWN = 36
"""Characters of a long name that are repeated in a derived name."""
_MOMENTS = re.compile(r"\.moments-[0-9a-f]{16}$")
_TRAIN = ".train"
"""Suffix of the scores key that holds the training rows' names."""

BLOCKS = "blocks"
SCORES = "scores"
BASES = "bases"
EVALUATIONS = "evaluations"
DECISIONS = "decisions"
ROWS = "datamodels"
RUNS = "runs"
SHARED_ROWS = re.compile(r"shared-[0-9a-f]{16}-[0-9a-f]{8}")
"""Names of temporary row sets of parallel work; they are deleted when the work ends."""
HEADS = "heads"
CATALOG = "catalog.sqlite"


def _named(*fields: str) -> dict[str, str]:
    return dict(zip(fields, fields, strict=True))


def is_name(name: str) -> bool:
    """Return True if gradkeep could have given this name."""
    return _NAME.fullmatch(name) is not None


def validate_name(what: str, name: str) -> str:
    """Return the name; raise `StoreError` unless it is a valid file name on every system."""
    if not isinstance(name, str) or not is_name(name):
        raise StoreError(
            f"{what} {name!r} cannot be a name in a store",
            code="store.invalid_name",
            expected="1 to 100 letters, digits or _ . + = @ -, not beginning with a dot or sign",
        )
    return name


class _Key:
    """Name of a block; its parts are the folders below a root."""

    __slots__ = ()
    root: ClassVar[str]
    parts: ClassVar[dict[str, str]]
    """Fields in the order of the folders, with their labels in tables and errors."""

    def __post_init__(self) -> None:
        for name, value in self.labels.items():
            validate_name(name, value)

    @property
    def folder(self) -> str:
        """Folder of the block in the store."""
        return "/".join((self.root, *self.labels.values()))

    @property
    def labels(self) -> dict[str, str]:
        """Columns that identify the rows of this block in tables."""
        return {label: getattr(self, field) for field, label in self.parts.items()}


@dataclass(frozen=True, slots=True, order=True)
class CaptureKey(_Key):
    """Name a capture: one checkpoint of a run, evaluated on one split.

    Attributes:
        checkpoint: Name of the checkpoint.
        split: Name of the split.
        run: Name of the run.
        capture: Name of the capture, where one split has several.

    Example:
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
        """Key of the moments that belong to the capture and are deleted with it.

        Example:
            >>> CaptureKey(checkpoint="final", split="train").moments.folder
            'bases/main/final/train.main.moments-6495e63d508d7c41'
        """
        return self.beside("moments")

    def beside(self, what: str) -> BasisKey:
        """Return the key of a block that belongs to the capture and is deleted with it.

        Args:
            what: Kind of the block, such as `moments`.

        Returns:
            The key; `owns` recognizes it.
        """
        name = f"{self._prefix}{what}{self._suffix}"
        return BasisKey(self.checkpoint, run=self.run, capture=name)

    def owns(self, basis: BasisKey) -> bool:
        """Return True if a block belongs to this capture.

        Args:
            basis: Key of the block.

        Returns:
            True for keys made by `beside`.

        Example:
            >>> key = CaptureKey(checkpoint="final", split="train")
            >>> key.owns(key.moments), key.owns(BasisKey("final"))
            (True, False)
        """
        same = (basis.run, basis.checkpoint) == (self.run, self.checkpoint)
        name = basis.capture
        return same and name.startswith(self._prefix) and name.endswith(self._suffix)

    @property
    def _prefix(self) -> str:
        return f"{self.split[:_SHOWN]}.{self.capture[:_SHOWN]}."

    @property
    def _suffix(self) -> str:
        return f"-{xxhash.xxh3_64_hexdigest(f'{self.split}/{self.capture}'.encode())}"


@dataclass(frozen=True, slots=True, order=True)
class ScoresKey(_Key):
    """Name saved scores.

    Attributes:
        name: Name of the scores.

    Example:
        >>> ScoresKey("digits-kernel").folder
        'scores/digits-kernel'
    """

    root: ClassVar[str] = SCORES
    parts: ClassVar[dict[str, str]] = {"name": "scores"}
    name: str

    @property
    def train(self) -> ScoresKey:
        """Key of the block that holds the ids of the training rows of these scores.

        Example:
            >>> key = ScoresKey("digits-kernel")
            >>> key.train.name, key.owns(key.train), key.train.names_rows
            ('digits-kernel.train', True, True)
        """
        return ScoresKey(f"{self.name}{_TRAIN}")

    @property
    def names_rows(self) -> bool:
        """True if this block holds the training row ids of other scores, not scores."""
        return self.name.endswith(_TRAIN)

    def owns(self, other: ScoresKey) -> bool:
        """Return True if another block holds the training row ids of these scores.

        Args:
            other: Key of the other block.

        Returns:
            True if `other` is `self.train`.
        """
        return other.name == f"{self.name}{_TRAIN}"


@dataclass(frozen=True, slots=True, order=True)
class BasisKey(_Key):
    """Name a basis: the coordinates of the compressed captures of one checkpoint.

    Attributes:
        checkpoint: Name of the checkpoint.
        run: Name of the run.
        capture: Name of the captures that use the basis.

    Example:
        >>> BasisKey("final").folder
        'bases/main/final/main'
    """

    root: ClassVar[str] = BASES
    parts: ClassVar[dict[str, str]] = _named("run", "checkpoint", "capture")
    checkpoint: str
    run: str = "main"
    capture: str = "main"

    @property
    def of_moments(self) -> bool:
        """True if the block holds the moments of a capture.

        Example:
            >>> CaptureKey("final", "train").moments.of_moments, BasisKey("final").of_moments
            (True, False)
        """
        return _MOMENTS.search(self.capture) is not None


@dataclass(frozen=True, slots=True, order=True)
class EvaluationKey(_Key):
    """Name a saved evaluation.

    Attributes:
        name: Name of the evaluation.

    Example:
        >>> EvaluationKey("lds-kernel").folder
        'evaluations/lds-kernel'
    """

    root: ClassVar[str] = EVALUATIONS
    parts: ClassVar[dict[str, str]] = {"name": "evaluation"}
    name: str


BlockKey = CaptureKey | ScoresKey | BasisKey | EvaluationKey
"""Key of a block: a capture, saved scores, a basis or an evaluation."""


def parse_block_key(folder: str) -> BlockKey:
    """Return the key of the block in a folder.

    >>> parse_block_key("scores/dot")
    ScoresKey(name='dot')
    """
    root, *names = folder.split("/")
    kinds: tuple[type[BlockKey], ...] = (CaptureKey, ScoresKey, BasisKey, EvaluationKey)
    kind = next(kind for kind in kinds if kind.root == root)
    return kind(**dict(zip(kind.parts, names, strict=True)))


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
_OWN_SUFFIXES = (".json", ".safetensors")


@dataclass(frozen=True, slots=True)
class KnownFile:
    """Kind, owner and number of a file, parsed from its key."""

    kind: str
    """One of the keys of `_PATTERNS`."""
    folder: str
    """Block, row set, run or checkpoint that the file belongs to, or that a record is about."""
    number: int
    """Version, segment, row or size in the name; -1 if the name has none."""


def parse_file_key(key: str) -> KnownFile | None:
    """Parse the key of a file; return None if gradkeep writes no file of that name.

    >>> parse_file_key("scores/dot/seg/000002.safetensors")
    KnownFile(kind='segment', folder='scores/dot', number=2)
    >>> parse_file_key("scores/dot/notes.txt")
    """
    for kind, pattern in _FILES:
        match = pattern.fullmatch(key)
        if match is not None:
            number = match.groupdict().get("number")
            return KnownFile(kind, match["folder"], -1 if number is None else int(number))
    return None


def is_folder_name(key: str) -> bool:
    """Return True if gradkeep gives this name to folders only."""
    return _FOLDERS.fullmatch(key) is not None


def may_be_folder_name(key: str) -> bool:
    """Return True if a folder of a run, capture or row set can have this name."""
    return _ABOVE.fullmatch(key) is not None


def looks_like_own_file(key: str) -> bool:
    """Return True if a misplaced file was probably written by gradkeep."""
    name = key.rpartition("/")[2]
    return name.endswith(_OWN_SUFFIXES) or (
        name.startswith("samples-") and name.endswith(".parquet")
    )


def file_of_record(head: KnownFile) -> str:
    """Return the key of the file that a record below `heads/` is about."""
    folder, number = head.folder, head.number
    if folder.startswith(f"{RUNS}/"):
        return f"{folder}/{'ckpt.json' if '/ckpt/' in folder else 'run.json'}"
    if folder.startswith(f"{ROWS}/") and folder.endswith("/size") and folder.count("/") == 2:
        return f"{folder}/{number:012d}.json"
    return f"{folder}/manifest/{number:06d}.json"


def row_part(file: KnownFile) -> str | None:
    """Return the part of a row set's records that records a row or a failed attempt."""
    parts = {"row": "rows", "failure": "failed"}
    return parts.get(file.kind)


def record_folder(file: KnownFile) -> str | None:
    """Return the folder below `heads/` in which a file is recorded, or None."""
    if file.kind == "size":
        return f"{file.folder}/size"
    return file.folder if file.kind in ("run", "checkpoint", "manifest") else None


def is_step_log(key: str) -> bool:
    """Return True for a recorded training step that users put there for the page: `remat/NAME.log`.

    >>> is_step_log("remat/step.log"), is_step_log("remat/a/step.log")
    (True, False)
    """
    return re.fullmatch(rf"remat/{_N}\.log", key) is not None
