"""Small JSON files that carry their own checksum.

The last field of the object is the xxh3-128 of every byte before it, so that a change of any byte
of the file, a space included, is noticed. The file stays plain JSON for every other reader.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import xxhash

from gradkeep.errors import Damaged

if TYPE_CHECKING:
    from collections.abc import Mapping

_SEAL_BYTES = len(b',\n  "xxh3": "') + 32 + len(b'"\n}\n')


def to_bytes(fields: Mapping[str, Any]) -> bytes:
    """The document's bytes; the same fields give the same bytes.

    >>> print(to_bytes({"rows": 3}).decode(), end="")
    {
      "rows": 3,
      "xxh3": "9475153a40ace234927a359bd6822a7c"
    }
    """
    text = json.dumps(fields, indent=2, ensure_ascii=False, allow_nan=False)
    body = text.removesuffix("\n}").encode()
    return body + _seal(body)


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
    fields: dict[str, Any] = json.loads(data)
    del fields["xxh3"]
    return fields


def digest(fields: Mapping[str, Any]) -> str:
    """A fingerprint of the fields, whatever their order."""
    text = json.dumps(fields, sort_keys=True, ensure_ascii=False, allow_nan=False)
    return xxhash.xxh3_128_hexdigest(text.encode())


def _seal(body: bytes) -> bytes:
    return b',\n  "xxh3": "%s"\n}\n' % xxhash.xxh3_128_hexdigest(body).encode()
