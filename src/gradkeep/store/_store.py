"""The store: one place that keeps what training left behind."""

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
from gradkeep.store._decisions import append_decision, read_decisions
from gradkeep.store._document import Count, Record, from_bytes, parse_record, read_bytes
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
    Checkpoint,
    EvaluationKey,
    Run,
    ScoresKey,
    checked_name,
)
from gradkeep.store._records import (
    checked_run,
    checkpoint_folder,
    read_checkpoint,
    read_run,
    record_head,
    run_folder,
)
from gradkeep.store.backends._schemes import backend_for
from gradkeep.store.blocks._block import Block
from gradkeep.store.blocks._manifest import (
    MANIFESTS,
    drop_rows,
    manifest_key,
    schema_key,
    segment_file,
)
from gradkeep.store.blocks._writer import Writer, WriterShare, ensure_schema
from gradkeep.store.catalog._info import store_info
from gradkeep.store.catalog._samples import ensure_samples, samples_available
from gradkeep.store.catalog._scan import block_addresses, folders, keys_below
from gradkeep.store.catalog._sql import sql
from gradkeep.store.rows._row_files import check_size, set_size
from gradkeep.store.rows._rows import Rows

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from gradkeep.errors import GradkeepError
    from gradkeep.store._decisions import Decision
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
    """An opened store; made by `gk.open`.

    Everything in it is immutable once written, so any number of processes may read and write it at
    the same time.
    """

    def __init__(
        self, backend: Backend, *, durability: Durability = "full", verify: bool = True
    ) -> None:
        self.backend = backend
        self.durability: Durability = durability
        self.verify_reads = verify
        self.uuid = read_identity(backend)

    @staticmethod
    def require_some(backend: Backend) -> None:
        """Raise unless there is a store, damaged or not, that this version understands."""
        names = {entry.name for entry in backend.list("")}
        if not names & {
            *(STORE_FILE, BASES, BLOCKS, DECISIONS, EVALUATIONS, SCORES, ROWS, RUNS, HEADS)
        }:
            _check_free(backend, create=False)
        if STORE_FILE in names:
            # What a later version wrote is not damage, and must not be repaired as if it were.
            try:
                read_identity(backend)
            except (FormatTooNewError, NotAStoreError):
                raise
            except (StoreError, OSError):
                return  # damaged, or not to be read now

    @property
    def location(self) -> str:
        """Where the store is."""
        return self.backend.location

    def __repr__(self) -> str:
        return repr(self.info())

    def _repr_html_(self) -> str:
        return self.info()._repr_html_()

    def info(self) -> StoreInfo:
        """What the store holds, with sizes and ratios: a tree that shows itself as a table."""
        return store_info(self)

    @_arguments.checked(StoreError)
    def sql(self, query: str) -> SqlResult:
        """The answer to one reading SQL statement over `samples`, `captures`, `scores`, `runs`
        and `checkpoints`.

        Costs the columns that the query names; needs the extra `sql`.

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
        """Record a run; adding it again is free, adding another one under its name is refused."""
        recorded = checked_run(run)
        self._put_record(run_folder(run.name), "run.json", recorded)
        return recorded

    @_arguments.checked(StoreError)
    def add_checkpoint(self, checkpoint: Checkpoint) -> Checkpoint:
        """Record a checkpoint of a run; adding it again is free, adding another one is refused.

        Raises:
            SchemaMismatchError: Another checkpoint has that name: other weights, or another function of
                the same weights, such as a model with another activation.
        """
        recorded = checkpoint
        folder = checkpoint_folder(recorded.run, recorded.name)
        known = read_checkpoint(self.backend, recorded.run, recorded.name)
        if known is not None and known.weights == recorded.weights:
            if not _may_be_same_function(known.function, recorded.function):
                raise SchemaMismatchError(
                    "this checkpoint was captured with another function of the same weights",
                    path=self.backend.describe(folder),
                    fix="capture with the model that it was first captured with, or capture every "
                    "split with this one under another checkpoints= name",
                )
            recorded = dataclasses.replace(recorded, function=known.function)
        self._put_record(folder, "ckpt.json", recorded)
        return recorded

    def runs(self) -> list[Run]:
        """All recorded runs, by name."""
        records = (read_run(self.backend, name) for name in folders(self.backend, RUNS))
        return [run for run in records if run is not None]

    @_arguments.checked(StoreError)
    def checkpoints(self, run: str = "main") -> list[Checkpoint]:
        """All recorded checkpoints of a run, by step."""
        names = folders(self.backend, f"{run_folder(checked_name('run', run))}/ckpt")
        records = (read_checkpoint(self.backend, run, name) for name in names)
        found = [checkpoint for checkpoint in records if checkpoint is not None]
        return sorted(found, key=lambda item: (-1 if item.step is None else item.step, item.name))

    @_arguments.checked(StoreError)
    def decide(self, decision: Decision) -> Decision:
        """Record what a person said about a row's label, durably; returns it with its number.

        >>> import gradkeep as gk, tempfile
        >>> store = gk.open(tempfile.mkdtemp())
        >>> store.decide(gk.store.Decision("train", row=7, action="relabel", label=3)).number
        0
        >>> [one.action for one in store.decisions("train")]
        ['relabel']
        """
        return append_decision(self.backend, decision, durability=self.durability)

    @_arguments.checked(StoreError)
    def decisions(self, split: str = "train", *, start: int = 0) -> list[Decision]:
        """All decisions about a split, in order, from number `start` on."""
        return read_decisions(self.backend, split, start=max(0, start))

    @_arguments.checked(StoreError)
    def write(
        self,
        key: BlockKey,
        schema: Schema,
        *,
        extend: bool = False,
        share: WriterShare | None = None,
    ) -> Writer:
        """A writer for a capture or scores: new, or resumed where an earlier one stopped.

        `extend=True` adds rows to a sealed block as its next version; `share` splits the work
        among processes that all see the same rows.
        """
        return Writer(
            self.backend,
            key.folder,
            schema,
            durability=self.durability,
            extend=extend,
            share=share,
            on_seal=lambda manifest: self._derive(key, manifest),
        )

    @_arguments.checked(StoreError)
    def read(self, key: BlockKey, *, version: int | None = None, live: bool = False) -> Block:
        """A capture or scores to read: the newest version, an older one, or the rows so far."""
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
        """Whether there is such a capture or scores, sealed or not."""
        return self.backend.exists(schema_key(key.folder))

    @staticmethod
    def capture_identities(fingerprints: Mapping[str, Any]) -> dict[str, str]:
        """Read the folder of each capture that something was computed from, with its identity."""
        text = str(fingerprints.get("captures") or "{}")
        try:
            found = json.loads(text)
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, dict) or not all(isinstance(one, str) for one in found.values()):
            raise DamagedError(
                "the captures that this was computed from cannot be read", found=text[:100]
            )
        return found

    def changed_captures(self, fingerprints: Mapping[str, Any]) -> list[str]:
        """List the captures that hold other rows than when something was computed from them.

        Captures that are gone are not listed: nothing can be confused with their rows.

        Args:
            fingerprints: Those of saved scores or evaluations; "captures" maps the folder of each
                capture to its `Manifest.identity`, as JSON.

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
        self, key: BlockKey, fingerprints: Mapping[str, Any], error: type[GradkeepError], again: str
    ) -> None:
        """Raise `error` if a capture holds other rows than when something was computed from it.

        Args:
            key: The saved scores or evaluation.
            fingerprints: Those of its schema, as for `changed_captures`.
            error: The class of the error.
            again: The command that computes it again.
        """
        changed = self.changed_captures(fingerprints)
        if changed:
            raise error(
                f"{key.folder} was computed from other rows than the store holds now",
                path=self.location,
                found=f"{', '.join(changed[:3])} captured again since",
                fix=f"delete it and compute it again: gradkeep delete {self.location} {key.folder} "
                f"--yes, then {again}",
            )

    @_arguments.checked(StoreError)
    def drop_rows(self, key: BlockKey, ids: Any) -> Manifest:
        """Publish a version of a block without these ids; `gc` frees their bytes later."""
        manifest = drop_rows(self.read(key), ids, durability=self.durability)
        self._derive(key, manifest)
        return manifest

    @_arguments.checked(StoreError)
    def delete(self, key: BlockKey) -> None:
        """Delete a whole block with all its versions, and what is nothing without it.

        Also what a writer left that went on while its block was deleted.

        With a capture go its moments and codes, with scores the names of their training rows.
        """
        owned = self.owned(key)
        # A writer that went on while its block was deleted leaves segments without a schema.
        left = next(keys_below(self.backend, key.folder), None) is not None
        if not self.has(key) and not owned and not left:
            raise StoreError("there is no such block", path=self.backend.describe(key.folder))
        # A capture is whole without what it owns; scores cannot be read without theirs, which goes after
        # them, and by their key also where a killed delete left nothing else.
        for block in (key, *owned) if isinstance(key, ScoresKey) else (*owned, key):
            self._delete_folder(block.folder)

    @_arguments.checked(StoreError)
    def owned(self, key: BlockKey) -> list[BlockKey]:
        """What is nothing without a block, and goes with it."""
        if isinstance(key, CaptureKey):
            return [basis for basis in self.bases() if key.owns(basis)]
        return [one for one in self.scores() if key.owns(one)] if isinstance(key, ScoresKey) else []

    def _delete_folder(self, folder: str) -> None:
        # Records first, manifests next, the schema last: at any moment what is left is an unsealed block.
        # Each part has a name that is deleted even if an earlier, killed delete removed them all: that
        # must be durable before the rest goes, or a power cut brings some of them back.
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
        """Rows that many processes write: created with a schema and a size, else opened."""
        folder = f"{ROWS}/{checked_name('rows', name)}"
        if num_rows is not None:
            check_size(num_rows, path=self.backend.describe(folder))
        if schema is not None:
            if schema.num_rows is not None:
                schema = dataclasses.replace(schema, num_rows=None)
            ensure_schema(self.backend, folder, schema, durability=self.durability)
        rows = Rows(self.backend, folder, durability=self.durability, verify=self.verify_reads)
        if num_rows and num_rows >= rows.num_rows:
            # Also when it is known: whoever set it may have died before it was durable.
            set_size(self.backend, folder, num_rows, durability=self.durability)
        return rows

    @_arguments.checked(StoreError)
    def delete_rows(self, name: str) -> None:
        """Delete a whole set of rows, with its leases, failures and versions."""
        folder = f"{ROWS}/{checked_name('rows', name)}"
        if next(keys_below(self.backend, folder), None) is None:
            raise StoreError("there is no such set of rows", path=self.backend.describe(folder))
        self._delete_folder(folder)

    def blocks(self) -> list[BlockKey]:
        """The keys of all captures, scores, bases and evaluations, sealed or not."""
        return [*self.captures(), *self.scores(), *self.bases(), *self.evaluations()]

    def captures(self) -> list[CaptureKey]:
        """The keys of all captures, sealed or not."""
        return [address.capture for address in self._addresses("capture")]

    def scores(self) -> list[ScoresKey]:
        """The keys of all saved scores."""
        return [ScoresKey(address.name) for address in self._addresses("scores")]

    def bases(self) -> list[BasisKey]:
        """The keys of all bases that compressed captures are kept in."""
        return [address.basis for address in self._addresses("basis")]

    def evaluations(self) -> list[EvaluationKey]:
        """The keys of all saved evaluations."""
        return [EvaluationKey(address.name) for address in self._addresses("evaluation")]

    def row_sets(self) -> list[str]:
        """The names of all sets of rows."""
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
            del fields["function"]  # as records were written before there was one
        data = _document.to_bytes(fields)
        _document.check_size(data, f"the record of {record.name!r}")
        try:
            self.backend.put_if_absent(key, [data], durability=self.durability)
        except ConflictError:
            path = self.backend.describe(key)
            known = read_bytes(self.backend, key, most=_document.LARGE_DOCUMENT)
            stored = from_bytes(known, path=path)
            lines = [
                f"\n    {name}: stored {stored.get(name)!r}, given {fields[name]!r}"
                for name in fields
                if stored.get(name) != fields[name]
            ]
            raise SchemaMismatchError(
                "recorded before with other contents; nothing was changed",
                path=path,
                found="".join(lines),
                fix="use another name",
            ) from None
        xxh3 = xxhash.xxh3_128_hexdigest(data)
        record_head(self.backend, folder, 0, xxh3, durability=self.durability)


