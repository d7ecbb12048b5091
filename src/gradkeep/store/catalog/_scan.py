"""Find out what a store holds by looking at its files; the files are the truth.

Of a sealed block only the manifest is read; of segments that no manifest names yet, the headers.
Nothing here raises because a file is damaged: a block that cannot be read is found `unreadable`,
with the reason.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Literal, TypeVar

from gradkeep.errors import Damaged, GradkeepError
from gradkeep.store._keys import (
    BASES,
    BLOCKS,
    EVALUATIONS,
    HEADS,
    ROWS,
    RUNS,
    SCORES,
    BasisKey,
    CaptureKey,
    is_name,
)
from gradkeep.store._records import read_checkpoint, read_run
from gradkeep.store.blocks._manifest import (
    MANIFESTS,
    SEGMENTS,
    is_number,
    latest_manifest,
    load_schema,
    manifest_key,
    numbered_files,
    schema_key,
)
from gradkeep.store.blocks._packing import SUFFIX
from gradkeep.store.blocks._segment import Segment
from gradkeep.store.rows._row_files import LOOSE, PACKED, SIZES
from gradkeep.store.rows._rows import Rows

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from gradkeep.store.backends._backend import Backend, Entry
    from gradkeep.store.blocks._manifest import Manifest
    from gradkeep.store.blocks._schema import Array, Schema

BlockKind = Literal["capture", "scores", "rows", "basis", "evaluation"]
BlockState = Literal["sealed", "open", "unreadable"]
_NAMED: dict[BlockKind, str] = {"scores": SCORES, "rows": ROWS, "evaluation": EVALUATIONS}
"""Where the kinds lie that a name alone tells apart."""
LATEST = 253402214400.0
"""The last day that a calendar of four digits can show; a file can claim to be younger."""


@dataclass(frozen=True, slots=True)
class BlockAddress:
    """Which block: a capture, saved scores, a set of rows, a basis, or an evaluation."""

    kind: BlockKind
    name: str
    run: str | None = None
    checkpoint: str | None = None
    split: str | None = None

    @property
    def folder(self) -> str:
        """Where it lies in the store.

        >>> BlockAddress("capture", "main", run="main", checkpoint="final", split="train").folder
        'blocks/main/final/train/main'
        """
        if self.kind == "capture":
            return f"{BLOCKS}/{self.run}/{self.checkpoint}/{self.split}/{self.name}"
        if self.kind == "basis":
            return self.basis.folder
        # Of a catalogue that is odd the kind may be any word: what is looked up then is not there.
        return f"{_NAMED.get(self.kind, ROWS)}/{self.name}"

    @property
    def word(self) -> str:
        """What people are told that it is: also of what has a place among the bases."""
        return "moments" if self.kind == "basis" and self.basis.of_moments else self.kind

    @property
    def capture(self) -> CaptureKey:
        """The key of a capture."""
        checkpoint, split = str(self.checkpoint), str(self.split)
        return CaptureKey(checkpoint, split, run=str(self.run), capture=self.name)

    @property
    def basis(self) -> BasisKey:
        """The key of a basis."""
        return BasisKey(str(self.checkpoint), run=str(self.run), capture=self.name)


@dataclass(frozen=True, slots=True)
class SegmentFacts:
    """One segment that holds rows of a block."""

    file: str
    """Its key below the block's folder."""
    rows: int
    bytes: int
    xxh3: str
    sealed: bool
    """Whether the newest version names it; else it was committed since."""
    modified: float


@dataclass(frozen=True, slots=True)
class LayerFacts:
    """One captured layer, and what its arrays take."""

    name: str
    type: str
    parameters: int
    row_bytes: float
    """Bytes per row on disk; of ragged or compressed arrays, those of the first segment."""

    @property
    def dense_row_bytes(self) -> int:
        """Bytes of one row's dense float32 gradient."""
        return 4 * self.parameters


