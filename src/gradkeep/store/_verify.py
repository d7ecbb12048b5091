"""Check every byte of a store: what is damaged, what is missing, what does not belong there.

Nothing that is found in a store makes a check raise: what cannot be read is damage, with the reason.
"""

from __future__ import annotations

import contextlib
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

import xxhash

from gradkeep import _arguments
from gradkeep.errors import DamagedError, GradkeepError, StoreError
from gradkeep.store._decisions import decision_key, read_decision
from gradkeep.store._document import (
    LARGE_DOCUMENT,
    LARGEST_DOCUMENT,
    SMALL_DOCUMENT,
    malformed_document,
    read_bytes,
    read_document,
)
from gradkeep.store._gc import YOUNG_SECONDS, repair_damage
from gradkeep.store._keys import (
    CATALOG,
    ROWS,
    KnownFile,
    is_folder_name,
    is_step_log,
    parse_block_key,
    parse_file_key,
    looks_like_own_file,
    may_be_folder_name,
    file_of_record,
    row_part,
)
from gradkeep.store._records import Head, head_key, read_checkpoint, read_run
from gradkeep.store._store import STORE_FILE, Store, read_identity
from gradkeep.store.backends._backend import QUARANTINE
from gradkeep.store.backends._schemes import backend_for
from gradkeep.store.blocks._block import Block
from gradkeep.store.blocks._manifest import load_manifest, load_schema, schema_key
from gradkeep.store.blocks._segment import Segment
from gradkeep.store.catalog._samples import (
    check_samples,
    holds_samples_of,
    is_tied,
    samples_available,
)
from gradkeep.store.rows._leases import ROWS_PER_FOLDER, LeaseRecord
from gradkeep.store.rows._row_files import SIZES, RowFiles, SizeRecord, size_key
from gradkeep.store.rows._rows import FailureRecord

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterator

    from gradkeep.store.backends._backend import Backend, Entry
    from gradkeep.store.blocks._manifest import Manifest
    from gradkeep.store.blocks._schema import Schema


_MOST_BYTES = {"schema": LARGE_DOCUMENT, "run": LARGE_DOCUMENT, "manifest": LARGEST_DOCUMENT}
_OF_ROWS = ("segment", "packed", "row")
"""The kinds of files that hold rows, and so nearly all bytes."""


