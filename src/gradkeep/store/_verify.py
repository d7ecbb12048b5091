"""Check every byte of a store for damaged, missing and unknown files.

No content of a store makes a check raise: files that cannot be read are reported as damage.
"""

from __future__ import annotations

import contextlib
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

import xxhash

from gradkeep import _arguments
from gradkeep.errors import DamagedError, GradkeepError, StoreError
from gradkeep.store._document import (
    LARGE_DOCUMENT,
    LARGEST_DOCUMENT,
    SMALL_DOCUMENT,
    Head,
    decision_key,
    head_key,
    malformed_document,
    read_bytes,
    read_checkpoint,
    read_decision,
    read_document,
    read_run,
)
from gradkeep.store._gc import YOUNG_SECONDS, repair_damage
from gradkeep.store._keys import (
    CATALOG,
    ROWS,
    KnownFile,
    file_of_record,
    is_folder_name,
    is_step_log,
    looks_like_own_file,
    may_be_folder_name,
    parse_block_key,
    parse_file_key,
    row_part,
)
from gradkeep.store._store import STORE_FILE, Store, read_identity
from gradkeep.store.backends._backend import QUARANTINE, backend_for
from gradkeep.store.blocks._block import Block
from gradkeep.store.blocks._manifest import load_manifest, load_schema, schema_key
from gradkeep.store.blocks._segment import Segment
from gradkeep.store.catalog._sql import (
    check_samples,
    holds_samples_of,
    is_tied,
    samples_available,
)
from gradkeep.store.rows._row_files import ROWS_PER_FOLDER, SIZES, RowFiles, SizeRecord, size_key
from gradkeep.store.rows._rows import FailureRecord, LeaseRecord

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterator

    from gradkeep.store.backends._backend import Backend, Entry
    from gradkeep.store.blocks._manifest import Manifest
    from gradkeep.store.blocks._schema import Schema


_MOST_BYTES = {"schema": LARGE_DOCUMENT, "run": LARGE_DOCUMENT, "manifest": LARGEST_DOCUMENT}
_OF_ROWS = ("segment", "packed", "row")
"""Kinds of files that hold rows, and so nearly all bytes."""


@dataclass(frozen=True, slots=True)
class Damage:
    """One damaged or missing file.

    Attributes:
        path: Key of the file in the store.
        tensor: Tensor inside a segment, if the damage is inside one.
        what: Description of the damage.
    """

    path: str
    tensor: str | None
    what: str


