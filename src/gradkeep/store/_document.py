"""Small JSON files that carry their own checksum.

The last field of the object is the xxh3-128 of every byte before it, so that a change of any byte
of the file, a space included, is noticed. The file stays plain JSON for every other reader. A
checksum is no signature: what a stranger wrote can carry a right one, so size and depth are bounded
here, and `_fields.py` looks at every type.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any, NoReturn

import xxhash

from gradkeep.errors import Damaged, StoreError

if TYPE_CHECKING:
    from collections.abc import Mapping

SMALL_DOCUMENT = 1 << 20
"""Bytes of documents of a fixed set of fields; a traceback fits."""
LARGE_DOCUMENT = 32 << 20
"""Bytes of a schema or a run's configuration; 60,000 layers fit."""
LARGEST_DOCUMENT = 256 << 20
"""Bytes of a manifest; one of a million segments fits."""
_MOST_CONTAINERS = 2 << 20
"""Lists and objects of a document. Each takes 64 bytes or more in memory, but as few as three in a file."""
_MOST_VALUES = 16 << 20
_DEEPEST = 64
_SEAL_BYTES = len(b',\n  "xxh3": "') + 32 + len(b'"\n}\n')
_SURROGATE = re.compile("[\ud800-\udfff]")


def to_bytes(fields: Mapping[str, Any]) -> bytes:
    """The document's bytes; the same fields give the same bytes.

    >>> print(to_bytes({"rows": 3}).decode(), end="")
    {
      "rows": 3,
      "xxh3": "9475153a40ace234927a359bd6822a7c"
    }
    """
    text = json.dumps(fields, indent=2, ensure_ascii=False, allow_nan=False)
    body = _encoded(text.removesuffix("\n}"))
    return body + _seal(body)


def check_size(data: bytes, what: str) -> None:
    """Raise `StoreError` for a document that could not be read back."""
    if len(data) > LARGE_DOCUMENT or data.count(b"[") + data.count(b"{") > _MOST_CONTAINERS:
        raise StoreError(
            f"{what} is too large to be recorded",
            found=f"{len(data)} bytes",
            expected=f"at most {LARGE_DOCUMENT} bytes",
            fix="keep large values in files of your own, and their digest here",
        )


def from_bytes(data: bytes, *, path: str) -> dict[str, Any]:
    """The document's fields; raises `Damaged` if any byte is not as it was written."""
    body = data[:-_SEAL_BYTES]
    if len(data) <= _SEAL_BYTES or data[-_SEAL_BYTES:] != _seal(body):
        raise Damaged(
            "this document is not as it was written",
            path=path,
            found=f"{len(data)} bytes whose checksum does not fit",
            expected="the bytes that gradkeep wrote",
            fix="`gradkeep verify STORE --repair` moves it aside; run the work again to recreate it",
        )
    fields = parse_json(data, path=path)
    del fields["xxh3"]
    return fields


def parse_json(data: bytes, *, path: str) -> dict[str, Any]:
    """Parse a JSON object; raises `Damaged` for all else, however large or deep it is.

    Values are counted before they are made: by the characters that begin and separate them.
    """
    if len(data) > LARGEST_DOCUMENT:
        raise not_ours(path, f"{len(data)} bytes", f"at most {LARGEST_DOCUMENT} bytes")
    containers = data.count(b"[") + data.count(b"{")
    if containers > _MOST_CONTAINERS:
        raise not_ours(path, f"{containers} lists and objects", f"at most {_MOST_CONTAINERS}")
    values = data.count(b",")
    if values > _MOST_VALUES:
        raise not_ours(path, f"{values} values", f"at most {_MOST_VALUES}")
    try:
        fields = json.loads(data, parse_constant=_no_number)
    except (ValueError, RecursionError) as error:  # a UnicodeDecodeError is a ValueError
        raise not_ours(path, f"{type(error).__name__}: {error}"[:200], "a JSON object") from None
    if not isinstance(fields, dict):
        raise not_ours(path, type(fields).__name__, "a JSON object")
    if _is_deeper(fields, _DEEPEST):
        raise not_ours(path, f"more than {_DEEPEST} values inside each other", "a flat document")
    return fields


def not_ours(path: str, found: object, expected: object) -> Damaged:
    """The error for a document whose checksum fits but which gradkeep did not write."""
    return Damaged(
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
    return _SURROGATE.sub(lambda found: f"\\u{ord(found[0]):04x}", text).encode()


def _seal(body: bytes) -> bytes:
    return b',\n  "xxh3": "%s"\n}\n' % xxhash.xxh3_128_hexdigest(body).encode()


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number")


def _is_deeper(value: object, most: int) -> bool:
    level: list[object] = [value]
    for _ in range(most):
        below: list[object] = []
        for item in level:
            if isinstance(item, dict):
                below += [x for x in item.values() if isinstance(x, dict | list)]
            elif isinstance(item, list):
                below += [x for x in item if isinstance(x, dict | list)]
        if not below:
            return False
        level = below
    return True
