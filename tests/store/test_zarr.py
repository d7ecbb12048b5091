"""A block's array through Zarr: the same values, verified, and nothing missing read as a number."""

import json
import sys

import numpy as np
import pytest
from raises import raises

import gradkeep as gk
from gradkeep.errors import (
    DamagedError,
    MissingExtraError,
    MissingRowsError,
    NotSealedError,
    StoreError,
)
from gradkeep.store import Bucket, LocalDisk, Memory, zarr_references, zarr_view

KEY = gk.store.CaptureKey(checkpoint="final", split="train")
SHOWN = (
    gk.store.Array("loss"),
    gk.store.Array("wide", "float64", (3,), kind="data"),
    gk.store.Array("half", "float16", (2, 5), kind="prefix"),
    gk.store.Array("prefix", shape=(4,), kind="prefix", encoding="float16"),
    gk.store.Array("flag", "bool"),
    *(
        gk.store.Array(name, name, (2,), kind="data")
        for name in ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
    ),
)
REFUSED = (
    gk.store.Array("bfloat16", shape=(2,), kind="suffix", encoding="bfloat16"),
    gk.store.Array("scaled", shape=(2,), kind="suffix", encoding="float16-scaled"),
    gk.store.Array("small", shape=(2,), kind="suffix", encoding="int8-scaled"),
    gk.store.Array("mask", "bool", (9,), kind="mask", encoding="bits"),
    gk.store.Array("tokens", shape=(2,), kind="prefix", ragged=True),
    gk.store.Array("cold", shape=(2,), kind="data", compression="zstd"),
)


@pytest.fixture(params=["disk", "memory", "bucket"])
def store(request, tmp_path):
    places = {"disk": lambda: LocalDisk(tmp_path), "memory": Memory}
    backend = places.get(request.param, lambda: Bucket("memory://"))()
    return gk.open(backend, durability="process")


def rows(arrays, count, first=0):
    random = np.random.default_rng(first)
    values = {}
    for array in arrays:
        shape = (count, *array.shape)
        if array.ragged:
            values[array.name] = [np.ones((1, *array.shape), array.dtype)] * count
        elif array.dtype.startswith("float"):
            values[array.name] = random.standard_normal(shape).astype(array.dtype)
        else:
            values[array.name] = random.integers(0, 2, shape).astype(array.dtype)
    return values


def write(store, arrays, count, *, first=0, extend=False):
    schema = gk.store.Schema(arrays, rows_per_segment=4)
    with store.write(KEY, schema, extend=extend) as writer:
        writer.append(range(first, first + count), rows(arrays, count, first))
    return store.read(KEY)


@pytest.mark.parametrize("count", [0, 1, 4, 7, 8, 13])
def test_a_view_holds_the_values_of_the_column(store, count):
    block = write(store, SHOWN, count)
    for array in SHOWN:
        view = zarr_view(block, array.name)
        assert view.shape == (count, *array.shape)
        assert view.dtype == array.stored_dtype
        assert view.read_only
        column = block.column(array.name)
        # float16 is shown as it is stored; widened, it is what the column says.
        assert np.array_equal(np.asarray(view[:]).astype(array.dtype), column), array.name
        assert np.array_equal(np.asarray(view[2:6]).astype(array.dtype), column[2:6])


def test_a_view_of_whole_segments_is_chunked_by_them(store):
    view = zarr_view(write(store, SHOWN, 13), "half")
    assert view.chunks == (4, 2, 5)
    assert view.nchunks == 4
    assert np.isnan(view.fill_value)
    assert view.attrs["version"] == 0


@pytest.mark.parametrize("array", REFUSED, ids=lambda array: array.name)
def test_what_zarr_cannot_show_is_refused(store, array):
    block = write(store, (array,), 5)
    for show in (zarr_view, zarr_references):
        with pytest.raises(StoreError, match=r"block\.column\("):
            show(block, array.name)


def test_segments_of_different_lengths_are_refused(store):
    write(store, SHOWN, 6)
    extended = write(store, SHOWN, 3, first=6, extend=True)
    with raises(StoreError, "store.zarr_segments"):
        zarr_view(extended, "loss")
    store.drop_rows(KEY, [1])
    with raises(StoreError, "store.zarr_segments"):
        zarr_view(store.read(KEY), "loss")


def test_rows_dropped_from_the_end_do_not_hurt(store):
    write(store, SHOWN, 10)
    store.drop_rows(KEY, [8])
    block = store.read(KEY)
    assert np.array_equal(zarr_view(block, "wide")[:], block.column("wide"))


def test_of_a_block_still_being_written_only_floats_are_shown(store):
    writer = store.write(KEY, gk.store.Schema(SHOWN, rows_per_segment=4))
    writer.append(range(8), rows(SHOWN, 8))
    writer.flush()
    live = store.read(KEY, live=True)
    assert np.array_equal(zarr_view(live, "wide")[:], live.column("wide"))
    for name in ("int64", "uint8", "flag"):
        with pytest.raises(NotSealedError):
            zarr_view(live, name)
    writer.close()


@pytest.mark.parametrize("name", ["loss", "int64"])
def test_a_segment_that_is_gone_raises_and_is_no_fill_value(store, name):
    block = write(store, SHOWN, 13)
    view = zarr_view(block, name)
    store.backend.delete([f"{KEY.folder}/seg/000001.safetensors"], durability="process")
    assert len(view[:4]) == 4
    with pytest.raises(MissingRowsError):
        view[:]


def test_a_changed_byte_is_noticed(store):
    block = write(store, SHOWN, 13)
    key = f"{KEY.folder}/seg/000001.safetensors"
    content = bytearray(store.backend.read(key))
    content[-1] ^= 1  # the last tensor is the last one-byte array
    store.backend.delete([key], durability="process")
    store.backend.put_if_absent(key, [bytes(content)], durability="process")
    with pytest.raises(DamagedError):
        zarr_view(block, "uint8")[:]


@pytest.mark.parametrize("count", [1, 8, 13])
def test_references_are_read_by_fsspec_and_zarr(tmp_path, count):
    import zarr

    block = write(gk.open(tmp_path, durability="process"), SHOWN, count)
    for array in SHOWN:
        # Written and read again, as another program would get them.
        references = json.loads(json.dumps(zarr_references(block, array.name)))
        options = {"fo": references, "remote_protocol": "file"}
        shown = zarr.open_array("reference://", mode="r", storage_options=options)
        assert np.array_equal(np.asarray(shown[:]).astype(array.dtype), block.column(array.name))


def test_references_point_into_the_segments(tmp_path):
    block = write(gk.open(tmp_path, durability="process"), SHOWN, 13)
    refs = zarr_references(block, "wide")["refs"]
    path, offset, length = refs["c/2/0"]
    with open(path, "rb") as file:
        file.seek(offset)
        batch = np.frombuffer(file.read(length)).reshape(4, 3)
    assert np.array_equal(batch, block.column("wide")[8:12])
    assert refs["c/3/0"].startswith("base64:")


def test_references_need_files():
    block = write(gk.open(Memory()), SHOWN, 13)
    with raises(StoreError, "store.no_local_file", fix="zarr_view"):
        zarr_references(block, "loss")


def test_without_zarr_the_extra_is_named(monkeypatch):
    block = write(gk.open(Memory()), SHOWN, 4)
    monkeypatch.setitem(sys.modules, "zarr", None)
    with pytest.raises(MissingExtraError, match=r"pip install -e .*\[zarr\]"):
        zarr_view(block, "loss")
