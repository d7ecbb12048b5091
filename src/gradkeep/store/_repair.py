"""Move what is damaged aside, so that running the work again makes it anew."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gradkeep.errors import GradkeepError
from gradkeep.store._keys import HEADS
from gradkeep.store._layout import known_file, record_folder, row_part
from gradkeep.store._records import head_keys
from gradkeep.store._store import STORE_FILE, put_identity
from gradkeep.store.backends._backend import QUARANTINE
from gradkeep.store.catalog._samples import find_samples
from gradkeep.store.catalog._scan import keys_below
from gradkeep.store.rows._row_files import drop_packed_file, set_size
from gradkeep.store.rows._row_records import row_records

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from gradkeep.store._layout import KnownFile
    from gradkeep.store.backends._backend import Backend


def repair_damage(
    backend: Backend, damaged: Sequence[str], orphans: Sequence[str]
) -> tuple[str, ...]:
    """Move the damaged files to the quarantine and remove unfinished writes; a sentence for each."""
    done: list[str] = []
    for key in damaged:
        try:
            done += _one(backend, key)
        except (GradkeepError, OSError) as error:
            reason = error.what if isinstance(error, GradkeepError) else str(error)
            done.append(f"{key or 'the store'} could not be repaired: {reason}")
    if orphans:
        try:
            backend.delete(orphans, durability="full")
            done += [f"removed the unfinished write {key}" for key in orphans]
        except GradkeepError as error:
            done.append(f"unfinished writes could not be removed: {error.what}")
    return tuple(done)


def _one(backend: Backend, key: str) -> Iterator[str]:
    file = known_file(key)
    if not key or key == QUARANTINE:
        yield f"{key or 'the store'} was left as it is; look at it yourself"
        return
    missing = not backend.exists(key)
    if missing and file is not None and file.kind == "schema":
        yield from _set_aside(backend, file.folder)
        return
    if missing:
        yield f"{key} is gone; run the work again to recreate it"
    elif file is not None and file.kind == "lease":
        backend.delete([key], durability="process")
        yield f"removed the unreadable lease {key}"
    else:
        yield f"moved {key} to {backend.move_aside(key)}"
    if key == STORE_FILE:
        put_identity(backend, durability="full")
        yield f"wrote a new {STORE_FILE}; the store's old uuid is lost"
    if file is not None:
        yield from _follow_up(backend, key, file, missing=missing)


def _set_aside(backend: Backend, folder: str) -> Iterator[str]:
    """Move what cannot be read without its schema aside, as after a delete under a writer."""
    forgotten = backend.delete(list(keys_below(backend, f"{HEADS}/{folder}")), durability="full")
    if forgotten:
        yield f"forgot that {folder} was published"
    for key in list(keys_below(backend, folder)):
        if known_file(key) is not None:
            yield f"moved {key} to {backend.move_aside(key)}: its schema is gone"


def _follow_up(backend: Backend, key: str, file: KnownFile, *, missing: bool) -> Iterator[str]:
    """What must change because a file is gone, told in a sentence each."""
    recorded = record_folder(file)
    forgotten = 0
    if recorded is not None:
        number = max(0, file.number)
        heads = [x for x, told in head_keys(backend, recorded).items() if told == number]
        forgotten = backend.delete(heads, durability="full")
    part = row_part(file)
    if part is not None:
        records = row_records(backend, file.folder, part, [file.number])
        forgotten = backend.delete(records, durability="full")
    if forgotten and file.kind != "size":
        yield f"forgot that {key} was published"
    if file.kind == "manifest":
        # The number will be given again, perhaps to other rows.
        derived = find_samples(backend, file.folder, file.number)
        if derived is not None:
            backend.delete([derived], durability="full")
            yield f"removed {derived}, which was derived from it"
    if file.kind == "packed" and drop_packed_file(backend, file.folder, key):
        yield f"published a version without {key}; its rows count as not done"
    if file.kind == "size" and (forgotten or missing):
        # All that it holds is in its name.
        set_size(backend, file.folder, file.number, durability="full")
        yield f"wrote {key} again"
