"""Small JSON files with a checksum: records of runs, checkpoints and published versions.

The last field of the object is the xxh3-128 of every byte before it, so that a change of any byte,
even of a space, is detected. The file stays plain JSON for other readers. A checksum is not a
signature: a file written by someone else can carry a valid one. Size and depth are therefore bounded
before parsing, and `parse_record` checks every name and type.

When a version of a block is published, its number and the digest of its manifest are stored in the
name of a small file below `heads/`. A manifest that was deleted or replaced by an older one, or a
whole block that was deleted, is then detected. Runs and checkpoints have such a record too.

The order makes this safe at any moment. The file is published first, its record second: a process
that dies in between leaves a version without a record, which is no damage, and the next writer adds
it. Deletion removes the record first. A record without its file therefore always means that the file
was lost. Stores of earlier versions have no records and can be read without them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import operator
import re
import secrets
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn, TypeVar

import msgspec
import xxhash

from gradkeep._arguments import check_fields, instance
from gradkeep.errors import ConflictError, DamagedError, ReadOnlyError, StoreError
from gradkeep.store._keys import DECISIONS, HEADS, RUNS, validate_name

if TYPE_CHECKING:
    from collections.abc import Iterable

    from gradkeep.store.backends._backend import Backend, Durability

SMALL_DOCUMENT = 1 << 20
"""Largest size in bytes of documents with a fixed set of fields; a traceback fits."""
LARGE_DOCUMENT = 32 << 20
"""Largest size in bytes of a schema or a run's configuration; 60,000 layers fit."""
LARGEST_DOCUMENT = 256 << 20
"""Largest size in bytes of a manifest; one of a million segments fits."""
LARGEST_WHOLE = 2**63 - 1
"""Largest signed 64-bit integer."""
_MOST_CONTAINERS = 2 << 20
"""Most lists and objects in a document: each takes 64 bytes or more of memory, but 3 in a file."""
_MOST_VALUES = 16 << 20
_DEEPEST = 64
_SEAL_BYTES = len(b',\n  "xxh3": "') + 32 + len(b'"\n}\n')
_SURROGATE = re.compile("[\ud800-\udfff]")

T = TypeVar("T")
Count = Annotated[int, msgspec.Meta(ge=0, le=LARGEST_WHOLE)]
Finite = Annotated[float, msgspec.Meta(ge=-sys.float_info.max, le=sys.float_info.max)]


class Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of the records in documents; unknown fields are refused."""

    digest: str | None = msgspec.field(default=None, name="xxh3")
    """In memory the xxh3-128 of the whole document; in the file that of all bytes before itself."""


def to_bytes(fields: Mapping[str, Any] | Record) -> bytes:
    """Serialize a document; the same fields give the same bytes.

    >>> print(to_bytes({"rows": 3}).decode(), end="")
    {
      "rows": 3,
      "xxh3": "9475153a40ace234927a359bd6822a7c"
    }
    """
    values = dict(msgspec.to_builtins(fields)) if isinstance(fields, Record) else fields
    values = {name: values[name] for name in values if name != "xxh3"}
    text = json.dumps(values, indent=2, ensure_ascii=False, allow_nan=False)
    body = _encoded(text.removesuffix("\n}"))
    return body + _seal(body)


def check_size(data: bytes, what: str) -> None:
    """Raise `StoreError` for a document that is too large to be read back."""
    if len(data) > LARGE_DOCUMENT or data.count(b"[") + data.count(b"{") > _MOST_CONTAINERS:
        raise StoreError(
            f"{what} is too large",
            code="store.document_too_large",
            found=f"{len(data)} bytes",
            expected=f"at most {LARGE_DOCUMENT} bytes and {_MOST_CONTAINERS} lists and objects",
            fix="Save large values in your own files, and record their digest here.",
        )


def read_bytes(backend: Backend, key: str, *, most: int) -> bytes:
    """Read a document of at most `most` bytes."""
    with contextlib.closing(backend.open(key)) as opened:
        if opened.size > most:
            path = backend.describe(key)
            raise malformed_document(path, f"{opened.size} bytes", f"at most {most} bytes")
        return opened.read(0, opened.size)


def read_document(backend: Backend, key: str, kind: type[T], *, most: int = SMALL_DOCUMENT) -> T:
    """Read a document as a record; raise FileNotFoundError if it does not exist."""
    data, path = read_bytes(backend, key, most=most), backend.describe(key)
    _check_seal(data, path=path)
    if not issubclass(kind, Record):
        return parse_record(kind, from_bytes(data, path=path), path=path)
    _check_counts(data, path=path)
    try:
        record = msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, RecursionError):  # also lone surrogates, which are allowed
        record = parse_record(kind, from_bytes(data, path=path), path=path)
    msgspec.structs.force_setattr(record, "digest", xxhash.xxh3_128_hexdigest(data))
    return record


def parse_record(kind: type[T], fields: Any, *, path: str) -> T:
    """Build a record or dataclass from JSON fields; raise `DamagedError` for wrong names or types."""
    if dataclasses.is_dataclass(kind) and isinstance(fields, dict):
        unknown = set(fields) - {part.name for part in dataclasses.fields(kind) if part.init}
        if unknown:
            raise malformed_document(path, min(unknown)[:200], "no such field")
    try:
        return msgspec.convert(fields, kind)
    except DamagedError:
        raise
    except (msgspec.ValidationError, StoreError, OverflowError, UnicodeError) as error:
        raise malformed_document(path, str(error)[:200], "fields that gradkeep writes") from None


def from_bytes(data: bytes, *, path: str) -> dict[str, Any]:
    """Parse a document; raise `DamagedError` if any byte was changed."""
    _check_seal(data, path=path)
    fields = parse_json(data, path=path)
    del fields["xxh3"]
    return fields


def _check_seal(data: bytes, *, path: str) -> None:
    body = data[:-_SEAL_BYTES]
    if len(data) <= _SEAL_BYTES or data[-_SEAL_BYTES:] != _seal(body):
        raise DamagedError("the document does not match its checksum", path=path)


def _check_counts(data: bytes, *, path: str) -> None:
    """Limit the number of values before parsing, by counting brackets and commas."""
    containers = data.count(b"[") + data.count(b"{")
    for size, most, what in (
        (len(data), LARGEST_DOCUMENT, "bytes"),
        (containers, _MOST_CONTAINERS, "lists and objects"),
        (data.count(b","), _MOST_VALUES, "values"),
    ):
        if size > most:
            raise malformed_document(path, f"{size} {what}", f"at most {most}")


def parse_json(data: bytes, *, path: str) -> dict[str, Any]:
    """Parse a JSON object; raise `DamagedError` for anything else, however large or deep."""
    _check_counts(data, path=path)
    try:
        fields = json.loads(data, parse_constant=_no_number)
    except (ValueError, RecursionError) as error:  # a UnicodeDecodeError is a ValueError
        raise malformed_document(
            path, f"{type(error).__name__}: {error}"[:200], "a JSON object"
        ) from None
    if not isinstance(fields, dict):
        raise malformed_document(path, type(fields).__name__, "a JSON object")
    if _is_deeper(fields, _DEEPEST):
        raise malformed_document(
            path, f"more than {_DEEPEST} levels", f"at most {_DEEPEST} nested levels"
        )
    return fields


def malformed_document(
    path: str, actual: object, expected: object = "fields that gradkeep writes"
) -> DamagedError:
    """Return the error for a document with a valid checksum but contents that gradkeep does not write."""
    return DamagedError(
        "the document was not written by gradkeep",
        code="store.malformed_document",
        path=path,
        found=actual,
        expected=expected,
    )


def digest(fields: Mapping[str, Any]) -> str:
    """Return a fingerprint of the fields that does not depend on their order."""
    text = json.dumps(fields, sort_keys=True, ensure_ascii=False, allow_nan=False)
    return xxhash.xxh3_128_hexdigest(_encoded(text))


def _encoded(text: str) -> bytes:
    # Lone surrogates, as in broken file names, cannot be encoded as UTF-8; JSON can escape them.
    return _SURROGATE.sub(lambda match: f"\\u{ord(match[0]):04x}", text).encode()


def _seal(body: bytes) -> bytes:
    return b',\n  "xxh3": "%s"\n}\n' % xxhash.xxh3_128_hexdigest(body).encode()


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number")


def _is_deeper(fields: dict[str, Any], most: int) -> bool:
    level: list[Any] = [fields]
    for _ in range(most):
        values = [x.values() if isinstance(x, dict) else x for x in level]
        level = [item for part in values for item in part if isinstance(item, dict | list)]
        if not level:
            return False
    return True


_HEAD_NAME = re.compile(r"(\d{6,18})-([0-9a-f]{32})\.json")


def run_folder(run: str) -> str:
    return f"{RUNS}/{run}"


def checkpoint_folder(run: str, name: str) -> str:
    return f"{RUNS}/{run}/ckpt/{name}"


@dataclass(frozen=True, slots=True)
class Run:
    """Record of one training run.

    Attributes:
        name: Name of the run.
        config: Configuration, as JSON values.
        code: Version of the code, for example a commit.
        data: Fingerprint of the data set.
    """

    name: str
    config: Mapping[str, Any] = field(default_factory=dict)
    code: str | None = None
    data: str | None = None

    def __post_init__(self) -> None:
        validate_name("run", self.name)
        instance("config", self.config, Mapping, error=StoreError)
        for name in ("code", "data"):
            # Any text is accepted.
            instance(name, getattr(self, name), (str, type(None)), error=StoreError)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Record of one state of the weights of a run.

    Attributes:
        run: Name of the run.
        name: Name of the checkpoint.
        weights: Fingerprint of the weights.
        step: Training step.
        lr: Learning rate at that step.
        parent: Name of the previous checkpoint.
        function: Fingerprint of the function that the model computes with the weights.
    """

    run: str
    name: str
    weights: str
    step: int | None = None
    lr: float | None = None
    parent: str | None = None
    function: str | None = None

    def __post_init__(self) -> None:
        check_fields(self, StoreError)
        validate_name("run", self.run)
        validate_name("checkpoint", self.name)
        if self.step is not None:  # numpy's numbers are not JSON
            object.__setattr__(self, "step", operator.index(self.step))
        if self.lr is not None:
            object.__setattr__(self, "lr", float(self.lr))


