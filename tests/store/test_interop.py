"""Other tools read a store's files without gradkeep."""

import json
import struct
from itertools import pairwise

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from store_suite.examples import ARRAYS, ExampleRow, batch_of, check_column, ids_of, schema

import gradkeep as gk

KEY = gk.store.CaptureKey(checkpoint="final", split="train", run="main")
ROWS = [ExampleRow(number) for number in (7, 3, 11, 0, 5, 2, 40, 1, 8, 90)]
ITEM_BYTES = {
    **dict.fromkeys(("BOOL", "U8", "I8"), 1),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 2),
    **dict.fromkeys(("F32", "I32", "U32"), 4),
    **dict.fromkeys(("F64", "I64", "U64"), 8),
}
PLAIN = [array for array in ARRAYS if array.encoding == "plain" and not array.compression]


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    store = gk.open(tmp_path_factory.mktemp("interop"), durability="process")
    with store.write(KEY, schema(6)) as writer:
        writer.append(ids_of(ROWS), batch_of(ROWS))
    return store


@pytest.fixture(params=[(0, 6), (6, 10)], ids=["first", "last"])
def segment(request, store):
    """The path of a segment and the rows in it."""
    start, stop = request.param
    block = store.read(KEY)
    file = block.manifest.segments[start // 6].file
    return store.backend.local_path(f"{KEY.folder}/{file}"), ROWS[start:stop]


def header_of(path):
    with open(path, "rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        return json.loads(file.read(length)), 8 + length


def ragged(values, offsets):
    return [values[low:high] for low, high in pairwise(offsets)]


def test_safetensors_reads_a_segment_with_numpy(segment):
    path, rows = segment
    with safe_open(path, framework="np") as file:
        assert file.get_tensor("ids").tolist() == ids_of(rows)
        for array in PLAIN:
            values = file.get_tensor(array.name)
            if array.ragged:
                values = ragged(values, file.get_tensor(f"{array.name}#offsets"))
            check_column(array, values, rows)
        half, scale = file.get_tensor("scaled"), file.get_tensor("scaled#scale")
        scaled = half.astype(np.float32) * scale[:, None]
        check_column(next(a for a in ARRAYS if a.name == "scaled"), scaled, rows)
        bits = np.unpackbits(file.get_tensor("mask"), axis=1, count=11, bitorder="little")
        assert bits.tolist() == [row.values()["mask"].tolist() for row in rows]
        assert len(file.get_slice("loss")[1:3]) == 2


def test_safetensors_reads_a_segment_with_torch(segment, store):
    path, rows = segment
    tensors = load_file(path)
    assert tensors["ids"].tolist() == ids_of(rows)
    assert tensors["suffix"].dtype == torch.bfloat16
    # The same rounding as torch's own.
    expected = torch.tensor(np.array([row.values()["suffix"] for row in rows])).bfloat16()
    assert torch.equal(tensors["suffix"], expected)
    batch = store.read(KEY).read(ids_of(rows))
    assert torch.equal(tensors["suffix"].float(), batch.tensor("suffix"))
    assert tensors["prefix"].dtype == torch.float16
    assert torch.equal(tensors["prefix"].float(), batch.tensor("prefix"))


def test_the_metadata_of_a_segment_is_readable(segment, store):
    path, rows = segment
    with safe_open(path, framework="np") as file:
        metadata = file.metadata()
        names = set(file.keys())
    assert metadata["format"].startswith("gradkeep-segment")
    assert metadata["schema"] == store.read(KEY).schema.hash
    assert metadata["rows"] == str(len(rows))
    assert metadata["first_row"] == str(ROWS.index(rows[0]))
    assert all(len(metadata[f"xxh3:{name}"]) == 32 for name in names)


def test_every_tensor_is_aligned_and_can_be_mapped(segment):
    path, rows = segment
    header, base = header_of(path)
    del header["__metadata__"]
    assert base % 64 == 0
    for item in header.values():
        assert (base + item["data_offsets"][0]) % ITEM_BYTES[item["dtype"]] == 0
    for array in PLAIN:
        item = header[array.name]
        offset = base + item["data_offsets"][0]
        shape = tuple(item["shape"])
        if 0 in shape:
            continue  # numpy cannot map nothing
        values = np.memmap(path, array.dtype, "r", offset=offset, shape=shape)
        assert values.flags.aligned
        if not array.ragged:
            check_column(array, values, rows)


def test_a_large_segment_begins_at_a_page(tmp_path):
    store = gk.open(tmp_path, durability="process")
    wide = gk.store.Schema(
        (
            gk.store.Array("x", shape=(1024,), kind="data"),
            gk.store.Array("odd", "uint8", (3,), kind="data"),
        )
    )
    values = np.random.default_rng(0).standard_normal((600, 1024), np.float32)
    with store.write(KEY, wide) as writer:
        writer.append(range(600), {"x": values, "odd": np.zeros((600, 3), np.uint8)})
    entry = store.read(KEY).manifest.segments[0]
    path = store.backend.local_path(f"{KEY.folder}/{entry.file}")
    header, base = header_of(path)
    assert base % 4096 == 0
    start = base + header["x"]["data_offsets"][0]
    mapped = np.memmap(path, np.float32, "r", offset=start, shape=(len(load_file(path)["x"]), 1024))
    assert np.array_equal(mapped, values[: len(mapped)])


@pytest.fixture
def samples(store):
    names = [entry.name for entry in store.backend.list(KEY.folder)]
    (name,) = [name for name in names if name.endswith(".parquet")]
    return store.backend.local_path(f"{KEY.folder}/{name}")


def test_duckdb_reads_the_samples(samples):
    import duckdb

    with duckdb.connect() as connection:
        actual = connection.execute(
            "select id, loss, label, split, checkpoint, run from read_parquet(?) order by id",
            [samples],
        ).fetchall()
    values = {row.id: row.values() for row in ROWS}
    assert actual == [
        (
            number,
            float(values[number]["loss"]),
            int(values[number]["label"]),
            "train",
            "final",
            "main",
        )
        for number in sorted(values)
    ]


def test_pyarrow_reads_the_samples(samples):
    import pyarrow.parquet as pq

    table = pq.read_table(samples)
    assert table["id"].to_pylist() == ids_of(ROWS)
    losses = np.array([row.values()["loss"] for row in ROWS])
    assert table["loss"].to_numpy().tobytes() == losses.tobytes()
    assert pq.read_metadata(samples).row_group(0).column(0).compression == "ZSTD"


def test_documents_are_plain_json(store):
    actual = 0
    for name in ("STORE.json", f"{KEY.folder}/schema.json", f"{KEY.folder}/manifest/000000.json"):
        with open(store.backend.local_path(name)) as file:
            actual += "xxh3" in json.load(file)
    assert actual == 3