@dataclass(frozen=True, slots=True)
class BlockFacts:
    """A block as its files show it.

    `rows`, `num_segments` and `data_bytes` are those of the newest version, or of everything that
    is committed if nothing was sealed yet.
    """

    address: BlockAddress
    state: BlockState
    problem: str | None
    """What cannot be read, and where."""
    version: int | None
    rows: int
    num_rows: int | None
    """How many rows it is meant to have."""
    unsealed_rows: int
    """Rows committed after the newest version."""
    num_segments: int
    data_bytes: int
    bytes: int
    """Bytes of all its files, older versions included."""
    modified: float
    """When its newest file came, in seconds since the epoch; 0 where the backend does not know."""
    schema_hash: str | None
    fingerprints: Mapping[str, str | int | float | bool | None]
    layers: tuple[LayerFacts, ...]
    arrays: tuple[Array, ...]

    @property
    def kind(self) -> BlockKind:
        """A capture, saved scores, a set of rows, a basis, or an evaluation."""
        return self.address.kind

    @property
    def dense_bytes(self) -> int:
        """Bytes of the dense float32 gradients of these rows."""
        return self.rows * sum(layer.dense_row_bytes for layer in self.layers)

    @property
    def ratio(self) -> float | None:
        """How many times smaller than dense gradients; None where there is nothing to compare."""
        if not self.dense_bytes or not self.data_bytes:
            return None
        return self.dense_bytes / self.data_bytes


@dataclass(frozen=True, slots=True)
class RunFacts:
    """A recorded run; without its fields if the record cannot be read."""

    name: str
    config: Mapping[str, object] | None = None
    code: str | None = None
    data: str | None = None
    problem: str | None = None


@dataclass(frozen=True, slots=True)
class CheckpointFacts:
    """A recorded checkpoint; without its fields if the record cannot be read."""

    run: str
    name: str
    weights: str | None = None
    step: int | None = None
    lr: float | None = None
    parent: str | None = None
    problem: str | None = None


@dataclass(frozen=True, slots=True)
class ScannedBlock:
    """One block and its segments."""

    facts: BlockFacts
    segments: tuple[SegmentFacts, ...]


_T = TypeVar("_T")


def block_addresses(backend: Backend, *kinds: BlockKind) -> Iterator[BlockAddress]:
    """Every folder that can hold a block of these kinds (or any); some may turn out to be empty."""
    if not kinds or "capture" in kinds:
        for run in folders(backend, BLOCKS):
            for checkpoint in folders(backend, f"{BLOCKS}/{run}"):
                for split in folders(backend, f"{BLOCKS}/{run}/{checkpoint}"):
                    for name in folders(backend, f"{BLOCKS}/{run}/{checkpoint}/{split}"):
                        yield BlockAddress("capture", name, run, checkpoint, split)
    for kind, place in _NAMED.items():
        if not kinds or kind in kinds:
            for name in folders(backend, place):
                yield BlockAddress(kind, name)
    if not kinds or "basis" in kinds:
        for run in folders(backend, BASES):
            for checkpoint in folders(backend, f"{BASES}/{run}"):
                for name in folders(backend, f"{BASES}/{run}/{checkpoint}"):
                    yield BlockAddress("basis", name, run, checkpoint)


def entries_below(backend: Backend, folder: str) -> Iterator[tuple[str, Entry]]:
    """List every file below a folder, with its key."""
    for entry in backend.list(folder):
        key = f"{folder}/{entry.name}"
        if entry.is_folder:
            yield from entries_below(backend, key)
        else:
            yield key, entry


def keys_below(backend: Backend, folder: str) -> Iterator[str]:
    """List the keys of every file below a folder."""
    for key, _ in entries_below(backend, folder):
        yield key


def folders(backend: Backend, prefix: str) -> list[str]:
    """The names of the folders directly below `prefix` that can be names in a store."""
    return [item.name for item in backend.list(prefix) if item.is_folder and is_name(item.name)]


def watched_folders(backend: Backend, address: BlockAddress) -> list[str]:
    """The folders whose names decide what a scan of this block finds."""
    folder = address.folder
    if address.kind != "rows":
        return [folder, f"{folder}/{MANIFESTS}", f"{folder}/{SEGMENTS}", f"{HEADS}/{folder}"]
    loose = [f"{folder}/{LOOSE}/{name}" for name in folders(backend, f"{folder}/{LOOSE}")]
    parts = (MANIFESTS, PACKED, SIZES, LOOSE)
    return [folder, *(f"{folder}/{part}" for part in parts), *loose, f"{HEADS}/{folder}"]


def scan_block(
    backend: Backend, address: BlockAddress, known: Mapping[str, SegmentFacts] | None = None
) -> ScannedBlock | None:
    """What the files of one block say; None if there are none.

    `known` are segments of an earlier scan: a file is immutable, so one with the same name, size
    and time is not opened again. Costs a listing, a manifest, and a header per new segment.
    """
    scan = _BlockScan(backend, address, {} if known is None else known)
    if not any(scan.listed.values()):
        return None
    sealed = scan.sealed()
    if address.kind == "rows":
        return ScannedBlock(scan.facts(sealed, rows=scan.done_rows()), tuple(sealed))
    fresh = scan.fresh()
    if scan.version is None:
        return ScannedBlock(scan.facts(fresh), tuple(fresh))
    unsealed = sum(segment.rows for segment in fresh)
    return ScannedBlock(scan.facts(sealed, unsealed_rows=unsealed), (*sealed, *fresh))


