"""Read the rows of one version of a block, streamed or by id."""

from __future__ import annotations

import contextlib
import itertools
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np

from gradkeep import _arguments
from gradkeep.errors import (
    DamagedError,
    InvalidRowsError,
    MissingRowsError,
    NotSealedError,
    StoreError,
)
from gradkeep.store.blocks._columns import Batch, Column, check_fill, fill_missing
from gradkeep.store.blocks._incoming import IdIndex, nonnegative, whole_numbers
from gradkeep.store.blocks._manifest import (
    Manifest,
    SegmentEntry,
    latest_manifest,
    live_manifest,
    load_manifest,
    load_schema,
    manifest_key,
    manifest_versions,
    open_segment,
)
from gradkeep.store.blocks._segment import MOST_MAPPED

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator, Sequence

    from gradkeep.store.backends._backend import Backend, Durability
    from gradkeep.store.blocks._columns import AnyArray
    from gradkeep.store.blocks._schema import Array
    from gradkeep.store.blocks._segment import Pick, Segment

_BATCH = 1 << 24
_VERIFIED_BATCH = 1 << 22  # small enough to stay in the CPU cache between hashing and use


class Block:
    """Sealed version of a block of rows, or with `live=True` the rows committed so far.

    Rows have an order (0 to `len(block) - 1`, as written) and an id each.

    Args:
        backend: Where the store is.
        folder: Folder of the block.
        version: An older version; the newest by default.
        live: Read a block that is not sealed.
        verify: Check checksums.
        durability: Durability of the store, for files derived from the block.

    Attributes:
        schema: Arrays and fingerprints of the block.
        manifest: Segments of this version.
        starts: Position of the first row of each segment, and the number of rows `[segments + 1]`.

    Raises:
        NotSealedError: No version was sealed.
        MissingRowsError: There is no such version.
        DamagedError: The schema or the manifest is damaged.
    """

    def __init__(
        self,
        backend: Backend,
        folder: str,
        *,
        version: int | None = None,
        live: bool = False,
        verify: bool = True,
        durability: Durability = "full",
    ) -> None:
        self.folder = folder
        self.path = backend.describe(folder)
        self.schema = load_schema(backend, folder)
        self.durability: Durability = durability
        self.backend, self._verify = backend, verify
        manifest = (
            self._choose(version) if not live else live_manifest(backend, folder, self.schema)
        )
        self.manifest = manifest
        self.starts = np.cumsum([0, *(entry.rows for entry in manifest.segments)], dtype=np.int64)
        self._opened: OrderedDict[str, Segment] = OrderedDict()
        self._index: IdIndex | None = None

    def _choose(self, version: int | None) -> Manifest:
        if version is not None:
            manifest = load_manifest(self.backend, self.folder, version)
        else:
            newest = latest_manifest(self.backend, self.folder)
            if newest is None:
                raise NotSealedError(
                    "no version of this block is sealed",
                    path=self.path,
                    fix="Finish the work that writes it, or pass live=True for the rows so far.",
                )
            manifest = newest
        if manifest.schema_hash != self.schema.hash:
            path = self.backend.describe(manifest_key(self.folder, manifest.version))
            raise DamagedError(
                "the manifest has another schema than its block",
                code="store.other_schema",
                path=path,
            )
        return manifest

    def __len__(self) -> int:
        return int(self.starts[-1])

    @property
    def version(self) -> int:
        """Number of this version; -1 for the live view."""
        return self.manifest.version

    @property
    def names(self) -> list[str]:
        """Names of the arrays."""
        return [array.name for array in self.schema.arrays]

    @property
    def ids(self) -> AnyArray:
        """Ids of all rows `[N]` in order."""
        return self._ids().ids

    def versions(self) -> list[int]:
        """List the readable versions, oldest first."""
        return manifest_versions(self.backend, self.folder)

    def stream(
        self,
        names: Sequence[str] | None = None,
        *,
        batch_rows: int | None = None,
        segments: range | None = None,
    ) -> Iterator[Batch]:
        """Iterate over all rows in order with O(1) memory, reading the next segment ahead.

        Rows are mapped from disk. No batch spans two segments. Its bytes are verified just before it is
        yielded, so they are in the cache when used.

        Args:
            names: Arrays to read; all by default.
            batch_rows: Rows per batch; by default some megabytes of rows.
            segments: Read only these segments of the manifest.

        Yields:
            Batches of rows.
        """
        if batch_rows is not None:
            _arguments.count("batch_rows", batch_rows, error=InvalidRowsError, least=1)
        arrays = self._arrays(names)
        chosen = range(len(self.manifest.segments)) if segments is None else segments
        entries = [self.manifest.segments[number] for number in chosen]
        starts = [int(self.starts[number]) for number in chosen]
        with contextlib.closing(self._one_ahead(entries, arrays)) as opened:
            for segment, start in zip(opened, starts, strict=False):
                try:
                    rows = batch_rows or self._suitable_rows(segment, arrays)
                    yield from _batches(segment, arrays, start, rows)
                finally:
                    segment.close()

    def _one_ahead(
        self, entries: Sequence[SegmentEntry], arrays: Sequence[Array]
    ) -> Generator[Segment]:
        """Yield opened segments in order, reading the next one ahead."""
        if not self.backend.remote:
            # The system reads ahead from a local disk.
            segments = [self._open_ahead(entry, arrays) for entry in entries[:1]]
            for entry in entries[1:]:
                segments.append(self._open_ahead(entry, arrays))
                yield segments.pop(0)
            yield from segments
            return
        with ThreadPoolExecutor(1, thread_name_prefix="gradkeep-prefetch") as pool:
            futures = [pool.submit(self._open_ahead, entry, arrays) for entry in entries[:1]]
            for entry in entries[1:]:
                opened = futures.pop().result()
                futures.append(pool.submit(self._open_ahead, entry, arrays))
                yield opened
            for future in futures:
                yield future.result()

    def _suitable_rows(self, segment: Segment, arrays: Sequence[Array]) -> int:
        extents = [segment.extents[array.name] for array in arrays]
        row_bytes = sum(extent.stop - extent.start for extent in extents) / max(1, segment.rows)
        batch_bytes = _VERIFIED_BATCH if self._verify else _BATCH
        return max(1, int(batch_bytes / max(1.0, row_bytes)))

    def column(self, name: str) -> Any:
        """Read all rows of one array; meant for small arrays.

        Args:
            name: Name of the array.

        Returns:
            An array `[N, *shape]`; a list of arrays for ragged rows, a list of str for texts.
        """
        array = self.schema.array(name)
        parts = [batch[name] for batch in self.stream([name])]
        if array.is_text:
            return [text for part in parts for text in part.texts()]
        if array.ragged:
            return [part[row] for part in parts for row in range(len(part))]
        empty = np.empty((0, *array.shape), array.dtype)
        return np.concatenate(parts) if parts else empty

    def read(
        self, ids: Any, names: Sequence[str] | None = None, *, fill: float | None = None
    ) -> Batch:
        """Read the rows with these ids, in this order; reads only their bytes.

        Args:
            ids: Ids of the rows `[B]`; they may repeat.
            names: Arrays to read; all by default.
            fill: `float("nan")` to get NaN for missing rows of float arrays; by default they raise.

        Returns:
            The rows.

        Raises:
            MissingRowsError: The block does not hold one of the ids.
            InvalidRowsError: `fill` is not NaN, or an array cannot hold NaN.
        """
        row_ids = self._as_row_ids(ids)
        arrays = self._arrays(names)
        if fill is None:
            rows = self._ids().rows(row_ids, path=self.path)
            return Batch(row_ids, self._gather(arrays, rows, mapped=not self.backend.remote))
        check_fill(fill, arrays, path=self.path)
        rows = self._ids().find(row_ids)
        present = rows >= 0
        columns = self._gather(arrays, rows[present])
        return Batch(row_ids, tuple(fill_missing(column, present) for column in columns))

    def read_rows(self, rows: Any, names: Sequence[str] | None = None) -> Batch:
        """Read the rows at these positions, in this order; opens only their segments.

        Args:
            rows: Positions (0 to N - 1).
            names: Arrays to read; all by default.

        Returns:
            The rows.

        Raises:
            MissingRowsError: A position is out of range.
        """
        positions = whole_numbers(rows, path=self.path)
        outside = positions[(positions < 0) | (positions >= len(self))]
        if len(outside):
            raise MissingRowsError(
                f"there is no row {int(outside[0])}",
                path=self.path,
                expected=f"positions from 0 to {len(self) - 1}",
            )
        if self._index is not None:
            return Batch(self.ids[positions], self._gather(self._arrays(names), positions))
        ids = np.empty(len(positions), np.int64)
        columns = self._gather(self._arrays(names), positions, ids)
        return Batch(ids, columns)

    def positions(self, ids: Any) -> AnyArray:
        """Return the positions (0 to N - 1) of the rows with these ids.

        Args:
            ids: Ids of the rows `[B]`.

        Returns:
            Positions `[B]` int64.

        Raises:
            MissingRowsError: The block does not hold one of the ids.
        """
        return self._ids().rows(self._as_row_ids(ids), path=self.path)

    def _as_row_ids(self, ids: Any) -> AnyArray:
        # Ids may repeat here: only their kind and sign are checked.
        return nonnegative(whole_numbers(ids, path=self.path), path=self.path)

    def _arrays(self, names: Sequence[str] | None) -> list[Array]:
        if names is None:
            return list(self.schema.arrays)
        return [
            self.schema.array(name) for name in _arguments.texts("names", names, error=StoreError)
        ]

    def _ids(self) -> IdIndex:
        if self._index is None:
            self._index = IdIndex(self.ids_of(self.manifest.segments))
        return self._index

    def ids_of(self, entries: Sequence[SegmentEntry]) -> AnyArray:
        """Return the ids of the rows of some segments.

        Args:
            entries: Segments of this version.

        Returns:
            Ids in order, int64.
        """
        parts = [self._segment(entry).small("ids") for entry in entries]
        return np.concatenate([np.empty(0, np.int64), *parts])

    def _segment(self, entry: SegmentEntry) -> Segment:
        """Return an opened segment; the 64 most recently used stay open."""
        segment = self._opened.pop(entry.file, None)
        if segment is None:
            segment = self._open(entry)
        self._opened[entry.file] = segment
        if len(self._opened) > 64:
            self._opened.popitem(last=False)[1].close()
        return segment

    def _open(self, entry: SegmentEntry) -> Segment:
        return open_segment(
            self.backend, self.folder, entry, schema=self.schema, verify=self._verify
        )

    def _open_ahead(self, entry: SegmentEntry, arrays: Sequence[Array]) -> Segment:
        segment = self._open(entry)
        segment.read_ahead([array.name for array in arrays])
        return segment

    def _gather(
        self,
        arrays: Sequence[Array],
        rows: AnyArray,
        ids: AnyArray | None = None,
        *,
        mapped: bool = False,
    ) -> tuple[Column, ...]:
        """Read stored rows at these positions in file order; also fill `ids` if passed.

        Every segment is opened once for all arrays. With `mapped`, maps of segments may stay in memory.
        """
        order = rows.argsort(kind="stable")
        ranked = rows[order]
        numbers = self.starts.searchsorted(ranked, "right") - 1
        firsts = [0, *(np.flatnonzero(numbers[1:] != numbers[:-1]) + 1).tolist(), len(rows)]
        gathered = [
            _GatheredRagged(array) if array.ragged else _GatheredRows(array, len(rows), mapped)
            for array in arrays
        ]
        for low, high in itertools.pairwise(firsts if len(rows) else ()):
            index = int(numbers[low])
            within = ranked[low:high] - self.starts[index]
            slots = order[low:high]
            segment = self._segment(self.manifest.segments[index])
            if ids is not None:
                ids[slots] = segment.small("ids")[within]
            for rows_of_array in gathered:
                rows_of_array.add(segment, within, slots)
        while mapped and sum(one.mapped_bytes for one in self._opened.values()) > MOST_MAPPED:
            self._opened.popitem(last=False)[1].close()
        return tuple(rows_of_array.column(order) for rows_of_array in gathered)


