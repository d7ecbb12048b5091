"""The store: captures, scores, evaluations and row sets in one place."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import uuid
from typing import TYPE_CHECKING, Any

import xxhash

from gradkeep import _arguments
from gradkeep.errors import (
    ConflictError,
    DamagedError,
    FormatTooNewError,
    NotAStoreError,
    NotSealedError,
    SchemaMismatchError,
    StoreError,
)
from gradkeep.store import _document
from gradkeep.store._document import (
    Checkpoint,
    Count,
    Record,
    Run,
    append_decision,
    checkpoint_folder,
    from_bytes,
    parse_record,
    read_bytes,
    read_checkpoint,
    read_decisions,
    read_run,
    record_head,
    run_folder,
    validate_run,
)
from gradkeep.store._keys import (
    BASES,
    BLOCKS,
    DECISIONS,
    EVALUATIONS,
    HEADS,
    ROWS,
    RUNS,
    SCORES,
    BasisKey,
    CaptureKey,
    EvaluationKey,
    ScoresKey,
    validate_name,
)
from gradkeep.store.backends._backend import backend_for
from gradkeep.store.blocks._block import Block
from gradkeep.store.blocks._manifest import (
    MANIFESTS,
    drop_rows,
    manifest_key,
    schema_key,
    segment_file,
)
from gradkeep.store.blocks._writer import Writer, ensure_schema
from gradkeep.store.catalog._info import store_info
from gradkeep.store.catalog._scan import block_addresses, folders, keys_below
from gradkeep.store.catalog._sql import ensure_samples, samples_available, sql
from gradkeep.store.rows._row_files import check_size, set_size
from gradkeep.store.rows._rows import Rows

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from gradkeep.errors import GradkeepError
    from gradkeep.store._document import Decision
    from gradkeep.store._keys import BlockKey
    from gradkeep.store.backends._backend import Backend, Durability
    from gradkeep.store.blocks._manifest import Manifest
    from gradkeep.store.blocks._schema import Schema
    from gradkeep.store.catalog._info import StoreInfo
    from gradkeep.store.catalog._scan import BlockAddress, BlockKind
    from gradkeep.store.catalog._sql import SqlResult

FORMAT = "gradkeep-store"
VERSION = 1
STORE_FILE = "STORE.json"


class Store:
    """An opened store; use `gk.open` to create one.

    Everything in it is immutable once written, so any number of processes may read and write it at
    the same time.

    Args:
        backend: Where the bytes are.
        durability: `full` syncs every write to disk; `process` survives a crash of the program only.
        verify: Check checksums when reading.

    Attributes:
        backend: Where the bytes are.
        durability: As passed.
        verify_reads: True if reads check checksums.
        uuid: Identifier of the store.

    Raises:
        NotAStoreError: There is no store.
        FormatTooNewError: The store was written by a later version.
        DamagedError: The document `STORE.json` is damaged.
    """

    def __init__(
        self, backend: Backend, *, durability: Durability = "full", verify: bool = True
    ) -> None:
        self.backend = backend
        self.durability: Durability = durability
        self.verify_reads = verify
        self.uuid = read_identity(backend)

    @staticmethod
    def require_store(backend: Backend) -> None:
        """Raise unless there is a store, damaged or not, that this version understands.

        Args:
            backend: Where the store should be.

        Raises:
            NotAStoreError: There is no store.
            FormatTooNewError: The store was written by a later version.
        """
        names = {entry.name for entry in backend.list("")}
        if not names & {
            *(STORE_FILE, BASES, BLOCKS, DECISIONS, EVALUATIONS, SCORES, ROWS, RUNS, HEADS)
        }:
            _check_free(backend, create=False)
        if STORE_FILE in names:
            # Files of a later version are not damaged and must not be repaired.
            try:
                read_identity(backend)
            except (FormatTooNewError, NotAStoreError):
                raise
            except (StoreError, OSError):
                return  # damaged, or not readable now

    @property
    def location(self) -> str:
        """Path or URL of the store."""
        return self.backend.location

    def __repr__(self) -> str:
        return repr(self.info())

    def _repr_html_(self) -> str:
        return self.info()._repr_html_()

    def info(self) -> StoreInfo:
        """Summarize the contents of the store, with sizes and compression ratios.

        Returns:
            A tree that prints as a table.
        """
        return store_info(self)

    @_arguments.checked(StoreError)
    def sql(self, query: str) -> SqlResult:
        """Run one reading SQL statement over `samples`, `captures`, `scores`, `runs` and `checkpoints`.

        Loads only the columns that the query names. Needs the extra `sql`.

        Args:
            query: One statement: SELECT, DESCRIBE, SHOW, SUMMARIZE, EXPLAIN or PRAGMA.

        Returns:
            The rows; they print as a table.

        Raises:
            StoreError: The statement is wrong, or does not only read.
            MissingExtraError: DuckDB or pyarrow is not installed.

        Example:
            >>> import gradkeep as gk, tempfile
            >>> store = gk.open(tempfile.mkdtemp())
            >>> schema = gk.store.Schema((gk.store.Array("loss"), gk.store.Array("label", "int64")))
            >>> with store.write(gk.store.CaptureKey(checkpoint="final", split="train"), schema) as writer:
            ...     writer.append([0, 1, 2], {"loss": [0.5, 2.0, 1.0], "label": [7, 3, 3]})
            >>> store.sql("select label, avg(loss) as loss from samples group by label order by label")
            label  loss
                3   1.5
                7   0.5
        """
        return sql(self, query)

    @_arguments.checked(StoreError)
    def add_run(self, run: Run) -> Run:
        """Record a run; adding the same run again does nothing.

        Args:
            run: The run.

        Returns:
            The run as recorded, with its config as JSON values.

        Raises:
            SchemaMismatchError: A different run has that name.
            StoreError: The config cannot be written as JSON.
        """
        recorded = validate_run(run)
        self._put_record(run_folder(run.name), "run.json", recorded)
        return recorded

    @_arguments.checked(StoreError)
    def add_checkpoint(self, checkpoint: Checkpoint) -> Checkpoint:
        """Record a checkpoint of a run; adding the same checkpoint again does nothing.

        Args:
            checkpoint: The checkpoint.

        Returns:
            The checkpoint as recorded.

        Raises:
            SchemaMismatchError: A different checkpoint has that name: other weights, or another function
                of the same weights, such as a model with another activation.
        """
        recorded = checkpoint
        folder = checkpoint_folder(recorded.run, recorded.name)
        known = read_checkpoint(self.backend, recorded.run, recorded.name)
        if known is not None and known.weights == recorded.weights:
            if not _may_be_same_function(known.function, recorded.function):
                raise SchemaMismatchError(
                    "the checkpoint was captured with another function of the same weights",
                    code="store.function_changed",
                    path=self.backend.describe(folder),
                    fix="Use the model of the first capture, or capture every split with this model "
                    "under another checkpoints= name.",
                )
            recorded = dataclasses.replace(recorded, function=known.function)
        self._put_record(folder, "ckpt.json", recorded)
        return recorded

    def runs(self) -> list[Run]:
        """List all recorded runs by name."""
        records = (read_run(self.backend, name) for name in folders(self.backend, RUNS))
        return [run for run in records if run is not None]

    @_arguments.checked(StoreError)
    def checkpoints(self, run: str = "main") -> list[Checkpoint]:
        """List all recorded checkpoints of a run.

        Args:
            run: Name of the run.

        Returns:
            The checkpoints by step, then name.
        """
        names = folders(self.backend, f"{run_folder(validate_name('run', run))}/ckpt")
        records = (read_checkpoint(self.backend, run, name) for name in names)
        checkpoints = [checkpoint for checkpoint in records if checkpoint is not None]
        return sorted(
            checkpoints, key=lambda item: (-1 if item.step is None else item.step, item.name)
        )

    @_arguments.checked(StoreError)
    def decide(self, decision: Decision) -> Decision:
        """Record a person's decision about the label of a row, durably.

        Args:
            decision: The decision; its number and time are assigned.

        Returns:
            The decision with its number and time.

        Example:
            >>> import gradkeep as gk, tempfile
            >>> store = gk.open(tempfile.mkdtemp())
            >>> store.decide(gk.store.Decision("train", row=7, action="relabel", label=3)).number
            0
            >>> [decision.action for decision in store.decisions("train")]
            ['relabel']
        """
        return append_decision(self.backend, decision, durability=self.durability)

    @_arguments.checked(StoreError)
    def decisions(self, split: str = "train", *, start: int = 0) -> list[Decision]:
        """List the decisions about a split in order.

        Args:
            split: Name of the split.
            start: Number of the first decision to return.

        Returns:
            The decisions, undone ones and undos included.
        """
        return read_decisions(self.backend, split, start=max(0, start))

    @_arguments.checked(StoreError)
    def write(
        self,
        key: BlockKey,
        schema: Schema,
        *,
        extend: bool = False,
        segments: range | None = None,
    ) -> Writer:
        """Open a writer for a block: a new one, or resumed where an earlier writer stopped.

        Args:
            key: The block to write.
            schema: Its arrays, size and fingerprints.
            extend: Add rows to a sealed block as its next version.
            segments: Numbers of the segments of this process, if several processes write the block; such a
                writer need not see earlier rows, and does not seal.

        Returns:
            A context manager that seals the block when it ends without an exception.

        Raises:
            SchemaMismatchError: The block exists with another schema.
        """
        return Writer(
            self.backend,
            key.folder,
            schema,
            durability=self.durability,
            extend=extend,
            segments=segments,
            on_seal=lambda manifest: self._derive(key, manifest),
        )

    @_arguments.checked(StoreError)
    def read(self, key: BlockKey, *, version: int | None = None, live: bool = False) -> Block:
        """Open a block for reading.

        Args:
            key: The block to read.
            version: An older version; the newest by default.
            live: Read the rows written so far of a block that is not sealed.

        Returns:
            The block.

        Raises:
            MissingRowsError: There is no such block or version.
            NotSealedError: The block is still being written.
        """
        return Block(
            self.backend,
            key.folder,
            version=version,
            live=live,
            verify=self.verify_reads,
            durability=self.durability,
        )

    @_arguments.checked(StoreError)
    def has(self, key: BlockKey) -> bool:
        """Return True if the block exists, sealed or not.

        Args:
            key: Key of the block.
        """
        return self.backend.exists(schema_key(key.folder))

    @staticmethod
    def capture_identities(fingerprints: Mapping[str, Any]) -> dict[str, str]:
        """Parse the identities of the captures that a result was computed from.

        Args:
            fingerprints: Fingerprints of saved scores or of an evaluation.

        Returns:
            The `Manifest.identity` of each capture, by folder.

        Raises:
            DamagedError: The entry "captures" is malformed.
        """
        text = str(fingerprints.get("captures") or "{}")
        try:
            identities = json.loads(text)
        except (ValueError, RecursionError):
            identities = None
        if not isinstance(identities, dict) or not all(
            isinstance(identity, str) for identity in identities.values()
        ):
            raise DamagedError(
                "the list of source captures is malformed",
                code="store.malformed_identities",
                found=text[:100],
            )
        return identities

    def changed_captures(self, fingerprints: Mapping[str, Any]) -> list[str]:
        """List the captures that hold other rows than when a result was computed from them.

        Deleted captures are not listed.

        Args:
            fingerprints: Fingerprints of saved scores or of an evaluation; "captures" maps the folder of
                each capture to its `Manifest.identity`, as JSON.

        Returns:
            Folders of captures whose newest version has another identity or is not sealed.
        """
        identities = self.capture_identities(fingerprints)
        known = {key.folder: key for key in self.captures()} if identities else {}
        changed = []
        for folder in identities.keys() & known.keys():
            try:
                identity = self.read(known[folder]).manifest.identity
            except NotSealedError:
                identity = ""
            if identity != identities[folder]:
                changed.append(folder)
        return sorted(changed)

    def require_current(
        self,
        key: BlockKey,
        fingerprints: Mapping[str, Any],
        error: type[GradkeepError],
        command: str,
    ) -> None:
        """Raise `error` if a capture holds other rows than when a result was computed from it.

        Args:
            key: The saved scores or evaluation.
            fingerprints: Fingerprints of its schema, as for `changed_captures`.
            error: Class of the error.
            command: Command that recomputes the result.
        """
        changed = self.changed_captures(fingerprints)
        if changed:
            raise error(
                f"{key.folder} is outdated",
                code=f"{error.code.partition('.')[0]}.outdated",
                path=self.location,
                found=f"{', '.join(changed[:3])} has changed since",
                fix=f"Delete it and compute it again: gradkeep delete {self.location} {key.folder} "
                f"--yes, then {command}",
            )

    @_arguments.checked(StoreError)
    def drop_rows(self, key: BlockKey, ids: Any) -> Manifest:
        """Publish a version of a block without some rows; `gc` frees their bytes later.

        Args:
            key: Key of the block.
            ids: Ids of the rows to drop.

        Returns:
            Manifest of the new version.

        Raises:
            MissingRowsError: The block does not hold one of the ids.
        """
        manifest = drop_rows(self.read(key), ids, durability=self.durability)
        self._derive(key, manifest)
        return manifest

    @_arguments.checked(StoreError)
    def delete(self, key: BlockKey) -> None:
        """Delete a block with all its versions, and the blocks that belong to it.

        Deleting a capture deletes its moments and codes; deleting scores deletes the ids of their training
        rows. Segments of a writer that continued while its block was deleted are deleted too.

        Args:
            key: Key of the block.

        Raises:
            StoreError: There is no such block.
        """
        owned = self.owned(key)
        # A writer that went on while its block was deleted leaves segments without a schema.
        has_files = next(keys_below(self.backend, key.folder), None) is not None
        if not self.has(key) and not owned and not has_files:
            raise StoreError(
                "there is no such block",
                code="store.no_such_block",
                path=self.backend.describe(key.folder),
            )
        # A capture can be read without the blocks it owns; scores cannot. A killed delete must leave
        # the owned block of scores for the next delete.
        for block in (key, *owned) if isinstance(key, ScoresKey) else (*owned, key):
            self._delete_folder(block.folder)

    @_arguments.checked(StoreError)
    def owned(self, key: BlockKey) -> list[BlockKey]:
        """List the blocks that belong to a block and are deleted with it.

        Args:
            key: Key of a block.

        Returns:
            Keys of its moments and codes, or of the training row ids of scores.
        """
        if isinstance(key, CaptureKey):
            return [basis for basis in self.bases() if key.owns(basis)]
        if isinstance(key, ScoresKey):
            return [scores for scores in self.scores() if key.owns(scores)]
        return []

    def _delete_folder(self, folder: str) -> None:
        # Records first, manifests next, the schema last: at any moment the rest is an unsealed block.
        # Each part names a file that need not exist: its deletion is made durable before the next part,
        # even after a killed delete, or a power cut would bring some files back.
        backend, last = self.backend, schema_key(folder)
        heads = [*keys_below(backend, f"{HEADS}/{folder}"), f"{HEADS}/{folder}/any"]
        backend.delete(heads, durability=self.durability)
        keys = [key for key in keys_below(backend, folder) if key != last]
        manifests = [key for key in keys if key.startswith(f"{folder}/{MANIFESTS}/")]
        rest = [key for key in keys if key not in set(manifests)]
        for part in (
            [manifest_key(folder, 0), *manifests],
            [f"{folder}/{segment_file(0)}", *rest],
            [last],
        ):
            backend.delete(part, durability=self.durability)

    @_arguments.checked(StoreError)
    def rows(self, name: str, schema: Schema | None = None, *, num_rows: int | None = None) -> Rows:
        """Open a set of rows that many processes write; create it if a schema is passed.

        Args:
            name: Name of the row set.
            schema: Arrays of the rows; required to create the set.
            num_rows: Number of rows; a larger number than before grows the set.

        Returns:
            The row set.

        Raises:
            MissingRowsError: There is no such set and no schema was passed.
            SchemaMismatchError: The set exists with another schema.
        """
        folder = f"{ROWS}/{validate_name('rows', name)}"
        if num_rows is not None:
            check_size(num_rows, path=self.backend.describe(folder))
        if schema is not None:
            if schema.num_rows is not None:
                schema = dataclasses.replace(schema, num_rows=None)
            ensure_schema(self.backend, folder, schema, durability=self.durability)
        rows = Rows(self.backend, folder, durability=self.durability, verify=self.verify_reads)
        if num_rows and num_rows >= rows.num_rows:
            # Even if it is set already: its writer may have died before it was durable.
            set_size(self.backend, folder, num_rows, durability=self.durability)
        return rows

    @_arguments.checked(StoreError)
    def delete_rows(self, name: str) -> None:
        """Delete a set of rows with its leases, failures and versions.

        Args:
            name: Name of the row set.

        Raises:
            StoreError: There is no such set.
        """
        folder = f"{ROWS}/{validate_name('rows', name)}"
        if next(keys_below(self.backend, folder), None) is None:
            raise StoreError(
                "there is no such set of rows",
                code="store.no_such_rows",
                path=self.backend.describe(folder),
            )
        self._delete_folder(folder)

    def blocks(self) -> list[BlockKey]:
        """List the keys of all captures, scores, bases and evaluations, sealed or not."""
        return [*self.captures(), *self.scores(), *self.bases(), *self.evaluations()]

    def captures(self) -> list[CaptureKey]:
        """List the keys of all captures, sealed or not."""
        return [address.capture for address in self._addresses("capture")]

    def scores(self) -> list[ScoresKey]:
        """List the keys of all saved scores, and of the blocks with their training row ids."""
        return [ScoresKey(address.name) for address in self._addresses("scores")]

    def bases(self) -> list[BasisKey]:
        """List the keys of all bases of compressed captures, moments included."""
        return [address.basis for address in self._addresses("basis")]

    def evaluations(self) -> list[EvaluationKey]:
        """List the keys of all saved evaluations."""
        return [EvaluationKey(address.name) for address in self._addresses("evaluation")]

    def row_sets(self) -> list[str]:
        """List the names of all sets of rows."""
        return [address.name for address in self._addresses("rows")]

    def _addresses(self, kind: BlockKind) -> Iterator[BlockAddress]:
        for address in block_addresses(self.backend, kind):
            if self.backend.exists(schema_key(address.folder)):
                yield address

    def _derive(self, key: BlockKey, manifest: Manifest) -> None:
        if samples_available() and not isinstance(key, BasisKey | EvaluationKey):
            block = self.read(key, version=manifest.version)
            ensure_samples(self.backend, block, key.labels, durability=self.durability)

    def _put_record(self, folder: str, name: str, record: Run | Checkpoint) -> None:
        key, fields = f"{folder}/{name}", dataclasses.asdict(record)
        if fields.get("function", "") is None:
            del fields["function"]  # records of earlier versions do not have it
        data = _document.to_bytes(fields)
        _document.check_size(data, f"the record of {record.name!r}")
        try:
            self.backend.put_if_absent(key, [data], durability=self.durability)
        except ConflictError:
            path = self.backend.describe(key)
            known = read_bytes(self.backend, key, most=_document.LARGE_DOCUMENT)
            stored = from_bytes(known, path=path)
            lines = [
                f"\n    {name}: stored {stored.get(name)!r}, passed {fields[name]!r}"
                for name in fields
                if stored.get(name) != fields[name]
            ]
            raise SchemaMismatchError(
                "the name is already recorded with other contents",
                code="store.record_exists",
                path=path,
                found="".join(lines),
                fix="Use another name.",
            ) from None
        xxh3 = xxhash.xxh3_128_hexdigest(data)
        record_head(self.backend, folder, 0, xxh3, durability=self.durability)


def _may_be_same_function(one: str | None, other: str | None) -> bool:
    """Return True if two fingerprints may be of the same function.

    Early records have none, and the same code has another fingerprint in another version of Python.
    """
    if one is None or other is None:
        return True
    return one == other or one.split(" ")[0] != other.split(" ")[0]


@_arguments.checked(StoreError)
def open(
    path: Store | str | os.PathLike[str] | Backend,
    *,
    create: bool = True,
    durability: Durability = "full",
    verify: bool = True,
) -> Store:
    """Open the store at `path`, or create it if nothing is there.

    Args:
        path: Folder or URL of the store, a backend, or an opened store, which is returned unchanged.
        create: Create the store if it does not exist.
        durability: `full` syncs every write to disk. `process` skips every fsync: faster, survives a
            crash of the program but not of the machine.
        verify: Check checksums when reading.

    Returns:
        The opened store.

    Raises:
        NotAStoreError: There is no store and `create` is False, or something else is at that path.
        FormatTooNewError: The store was written by a later version.
        DamagedError: The document `STORE.json` is damaged.

    Example:
        >>> import gradkeep as gk, tempfile
        >>> folder = tempfile.mkdtemp()
        >>> store = gk.open(folder)
        >>> schema = gk.store.Schema((gk.store.Array("loss"),))
        >>> with store.write(gk.store.CaptureKey(checkpoint="final", split="train"), schema) as writer:
        ...     writer.append([7, 3], {"loss": [0.5, 2.0]})
        >>> store.read(gk.store.CaptureKey(checkpoint="final", split="train")).read([3])["loss"]
        array([2.], dtype=float32)
    """
    if isinstance(path, Store):
        return path
    backend = backend_for(path)
    if not backend.exists(STORE_FILE):
        _check_free(backend, create=create)
        # On a conflict another process has just created the store.
        with contextlib.suppress(ConflictError):
            put_identity(backend, durability=durability)
    return Store(backend, durability=durability, verify=verify)


def _check_free(backend: Backend, *, create: bool) -> None:
    root = backend.local_path("")
    obstacle = None
    if root is not None and os.path.islink(root) and not os.path.exists(root):
        obstacle = f"a broken link to {os.readlink(root)}"
    elif root is not None and os.path.exists(root) and not os.path.isdir(root):
        obstacle = "a file"
    elif names := [entry.name for entry in backend.list("")]:
        if backend.exists(STORE_FILE):
            return  # another process has just created the store
        obstacle = f"a folder with {', '.join(names[:3])}{' ...' if len(names) > 3 else ''}"
    if obstacle is not None:
        raise NotAStoreError(
            "this path is not a store",
            code="store.path_in_use",
            path=backend.location,
            found=obstacle,
            fix="Pass the path of a store, or a new path to create one.",
        )
    if not create:
        raise NotAStoreError(
            "there is no store here",
            path=backend.location,
            fix="Check the path; `gradkeep demo` creates a store with examples.",
        )


class _Identity(Record, frozen=True):
    format: str
    version: Count
    uuid: str


def put_identity(backend: Backend, *, durability: Durability) -> None:
    """Write the document that makes a folder a store."""
    identity = _Identity(format=FORMAT, version=VERSION, uuid=str(uuid.uuid4()))
    backend.put_if_absent(STORE_FILE, [_document.to_bytes(identity)], durability=durability)


def read_identity(backend: Backend) -> str:
    """Return the store's uuid; raise unless this version can read the store."""
    path = backend.describe(STORE_FILE)
    data = read_bytes(backend, STORE_FILE, most=_document.SMALL_DOCUMENT)
    fields = from_bytes(data, path=path)
    if fields.get("format") != FORMAT:
        raise NotAStoreError(
            "this document does not belong to a store",
            code="store.foreign_document",
            path=path,
            found=ascii(fields.get("format"))[:200],
            expected=FORMAT,
        )
    version = fields.get("version")
    if type(version) is int and version > VERSION:  # it may have unknown fields
        raise FormatTooNewError(
            "the store was written by a later version of gradkeep",
            path=path,
            found=f"format {version}",
            expected=f"at most {VERSION}",
            fix="Upgrade gradkeep.",
        )
    identity = parse_record(_Identity, fields, path=path).uuid
    if not identity.isascii() or not identity.isprintable():
        raise _document.malformed_document(path, "uuid: not printable ASCII")
    return identity