def _may_be_same_function(one: str | None, other: str | None) -> bool:
    """Tell whether two fingerprints may be of one function.

    Early records have none, and the same code has another one in another version of Python.
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
    """Open the store at `path`, checked; make a new one if there is nothing there; an open one stays.

    `durability="process"` skips every fsync: fast scratch that survives a crash of the program but
    not of the machine. `verify=False` skips the checksums of reads.

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
    if durability not in ("full", "process"):
        raise StoreError("unknown durability", found=durability, expected="'full' or 'process'")
    backend = backend_for(path)
    if not backend.exists(STORE_FILE):
        _check_free(backend, create=create)
        # On a conflict another process made the store in this very moment: that one is it.
        with contextlib.suppress(ConflictError):
            put_identity(backend, durability=durability)
    return Store(backend, durability=durability, verify=verify)


def _check_free(backend: Backend, *, create: bool) -> None:
    root = backend.local_path("")
    found = None
    if root is not None and os.path.islink(root) and not os.path.exists(root):
        found = f"a link that leads nowhere ({os.readlink(root)})"
    elif root is not None and os.path.exists(root) and not os.path.isdir(root):
        found = "a file"
    elif names := [entry.name for entry in backend.list("")]:
        if backend.exists(STORE_FILE):
            return  # another process made the store since we looked
        found = f"a folder with {', '.join(names[:3])}{' ...' if len(names) > 3 else ''}"
    if found is not None:
        raise NotAStoreError(
            "this is not a store",
            path=backend.location,
            found=found,
            fix="give the path of a store, or a path that does not exist yet to make one",
        )
    if not create:
        raise NotAStoreError(
            "there is no store here",
            path=backend.location,
            fix="check the path; `gradkeep demo` makes a store to look at",
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
    """The store's uuid; raises unless there is a store that this version can read."""
    path = backend.describe(STORE_FILE)
    data = read_bytes(backend, STORE_FILE, most=_document.SMALL_DOCUMENT)
    fields = from_bytes(data, path=path)
    if fields.get("format") != FORMAT:
        found = ascii(fields.get("format"))[:200]
        raise NotAStoreError("this is not a store", path=path, found=found, expected=FORMAT)
    version = fields.get("version")
    if type(version) is int and version > VERSION:  # it may have fields that are not known here
        raise FormatTooNewError(
            f"this store was written by a later gradkeep: format {version}, known is {VERSION}",
            path=path,
            fix="upgrade gradkeep",
        )
    identity = parse_record(_Identity, fields, path=path).uuid
    if not identity.isascii() or not identity.isprintable():
        raise _document.not_ours(path, "uuid: not one that gradkeep gives")
    return identity
