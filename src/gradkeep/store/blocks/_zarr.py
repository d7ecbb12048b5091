"""Show a block's array as a read-only Zarr v3 array over its segments.

A segment is a chunk: `zarr.json` is generated, and each chunk is a byte range of a segment's file.
Only the last chunk is copied, because Zarr needs it padded to full size.
"""

from __future__ import annotations

import base64
import contextlib
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from gradkeep._environment import import_extra
from gradkeep.errors import NotSealedError, StoreError
from gradkeep.store.blocks._manifest import open_segment

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gradkeep.store.blocks._block import Block
    from gradkeep.store.blocks._columns import AnyArray
    from gradkeep.store.blocks._schema import Array

_METADATA = "zarr.json"


def zarr_view(block: Block, name: str) -> Any:
    """Open one array of a block `[N, *shape]` as a read-only `zarr.Array`, verified as it is read.

    A missing segment raises `MissingRowsError`; it is never read as the fill value.

    Args:
        block: The block.
        name: Name of a plain or `float16` array (which appears as float16) of fixed shape, uncompressed,
            in segments of equal length.

    Returns:
        The Zarr array.

    Raises:
        StoreError: The array cannot be shown without a copy.
        MissingExtraError: zarr is not installed.

    Example:
        >>> import gradkeep as gk
        >>> store = gk.open(gk.store.Memory())
        >>> key = gk.store.CaptureKey(checkpoint="final", split="train")
        >>> with store.write(key, gk.store.Schema((gk.store.Array("loss"),), rows_per_segment=2)) as writer:
        ...     writer.append([0, 1, 2], {"loss": [0.5, 2.0, 4.0]})
        >>> view = zarr_view(store.read(key), "loss")
        >>> view.shape, view.chunks, view[1:]
        ((3,), (2,), array([2., 4.], dtype=float32))
    """
    zarr, storage, buffer = (
        import_extra(module, extra="zarr", what="a Zarr view")
        for module in ("zarr", "zarr.storage", "zarr.buffer")
    )
    chunks = _Chunks(block, _validate_array(block, name), buffer.cpu.Buffer)
    store = storage.MemoryStore(store_dict=chunks, read_only=True)
    return zarr.open_array(store, mode="r", zarr_format=3)


def zarr_references(block: Block, name: str) -> dict[str, Any]:
    """Build references to the chunks of `zarr_view`, for other processes and tools.

    fsspec's `ReferenceFileSystem`, kerchunk and VirtualiZarr read them. They check no checksum: run
    `gradkeep verify` before.

    Args:
        block: The block.
        name: Name of the array; the same restrictions as for `zarr_view`.

    Returns:
        `{"version": 1, "refs": {chunk: [file, offset, length]}}`.

    Raises:
        StoreError: The array cannot be shown without a copy, or the store is not in a folder.
    """
    array = _validate_array(block, name)
    chunk_rows = _chunk_rows(block, array)
    refs: dict[str, Any] = {_METADATA: json.dumps(_metadata(block, array, chunk_rows))}
    for index, entry in enumerate(block.manifest.segments):
        key = f"{block.folder}/{entry.file}"
        path = block.backend.local_path(key)
        if path is None:
            raise StoreError(
                "references need local files",
                code="store.no_local_file",
                path=block.backend.describe(key),
                expected="a store in a folder",
                fix="Use zarr_view, which reads from every backend.",
            )
        if entry.rows == chunk_rows:
            segment = open_segment(block.backend, block.folder, entry, schema=block.schema)
            segment.close()
            extent = segment.extents[name]
            refs[_chunk_key(array, index)] = [path, extent.start, extent.stop - extent.start]
        else:
            padded = _chunk(block, array, index, chunk_rows)
            refs[_chunk_key(array, index)] = "base64:" + base64.b64encode(padded.tobytes()).decode()
    return {"version": 1, "refs": refs}


