"""Find the blocks of a store by listing its files.

Reads only the manifest of a sealed block, and the headers of segments that no manifest lists. Damaged
files do not raise here: such a block is reported as `unreadable`, with the reason.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Literal, TypeVar

from gradkeep.errors import GradkeepError
from gradkeep.store._document import read_checkpoint, read_run
from gradkeep.store._keys import (
    BASES,
    BLOCKS,
    EVALUATIONS,
    ROWS,
    RUNS,
    SCORES,
    BasisKey,
    CaptureKey,
    is_name,
)
from gradkeep.store.blocks._manifest import (
    MANIFESTS,
    SEGMENTS,
    entry_of,
    latest_manifest,
    load_schema,
    manifest_key,
    numbered_files,
    schema_key,
    segment_file,
)
from gradkeep.store.blocks._segment import SUFFIX, Segment
from gradkeep.store.rows._row_files import LOOSE, PACKED, SIZES
from gradkeep.store.rows._rows import Rows

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from gradkeep.store.backends._backend import Backend, Entry
    from gradkeep.store.blocks._manifest import Manifest, SegmentEntry
    from gradkeep.store.blocks._schema import Array, Schema

BlockKind = Literal["capture", "scores", "rows", "basis", "evaluation"]
BlockState = Literal["sealed", "open", "unreadable"]
_PLACES: dict[BlockKind, tuple[str, int]] = {
    "capture": (BLOCKS, 4),
    "scores": (SCORES, 1),
    "rows": (ROWS, 1),
    "evaluation": (EVALUATIONS, 1),
    "basis": (BASES, 3),
}
"""Root folder of each kind of block, and its depth in folders."""


@dataclass(frozen=True, slots=True)
class BlockAddress:
    """Address of a capture, saved scores, a row set, a basis or an evaluation."""

    kind: BlockKind
    name: str
    run: str | None = None
    checkpoint: str | None = None
    split: str | None = None

    @property
    def folder(self) -> str:
        """Folder in the store.

        >>> BlockAddress("capture", "main", run="main", checkpoint="final", split="train").folder
        'blocks/main/final/train/main'
        """
        above = (_PLACES[self.kind][0], self.run, self.checkpoint, self.split)
        return "/".join([*(part for part in above if part), self.name])

    @property
    def word(self) -> str:
        """Kind shown to users; moments are stored among the bases."""
        return "moments" if self.kind == "basis" and self.basis.of_moments else self.kind

    @property
    def capture(self) -> CaptureKey:
        """Key of a capture."""
        checkpoint, split = str(self.checkpoint), str(self.split)
        return CaptureKey(checkpoint, split, run=str(self.run), capture=self.name)

    @property
    def basis(self) -> BasisKey:
        """Key of a basis."""
        return BasisKey(str(self.checkpoint), run=str(self.run), capture=self.name)


@dataclass(frozen=True, slots=True)
class LayerFacts:
    """One captured layer, and the size of its arrays."""

    name: str
    type: str
    parameters: int
    row_bytes: float
    """Bytes per row on disk; for ragged or compressed arrays, of the first segment."""

    @property
    def dense_row_bytes(self) -> int:
        """Bytes of one row's dense float32 gradient."""
        return 4 * self.parameters


@dataclass(frozen=True, slots=True)
class BlockFacts:
    """State of a block according to its files.

    `rows`, `num_segments` and `data_bytes` are those of the newest version, or of all committed segments
    if nothing was sealed yet.
    """

    address: BlockAddress
    state: BlockState
    problem: str | None
    """File that cannot be read, and the reason."""
    version: int | None
    rows: int
    num_rows: int | None
    """Number of rows of the complete block."""
    unsealed_rows: int
    """Rows committed after the newest version."""
    num_segments: int
    data_bytes: int
    bytes: int
    """Bytes of all its files, older versions included."""
    modified: float
    """Time of its newest file in seconds since the epoch; 0 if unknown."""
    schema_hash: str | None
    fingerprints: Mapping[str, str | int | float | bool | None]
    layers: tuple[LayerFacts, ...]
    arrays: tuple[Array, ...]

    @property
    def kind(self) -> BlockKind:
        """Kind of the block."""
        return self.address.kind

    @property
    def rows_text(self) -> str:
        """How many rows there are, of how many, and how many are not sealed."""
        total = "" if self.num_rows in (None, self.rows) else f" of {self.num_rows}"
        unsealed = f" + {self.unsealed_rows} open" if self.unsealed_rows else ""
        return f"{self.rows}{total}{unsealed}"

    @property
    def state_text(self) -> str:
        """State in words for users."""
        if self.kind == "rows" and self.state != "unreadable":
            return "complete" if self.rows == self.num_rows else "open"
        return (
            f"sealed, version {self.version}"
            if self.version and self.state == "sealed"
            else self.state
        )

    @property
    def dense_bytes(self) -> int:
        """Bytes of the dense float32 gradients of these rows."""
        return self.rows * sum(layer.dense_row_bytes for layer in self.layers)

    @property
    def ratio(self) -> float | None:
        """Size of the dense gradients divided by the stored size; None without gradients."""
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