def validate_run(run: Run) -> Run:
    """Return the run with its config as JSON values; raise `StoreError` if that is impossible."""
    try:
        config = json.loads(json.dumps(dict(run.config), allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise StoreError(
            f"the config of run {run.name!r} cannot be recorded",
            code="store.invalid_config",
            found=str(error)[:300],
            expected="strings, finite numbers, lists and objects",
        ) from None
    return dataclasses.replace(run, config=config)


def read_run(backend: Backend, name: str) -> Run | None:
    """Read the record of a run; return None if there is none."""
    run = _read_record(backend, f"{run_folder(name)}/run.json", Run)
    if run is not None and run.name != name:
        raise malformed_document(backend.describe(run_folder(name)), "the record of another run")
    return run


def read_checkpoint(backend: Backend, run: str, name: str) -> Checkpoint | None:
    """Read the record of a checkpoint; return None if there is none."""
    folder = checkpoint_folder(run, name)
    checkpoint = _read_record(backend, f"{folder}/ckpt.json", Checkpoint)
    if checkpoint is not None and (checkpoint.run, checkpoint.name) != (run, name):
        raise malformed_document(backend.describe(folder), "the record of another checkpoint")
    return checkpoint


def _read_record(backend: Backend, key: str, kind: type[T]) -> T | None:
    try:
        return read_document(backend, key, kind, most=LARGE_DOCUMENT)
    except FileNotFoundError:
        return None


class Head(Record, frozen=True):
    """Second record of a published file, outside of the folder that it is about."""

    of: str
    version: Count
    published: str = msgspec.field(name="digest")


def head_key(folder: str, version: int, xxh3: str) -> str:
    """Return the key of a record: folder, version and digest of the published bytes."""
    return f"{HEADS}/{folder}/{version:06d}-{xxh3}.json"


def read_heads(backend: Backend, folder: str) -> dict[int, frozenset[str]]:
    """Read the digests recorded for each version; an undamaged store has one per version."""
    heads: dict[int, frozenset[str]] = {}
    for entry in backend.list(f"{HEADS}/{folder}"):
        match = _HEAD_NAME.fullmatch(entry.name)
        if match is not None:
            version = int(match[1])
            heads[version] = heads.get(version, frozenset()) | {match[2]}
    return heads


def head_keys(backend: Backend, folder: str) -> dict[str, int]:
    """List all records of a folder, with the version of each."""
    return {
        head_key(folder, version, digest): version
        for version, digests in read_heads(backend, folder).items()
        for digest in digests
    }


def record_head(
    backend: Backend, folder: str, version: int, xxh3: str, *, durability: Durability
) -> None:
    """Record a published version; repeated by the next process if its writer died before this."""
    data = to_bytes({"of": folder, "version": version, "digest": xxh3})
    # A read-only store stays readable.
    with contextlib.suppress(ReadOnlyError):
        backend.put_if_absent(head_key(folder, version, xxh3), [data], durability=durability)


@dataclass(frozen=True, slots=True)
class Decision:
    """Record a person's decision about the label of one row.

    Attributes:
        split: Split of the row.
        row: Id of the row.
        action: `accept` (the label is right), `relabel` (the label is wrong and should be `label`, if
            known) or `undo` (cancel the decision with the number `of`).
        label: The right label.
        before: Label at the time of the decision.
        of: Number of the decision that an undo cancels.
        number: Position in the log of its split; assigned when the decision is recorded.
        time: Time of recording, in seconds since the epoch.
    """

    split: str
    row: int
    action: Literal["accept", "relabel", "undo"]
    label: int | None = None
    before: int | None = None
    of: int | None = None
    number: int = -1
    time: float = 0.0

    def __post_init__(self) -> None:
        check_fields(self, StoreError)
        validate_name("split", self.split)
        if (self.action == "undo") != (self.of is not None):
            raise StoreError(
                "`of` must be set for action 'undo' and for no other", code="store.invalid_decision"
            )


def append_decision(backend: Backend, decision: Decision, *, durability: Durability) -> Decision:
    """Append a decision to the log of its split; return it with its number and time."""
    number = _next_number(backend, decision.split)
    while True:
        numbered = dataclasses.replace(decision, number=number, time=time.time())
        fields = {**dataclasses.asdict(numbered), "token": secrets.token_hex(8)}
        try:
            backend.put_if_absent(
                decision_key(numbered.split, number),
                [to_bytes(fields)],
                durability=durability,
            )
        except ConflictError:  # another process took this number
            number += 1
            continue
        return numbered


def read_decisions(backend: Backend, split: str, *, start: int = 0) -> list[Decision]:
    """Read the decisions about a split in order, from `start` on; a gap is damage."""
    count = _next_number(backend, validate_name("split", split))
    decisions = []
    for number in range(start, count):
        key = decision_key(split, number)
        try:
            decisions.append(read_decision(backend, key))
        except FileNotFoundError:
            raise DamagedError(
                "a decision is missing, but later ones exist",
                code="store.missing_decision",
                path=backend.describe(key),
            ) from None
    return decisions


def read_decision(backend: Backend, key: str) -> Decision:
    """Read one decision."""
    path = backend.describe(key)
    fields = from_bytes(read_bytes(backend, key, most=SMALL_DOCUMENT), path=path)
    if not isinstance(fields.pop("token", None), str):  # makes equal decisions differ
        raise malformed_document(path, "no token")
    return parse_record(Decision, fields, path=path)


def current_decisions(decisions: Iterable[Decision]) -> dict[int, Decision]:
    """Return the last decision about each row that was not undone, by row id.

    >>> log = [Decision("train", 7, "accept", number=0), Decision("train", 7, "undo", of=0, number=1)]
    >>> current_decisions(log[:1])[7].action, current_decisions(log)
    ('accept', {})
    """
    stacks: dict[int, list[Decision]] = {}
    for decision in decisions:
        stack = stacks.setdefault(decision.row, [])
        if decision.action == "undo":
            stack[:] = [other for other in stack if other.number != decision.of]
        else:
            stack.append(decision)
    return {row: stack[-1] for row, stack in stacks.items() if stack}


def decision_key(split: str, number: int) -> str:
    return f"{DECISIONS}/{split}/{number:06d}.json"


def _next_number(backend: Backend, split: str) -> int:
    names = (entry.name.removesuffix(".json") for entry in backend.list(f"{DECISIONS}/{split}"))
    return max((int(name) + 1 for name in names if name.isdecimal()), default=0)