class _Chunks(Mapping[str, Any]):
    """Mapping that Zarr reads as a store: the metadata, and every segment's tensor as a chunk."""

    def __init__(self, block: Block, array: Array, buffer: Any) -> None:
        self._block, self._array, self._buffer = block, array, buffer
        self._rows = _chunk_rows(block, array)
        segments = range(len(block.manifest.segments))
        self._places = {_chunk_key(array, index): index for index in segments}

    def __getitem__(self, key: str) -> Any:
        if key == _METADATA:
            text = json.dumps(_metadata(self._block, self._array, self._rows))
            return self._buffer.from_bytes(text.encode())
        chunk = _chunk(self._block, self._array, self._places[key], self._rows)
        return self._buffer.from_array_like(chunk)

    def __iter__(self) -> Iterator[str]:
        return iter((_METADATA, *self._places))

    def __len__(self) -> int:
        return 1 + len(self._places)


def _chunk(block: Block, array: Array, index: int, rows: int) -> AnyArray:
    """Return the bytes of one chunk: mapped, or copied and padded if the segment is shorter."""
    entry = block.manifest.segments[index]
    with contextlib.closing(
        open_segment(block.backend, block.folder, entry, schema=block.schema)
    ) as segment:
        values = segment.view(array.name)
    if entry.rows < rows:
        padding = np.full((rows - entry.rows, *array.shape), _fill(array), values.dtype)
        values = np.concatenate([values, padding])
    return values.reshape(-1).view(np.uint8)


def _chunk_key(array: Array, index: int) -> str:
    return "/".join(("c", str(index), *("0" for _ in array.shape)))


def _chunk_rows(block: Block, array: Array) -> int:
    counts = [entry.rows for entry in block.manifest.segments]
    rows = max(counts, default=1)
    if any(count != rows for count in counts[:-1]):
        raise _unsupported(
            block,
            array,
            "store.zarr_segments",
            "segments of different lengths (rows were dropped, or added to a sealed block)",
            "segments of equal length, except for the last one",
        )
    return rows


def _metadata(block: Block, array: Array, chunk_rows: int) -> dict[str, Any]:
    chunk_shape = [chunk_rows, *(max(1, size) for size in array.shape)]
    one_byte = array.stored_dtype.itemsize == 1
    codec: dict[str, Any] = {"name": "bytes"}
    if not one_byte:
        codec["configuration"] = {"endian": "little"}
    fill = _fill(array)
    return {
        "zarr_format": 3,
        "node_type": "array",
        "shape": [len(block), *array.shape],
        "data_type": array.stored_dtype.name,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": chunk_shape}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
        "fill_value": "NaN" if fill != fill else fill,
        "codecs": [codec],
        "attributes": {"block": block.folder, "version": block.version, "array": array.name},
    }


def _fill(array: Array) -> float | int | bool:
    kind = array.stored_dtype.kind
    return float("nan") if kind == "f" else False if kind == "b" else 0


def _validate_array(block: Block, name: str) -> Array:
    """Return the array; raise unless Zarr can show it as it is stored."""
    array = block.schema.array(name)
    if array.encoding not in ("plain", "float16"):
        actual, expected = f"encoding {array.encoding!r}", "'plain' or 'float16'"
        raise _unsupported(block, array, "store.zarr_encoding", actual, expected)
    if array.ragged:
        actual = "rows of different lengths"
        raise _unsupported(block, array, "store.zarr_ragged", actual, "a fixed shape")
    if array.compression is not None:
        actual = f"compression {array.compression!r}"
        raise _unsupported(block, array, "store.zarr_compression", actual, "no compression")
    if block.version < 0 and array.stored_dtype.kind != "f":
        raise NotSealedError(
            f"array {name!r} of a live block cannot be shown: integers have no NaN for missing rows",
            path=block.path,
            fix="Finish the work that writes it, then open the block without live=True.",
        )
    return array


def _unsupported(block: Block, array: Array, code: str, actual: str, expected: str) -> StoreError:
    return StoreError(
        f"Zarr cannot show array {array.name!r} as it is stored",
        code=code,
        path=block.path,
        found=actual,
        expected=expected,
        fix=f"Read it with block.column({array.name!r}) or block.stream([{array.name!r}]).",
    )
