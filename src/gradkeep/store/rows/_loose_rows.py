"""Reading many rows that lie in files of their own: gathered as bytes, made into columns once."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from gradkeep.errors import Damaged
from gradkeep.store.blocks._columns import Batch, Column
from gradkeep.store.blocks._segment import Segment

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from gradkeep.store.backends._backend import Backend
    from gradkeep.store.blocks._schema import Array, Schema


@dataclass(frozen=True, slots=True)
class _Pieces:
    """What the files read so far hold of one array."""

    array: Array
    values: list[memoryview | bytes] = field(default_factory=list)
    scales: list[memoryview] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)

    def add(self, segment: Segment) -> None:
        array = self.array
        if array.ragged:
            self.lengths.append(int(segment.small(f"{array.name}#offsets")[-1]))
        if array.scaled:
            self.scales.append(segment.stored_bytes(f"{array.name}#scale"))
        if array.compression is None:
            self.values.append(segment.stored_bytes(array.name))
        else:
            self.values.append(segment.column(array).values.tobytes())

    def column(self) -> Column:
        array = self.array
        # A bytearray, not bytes: torch takes only what it may write to.
        joined = np.frombuffer(bytearray().join(self.values), array.stored_dtype)
        count = sum(self.lengths) if array.ragged else len(self.values)
        scale = offsets = None
        if array.scaled:
            scale = np.frombuffer(bytearray().join(self.scales), np.float32)
        if array.ragged:
            offsets = np.cumsum([0, *self.lengths], dtype=np.int64)
        return Column(array, joined.reshape(count, *array.stored_shape), scale, offsets)


def read_loose_rows(
    backend: Backend,
    schema: Schema,
    arrays: Sequence[Array],
    files: Iterable[tuple[int, str]],
    *,
    verify: bool,
) -> Batch:
    """The rows of these files, each `(row, key)`, verified; those whose file is gone are left out."""
    found: list[int] = []
    pieces = [_Pieces(array) for array in arrays]
    plain = not any(array.ragged or array.compression for array in arrays)
    fitting: object = None
    for row, key in files:
        try:
            # There can be millions of them: what is remembered of each would add up.
            segment = Segment(backend, key, verify=verify, remember=False)
        except FileNotFoundError:
            continue
        try:
            ids = segment.stored_bytes("ids")
            if segment.schema_hash != schema.hash or ids != row.to_bytes(8, "little"):
                raise Damaged(
                    "this file is not the row its name says",
                    path=segment.path,
                    fix="`gradkeep verify STORE --repair` moves it aside",
                )
            # Files of one schema share what was understood of their headers.
            if not plain or segment.extents is not fitting:
                for array in arrays:
                    segment.require_form(array)
                fitting = segment.extents
            for piece in pieces:
                piece.add(segment)
        finally:
            segment.close()
        found.append(row)
    return Batch(np.array(found, np.int64), tuple(piece.column() for piece in pieces))