_T = TypeVar("_T")


def block_addresses(backend: Backend, *kinds: BlockKind) -> Iterator[BlockAddress]:
    """Iterate over every folder that can hold a block of these kinds (or any), empty ones included."""
    for kind, (root, depth) in _PLACES.items():
        if not kinds or kind in kinds:
            for *above, name in _folders_below(backend, root, depth):
                yield BlockAddress(kind, name, *above)


def _folders_below(backend: Backend, folder: str, depth: int) -> Iterator[tuple[str, ...]]:
    """Iterate over folders at this depth, each with the names above it."""
    for name in folders(backend, folder):
        if depth == 1:
            yield (name,)
        else:
            for below in _folders_below(backend, f"{folder}/{name}", depth - 1):
                yield (name, *below)


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
    """List the folders directly below `prefix` that have valid names."""
    return [item.name for item in backend.list(prefix) if item.is_folder and is_name(item.name)]


def scan_blocks(backend: Backend, *kinds: BlockKind) -> list[BlockFacts]:
    """Read the state of every block of these kinds (or any), by folder.

    Costs a listing and a manifest per block, and a header for every segment that no version lists.
    """
    facts = (_BlockScan(backend, address).facts() for address in block_addresses(backend, *kinds))
    return sorted(
        (block for block in facts if block is not None), key=lambda block: block.address.folder
    )


class _BlockScan:
    """Scan of one block; collects its state and the first problem."""

    def __init__(self, backend: Backend, address: BlockAddress) -> None:
        self._backend, self._address, self._folder = backend, address, address.folder
        self._problem: str | None = None
        parts = (MANIFESTS, PACKED, SIZES) if address.kind == "rows" else (MANIFESTS, SEGMENTS)
        self._top = self._list(self._folder)
        self._files = {part: self._list(f"{self._folder}/{part}") for part in parts}
        self._loose: list[Entry] = []
        if address.kind == "rows":
            place = f"{self._folder}/{LOOSE}"
            names = self._attempt(place, lambda: folders(backend, place)) or ()
            self._loose = [entry for name in names for entry in self._list(f"{place}/{name}")]

    def facts(self) -> BlockFacts | None:
        """Return the state of the block, its first problem included; None if there are no files."""
        parts = (self._top, *self._files.values(), self._loose)
        entries = [entry for part in parts for entry in part]
        if not entries:
            return None
        schema = self._load_schema()
        version = max(numbered_files(self._files[MANIFESTS], ".json"), default=None)
        manifest = self._load_manifest(version or 0, schema)
        segments = list(manifest.segments) if manifest is not None else []
        others = self._check_files(segments)
        unsealed: list[SegmentEntry] = []
        if self._address.kind == "rows":
            done = self._attempt(self._folder, lambda: Rows(self._backend, self._folder).done())
            rows = 0 if done is None else len(done)
            num_rows: int | None = max(
                numbered_files(self._files[SIZES], ".json", digits=12), default=0
            )
        else:
            num_rows = None if schema is None else schema.num_rows
            if version is None or manifest is not None:
                first = 0 if manifest is None else manifest.next_segment
                unsealed = self._from_headers((x for x in others if x >= first), schema)
            if version is None:
                segments, unsealed = unsealed, []
            rows = sum(segment.rows for segment in segments)
        stored = sum(one.bytes for one in segments) + sum(entry.size for entry in self._loose)
        layers = self._layers(schema, segments)  # may still find a problem
        return BlockFacts(
            address=self._address,
            state="unreadable" if self._problem else "open" if version is None else "sealed",
            problem=self._problem,
            version=version,
            rows=rows,
            num_rows=num_rows,
            unsealed_rows=sum(segment.rows for segment in unsealed),
            num_segments=len(segments),
            data_bytes=stored,
            bytes=sum(entry.size for entry in entries),
            # Times are limited to the year 9999; files can have later ones.
            modified=min(max(0.0, *(entry.modified for entry in entries)), 253402214400.0),
            schema_hash=None if schema is None else schema.hash,
            fingerprints={} if schema is None else schema.fingerprints,
            layers=layers,
            arrays=() if schema is None else schema.arrays,
        )

    def _list(self, folder: str) -> list[Entry]:
        listed = self._attempt(folder, lambda: self._backend.list(folder)) or ()
        return [entry for entry in listed if not entry.is_folder]

    def _check_files(self, segments: Sequence[SegmentEntry]) -> list[int]:
        """Note missing segments of the newest version; return the numbers of other segments."""
        part = PACKED if self._address.kind == "rows" else SEGMENTS
        others = {entry.name: entry for entry in self._files[part]}
        for segment in segments:
            entry = others.pop(segment.file.partition("/")[2], None)
            if entry is None:
                what = f"missing, with {segment.rows} rows"
                self._note(f"{self._folder}/{segment.file}", what)
            elif entry.size != segment.bytes:
                what = f"{entry.size} bytes instead of {segment.bytes}"
                self._note(f"{self._folder}/{segment.file}", what)
        return numbered_files(others.values(), SUFFIX)

    def _from_headers(self, numbers: Iterable[int], schema: Schema | None) -> list[SegmentEntry]:
        """Read the segments that were committed after the newest version."""
        backend, folder = self._backend, self._folder
        entries = []
        for number in numbers:
            read = partial(entry_of, backend, folder, number, schema=schema)
            entries.append(self._attempt(f"{folder}/{segment_file(number)}", read))
        return [entry for entry in entries if entry is not None]

    def _load_schema(self) -> Schema | None:
        key = schema_key(self._folder)
        if not any(f"{self._folder}/{entry.name}" == key for entry in self._top):
            self._note(key, "the file is missing")
            return None
        return self._attempt(key, lambda: load_schema(self._backend, self._folder))

    def _load_manifest(self, version: int, schema: Schema | None) -> Manifest | None:
        key = manifest_key(self._folder, version)
        manifest = self._attempt(key, lambda: latest_manifest(self._backend, self._folder))
        if manifest is not None and schema is not None and manifest.schema_hash != schema.hash:
            self._note(key, "the manifest has another schema than its block")
            return None
        return manifest

    def _layers(
        self, schema: Schema | None, segments: Sequence[SegmentEntry]
    ) -> tuple[LayerFacts, ...]:
        if schema is None or not schema.layers:
            return ()
        sizes = {array.name: float(array.row_bytes) for array in schema.arrays}
        if segments and any(array.ragged or array.compression for array in schema.arrays):
            key = f"{self._folder}/{segments[0].file}"
            sizes |= self._attempt(key, lambda: _measure_row_bytes(self._backend, key)) or {}
        of_layer = dict.fromkeys((layer.name for layer in schema.layers), 0.0)
        for array in schema.arrays:
            if array.layer in of_layer:
                of_layer[array.layer] += sizes[array.name]
        return tuple(
            LayerFacts(layer.name, layer.type, layer.parameters, of_layer[layer.name])
            for layer in schema.layers
        )

    def _attempt(self, key: str, read: Callable[[], _T]) -> _T | None:
        """Return the result of `read`; None, and a noted problem, if a file is damaged or missing."""
        try:
            return read()
        except FileNotFoundError:
            self._note(key, "the file is missing")
        except GradkeepError as error:
            self._note(key, error.message)
        return None

    def _note(self, key: str, what: str) -> None:
        # The first problem only: later ones usually follow from it.
        if self._problem is None:
            self._problem = f"{key}: {what}"