class _GatheredRows:
    """Rows of fixed shape, read segment by segment into their final places."""

    def __init__(self, array: Array, count: int, mapped: bool) -> None:
        self._array, self._mapped = array, mapped
        self._values = np.empty((count, *array.stored_shape), array.stored_dtype)
        self._scale = np.empty(count, np.float32) if array.scaled else None

    def add(self, segment: Segment, within: AnyArray, slots: AnyArray) -> None:
        """Read the rows `within` a segment to their slots."""
        if not (self._mapped and segment.take(self._array, within, slots, self._values)):
            segment.gather(self._array, _runs(within, slots), self._values)
        if self._scale is not None:
            self._scale[slots] = segment.small(f"{self._array.name}#scale")[within]

    def column(self, order: AnyArray) -> Column:
        """Return the rows."""
        del order
        return Column(self._array, self._values, self._scale)


def _runs(rows: AnyArray, slots: AnyArray) -> list[Pick]:
    """Return consecutive rows that go to consecutive slots, as one pick each.

    >>> _runs(np.array([3, 4, 7]), np.array([0, 1, 2]))
    [(3, 5, 0), (7, 8, 2)]
    """
    breaks = np.flatnonzero((np.diff(rows) != 1) | (np.diff(slots) != 1)) + 1
    starts = np.concatenate([breaks[:0], [0], breaks])
    lengths = np.diff(starts, append=len(rows))
    firsts = rows[starts]
    stops = firsts + lengths
    return list(zip(firsts.tolist(), stops.tolist(), slots[starts].tolist(), strict=True))