@dataclass(frozen=True, slots=True)
class Verdict:
    """Result of checking a store, or a sample of its segments.

    Attributes:
        files: Number of files.
        bytes: Bytes that were checked.
        damage: Damaged and missing files.
        orphans: Unfinished writes whose writer is gone.
        unknown: Files that gradkeep did not write; they are ignored.
        repaired: A sentence for each repair.
        segments: Number of files that hold rows.
        read: Number of them that were read; fewer than `segments` if a sample was checked.
    """

    files: int
    bytes: int
    damage: tuple[Damage, ...]
    orphans: tuple[str, ...]
    unknown: tuple[str, ...]
    repaired: tuple[str, ...]
    segments: int = 0
    read: int = 0

    @property
    def healthy(self) -> bool:
        """True if nothing is damaged."""
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
    """Compare every file of a store with its checksums and with the files that name it; O(bytes).

    Files that were sealed, packed or recorded and are missing are found too. With `repair`, damaged files
    are moved to the store's quarantine, so that running the work again recreates exactly them, and
    unfinished writes are removed. Nothing else is changed.

    Args:
        store: The store or its path. Pass the path if `STORE.json` may be damaged: such a store cannot be
            opened, but it can be checked.
        repair: Quarantine damaged files and remove unfinished writes.
        sample: Read only this many of the files that hold rows; the others are only checked for existence.
            All documents are checked.
        seed: Seed of the sample; a new sample each time by default.
        progress: Called with the number of checked files and the number of all files.

    Returns:
        The damage found, and what was repaired.

    Raises:
        NotAStoreError: There is no store.
        FormatTooNewError: The store was written by a later version.

    Example:
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
            # Unread bytes may be intact: an unmounted disk, a missing permission.
            *(f"{key} was not moved: it could not be read" for key in sorted(check.unread)),
        )
    num_read = check.segments - len(check.skipped)
    findings = (tuple(check.damage), orphans, tuple(check.unknown), repaired)
    return Verdict(len(check.keys), check.bytes, *findings, segments=check.segments, read=num_read)


class _Check:
    """State of one check of a store."""

    def __init__(self, backend: Backend, sample: int | None, seed: int | None) -> None:
        self._backend = backend
        self.damage: list[Damage] = []
        self.unread: set[str] = set()
        """Files that could not be read, and so may be intact."""
        self.unknown: list[str] = []
        self.bytes = 0
        self.keys: dict[str, Entry] = {}
        self._folders: set[str] = set()
        for key, entry in sorted(self._walk("")):
            self.keys[key] = entry
        self._known = {
            key: file
            for key in self.keys
            if (file := parse_file_key(key)) and key not in self._folders
        }
        rows = [key for key, file in self._known.items() if file.kind in _OF_ROWS]
        self.segments = len(rows)
        self.skipped: set[str] = set()
        """Files of rows that are not in the sample."""
        if sample is not None and sample < len(rows):
            self.skipped = set(rows) - set(random.Random(seed).sample(rows, sample))
        manifests = [file for file in self._known.values() if file.kind == "manifest"]
        ordered = sorted(manifests, key=lambda file: file.number)
        self._newest = {file.folder: file.number for file in ordered}
        self._digests: dict[str, str] = {}
        self._manifests: dict[str, Manifest] = {}
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
        """Check every file, and the files that it names."""
        if STORE_FILE not in self.keys:
            self._note(STORE_FILE, "missing: every store needs this file")
        for done, key in enumerate(self.keys):
            if progress is not None:
                progress(done, len(self.keys))
            self._attempt(key, lambda key=key: self._file(key))  # type: ignore[misc]
        if progress is not None:
            progress(len(self.keys), len(self.keys))

    def _attempt(self, key: str, check: Callable[[], None]) -> None:
        try:
            check()
        except FileNotFoundError:
            # A file can be deleted meanwhile by compaction, gc or a lease.
            if self._is_there(key):
                self._note(key, "it cannot be opened")
        except Exception as error:  # no content of a store may end a check
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
            self._note(key, "the folder does not match its number")
            self._misplaced.add((f"{file.folder}/{row_part(file)}", file.number))
        elif file.kind == "row record":
            if self._backend.read(key):
                self._note(key, "the record of a row is not empty")
        elif key in self.skipped:
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
            self._backend.open(key).close()  # raises for a link
        if is_folder_name(key):
            self._note(key, "a file in place of a folder")
        elif looks_like_own_file(key):
            self._note(key, "gradkeep writes no file of this name here")
        elif not is_step_log(key):
            self.unknown.append(key)
        self.bytes += entry.size

    def _document(self, key: str, file: KnownFile) -> None:
        """Parse a document, and check that its content matches its name."""
        backend, matches = self._backend, True
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
            matches = head_key(head.of, head.version, head.published) == key
        elif file.kind == "size":
            matches = read_document(backend, key, SizeRecord).num_rows == file.number
        elif file.kind == "failure":
            matches = read_document(backend, key, FailureRecord).row == file.number
        elif file.kind == "decision":
            decision = read_decision(backend, key)
            matches = decision_key(decision.split, decision.number) == key
        elif file.kind == "lease":
            read_document(backend, key, LeaseRecord)
        if not matches:
            what = f"a {file.kind} that does not match its name"
            raise malformed_document(backend.describe(key), what)
        self._digests[key] = xxhash.xxh3_128_hexdigest(data)

    def _manifest(self, key: str, file: KnownFile) -> None:
        # Its record is compared later, once the manifest is known to be readable.
        manifest = load_manifest(self._backend, file.folder, file.number, recorded={})
        self._manifests[key] = manifest
        schema = self._schema(file.folder)
        if schema is not None and schema.hash != manifest.schema_hash:
            self._note(key, "it has another schema than its block")
        if file.folder.startswith(f"{ROWS}/") and self._newest[file.folder] != file.number:
            return  # older versions of packed rows are never read
        for entry in manifest.segments:
            named = f"{file.folder}/{entry.file}"
            if named not in self.keys and not self._is_there(named):
                rows = f"version {manifest.version} needs its {entry.rows} rows"
                self._note(named, f"missing: {rows}")
                continue
            if named in self.skipped:
                continue
            with contextlib.suppress(GradkeepError, FileNotFoundError):
                segment = Segment(self._backend, named)
                segment.close()
                if (segment.digest, segment.rows) != (entry.xxh3, entry.rows):
                    what = f"it differs from the segment that version {manifest.version} lists"
                    self._note(named, what)

    def _schema(self, folder: str) -> Schema | None:
        """Load the schema of a block; return None if it cannot be read."""
        try:
            return load_schema(self._backend, folder)  # equal bytes are parsed once
        except Exception:  # already reported for the schema file
            return None

    def _segment(self, key: str, file: KnownFile) -> None:
        with contextlib.closing(Segment(self._backend, key)) as segment:
            self.bytes += segment.size
            self._digests[key] = segment.digest
            errors = segment.check_everything()
            for error in errors:
                self._note(key, error.message, error.tensor)
            if not errors:
                self._place(segment, file)

    def _place(self, segment: Segment, file: KnownFile) -> None:
        """Check that an intact segment is in the right place and has all arrays of its schema."""
        ids = segment.small("ids")
        if file.kind == "row" and ids.tolist() != [file.number]:
            self._note(segment.key, "it holds a row that does not match its name")
        if file.kind in ("row", "packed") and len(ids):
            most = self._most_rows.get(file.folder, 0)
            self._most_rows[file.folder] = max(most, int(ids.max()) + 1)
        schema = self._schema(file.folder)
        if schema is None:
            return  # already reported for the schema file
        if segment.schema_hash != schema.hash:
            self._note(segment.key, "it has another schema than its block")
            return
        for array in schema.arrays:
            segment.column(array)
        path = self._backend.local_path(segment.key)
        if path is None:
            return
        # Other tools open it with the safetensors library.
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(path, framework="np") as opened:
                if set(opened.keys()) != set(segment.extents):
                    self._note(segment.key, "safetensors finds other tensors in it")
        except SafetensorError as error:
            self._note(segment.key, f"safetensors cannot read it: {error}")

    def _samples(self, key: str, file: KnownFile) -> None:
        data = self._backend.read(key)
        self.bytes += len(data)
        check_samples(data, key.rpartition("/")[2], path=key)
        try:
            block = Block(self._backend, file.folder, version=file.number)
            same = is_tied(key.rpartition("/")[2], block)
            if (
                same is None and samples_available()
            ):  # written by an older version: compare the content
                same = holds_samples_of(data, block, parse_block_key(file.folder).labels, path=key)
        except StoreError as error:
            if error.path == key:
                raise
            return  # its source is missing or damaged, which is reported for the source
        if same is False:
            self._note(key, f"it differs from version {file.number}")

    def recorded(self) -> None:
        """Check that every file recorded under `heads/` exists and matches its record."""
        reported = {item.path for item in self.damage}
        targets: dict[str, list[str]] = {}
        for key, file in self._known.items():
            if file.kind == "head" and key not in reported:
                targets.setdefault(file_of_record(file), []).append(key)
        for target, heads in targets.items():
            digest = self._digests.get(target)
            recorded_digests = {head.rpartition("-")[2].removesuffix(".json") for head in heads}
            if target in reported or digest in recorded_digests:
                continue
            # A deliberate deletion removes the record first; a new file exists by now.
            if any(map(self._is_there, heads)):
                if not self._is_there(target):
                    self._note(target, "missing: it is recorded under heads/")
                elif digest is not None:
                    self._note(target, "it differs from its record under heads/")

    def recorded_rows(self) -> None:
        """Check that every recorded row and failed attempt exists."""
        reported = {item.path for item in self.damage}
        digests: dict[tuple[str, int], set[str]] = {}
        for key, file in self._known.items():
            part = row_part(file)
            if part is not None:
                place = (key.rpartition("/")[0], file.number)
                digests.setdefault(place, set()).add(self._digests.get(key, ""))
        lost: dict[tuple[str, int], list[str]] = {}
        for key, file in self._known.items():
            present = digests.get((file.folder, file.number), set())
            if file.kind == "row record" and key not in reported and "" not in present:
                # A row can have several failed attempts, or several records if it was recomputed.
                lost.setdefault((file.folder, file.number), []).append(key)
        for (folder, row), records in lost.items():
            self._note_lost(folder, row, records, digests.get((folder, row), set()))

    def _note_lost(self, folder: str, row: int, records: list[str], present: set[str]) -> None:
        """Report a recorded row that is missing, unless it was packed or removed meanwhile."""
        unmatched = [key for key in records if key[-32:] not in present]
        rows, _, part = folder.rpartition("/")[0].rpartition("/")
        if not unmatched or not any(map(self._is_there, unmatched)):
            return
        if (f"{rows}/{part}", row) in self._misplaced:
            return  # already reported for the file
        if part == "failed":
            for key in unmatched:
                self._note(key, f"missing: the recorded failed attempt of row {row}")
            return
        key = f"{folder}/{row}.safetensors"
        if present and len(unmatched) == len(records):
            self._note(key, "it differs from its record under heads/")
        elif not present and not self._is_there(key) and row not in self._packed_rows(rows):
            self._note(key, "missing: it is recorded under heads/")

    def _packed_rows(self, folder: str) -> frozenset[int]:
        if folder not in self._packed:
            try:
                self._packed[folder] = RowFiles(self._backend, folder, verify=False).packed_rows
            except Exception:  # already reported for the manifest or schema
                self._packed[folder] = frozenset()
        return self._packed[folder]

    def chains(self) -> None:
        """Check that each version names its predecessor."""
        reported = {item.path for item in self.damage}
        for key, manifest in self._manifests.items():
            file = self._known[key]
            before = f"{key.rpartition('/')[0]}/{file.number - 1:06d}.json"
            digest = self._digests.get(before)
            if manifest.previous is None or digest is None or {key, before} & reported:
                continue
            if manifest.previous != digest:
                self._note(key, f"version {file.number - 1} is not its predecessor")

    def missing_schemas(self) -> None:
        """Check that every block with files has its schema."""
        needed = ("segment", "packed", "row", "manifest", "size")
        for folder in sorted({x.folder for x in self._known.values() if x.kind in needed}):
            key = schema_key(folder)
            if key not in self.keys and not self._is_there(key):
                self._note(key, "missing: the block has other files")

    def sizes(self) -> None:
        """Check that every row set is at least as large as the rows it holds."""
        for folder, most in sorted(self._most_rows.items()):
            files = self._known.values()
            sizes = [x.number for x in files if x.kind == "size" and x.folder == folder]
            is_reported = any(item.path.startswith(f"{folder}/{SIZES}") for item in self.damage)
            if most > max(sizes, default=0) and not is_reported:
                self._note(size_key(folder, most), f"missing: there are rows up to {most - 1}")

    def decisions(self) -> None:
        """Check that the logs of decisions have no gaps."""
        logs: dict[str, set[int]] = {}
        for file in self._known.values():
            if file.kind == "decision":
                logs.setdefault(file.folder.partition("/")[2], set()).add(file.number)
        for split, numbers in sorted(logs.items()):
            for number in sorted(set(range(max(numbers))) - numbers):
                self._note(decision_key(split, number), "missing: later decisions exist")


def _in_its_folder(key: str, file: KnownFile) -> bool:
    return int(key.split("/")[-2]) == file.number // ROWS_PER_FOLDER


def _reason(error: Exception) -> str:
    if not isinstance(error, GradkeepError):
        return f"it cannot be checked: {type(error).__name__}: {error}"[:300]
    if error.found is None or isinstance(error, DamagedError):
        return error.message
    return f"{error.message}: {error.found}"
