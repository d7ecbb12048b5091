"""Find out what a store holds by looking at its files; the files are the truth.

Of a sealed block only the manifest is read; of segments that no manifest names yet, the headers.
Nothing here raises because a file is damaged: a block that cannot be read is found `unreadable`,
with the reason.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from gradkeep.errors import Damaged, GradkeepError
from gradkeep.store import _document, _manifest
from gradkeep.store._block import SEGMENTS, load_schema, schema_key
from gradkeep.store._facts import (
    BlockFacts,
    CheckpointFacts,
    LayerFacts,
    Place,
    RunFacts,
    Scanned,
    SegmentFacts,
)
from gradkeep.store._layout import SUFFIX
from gradkeep.store._names import BLOCKS, ROWS, RUNS, SCORES, is_name
from gradkeep.store._row_files import LOOSE, PACKED, SIZES
from gradkeep.store._rows import Rows
from gradkeep.store._segment import Segment

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from gradkeep.store._backend import Backend, Entry
    from gradkeep.store._manifest import Manifest
    from gradkeep.store._schema import Schema

_T = TypeVar("_T")


def places(backend: Backend) -> Iterator[Place]:
    """Every folder that can hold a block; some may turn out to be empty."""
    for run in _folders(backend, BLOCKS):
        for checkpoint in _folders(backend, f"{BLOCKS}/{run}"):
            for split in _folders(backend, f"{BLOCKS}/{run}/{checkpoint}"):
                for name in _folders(backend, f"{BLOCKS}/{run}/{checkpoint}/{split}"):
                    yield Place("capture", name, run, checkpoint, split)
    for name in _folders(backend, SCORES):
        yield Place("scores", name)
    for name in _folders(backend, ROWS):
        yield Place("rows", name)


def watched_folders(backend: Backend, place: Place) -> list[str]:
    """The folders whose names decide what a scan of this block finds."""
    folder = place.folder
    if place.kind != "rows":
        return [folder, f"{folder}/{_manifest.FOLDER}", f"{folder}/{SEGMENTS}"]
    loose = [f"{folder}/{LOOSE}/{name}" for name in _folders(backend, f"{folder}/{LOOSE}")]
    parts = (_manifest.FOLDER, PACKED, SIZES, LOOSE)
    return [folder, *(f"{folder}/{part}" for part in parts), *loose]


def scan_block(
    backend: Backend, place: Place, known: Mapping[str, SegmentFacts] | None = None
) -> Scanned | None:
    """What the files of one block say; None if there are none.

    `known` are segments of an earlier scan: a file is immutable, so one with the same name, size
    and time is not opened again. Costs a listing, a manifest, and a header per new segment.
    """
    look = _Look(backend, place, {} if known is None else known)
    if not any(look.listed.values()):
        return None
    sealed = look.sealed()
    if place.kind == "rows":
        return Scanned(look.facts(sealed, rows=look.done_rows()), tuple(sealed))
    fresh = look.fresh()
    if look.version is None:
        return Scanned(look.facts(fresh), tuple(fresh))
    unsealed = sum(segment.rows for segment in fresh)
    return Scanned(look.facts(sealed, unsealed_rows=unsealed), (*sealed, *fresh))


class _Look:
    """One block while it is looked at: what is there, and the first thing that is wrong."""

    def __init__(self, backend: Backend, place: Place, known: Mapping[str, SegmentFacts]) -> None:
        self.folder = place.folder
        self.listed = {name: _files(backend, name) for name in watched_folders(backend, place)}
        self.problem: str | None = None
        self._backend, self._place, self._known = backend, place, known
        self._schema = self._load_schema()
        numbers = [entry.name.removesuffix(".json") for entry in self._files(_manifest.FOLDER)]
        self.version = max((int(name) for name in numbers if name.isdigit()), default=None)
        self._manifest = None if self.version is None else self._load_manifest(self.version)

    def sealed(self) -> list[SegmentFacts]:
        """The segments that the newest version names."""
        if self._manifest is None:
            return []
        part = PACKED if self._place.kind == "rows" else SEGMENTS
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
            if name.isdigit() and int(name) >= first:
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
            place=self._place,
            state="unreadable" if self.problem else "open" if self.version is None else "sealed",
            problem=self.problem,
            version=self.version,
            rows=sum(segment.rows for segment in segments) if rows is None else rows,
            num_rows=self._expected_rows(),
            unsealed_rows=unsealed_rows,
            num_segments=len(segments),
            data_bytes=sum(item.bytes for item in segments) + sum(item.size for item in loose),
            bytes=sum(entry.size for entry in entries),
            modified=max((entry.modified for entry in entries), default=0.0),
            schema_hash=None if schema is None else schema.hash,
            fingerprints={} if schema is None else schema.fingerprints,
            layers=layers,
            arrays=() if schema is None else schema.arrays,
        )

    def _expected_rows(self) -> int | None:
        if self._place.kind != "rows":
            return None if self._schema is None else self._schema.num_rows
        names = [entry.name.removesuffix(".json") for entry in self._files(SIZES)]
        return max((int(name) for name in names if name.isdigit()), default=0)

    def _load_schema(self) -> Schema | None:
        key = schema_key(self.folder)
        if not any(f"{self.folder}/{entry.name}" == key for entry in self.listed[self.folder]):
            self._note(key, "it is gone")
            return None
        return self._attempt(key, lambda: load_schema(self._backend, self.folder))

    def _load_manifest(self, version: int) -> Manifest | None:
        def load() -> Manifest:
            manifest = _manifest.load(self._backend, self.folder, version)
            if self._schema is not None and manifest.schema_hash != self._schema.hash:
                raise Damaged("the manifest belongs to another schema")
            return manifest

        return self._attempt(_manifest.key(self.folder, version), load)

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


def runs(backend: Backend) -> list[RunFacts]:
    """All recorded runs, readable or not, by name."""
    found = []
    for name in _folders(backend, RUNS):
        fields, problem = _record(backend, f"{RUNS}/{name}/run.json")
        if fields is not None:
            found.append(RunFacts(**fields))
        elif problem is not None:
            found.append(RunFacts(name, problem=problem))
    return found


def checkpoints(backend: Backend) -> list[CheckpointFacts]:
    """All recorded checkpoints of all runs, readable or not, by name."""
    found = []
    for run in _folders(backend, RUNS):
        for name in _folders(backend, f"{RUNS}/{run}/ckpt"):
            fields, problem = _record(backend, f"{RUNS}/{run}/ckpt/{name}/ckpt.json")
            if fields is not None:
                found.append(CheckpointFacts(**fields))
            elif problem is not None:
                found.append(CheckpointFacts(run, name, problem=problem))
    return found


def _record(backend: Backend, key: str) -> tuple[dict[str, Any] | None, str | None]:
    """A record's fields, or the reason why it cannot be read; neither if there is none."""
    try:
        return _document.from_bytes(backend.read(key), path=key), None
    except FileNotFoundError:
        return None, None
    except GradkeepError as error:
        return None, f"{key}: {error.what}"


def _folders(backend: Backend, prefix: str) -> list[str]:
    return [item.name for item in backend.list(prefix) if item.is_folder and is_name(item.name)]


def _files(backend: Backend, prefix: str) -> list[Entry]:
    return [entry for entry in backend.list(prefix) if not entry.is_folder]