class _BlockScan:
    """One block while it is looked at: what is there, and the first thing that is wrong."""

    def __init__(
        self, backend: Backend, address: BlockAddress, known: Mapping[str, SegmentFacts]
    ) -> None:
        self.folder = address.folder
        self.problem: str | None = None
        self.listed = self._listed(backend, address)
        self._backend, self._address, self._known = backend, address, known
        self._schema = self._load_schema()
        self.version = max(numbered_files(self._files(MANIFESTS), ".json"), default=None)
        self._manifest = self._load_manifest()

    def _listed(self, backend: Backend, address: BlockAddress) -> dict[str, Sequence[Entry]]:
        watched = self._attempt(self.folder, lambda: watched_folders(backend, address))
        parts = [self.folder, *(f"{self.folder}/{x}" for x in (MANIFESTS, SEGMENTS, PACKED, SIZES))]
        found: dict[str, Sequence[Entry]] = dict.fromkeys(parts, ())
        for name in watched or ():
            found[name] = self._attempt(name, partial(_files, backend, name)) or ()
        return found

    def sealed(self) -> list[SegmentFacts]:
        """The segments that the newest version names."""
        if self._manifest is None:
            return []
        part = PACKED if self._address.kind == "rows" else SEGMENTS
        there = {f"{part}/{entry.name}": entry for entry in self._files(part)}
        found = []
        for entry in self._manifest.segments:
            file = there.get(entry.file)
            if file is None:
                self._note(f"{self.folder}/{entry.file}", f"missing, with {entry.rows} rows")
            elif file.size != entry.bytes:
                what = f"{file.size} bytes instead of {entry.bytes}"
                self._note(f"{self.folder}/{entry.file}", what)
            when = 0.0 if file is None else file.modified
            found.append(
                SegmentFacts(
                    entry.file, entry.rows, entry.bytes, entry.xxh3, sealed=True, modified=when
                )
            )
        return found

    def fresh(self) -> list[SegmentFacts]:
        """The segments that were committed after the newest version, from their headers."""
        first = 0 if self._manifest is None else self._manifest.next_segment
        if self.version is not None and self._manifest is None:
            return []  # which ones are new is written in a manifest that cannot be read
        found = []
        for entry in self._files(SEGMENTS):
            name = entry.name.removesuffix(SUFFIX)
            if name != entry.name and is_number(name) and int(name) >= first:
                segment = self._attempt(
                    f"{self.folder}/{SEGMENTS}/{entry.name}", partial(self._from_header, entry)
                )
                found += [] if segment is None else [segment]
        return found

    def done_rows(self) -> int:
        """How many rows of a set of rows are done."""
        read = self._attempt(
            self.folder, lambda: len(Rows(self._backend, self.folder).done().tolist())
        )
        return 0 if read is None else read

    def facts(
        self, segments: Sequence[SegmentFacts], *, rows: int | None = None, unsealed_rows: int = 0
    ) -> BlockFacts:
        """All that was found, the problem included."""
        schema = self._schema
        entries = [entry for files in self.listed.values() for entry in files]
        loose = [
            entry for name in self.listed if f"/{LOOSE}/" in name for entry in self.listed[name]
        ]
        layers = self._layers(segments)  # may still find a problem
        return BlockFacts(
            address=self._address,
            state="unreadable" if self.problem else "open" if self.version is None else "sealed",
            problem=self.problem,
            version=self.version,
            rows=sum(segment.rows for segment in segments) if rows is None else rows,
            num_rows=self._expected_rows(),
            unsealed_rows=unsealed_rows,
            num_segments=len(segments),
            data_bytes=sum(item.bytes for item in segments) + sum(item.size for item in loose),
            bytes=sum(entry.size for entry in entries),
            modified=min(max(0.0, *(entry.modified for entry in entries), 0.0), LATEST),
            schema_hash=None if schema is None else schema.hash,
            fingerprints={} if schema is None else schema.fingerprints,
            layers=layers,
            arrays=() if schema is None else schema.arrays,
        )

    def _expected_rows(self) -> int | None:
        if self._address.kind != "rows":
            return None if self._schema is None else self._schema.num_rows
        return max(numbered_files(self._files(SIZES), ".json", digits=12), default=0)

    def _load_schema(self) -> Schema | None:
        key = schema_key(self.folder)
        if not any(f"{self.folder}/{entry.name}" == key for entry in self.listed[self.folder]):
            self._note(key, "it is gone")
            return None
        return self._attempt(key, lambda: load_schema(self._backend, self.folder))

    def _load_manifest(self) -> Manifest | None:
        def load() -> Manifest | None:
            manifest = latest_manifest(self._backend, self.folder)
            if manifest is None:
                return None
            if self._schema is not None and manifest.schema_hash != self._schema.hash:
                raise Damaged("the manifest belongs to another schema")
            return manifest

        return self._attempt(manifest_key(self.folder, self.version or 0), load)

    def _from_header(self, entry: Entry) -> SegmentFacts:
        file = f"{SEGMENTS}/{entry.name}"
        known = self._known.get(file)
        if known is not None and (known.bytes, known.modified) == (entry.size, entry.modified):
            return dataclasses.replace(known, sealed=False)
        segment = Segment(self._backend, f"{self.folder}/{file}")
        segment.close()
        if self._schema is not None and segment.schema_hash != self._schema.hash:
            raise Damaged("it belongs to another schema")
        return SegmentFacts(
            file, segment.rows, segment.size, segment.digest, sealed=False, modified=entry.modified
        )

    def _layers(self, segments: Sequence[SegmentFacts]) -> tuple[LayerFacts, ...]:
        if self._schema is None or not self._schema.layers:
            return ()
        sizes = {array.name: float(array.row_bytes) for array in self._schema.arrays}
        if segments and any(array.ragged or array.compression for array in self._schema.arrays):
            key = f"{self.folder}/{segments[0].file}"
            measured = self._attempt(key, lambda: _measured(self._backend, key))
            sizes |= {} if measured is None else measured
        return tuple(
            LayerFacts(
                layer.name,
                layer.type,
                layer.parameters,
                sum(
                    sizes[array.name] for array in self._schema.arrays if array.layer == layer.name
                ),
            )
            for layer in self._schema.layers
        )

    def _files(self, part: str) -> Sequence[Entry]:
        return self.listed[f"{self.folder}/{part}"]

    def _attempt(self, key: str, read: Callable[[], _T]) -> _T | None:
        """What `read` returns; None, and a problem noted, if a file is damaged or gone."""
        try:
            return read()
        except FileNotFoundError:
            self._note(key, "it is gone")
        except GradkeepError as error:
            self._note(key, error.what)
        return None

    def _note(self, key: str, what: str) -> None:
        # The first problem only: later ones tend to follow from it.
        if self.problem is None:
            self.problem = f"{key}: {what}"