class _GatheredRagged:
    """Ragged rows, read segment by segment and reordered at the end."""

    def __init__(self, array: Array) -> None:
        self._array = array
        self._parts: list[Column] = []

    def add(self, segment: Segment, within: AnyArray, slots: AnyArray) -> None:
        """Read the rows `within` a segment."""
        del slots
        array = self._array
        bounds = segment.small(f"{array.name}#offsets")
        starts, stops = bounds[within], bounds[within + 1]
        offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(stops - starts)])
        values = np.empty((offsets[-1], *array.stored_shape), array.stored_dtype)
        picks = zip(starts.tolist(), stops.tolist(), offsets.tolist(), strict=False)
        segment.gather(array, list(picks), values)
        scale = None
        if array.scaled:
            scales = segment.small(f"{array.name}#scale")
            ranges = [scales[low:high] for low, high in zip(starts, stops, strict=True)]
            scale = np.concatenate([scales[:0], *ranges])
        self._parts.append(Column(array, values, scale, offsets))

    def column(self, order: AnyArray) -> Column:
        """Return the rows in the requested order."""
        return Column.join(self._array, self._parts).take(np.argsort(order))


def _batches(
    segment: Segment, arrays: Sequence[Array], first_row: int, batch_rows: int
) -> Iterator[Batch]:
    ids = segment.small("ids")
    for start in range(0, segment.rows, batch_rows):
        stop = min(segment.rows, start + batch_rows)
        columns = tuple(segment.column(array, start, stop) for array in arrays)
        yield Batch(ids[start:stop], columns, first_row + start)