def _measure_row_bytes(backend: Backend, key: str) -> dict[str, float]:
    """Measure the bytes per row of every array in one segment, scales, offsets and checks included."""
    segment = Segment(backend, key)
    segment.close()
    sizes: dict[str, float] = {}
    for name, extent in segment.extents.items():
        array = name.partition("#")[0]
        sizes[array] = sizes.get(array, 0.0) + (extent.stop - extent.start) / max(1, segment.rows)
    return sizes


def scan_runs(backend: Backend) -> list[RunFacts]:
    """List all recorded runs by name, unreadable ones included."""
    runs = []
    for name in folders(backend, RUNS):
        try:
            run = read_run(backend, name)
            if run is not None:
                runs.append(RunFacts(name, run.config, _printable(run.code), _printable(run.data)))
        except GradkeepError as error:
            runs.append(RunFacts(name, problem=f"{RUNS}/{name}/run.json: {error.message}"))
    return runs


def scan_checkpoints(backend: Backend) -> list[CheckpointFacts]:
    """List all recorded checkpoints by run, step and name, unreadable ones included."""
    checkpoints = []
    for run in folders(backend, RUNS):
        for name in folders(backend, f"{RUNS}/{run}/ckpt"):
            try:
                x = read_checkpoint(backend, run, name)
                if x is not None:
                    weights, parent = _printable(x.weights), _printable(x.parent)
                    checkpoints.append(CheckpointFacts(run, name, weights, x.step, x.lr, parent))
            except GradkeepError as error:
                problem = f"{RUNS}/{run}/ckpt/{name}/ckpt.json: {error.message}"
                checkpoints.append(CheckpointFacts(run, name, problem=problem))
    # Checkpoints without a step first.
    return sorted(checkpoints, key=lambda x: (x.run, x.step is not None, x.step or 0, x.name))


def _printable(text: str | None) -> str | None:
    """Escape lone surrogates, which documents can hold but no terminal can show."""
    return None if text is None else text.encode("utf-8", "backslashreplace").decode()
