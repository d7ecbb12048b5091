"""Which file belongs where: the names that gradkeep gives, and what each of them holds."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from gradkeep.store._keys import (
    BASES,
    BLOCKS,
    DECISIONS,
    EVALUATIONS,
    HEADS,
    ROWS,
    RUNS,
    SCORES,
)

FileKind = Literal[
    "identity",
    "run",
    "checkpoint",
    "schema",
    "manifest",
    "segment",
    "packed",
    "row",
    "samples",
    "lease",
    "failure",
    "size",
    "head",
    "row record",
    "decision",
]

_N = r"[A-Za-z0-9_][A-Za-z0-9._+=@-]{0,99}"
_SIX = r"(?:\d{6}|[1-9]\d{6,17})"  # a number, padded to six digits
_ONE = r"(?:0|[1-9]\d{0,17})"
_HEX = r"[0-9a-f]{32}"
_BLOCK = rf"(?:{BLOCKS}/{_N}/{_N}/{_N}/{_N}|(?:{SCORES}|{EVALUATIONS})/{_N}|{BASES}/{_N}/{_N}/{_N})"
_SET = rf"{ROWS}/{_N}"
_RUN = rf"{RUNS}/{_N}"
_TOP = "|".join((BASES, BLOCKS, DECISIONS, EVALUATIONS, SCORES, ROWS, RUNS))
_PATTERNS: dict[FileKind, str] = {
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

    kind: FileKind
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


def row_part(file: KnownFile) -> Literal["rows", "failed"] | None:
    """Below which part of a row set's records a row or a failed attempt is recorded."""
    parts: dict[str, Literal["rows", "failed"]] = {"row": "rows", "failure": "failed"}
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
