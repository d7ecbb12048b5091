"""The second record of what was published: outside of the folder it tells of.

When a version of a block is published, its number and the digest of its manifest are put under
`heads/`, in the name of a small file. So a manifest that is gone, or was replaced by an older one, is
noticed, and so is a block that is gone as a whole. Runs and checkpoints have such a record too.

The order makes it safe at any moment. What is published comes first and its record after it: a
process that dies in between leaves a version without a record, which is no damage, and the next
writer adds it. What is removed on purpose loses its record first. So a record without its file always
means that the file was lost. Stores of earlier versions have no records, and are read without.
"""

from __future__ import annotations

import contextlib
import re
from typing import TYPE_CHECKING

from gradkeep.errors import ReadOnly
from gradkeep.store import _document
from gradkeep.store._fields import read_document
from gradkeep.store._keys import HEADS

if TYPE_CHECKING:
    from gradkeep.store.backends._backend import Backend, Durability

_NAME = re.compile(r"(\d{6,18})-([0-9a-f]{32})\.json")


def head_key(folder: str, version: int, xxh3: str) -> str:
    """The name of a record: what it tells of, which version, and the digest of its bytes."""
    return f"{HEADS}/{folder}/{version:06d}-{xxh3}.json"


def heads_of(backend: Backend, folder: str) -> dict[int, frozenset[str]]:
    """For every version that is recorded, the digest of its bytes; of a sound store there is one."""
    found: dict[int, frozenset[str]] = {}
    for entry in backend.list(f"{HEADS}/{folder}"):
        match = _NAME.fullmatch(entry.name)
        if match is not None:
            version = int(match[1])
            found[version] = found.get(version, frozenset()) | {match[2]}
    return found


def head_keys(backend: Backend, folder: str) -> dict[str, int]:
    """The names of all records of a folder, and the version each tells of."""
    return {
        head_key(folder, version, digest): version
        for version, digests in heads_of(backend, folder).items()
        for digest in digests
    }


def record_head(
    backend: Backend, folder: str, version: int, xxh3: str, *, durability: Durability
) -> None:
    """Record what was published; done again by whoever finds that its writer died before this."""
    data = _document.to_bytes({"of": folder, "version": version, "digest": xxh3})
    # A store that may only be read is read all the same.
    with contextlib.suppress(ReadOnly):
        backend.put_if_absent(head_key(folder, version, xxh3), [data], durability=durability)


def check_head(backend: Backend, key: str) -> None:
    """Raise `Damaged` unless a record says what its name says."""
    fields = read_document(backend, key)
    fields.only(("of", "version", "digest"))
    if head_key(fields.text("of"), fields.whole("version"), fields.text("digest")) != key:
        raise fields.wrong("another record than the name says")