@dataclass(frozen=True, slots=True)
class Damage:
    """One thing that is not as it was written."""

    path: str
    """The key of the file in the store."""
    tensor: str | None
    """The tensor inside a segment, if the damage is inside one."""
    what: str


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a check of the whole store, or of a sample of its segments, found."""

    files: int
    bytes: int
    damage: tuple[Damage, ...]
    orphans: tuple[str, ...]
    """Unfinished writes whose writer is gone."""
    unknown: tuple[str, ...]
    """Files that gradkeep did not put there; they are left alone."""
    repaired: tuple[str, ...]
    """What was done, a sentence each."""
    segments: int = 0
    """Files of rows that there are."""
    read: int = 0
    """How many of them were read: all, or as many as a sample had."""

    @property
    def healthy(self) -> bool:
        """Whether nothing is damaged."""
        return not self.damage


@_arguments.checked(StoreError)
def verify(
    store: Store | Backend | str | os.PathLike[str],
    *,
    repair: bool = False,
    sample: int | None = None,
    seed: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Verdict:
    """Read every file of a store and compare it with its checksums and with what names it; O(bytes).

    With `sample`, of the files that hold rows only so many are read, drawn anew each time or by `seed`;
    that all others exist is still seen, and all documents are checked. `Verdict.read` says how many.

    What was sealed, packed or recorded and is gone is found too. With `repair`, damaged files are
    moved to the store's quarantine, so that running the work again recreates exactly them, and
    unfinished writes are removed. Nothing else is changed. A path is best given as it is: a store
    whose own document is damaged cannot be opened, but checked.

    >>> import gradkeep as gk, tempfile
    >>> folder = tempfile.mkdtemp()
    >>> store = gk.open(folder)
    >>> gk.store.verify(folder).healthy
    True
    """
    backend = store.backend if isinstance(store, Store) else backend_for(store)
    Store.require_store(backend)
    _arguments.optional(_arguments.count, "sample", sample, error=StoreError, least=1)
    _arguments.optional(_arguments.count, "seed", seed, error=StoreError)
    check = _Check(backend, sample, seed)
    check.files(progress)
    check.recorded()
    check.recorded_rows()
    check.chains()
    check.missing_schemas()
    check.sizes()
    check.decisions()
    try:
        orphans = tuple(backend.leftovers(older_than=YOUNG_SECONDS))
    except (GradkeepError, OSError):
        orphans = ()
    repaired: tuple[str, ...] = ()
    if repair:
        paths = dict.fromkeys(item.path for item in check.damage)
        repaired = (
            *repair_damage(backend, [key for key in paths if key not in check.unread], orphans),
            # Bytes that nobody has seen may be sound: a disk that is away, a missing permission.
            *(f"{key} was left where it is: it could not be read" for key in sorted(check.unread)),
        )
    found = tuple(check.damage)
    return Verdict(
        len(check.keys),
        check.bytes,
        found,
        orphans,
        tuple(check.unknown),
        repaired,
        segments=check.segments,
        read=check.segments - len(check.left_out),
    )


class _Check:
    """One store while it is checked."""

    def __init__(self, backend: Backend, sample: int | None, seed: int | None) -> None:
        self._backend = backend
        self.damage: list[Damage] = []
        self.unread: set[str] = set()
        """What could not be read, so that nobody knows whether it is damaged."""
        self.unknown: list[str] = []
        self.bytes = 0
        self.keys: dict[str, Entry] = {}
        self._folders: set[str] = set()
        for key, entry in sorted(self._walk("")):
            self.keys[key] = entry
        self._known = {
            key: file for key in self.keys if (file := parse_file_key(key)) and key not in self._folders
        }
        rows = [key for key, file in self._known.items() if file.kind in _OF_ROWS]
        self.segments = len(rows)
        self.left_out: set[str] = set()
        """Files of rows that are not read, where a sample is."""
        if sample is not None and sample < len(rows):
            self.left_out = set(rows) - set(random.Random(seed).sample(rows, sample))
        manifests = [file for file in self._known.values() if file.kind == "manifest"]
        self._newest = {file.folder: 0 for file in manifests}
        for file in manifests:
            self._newest[file.folder] = max(self._newest[file.folder], file.number)
        self._digests: dict[str, str] = {}
        self._manifests: dict[str, Manifest] = {}
        self._schemas: dict[str, Schema | None] = {}
        self._most_rows: dict[str, int] = {}
        self._misplaced: set[tuple[str, int]] = set()
        self._packed: dict[str, frozenset[int]] = {}

    def _walk(self, prefix: str) -> Iterator[tuple[str, Entry]]:
        try:
            listed = self._backend.list(prefix)
        except (GradkeepError, OSError) as error:
            self._failed(prefix, error)
            return
        for entry in listed:
            key = f"{prefix}/{entry.name}" if prefix else entry.name
            if not entry.is_folder:
                if not key.startswith((CATALOG, f".{CATALOG}")):
                    yield key, entry
            elif parse_file_key(key) is not None:
                self._folders.add(key)
                yield key, entry
            elif key != QUARANTINE:
                yield from self._walk(key)

    def files(self, progress: Callable[[int, int], None] | None) -> None:
        """Look at every file by itself, and at what it names."""
        if STORE_FILE not in self.keys:
            self._note(STORE_FILE, "missing: without it this is no store")
        for done, key in enumerate(self.keys):
            if progress is not None:
                progress(done, len(self.keys))
            self._attempt(key, lambda key=key: self._file(key))  # type: ignore[misc]
        if progress is not None:
            progress(len(self.keys), len(self.keys))

    def _attempt(self, key: str, look: Callable[[], None]) -> None:
        try:
            look()
        except FileNotFoundError:
            # A file can be deleted while we look: compaction, gc and leases do that.
            if self._is_there(key):
                self._note(key, "it cannot be opened")
        except Exception as error:  # the promise is that a check ends, whatever it meets
            self._failed(key, error)

    def _failed(self, key: str, error: Exception) -> None:
        if not isinstance(error, DamagedError):
            self.unread.add(key)
        self._note(key, _reason(error), error.tensor if isinstance(error, DamagedError) else None)

    def _is_there(self, key: str) -> bool:
        try:
            return self._backend.exists(key)
        except (GradkeepError, OSError):
            return True

    def _note(self, key: str, what: str, tensor: str | None = None) -> None:
        self.damage.append(Damage(key, tensor, what))

    def _file(self, key: str) -> None:
        entry, file = self.keys[key], self._known.get(key)
        if key in self._folders:
            self._note(key, "a folder in place of a file")
        elif file is None:
            self._foreign(key, entry)
        elif file.kind in ("row", "lease", "failure") and not _in_its_folder(key, file):
            self._note(key, "it lies in another folder than its number says")
            self._misplaced.add((f"{file.folder}/{row_part(file)}", file.number))
        elif file.kind == "row record":
            if self._backend.read(key):
                self._note(key, "a record of a row is empty: its name says all")
        elif key in self.left_out:
            return
        elif file.kind in _OF_ROWS:
            self._segment(key, file)
        elif file.kind == "samples":
            self._samples(key, file)
        else:
            self._document(key, file)
            self.bytes += entry.size

    def _foreign(self, key: str, entry: Entry) -> None:
        if is_folder_name(key) or looks_like_own_file(key) or may_be_folder_name(key):
            self._backend.open(key).close()  # raises for a link, which is damage whatever its name
        if is_folder_name(key):
            self._note(key, "a file in place of a folder")
        elif looks_like_own_file(key):
            self._note(key, "gradkeep puts no file of this name here")
        elif not is_step_log(key):
            self.unknown.append(key)
        self.bytes += entry.size

    def _document(self, key: str, file: KnownFile) -> None:
        backend, path, problem = self._backend, self._backend.describe(key), None
        data = read_bytes(backend, key, most=_MOST_BYTES.get(file.kind, SMALL_DOCUMENT))
        if file.kind == "identity":
            read_identity(backend)
        elif file.kind == "run":
            read_run(backend, file.folder.rpartition("/")[2])
        elif file.kind == "checkpoint":
            _, run, _, name = file.folder.split("/")
            read_checkpoint(backend, run, name)
        elif file.kind == "schema":
            load_schema(backend, file.folder)
        elif file.kind == "manifest":
            self._manifest(key, file)
        elif file.kind == "head":
            head = read_document(backend, key, Head)
            if head_key(head.of, head.version, head.published) != key:
                problem = "another record than the name says"
        elif file.kind == "size":
            if read_document(backend, key, SizeRecord).num_rows != file.number:
                problem = "another number of rows than the name says"
        elif file.kind == "failure":
            if read_document(backend, key, FailureRecord).row != file.number:
                problem = "a failure of another row than the name says"
        elif file.kind == "decision":
            decision = read_decision(backend, key)
            if decision_key(decision.split, decision.number) != key:
                problem = "another decision than the name says"
        elif file.kind == "lease":
            read_document(backend, key, LeaseRecord)
        if problem is not None:
            raise malformed_document(path, problem)
        self._digests[key] = xxhash.xxh3_128_hexdigest(data)

    def _manifest(self, key: str, file: KnownFile) -> None:
        # What is recorded of it is compared afterwards, once it is known that it can be read.
        manifest = load_manifest(self._backend, file.folder, file.number, recorded={})
        self._manifests[key] = manifest
        schema = self._schema(file.folder)
        if schema is not None and schema.hash != manifest.schema_hash:
            self._note(key, "it belongs to another schema than its block's")
        if file.folder.startswith(f"{ROWS}/") and self._newest[file.folder] != file.number:
            return  # of packed rows, nobody reads an older version
        for entry in manifest.segments:
            named = f"{file.folder}/{entry.file}"
            if named not in self.keys and not self._is_there(named):
                rows = f"version {manifest.version} needs its {entry.rows} rows"
                self._note(named, f"missing: {rows}")
                continue
            if named in self.left_out:
                continue
            with contextlib.suppress(GradkeepError, FileNotFoundError):
                segment = Segment(self._backend, named)
                segment.close()
                if (segment.digest, segment.rows) != (entry.xxh3, entry.rows):
                    what = f"it is not the segment that version {manifest.version} names"
                    self._note(named, what)

    def _schema(self, folder: str) -> Schema | None:
        """The schema of a block, read once; None if it cannot be."""
        if folder not in self._schemas:
            try:
                self._schemas[folder] = load_schema(self._backend, folder)
            except Exception:  # told of the schema itself
                self._schemas[folder] = None
        return self._schemas[folder]

    def _segment(self, key: str, file: KnownFile) -> None:
        with contextlib.closing(Segment(self._backend, key)) as segment:
            self.bytes += segment.size
            self._digests[key] = segment.digest
            found = segment.check_everything()
            for error in found:
                self._note(key, error.message, error.tensor)
            if not found:
                self._place(segment, file)

    def _place(self, segment: Segment, file: KnownFile) -> None:
        """Whether a segment that is whole also lies where it belongs, and has all its arrays."""
        ids = segment.small("ids")
        if file.kind == "row" and ids.tolist() != [file.number]:
            self._note(segment.key, "it holds another row than its name says")
        if file.kind in ("row", "packed") and len(ids):
            most = self._most_rows.get(file.folder, 0)
            self._most_rows[file.folder] = max(most, int(ids.max()) + 1)
        schema = self._schema(file.folder)
        if schema is None:
            return  # told of the schema itself
        if segment.schema_hash != schema.hash:
            self._note(segment.key, "it belongs to another schema")
            return
        for array in schema.arrays:
            segment.column(array)
        path = self._backend.local_path(segment.key)
        if path is not None:
            self._by_library(path, segment)

    def _by_library(self, path: str, segment: Segment) -> None:
        """Whether safetensors itself opens the file: other tools must be able to read it."""
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(path, framework="np") as opened:
                names = set(opened.keys())
        except SafetensorError as error:
            self._note(segment.key, f"safetensors cannot read it: {error}")
            return
        if names != set(segment.extents):
            self._note(segment.key, "safetensors sees other tensors in it")

    def _samples(self, key: str, file: KnownFile) -> None:
        data = self._backend.read(key)
        self.bytes += len(data)
        check_samples(data, key.rpartition("/")[2], path=key)
        try:
            block = Block(self._backend, file.folder, version=file.number)
            same = is_tied(key.rpartition("/")[2], block)
            if same is None and samples_available():  # of an older version: only its content tells
                same = holds_samples_of(data, block, parse_block_key(file.folder).labels, path=key)
        except StoreError as error:
            if error.path == key:
                raise
            return  # what it was derived from is gone or damaged, which is told of that
        if same is False:
            self._note(key, f"it does not hold what version {file.number} holds")

    def recorded(self) -> None:
        """Whether all that was recorded under `heads/` is there, and is what was recorded."""
        told = {item.path for item in self.damage}
        found: dict[str, list[str]] = {}
        for key, file in self._known.items():
            if file.kind == "head" and key not in told:
                found.setdefault(file_of_record(file), []).append(key)
        for target, heads in found.items():
            digest = self._digests.get(target)
            wanted = {head.rpartition("-")[2].removesuffix(".json") for head in heads}
            if target in told or digest in wanted:
                continue
            # What is removed on purpose loses its record first; what was put since is there now.
            if any(map(self._is_there, heads)):
                if not self._is_there(target):
                    self._note(target, "missing: it was published and recorded under heads/")
                elif digest is not None:
                    self._note(target, "it is not the one that was recorded under heads/")

    def recorded_rows(self) -> None:
        """Whether every row and every failed attempt that was recorded is there."""
        told = {item.path for item in self.damage}
        digests: dict[tuple[str, int], set[str]] = {}
        for key, file in self._known.items():
            part = row_part(file)
            if part is not None:
                place = (key.rpartition("/")[0], file.number)
                digests.setdefault(place, set()).add(self._digests.get(key, ""))
        lost: dict[tuple[str, int], list[str]] = {}
        for key, file in self._known.items():
            there = digests.get((file.folder, file.number), set())
            if file.kind == "row record" and key not in told and "" not in there:
                # Of a failed attempt there may be several; a row that was lost and made again
                # is one of those recorded.
                lost.setdefault((file.folder, file.number), []).append(key)
        for (folder, row), records in lost.items():
            self._note_lost(folder, row, records, digests.get((folder, row), set()))

    def _note_lost(self, folder: str, row: int, records: list[str], there: set[str]) -> None:
        """Note what was recorded of a row and is gone, unless it was packed or removed meanwhile."""
        unmet = [key for key in records if key[-32:] not in there]
        rows, _, part = folder.rpartition("/")[0].rpartition("/")
        if not unmet or not any(map(self._is_there, unmet)):
            return
        if (f"{rows}/{part}", row) in self._misplaced:
            return  # told of the file itself
        if part == "failed":
            for key in unmet:
                self._note(key, f"missing: a failed attempt of row {row} that was recorded")
            return
        key = f"{folder}/{row}.safetensors"
        if there and len(unmet) == len(records):
            self._note(key, "it is not the one that was recorded under heads/")
        elif not there and not self._is_there(key) and row not in self._packed_rows(rows):
            self._note(key, "missing: it was put and recorded under heads/")

    def _packed_rows(self, folder: str) -> frozenset[int]:
        if folder not in self._packed:
            try:
                self._packed[folder] = RowFiles(self._backend, folder, verify=False).packed_rows
            except Exception:  # told of the manifest or schema itself
                self._packed[folder] = frozenset()
        return self._packed[folder]

    def chains(self) -> None:
        """Whether each version names the one before it."""
        told = {item.path for item in self.damage}
        for key, manifest in self._manifests.items():
            file = self._known[key]
            before = f"{key.rpartition('/')[0]}/{file.number - 1:06d}.json"
            digest = self._digests.get(before)
            if manifest.previous is None or digest is None or {key, before} & told:
                continue
            if manifest.previous != digest:
                self._note(key, f"version {file.number - 1} is not the one it came after")

    def missing_schemas(self) -> None:
        """Whether every block that holds anything has its schema."""
        needed = ("segment", "packed", "row", "manifest", "size")
        for folder in sorted({x.folder for x in self._known.values() if x.kind in needed}):
            key = schema_key(folder)
            if key not in self.keys and not self._is_there(key):
                self._note(key, "missing: the files beside it need it")

    def sizes(self) -> None:
        """Whether every set of rows is as large as the rows it holds."""
        for folder, most in sorted(self._most_rows.items()):
            files = self._known.values()
            sizes = [x.number for x in files if x.kind == "size" and x.folder == folder]
            told = any(item.path.startswith(f"{folder}/{SIZES}") for item in self.damage)
            if most > max(sizes, default=0) and not told:
                self._note(size_key(folder, most), f"missing: there are rows up to {most - 1}")

    def decisions(self) -> None:
        """Whether the logs of decisions have no gaps."""
        logs: dict[str, set[int]] = {}
        for file in self._known.values():
            if file.kind == "decision":
                logs.setdefault(file.folder.partition("/")[2], set()).add(file.number)
        for split, there in sorted(logs.items()):
            for number in sorted(set(range(max(there))) - there):
                self._note(decision_key(split, number), "missing: the log goes on after it")


def _in_its_folder(key: str, file: KnownFile) -> bool:
    return int(key.split("/")[-2]) == file.number // ROWS_PER_FOLDER


def _reason(error: Exception) -> str:
    if (
        isinstance(error, StoreError)
        and error.found is not None
        and not isinstance(error, DamagedError)
    ):
        return f"{error.message}: {error.found}"
    if isinstance(error, GradkeepError):
        return error.message
    return f"it cannot be checked: {type(error).__name__}: {error}"[:300]
