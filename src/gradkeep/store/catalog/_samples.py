"""Per-sample scalars as Parquet, next to the segments they were derived from.

The file is derived: it can be deleted and is recreated when needed. Its name contains the version it
belongs to and the digest of its bytes, so it is immutable and can be checked. Between them is a digest
of the manifest's digest and the file's: under the name of another version, or in the folder of another
block, the file is detected without reading it as Parquet.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from gradkeep._environment import import_extra
from gradkeep.errors import DamagedError, ReadOnlyError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from gradkeep.store.backends._backend import Backend, Durability
    from gradkeep.store.blocks._block import Block

_PREFIX = "samples-"
_SUFFIX = ".parquet"


def find_samples(backend: Backend, folder: str, version: int) -> str | None:
    """Return the key of a version's Parquet file, or None."""
    start = f"{_PREFIX}{version:06d}-"
    for entry in backend.list(folder):
        if entry.name.startswith(start) and entry.name.endswith(_SUFFIX):
            return f"{folder}/{entry.name}"
    return None


def is_samples(name: str) -> bool:
    """Return True for the name of a Parquet file of samples."""
    return name.startswith(_PREFIX) and name.endswith(_SUFFIX)


def check_samples(data: bytes | memoryview, name: str, *, path: str) -> None:
    """Raise `DamagedError` unless the bytes match the digest in the name."""
    if xxhash.xxh3_128_hexdigest(data) != name.removesuffix(_SUFFIX).rpartition("-")[2]:
        raise DamagedError(
            "the Parquet file does not match its checksum",
            path=path,
            fix="Delete it, or run `gradkeep verify STORE --repair`: it is recreated when needed.",
        )


def is_tied(name: str, block: Block) -> bool | None:
    """Return True if a file name belongs to this version; None for names of earlier versions."""
    parts = name.removesuffix(_SUFFIX).split("-")
    return None if len(parts) != 4 else parts[2] == _tie(block, parts[3])


def _tie(block: Block, digest: str) -> str:
    tied = f"{block.folder} {block.manifest.digest} {digest}"
    return xxhash.xxh3_64_hexdigest(tied.encode())


def samples_table(block: Block, labels: Mapping[str, str]) -> Any:
    """Build an Arrow table: the labels, `id`, and every array with one value or text per row."""
    pa = import_extra("pyarrow", extra="sql", what="Parquet")
    columns: dict[str, Any] = {}
    for name, value in labels.items():
        indices = _column(pa, np.zeros(len(block), np.int32))
        columns[name] = pa.DictionaryArray.from_arrays(indices, _text_column(pa, [value]))
    columns |= {name: _column(pa, values) for name, values in _scalars(block).items()}
    columns |= {name: _text_column(pa, values) for name, values in _texts(block).items()}
    return pa.Table.from_pydict(columns)


def _column(pa: Any, values: np.ndarray[Any, Any]) -> Any:
    """Build an Arrow array from memory; `pa.array` would import pandas."""
    bits = values.dtype == np.bool_
    memory = np.packbits(values, bitorder="little") if bits else np.ascontiguousarray(values)
    kind = pa.from_numpy_dtype(values.dtype)
    return pa.Array.from_buffers(kind, len(values), [None, pa.py_buffer(memory)])


def _text_column(pa: Any, texts: list[str]) -> Any:
    parts = [text.encode() for text in texts]
    bounds = np.cumsum([0, *map(len, parts)])
    if bounds[-1] > np.iinfo(np.int32).max:
        return pa.array(texts, pa.string())  # more than one array holds
    buffers = [None, pa.py_buffer(bounds.astype(np.int32)), pa.py_buffer(b"".join(parts))]
    return pa.Array.from_buffers(pa.string(), len(texts), buffers)


def _texts(block: Block) -> dict[str, list[str]]:
    """Read every array that holds a text per row."""
    return {array.name: block.column(array.name) for array in block.schema.arrays if array.is_text}


def _scalars(block: Block) -> dict[str, np.ndarray[Any, Any]]:
    """Read the ids `[N]` and every array that holds one value per row."""
    names = [array.name for array in block.schema.arrays if not array.shape and not array.ragged]
    parts: dict[str, list[Any]] = {name: [] for name in ("id", *names)}
    for batch in block.stream(names):
        parts["id"].append(batch.ids)
        for name in names:
            parts[name].append(batch[name])
    columns = {}
    for name, pieces in parts.items():
        dtype = "int64" if name == "id" else block.schema.array(name).dtype
        columns[name] = np.concatenate([np.empty(0, dtype), *pieces])
    return columns


def holds_samples_of(data: bytes, block: Block, labels: Mapping[str, str], *, path: str) -> bool:
    """Return True if Parquet bytes hold exactly the labels, ids and scalars of a version."""
    pa = import_extra("pyarrow", extra="sql", what="Parquet")
    import pyarrow.parquet as pq

    try:
        # Without threads: remaining threads of pyarrow can abort a process that ends at once.
        table = pq.ParquetFile(pa.BufferReader(data)).read(use_threads=False)
    except (pa.ArrowException, OSError) as error:
        raise DamagedError(
            "the Parquet file cannot be read",
            code="store.unreadable_samples",
            path=path,
            found=str(error)[:200],
        ) from error
    expected = samples_table(block, labels)
    # As text: NaN is not equal to itself.
    return table.column_names == expected.column_names and all(
        str(table.column(name).to_pylist()) == str(expected.column(name).to_pylist())
        for name in expected.column_names
    )


def ensure_samples(
    backend: Backend, block: Block, labels: Mapping[str, str], *, durability: Durability
) -> bytes:
    """Return the Parquet bytes of a version: read and checked, or created and saved."""
    key = find_samples(backend, block.folder, block.version)
    if key is not None:
        data = backend.read(key)
        check_samples(data, key.rpartition("/")[2], path=backend.describe(key))
        return data
    import pyarrow.parquet as pq

    buffer = io.BytesIO()
    # A dictionary of ids, which all differ, would only cost time.
    texts = [array.name for array in block.schema.arrays if array.is_text]
    pq.write_table(
        samples_table(block, labels),
        buffer,
        compression="zstd",
        use_dictionary=[*labels, *texts],
    )
    data = buffer.getvalue()
    digest = xxhash.xxh3_128_hexdigest(data)
    name = f"{_PREFIX}{block.version:06d}-{_tie(block, digest)}-{digest}{_SUFFIX}"
    # A read-only store can still be queried.
    with contextlib.suppress(ReadOnlyError):
        backend.put_if_absent(f"{block.folder}/{name}", [data], durability=durability)
    return data


def samples_available() -> bool:
    """Return True if pyarrow is installed."""
    return importlib.util.find_spec("pyarrow") is not None
