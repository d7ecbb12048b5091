"""Write the rows of a block as segments, in the background and resumable.

There is no progress file: a segment that exists is done. A second run skips existing segments after
comparing their ids with its own, and writes only the rest.
"""

from __future__ import annotations

import bisect
import contextlib
import itertools
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from gradkeep.errors import ConflictError, InvalidRowsError, MissingRowsError, StoreError
from gradkeep.store import _document
from gradkeep.store.blocks._block import Block
from gradkeep.store.blocks._columns import Column, Ragged, encode
from gradkeep.store.blocks._incoming import IdSet, as_ids, validate_rows
from gradkeep.store.blocks._manifest import (
    latest_manifest,
    load_schema,
    schema_key,
    seal,
    segment_file,
    segment_numbers,
)
from gradkeep.store.blocks._segment import PackedSegment, Segment, pack

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from types import TracebackType

    from gradkeep.store.backends._backend import Backend, Durability
    from gradkeep.store.blocks._columns import AnyArray
    from gradkeep.store.blocks._manifest import Manifest
    from gradkeep.store.blocks._schema import Array, Schema


class Writer:
    """Append rows to a block; a context manager that seals the block if no exception occurs.

    Every run must append the rows in the same order. `append` returns when the rows are buffered; they
    are acknowledged when `flush`, `seal` or the end of the `with` block returns. Memory: two segments.
    """

    def __init__(
        self,
        backend: Backend,
        folder: str,
        schema: Schema,
        *,
        durability: Durability = "full",
        extend: bool = False,
        segments: range | None = None,
        on_seal: Callable[[Manifest], None] | None = None,
    ) -> None:
        self.folder, self.schema = folder, schema
        self.path = backend.describe(folder)
        self._backend, self._durability = backend, durability
        self._segments = segments
        self._on_seal = on_seal
        ensure_schema(backend, folder, schema, durability=durability)
        newest = latest_manifest(backend, folder)
        written = () if newest is None else newest.written
        self._starts = list(itertools.accumulate(written, initial=0))
        """First row of each segment that a version lists; later segments are full."""
        self._first_row = self._first_number = 0
        self._sealed_rows: int | None = None
        self._sealed: dict[str, str] = {}
        self._present = set(segment_numbers(backend, folder))
        self._done = set(self._present)
        if self._present and durability == "full":
            # One is enough: only their names in the folder may not be durable yet.
            backend.ensure_durable([f"{folder}/{segment_file(max(self._present))}"])
        self._own: set[str] = set()
        self._seen = IdSet()
        if newest is not None and extend:
            self._first_row, self._first_number = newest.next_row, newest.next_segment
            self._seen.add(Block(backend, folder).ids)
        elif newest is not None:
            self._sealed_rows = newest.next_row
            # Segments that the version does not list were dropped on purpose; only listed segments
            # that are missing (moved to quarantine) are written again.
            self._sealed = {entry.file: entry.xxh3 for entry in newest.segments}
            self._done |= {
                number
                for number in range(newest.next_segment)
                if segment_file(number) not in self._sealed
            }
        self._position = self._first_row
        self._filling: SegmentBuffer | None = None
        self._spare: SegmentBuffer | None = None
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="gradkeep-write")
        self._under_way: Future[SegmentBuffer] | None = None
        self._failure: BaseException | None = None
        self._closed = False

    @property
    def position(self) -> int:
        """Row with which the next `append` begins."""
        return self._position

    def needs(self, count: int) -> bool:
        """Return True if this writer has to write any of the next `count` rows."""
        if count <= 0:
            return False
        numbers = range(self._number(self._position), self._number(self._position + count - 1) + 1)
        return any(number not in self._done and self._is_own(number) for number in numbers)

    def begin_at(self, row: int) -> None:
        """Continue with this row, without the rows before it; only for a writer of some segments."""
        if self._segments is None or self._filling is not None or row < self._position:
            raise StoreError(
                "only a writer of some segments can skip to a row",
                code="store.invalid_share",
                path=self.path,
                found=f"row {row}",
            )
        self._position = row

    def skip(self, ids: Any) -> None:
        """Skip rows for which `needs` returned False; their ids are still compared."""
        self._take(as_ids(ids, num_examples=self.schema.num_examples, path=self.path), None)

    def append(self, ids: Any, arrays: Mapping[str, Any]) -> None:
        """Append rows: ids `[B]` and every array of the schema `[B, *shape]` (ragged: a list)."""
        self._check_alive()
        numbers = as_ids(ids, num_examples=self.schema.num_examples, path=self.path)
        self._take(numbers, validate_rows(self.schema, numbers, arrays, path=self.path))

    def flush(self) -> None:
        """Wait until every full segment is acknowledged; raise the error of a background write."""
        self._check_alive()
        self._await_background()

    def seal(self) -> Manifest:
        """Write the last rows, check that none is missing, publish a version, and close."""
        self._check_alive()
        self._check_complete()
        if self._filling is not None:
            self._hand_over()
        self._await_background()
        manifest = seal(
            self._backend,
            self.folder,
            durability=self._durability,
            own=self._own,
            # A repeated run of a sealed block must not publish rows that another writer is adding.
            adding=self._sealed_rows is None,
        )
        if self._on_seal is not None:
            self._on_seal(manifest)
        self._shut()
        return manifest

    def close(self) -> None:
        """Stop without sealing: full segments stay, and a later run resumes after them."""
        if self._closed:
            return
        try:
            if self._failure is None:
                self._await_background()
        finally:
            self._shut()
        if self._failure is not None:
            raise self._failure
        if self._filling is not None:
            raise MissingRowsError(
                f"{self._filling.count} rows were appended but not saved: the block is not sealed",
                code="store.unsaved_rows",
                path=self.path,
                fix="Call seal() after the last row, or use the writer as a context manager.",
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._closed:
            return
        if error is None:
            try:
                if self._segments is None:
                    self.seal()
                else:
                    self._finish_segments(self._segments)
            finally:
                self._shut()
            return
        # Raise the error that ended the block; committed segments stay.
        self._filling = None
        if self._under_way is not None and self._failure is None:
            self._under_way.exception()
        self._shut()

    def _take(self, ids: AnyArray, arrays: Mapping[str, AnyArray | Ragged] | None) -> None:
        self._check_alive()
        self._check_room(len(ids))
        repeated = self._seen.among(ids)
        if len(repeated):
            raise InvalidRowsError(
                f"id {int(repeated[0])} was appended before",
                code="store.repeated_id",
                path=self.path,
            )
        self._seen.add(ids)
        try:
            self._place(ids, arrays)
        except BaseException as error:
            # The rows may be partly written: only a new writer can continue.
            self._failure = error
            raise

    def _place(self, ids: AnyArray, arrays: Mapping[str, AnyArray | Ragged] | None) -> None:
        at = 0
        while at < len(ids):
            number = self._number(self._position)
            count = min(len(ids) - at, self._start_of(number + 1) - self._position)
            chunk = slice(at, at + count)
            if number in self._done:
                self._compare(number, ids[chunk])
            elif self._is_own(number):
                if arrays is None:
                    raise MissingRowsError(
                        f"row {self._position} was skipped but is not in the store yet",
                        code="store.skipped_row",
                        path=self.path,
                        fix="Skip rows only while needs() returns False.",
                    )
                if self._filling is None and count == self._rows_of(number):
                    self._write_whole(number, ids[chunk], arrays, chunk)
                else:
                    self._fill(ids[chunk], arrays, chunk)
            at += count
            self._position += count
            if self._filling is not None and self._position == self._start_of(number + 1):
                self._hand_over()

    def _fill(self, ids: AnyArray, arrays: Mapping[str, AnyArray | Ragged], chunk: slice) -> None:
        if self._filling is None:
            if self._spare is None:
                rows = self.schema.rows_per_segment
                if self.schema.num_rows is not None:
                    rows = min(rows, self.schema.num_rows)
                self._spare = SegmentBuffer(self.schema, rows)
            self._filling, self._spare = self._spare, None
            self._filling.begin(self._position)
        self._filling.add(ids, arrays, chunk)

    def _write_whole(
        self,
        number: int,
        ids: AnyArray,
        arrays: Mapping[str, AnyArray | Ragged],
        chunk: slice,
    ) -> None:
        """Write a segment that was passed in one piece, without a copy."""
        self._await_background()
        columns = encode_rows(self.schema, arrays, chunk)
        self._put(number, pack(self.schema, ids, columns, first_row=self._position))
        self._done.add(number)

    def _hand_over(self) -> None:
        """Write the full buffer in the background, after waiting for the previous one."""
        assert self._filling is not None
        self._await_background()
        filling, self._filling = self._filling, None
        number = self._number(filling.first_row)

        def commit() -> SegmentBuffer:
            self._put(number, filling.pack())
            return filling

        self._under_way = self._pool.submit(commit)
        self._done.add(number)

    def _put(self, number: int, packed: PackedSegment) -> None:
        file = segment_file(number)
        key = f"{self.folder}/{file}"
        sealed = self._sealed.get(file, packed.digest)
        if packed.digest != sealed:
            raise InvalidRowsError(
                "the rows differ from the missing rows of the sealed version",
                code="store.other_rows",
                path=self._backend.describe(key),
                fix="Use the same model, data and order as before, or another capture name.",
            )
        self._backend.put_if_absent(key, packed.parts, durability=self._durability)
        self._own.add(file)

    def _await_background(self) -> None:
        if self._under_way is None:
            return
        future, self._under_way = self._under_way, None
        try:
            self._spare = future.result()
        except BaseException as error:
            self._failure = error
            raise

    def _check_alive(self) -> None:
        if self._failure is None and self._under_way is not None and self._under_way.done():
            self._await_background()
        if self._failure is not None:
            raise self._failure
        if self._closed:
            raise StoreError("the writer is closed", code="store.writer_closed", path=self.path)

    def _check_room(self, count: int) -> None:
        end = self._position + count
        limit = self.schema.num_rows if self.schema.num_rows is not None else self._sealed_rows
        if limit is not None and end > limit:
            raise InvalidRowsError(
                "too many rows for the block",
                code="store.too_many_rows",
                path=self.path,
                found=f"{end} rows",
                expected=f"at most {limit}",
                fix="Pass the size of the data set as num_rows."
                if self.schema.num_rows is not None
                else "Pass extend=True to add rows to this sealed block.",
            )

    def _check_complete(self) -> None:
        num_rows = self.schema.num_rows if self.schema.num_rows is not None else self._sealed_rows
        if num_rows is not None and self._position != num_rows:
            raise MissingRowsError(
                f"{num_rows - self._position} rows are missing; the block was not sealed",
                code="store.incomplete",
                path=self.path,
                fix="Run again with all rows: full segments are not written twice.",
            )

    def _finish_segments(self, segments: range) -> None:
        """Write the last of this writer's segments; raise if one would have missing rows."""
        self._check_alive()
        filling = self._filling
        number = None if filling is None else self._number(filling.first_row)
        whole = (
            filling is not None and number is not None and (filling.count == self._rows_of(number))
        )
        present = self._done | ({number} if whole else set())
        missing = [segment for segment in segments if segment not in present]
        if missing:
            raise MissingRowsError(
                f"rows of segment {missing[0]} are missing; it was not written",
                code="store.incomplete_share",
                path=self.path,
                found=f"rows up to {self._position}",
                fix="Use the same data in every worker.",
            )
        if self._filling is not None:
            self._hand_over()
        self._await_background()

    def _compare(self, number: int, ids: AnyArray) -> None:
        if number not in self._present:
            return
        start = self._position - self._start_of(number)
        key = f"{self.folder}/{segment_file(number)}"
        with contextlib.closing(Segment(self._backend, key)) as segment:
            stored = segment.small("ids")[start : start + len(ids)]
        if not np.array_equal(stored, ids):
            raise InvalidRowsError(
                "the order of the rows differs from the first run",
                code="store.other_order",
                path=self._backend.describe(key),
                found=f"ids {ids[:5].tolist()} ... at row {self._position}",
                expected=f"ids {stored[:5].tolist()} ...",
                fix="Use the same order (no shuffling without a fixed seed), or another capture name.",
            )

    def _is_own(self, number: int) -> bool:
        return self._segments is None or number in self._segments

    def _number(self, row: int) -> int:
        if row < self._starts[-1]:
            return bisect.bisect_right(self._starts, row) - 1
        beyond = (row - self._starts[-1]) // self.schema.rows_per_segment
        return len(self._starts) - 1 + beyond

    def _start_of(self, number: int) -> int:
        if number < len(self._starts):
            return self._starts[number]
        beyond = number - len(self._starts) + 1
        return self._starts[-1] + beyond * self.schema.rows_per_segment

    def _rows_of(self, number: int) -> int:
        """Return the number of rows of a segment; exact for the last one only with `num_rows`."""
        end = self._start_of(number + 1)
        if self.schema.num_rows is not None:
            end = min(end, self.schema.num_rows)
        return end - self._start_of(number)

    def _shut(self) -> None:
        self._closed = True
        self._pool.shutdown(wait=True)


class SegmentBuffer:
    """Buffers of one segment that is being filled; reused for the segment after the next."""

    def __init__(self, schema: Schema, rows: int) -> None:
        self._schema = schema
        self._ids = np.empty(rows, np.int64)
        self._buffers = [_ArrayBuffer(array, rows) for array in schema.arrays]
        self.first_row = 0
        self.count = 0

    def begin(self, first_row: int) -> None:
        self.first_row, self.count = first_row, 0
        for buffer in self._buffers:
            buffer.begin()

    def add(self, ids: AnyArray, arrays: Mapping[str, AnyArray | Ragged], chunk: slice) -> None:
        # Encode everything before changing any buffer, so that a failure changes nothing.
        columns = encode_rows(self._schema, arrays, chunk)
        self._ids[self.count : self.count + len(ids)] = ids
        for buffer, column in zip(self._buffers, columns, strict=True):
            buffer.add(self.count, column)
        self.count += len(ids)

    def pack(self) -> PackedSegment:
        columns = [buffer.column(self.count) for buffer in self._buffers]
        return pack(self._schema, self._ids[: self.count], columns, first_row=self.first_row)


def encode_rows(
    schema: Schema, arrays: Mapping[str, AnyArray | Ragged], chunk: slice
) -> list[Column]:
    """Encode the rows of a chunk; arrays that are stored as they are are not copied."""
    columns = []
    for array in schema.arrays:
        values = arrays[array.name]
        if isinstance(values, Ragged):
            bounds = values.offsets[chunk.start : chunk.stop + 1]
            tokens = encode(array, values.values[bounds[0] : bounds[-1]])
            columns.append(replace(tokens, offsets=bounds - bounds[0]))
        else:
            columns.append(encode(array, values[chunk]))
    return columns


class _ArrayBuffer:
    """Encoded rows of one array of one segment."""

    def __init__(self, array: Array, rows: int) -> None:
        self.array = array
        fixed = 0 if array.ragged else rows
        self._values = np.empty((fixed, *array.stored_shape), array.stored_dtype)
        self._scale = np.empty(fixed, np.float32) if array.scaled else None
        self.begin()

    def begin(self) -> None:
        self._pieces: list[Column] = []
        self._nonzero = self._flushed = 0

    def add(self, at: int, column: Column) -> None:
        if self.array.ragged:
            # The caller may reuse its memory as soon as append returns.
            own = column.values.copy() if self.array.encoding == "plain" else column.values
            self._pieces.append(replace(column, values=own))
            return
        self._nonzero += column.nonzero
        self._flushed += column.flushed
        self._values[at : at + len(column)] = column.values
        if self._scale is not None and column.scale is not None:
            self._scale[at : at + len(column)] = column.scale

    def column(self, count: int) -> Column:
        if self.array.ragged:
            return Column.join(self.array, self._pieces)
        scale = None if self._scale is None else self._scale[:count]
        values = self._values[:count]
        return Column(self.array, values, scale, None, self._nonzero, self._flushed)


def ensure_schema(backend: Backend, folder: str, schema: Schema, *, durability: Durability) -> None:
    """Write the schema of a new block, or raise unless it equals the existing one."""
    key = schema_key(folder)
    if not backend.exists(key):
        data = _document.to_bytes(schema.to_fields())
        _document.check_size(data, "the schema")
        # On a conflict another process has just written one: compare with that.
        with contextlib.suppress(ConflictError):
            backend.put_if_absent(key, [data], durability=durability)
    load_schema(backend, folder).require_same(schema, path=backend.describe(key))
