"""Per-sample scalars as Parquet, beside the segments they were taken from.

The file is derived: it can be deleted and is made again when it is needed. Its name carries the
version it belongs to and the digest of its own bytes, so it is immutable and checks itself. Between
them stands what ties both together, a digest of the manifest's digest and the file's: under another
version's name, or in another block's folder, it is told without being read as Parquet.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from gradkeep._surroundings import import_extra
from gradkeep.errors import DamagedError, ReadOnlyError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from gradkeep.store.backends._backend import Backend, Durability
    from gradkeep.store.blocks._block import Block

_PREFIX = "samples-"
_SUFFIX = ".parquet"


def find_samples(backend: Backend, folder: str, version: int) -> str | None:
    """The key of a version's Parquet file, if it was made."""
    start = f"{_PREFIX}{version:06d}-"
    for entry in backend.list(folder):
        if entry.name.startswith(start) and entry.name.endswith(_SUFFIX):
            return f"{folder}/{entry.name}"
    return None


def is_samples(name: str) -> bool:
    """Whether a file name is that of a Parquet file of samples."""
    return name.startswith(_PREFIX) and name.endswith(_SUFFIX)


def check_samples(data: bytes | memoryview, name: str, *, path: str) -> None:
    """Raise `DamagedError` unless the bytes are those that the name promises."""
    if xxhash.xxh3_128_hexdigest(data) != name.removesuffix(_SUFFIX).rpartition("-")[2]:
        raise DamagedError(
            "this Parquet file is not as it was written",
            path=path,
            fix="delete it, or run `gradkeep verify STORE --repair`: it is made again when needed",
        )


def is_tied(name: str, block: Block) -> bool | None:
    """Whether a file name is that of Parquet made of this version; None of names that do not tell."""
    parts = name.removesuffix(_SUFFIX).split("-")
    return None if len(parts) != 4 else parts[2] == _tie(block, parts[3])


def _tie(block: Block, digest: str) -> str:
    tied = f"{block.folder} {block.manifest.digest} {digest}"
    return xxhash.xxh3_64_hexdigest(tied.encode())


def samples_table(block: Block, labels: Mapping[str, str]) -> Any:
    """An Arrow table: the labels, `id`, and every array that holds one value, or text, per row."""
    pa = import_extra("pyarrow", extra="sql", what="Parquet")
    columns: dict[str, Any] = {}
    for name, value in labels.items():
        indices = _column(pa, np.zeros(len(block), np.int32))
        columns[name] = pa.DictionaryArray.from_arrays(indices, _text_column(pa, [value]))
    columns |= {name: _column(pa, values) for name, values in _scalars(block).items()}
    columns |= {name: _text_column(pa, values) for name, values in _texts(block).items()}
    return pa.Table.from_pydict(columns)


def _column(pa: Any, values: np.ndarray[Any, Any]) -> Any:
    """The values as Arrow has them; laid down as memory, for `pa.array` loads pandas."""
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
    """Every array that holds a text per row."""
    return {array.name: block.column(array.name) for array in block.schema.arrays if array.is_text}


def _scalars(block: Block) -> dict[str, np.ndarray[Any, Any]]:
    """The ids `[N]` and every array that holds one value per row."""
    names = [array.name for array in block.schema.arrays if not array.shape and not array.ragged]
    parts: dict[str, list[Any]] = {name: [] for name in ("id", *names)}
    for batch in block.stream(names):
        parts["id"].append(batch.ids)
        for name in names:
            parts[name].append(batch[name])
    found = {}
    for name, pieces in parts.items():
        dtype = "int64" if name == "id" else block.schema.array(name).dtype
        found[name] = np.concatenate([np.empty(0, dtype), *pieces])
    return found


def holds_samples_of(data: bytes, block: Block, labels: Mapping[str, str], *, path: str) -> bool:
    """Whether Parquet bytes hold exactly the labels, ids and scalars of a block's version."""
    pa = import_extra("pyarrow", extra="sql", what="Parquet")
    import pyarrow.parquet as pq

    try:
        # Without threads: those that pyarrow leaves behind can abort a process that ends at once.
        found = pq.ParquetFile(pa.BufferReader(data)).read(use_threads=False)
    except (pa.ArrowException, OSError) as error:
        raise DamagedError(
            "this Parquet file cannot be read", path=path, found=str(error)[:200]
        ) from error
    wanted = samples_table(block, labels)
    # As text: NaN is not equal to itself.
    return found.column_names == wanted.column_names and all(
        str(found.column(name).to_pylist()) == str(wanted.column(name).to_pylist())
        for name in wanted.column_names
    )


def ensure_samples(
    backend: Backend, block: Block, labels: Mapping[str, str], *, durability: Durability
) -> bytes:
    """The Parquet bytes of a block's version: read and checked, or made now and kept."""
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
    # A store that may only be read is queried all the same.
    with contextlib.suppress(ReadOnlyError):
        backend.put_if_absent(f"{block.folder}/{name}", [data], durability=durability)
    return data


def samples_available() -> bool:
    """Whether Parquet can be written here."""
    return importlib.util.find_spec("pyarrow") is not None
