"""Rows by id, read, verified and mapped in any order, against the values that were written."""

import os
import shutil
import tempfile
import time

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given
from raises import raises

import gradkeep as gk
from gradkeep.errors import DamagedError, GradkeepError
from gradkeep.store.blocks import _block

KEY = gk.store.CaptureKey("final", "train")
ROWS, PER_SEGMENT = 300, 64
ARRAYS = (
    gk.store.Array("wide", shape=(1500,)),  # several rows share a checksum
    gk.store.Array("narrow", shape=(3,)),  # verified as a whole
    gk.store.Array("half", shape=(700,), kind="suffix", encoding="float16-scaled"),
    gk.store.Array("packed", shape=(400,), compression="zstd"),
    gk.store.Array("ragged", shape=(200,), ragged=True),
)


def write(folder, seed):
    rng = np.random.default_rng(seed)
    values = {
        array.name: rng.standard_normal((ROWS, *array.shape)).astype(np.float32)
        for array in ARRAYS
        if not array.ragged
    }
    lengths = rng.integers(0, 9, ROWS)
    values["ragged"] = [rng.standard_normal((t, 200)).astype(np.float32) for t in lengths]
    schema = gk.store.Schema(ARRAYS, num_rows=ROWS, rows_per_segment=PER_SEGMENT)
    with gk.open(folder, durability="process").write(KEY, schema) as writer:
        writer.append(np.arange(ROWS), values)
    return values


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rows") / "store"
    values = write(folder, 0)
    time.sleep(0.15)  # files count as settled only a little after they were written
    return folder, values


def check(batch, values, ids):
    for array in ARRAYS:
        if array.ragged:
            for at, row in enumerate(ids):
                np.testing.assert_array_equal(batch[array.name][at], values[array.name][row])
        else:
            close = 1e-3 if array.name == "half" else 0
            expected = values[array.name][list(ids)]
            np.testing.assert_allclose(batch[array.name], expected, rtol=close, atol=close)


ids_of_reads = st.lists(
    st.one_of(
        st.lists(st.integers(0, ROWS - 1), max_size=20),
        st.tuples(st.integers(0, ROWS - 1), st.integers(0, 40)).map(
            lambda run: list(range(run[0], min(ROWS, sum(run))))
        ),
    ),
    min_size=1,
    max_size=5,
)


@given(reads=ids_of_reads, verify=st.booleans(), limit=st.sampled_from([0, 300_000, 1 << 28]))
def test_every_read_returns_what_was_written(written, reads, verify, limit):
    folder, values = written
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_block, "MOST_MAPPED", limit)
        block = gk.open(folder, verify=verify).read(KEY)
        for ids in reads:
            for _ in range(2):  # the second time rows are known
                check(block.read(ids), values, ids)
                check(block.read_rows(ids), values, ids)


def test_maps_are_limited(written, monkeypatch):
    folder, _ = written
    block = gk.open(folder).read(KEY)
    size = max(entry.bytes for entry in block.manifest.segments)
    monkeypatch.setattr(_block, "MOST_MAPPED", 2 * size)
    mapped = []
    for _ in range(3):
        for row in range(0, ROWS, PER_SEGMENT):
            block.read([row, row + 9], ["wide"])
            mapped.append(sum(opened.mapped_bytes for opened in block._opened.values()))
    assert 0 < max(mapped) <= 2 * size


@given(seed=st.integers(0, 30))
def test_what_is_remembered_of_a_file_ends_with_it(seed):
    folder = tempfile.mkdtemp()
    try:
        values = write(f"{folder}/one", 1)
        write(f"{folder}/other", 2)
        time.sleep(0.12)
        ids = np.random.default_rng(seed).choice(ROWS, 9, replace=False).tolist()
        for _ in range(2):
            check(gk.open(f"{folder}/one").read(KEY).read(ids), values, ids)
        seg = f"{folder}/one/{KEY.folder}/seg"
        name = sorted(os.listdir(seg))[seed % 3]
        if seed % 2:
            os.unlink(f"{seg}/{name}")
        else:
            os.replace(f"{folder}/other/{KEY.folder}/seg/{name}", f"{seg}/{name}")
        with pytest.raises(GradkeepError):
            gk.open(f"{folder}/one").read(KEY).read(range(ROWS))
    finally:
        shutil.rmtree(folder)


def test_a_flipped_byte_is_found_by_the_first_read_of_its_rows(tmp_path):
    write(tmp_path / "store", 1)
    time.sleep(0.15)
    block = gk.open(tmp_path / "store").read(KEY)
    block.read([0, 1], ["wide"])
    block.read([0, 1], ["wide"])
    extent = block._segment(block.manifest.segments[0]).extents["wide"]
    path = tmp_path / "store" / KEY.folder / block.manifest.segments[0].file
    content = bytearray(path.read_bytes())
    content[extent.stop - 5] ^= 1
    path.write_bytes(content)
    fresh = gk.open(tmp_path / "store").read(KEY)
    with raises(DamagedError, "store.damaged"):
        fresh.read([PER_SEGMENT - 1], ["wide"])
