"""Small JSON files that carry their own checksum, and the typed records in them.

The last field of the object is the xxh3-128 of every byte before it, so that a change of any byte
of the file, a space included, is noticed. The file stays plain JSON for every other reader. A
checksum is no signature: what a stranger wrote can carry a right one, so size and depth are bounded
before anything is parsed, and `parse_record` checks every name and type.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
import sys
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, TypeVar

import msgspec
import xxhash

from gradkeep.errors import DamagedError, StoreError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from gradkeep.store.backends._backend import Backend

SMALL_DOCUMENT = 1 << 20
"""Bytes of documents of a fixed set of fields; a traceback fits."""
LARGE_DOCUMENT = 32 << 20
"""Bytes of a schema or a run's configuration; 60,000 layers fit."""
LARGEST_DOCUMENT = 256 << 20
"""Bytes of a manifest; one of a million segments fits."""
LARGEST_WHOLE = 2**63 - 1
"""What a column of whole numbers holds, here and in every database."""
_MOST_CONTAINERS = 2 << 20
"""Lists and objects of a document. Each takes 64 bytes or more in memory, but as few as three in a file."""
_MOST_VALUES = 16 << 20
_DEEPEST = 64
_SEAL_BYTES = len(b',\n  "xxh3": "') + 32 + len(b'"\n}\n')
_SURROGATE = re.compile("[\ud800-\udfff]")

T = TypeVar("T")
Count = Annotated[int, msgspec.Meta(ge=0, le=LARGEST_WHOLE)]
Finite = Annotated[float, msgspec.Meta(ge=-sys.float_info.max, le=sys.float_info.max)]


class Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The fields of one kind of document; no other field may be there."""

    digest: str | None = msgspec.field(default=None, name="xxh3")
    """The xxh3-128 of the whole document, once it is known; in the file, of all before itself."""


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
    """Raise `StoreError` for a document that could not be read back."""
    if len(data) > LARGE_DOCUMENT or data.count(b"[") + data.count(b"{") > _MOST_CONTAINERS:
        raise StoreError(
            f"{what} is too large to be recorded: {len(data)} bytes of {LARGE_DOCUMENT}",
            fix="keep large values in files of your own, and their digest here",
        )


def read_bytes(backend: Backend, key: str, *, most: int) -> bytes:
    """Read a document of at most so many bytes."""
    with contextlib.closing(backend.open(key)) as opened:
        if opened.size > most:
            path = backend.describe(key)
            raise not_ours(path, f"{opened.size} bytes", f"at most {most} bytes")
        return opened.read(0, opened.size)


def read_document(backend: Backend, key: str, kind: type[T], *, most: int = SMALL_DOCUMENT) -> T:
    """Read a document of a store as a record; FileNotFoundError if there is none."""
    data, path = read_bytes(backend, key, most=most), backend.describe(key)
    _check_seal(data, path=path)
    if not issubclass(kind, Record):
        return parse_record(kind, from_bytes(data, path=path), path=path)
    _check_counts(data, path=path)
    try:
        record = msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, RecursionError):  # also half of a surrogate pair, which is allowed
        record = parse_record(kind, from_bytes(data, path=path), path=path)
    msgspec.structs.force_setattr(record, "digest", xxhash.xxh3_128_hexdigest(data))
    return record


def parse_record(kind: type[T], fields: Any, *, path: str) -> T:
    """Build a record or dataclass from JSON fields; `DamagedError` for fields of other names or types."""
    if dataclasses.is_dataclass(kind) and isinstance(fields, dict):
        unknown = set(fields) - {part.name for part in dataclasses.fields(kind) if part.init}
        if unknown:
            raise not_ours(path, min(unknown)[:200], "no such field")
    try:
        return msgspec.convert(fields, kind)
    except DamagedError:
        raise
    except (msgspec.ValidationError, StoreError, OverflowError, UnicodeError) as error:
        raise not_ours(path, str(error)[:200], "what gradkeep wrote") from None


def from_bytes(data: bytes, *, path: str) -> dict[str, Any]:
    """Parse a document; raises `DamagedError` if any byte is not as it was written."""
    _check_seal(data, path=path)
    fields = parse_json(data, path=path)
    del fields["xxh3"]
    return fields


def _check_seal(data: bytes, *, path: str) -> None:
    body = data[:-_SEAL_BYTES]
    if len(data) <= _SEAL_BYTES or data[-_SEAL_BYTES:] != _seal(body):
        raise DamagedError(
            "this document is not as it was written",
            path=path,
            fix="`gradkeep verify STORE --repair` moves it aside; run the work again to recreate it",
        )


def _check_counts(data: bytes, *, path: str) -> None:
    """Count values before they are made: by the characters that begin and separate them."""
    containers = data.count(b"[") + data.count(b"{")
    for count, most, what in (
        (len(data), LARGEST_DOCUMENT, "bytes"),
        (containers, _MOST_CONTAINERS, "lists and objects"),
        (data.count(b","), _MOST_VALUES, "values"),
    ):
        if count > most:
            raise not_ours(path, f"{count} {what}", f"at most {most}")


def parse_json(data: bytes, *, path: str) -> dict[str, Any]:
    """Parse a JSON object; raises `DamagedError` for all else, however large or deep it is."""
    _check_counts(data, path=path)
    try:
        fields = json.loads(data, parse_constant=_no_number)
    except (ValueError, RecursionError) as error:  # a UnicodeDecodeError is a ValueError
        raise not_ours(path, f"{type(error).__name__}: {error}"[:200], "a JSON object") from None
    if not isinstance(fields, dict):
        raise not_ours(path, type(fields).__name__, "a JSON object")
    if _is_deeper(fields, _DEEPEST):
        raise not_ours(path, f"more than {_DEEPEST} values inside each other", "a flat document")
    return fields


def not_ours(path: str, found: object, expected: object = "what gradkeep wrote") -> DamagedError:
    """The error for a document whose checksum fits but which gradkeep did not write."""
    return DamagedError(
        "this is not a document that gradkeep wrote",
        path=path,
        found=found,
        expected=expected,
        fix="`gradkeep verify STORE --repair` moves it aside; ask whoever made the store",
    )


def digest(fields: Mapping[str, Any]) -> str:
    """A fingerprint of the fields, whatever their order."""
    text = json.dumps(fields, sort_keys=True, ensure_ascii=False, allow_nan=False)
    return xxhash.xxh3_128_hexdigest(_encoded(text))


def _encoded(text: str) -> bytes:
    # Half of a pair of surrogates, as broken file names have it, is no text; JSON can escape it.
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