def _measured(backend: Backend, key: str) -> dict[str, float]:
    """Bytes per row of every array in one segment, with its scales, offsets and checks."""
    segment = Segment(backend, key)
    segment.close()
    sizes: dict[str, float] = {}
    for name, extent in segment.extents.items():
        array = name.partition("#")[0]
        sizes[array] = sizes.get(array, 0.0) + (extent.stop - extent.start) / max(1, segment.rows)
    return sizes


def scan_runs(backend: Backend) -> list[RunFacts]:
    """All recorded runs, readable or not, by name."""
    found = []
    for name in folders(backend, RUNS):
        try:
            run = read_run(backend, name)
            if run is not None:
                found.append(RunFacts(name, run.config, run.code, run.data))
        except GradkeepError as error:
            found.append(RunFacts(name, problem=f"{RUNS}/{name}/run.json: {error.what}"))
    return found


def scan_checkpoints(backend: Backend) -> list[CheckpointFacts]:
    """All recorded checkpoints of all runs, readable or not, by name."""
    found = []
    for run in folders(backend, RUNS):
        for name in folders(backend, f"{RUNS}/{run}/ckpt"):
            try:
                x = read_checkpoint(backend, run, name)
                if x is not None:
                    found.append(CheckpointFacts(run, name, x.weights, x.step, x.lr, x.parent))
            except GradkeepError as error:
                problem = f"{RUNS}/{run}/ckpt/{name}/ckpt.json: {error.what}"
                found.append(CheckpointFacts(run, name, problem=problem))
    return found


def _files(backend: Backend, prefix: str) -> list[Entry]:
    return [entry for entry in backend.list(prefix) if not entry.is_folder]
