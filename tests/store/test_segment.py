"""The segment's format, recomputed here from its description alone."""

import json

import numpy as np
import pytest
import xxhash

import gradkeep as gk
from gradkeep.errors import DamagedError
from gradkeep.store import Memory
from gradkeep.store.blocks._segment import Segment

KEY = gk.store.CaptureKey(checkpoint="final", split="train")
NAME = f"{KEY.folder}/seg/000000.safetensors"
RNG = np.random.default_rng(0)


def write(arrays, values, rows):
    backend = Memory()
    store = gk.open(backend)
    with store.write(
        KEY, gk.store.Schema(tuple(arrays), num_rows=rows, rows_per_segment=rows)
    ) as writer:
        writer.append(np.arange(rows), values)
    return backend, store


def parts_of(data):
    length = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + length]), data[8 + length :], data[: 8 + length]


def big():
    rows = 700
    arrays = [
        gk.store.Array("loss"),
        gk.store.Array("fc.prefix", shape=(3000,), kind="prefix"),
        gk.store.Array("fc.suffix", shape=(40,), kind="suffix", encoding="int8-scaled"),
    ]
    values = {
        "loss": RNG.normal(size=rows).astype(np.float32),
        "fc.prefix": RNG.normal(size=(rows, 3000)).astype(np.float32),
        "fc.suffix": RNG.normal(size=(rows, 40)).astype(np.float32),
    }
    return arrays, values, rows


def test_the_header_digest_covers_length_and_header():
    backend, _ = write(*big())
    header, _, raw = parts_of(backend.read(NAME))
    digest = header["__metadata__"]["header_xxh3"]
    assert next(iter(header)) == "__metadata__"
    zeroed = raw.replace(digest.encode(), b"0" * 32, 1)
    assert xxhash.xxh3_128_hexdigest(zeroed) == digest


def test_tensor_digests_are_of_bytes_or_of_block_digests():
    backend, _ = write(*big())
    header, data, _ = parts_of(backend.read(NAME))
    notes = header.pop("__metadata__")
    blocked = 0
    for name, item in header.items():
        low, high = item["data_offsets"]
        expected = xxhash.xxh3_128_hexdigest(data[low:high])
        if f"blocks:{name}" in notes:
            step, _, joined = notes[f"blocks:{name}"].partition(":")
            pieces = [data[at : min(high, at + int(step))] for at in range(low, high, int(step))]
            digests = b"".join(xxhash.xxh3_128_digest(piece) for piece in pieces)
            assert digests.hex() == joined
            expected = xxhash.xxh3_128_hexdigest(digests)
            blocked += 1
        assert notes[f"xxh3:{name}"] == expected
    assert blocked == 1


def test_checks_cover_groups_of_rows():
    arrays, values, rows = big()
    backend, _ = write(arrays, values, rows)
    header, data, _ = parts_of(backend.read(NAME))
    low, high = header["fc.prefix#check"]["data_offsets"]
    checks = np.frombuffer(data[low:high], np.uint64)
    group = int(header["__metadata__"]["check_rows:fc.prefix"])
    raw = values["fc.prefix"]
    expected = [xxhash.xxh3_64_intdigest(raw[at : at + group]) for at in range(0, rows, group)]
    assert checks.tolist() == expected


def test_every_tensor_is_aligned_for_its_type():
    for arrays, values, rows in (
        big(),
        ([gk.store.Array("a", "uint8"), gk.store.Array("b")], None, 5),
    ):
        values = values or {"a": np.arange(5, dtype=np.uint8), "b": np.arange(5, dtype=np.float32)}
        backend, _ = write(arrays, values, rows)
        segment = Segment(backend, NAME)
        for extent in segment.extents.values():
            assert extent.start % extent.dtype.itemsize == 0
        assert min(extent.start for extent in segment.extents.values()) % 64 == 0


@pytest.mark.parametrize("ids", [[0], [699], [5, 5, 4], list(range(0, 700, 7)), list(range(700))])
@pytest.mark.parametrize("compression", [None, "zstd"])
def test_gathered_rows_are_the_rows(ids, compression):
    rows = 700
    shapes = {"wide": (3000,), "narrow": (7,), "scalar": ()}
    arrays = [
        gk.store.Array(name, shape=shape, compression=compression) for name, shape in shapes.items()
    ]
    values = {name: RNG.normal(size=(rows, *shape)).astype("f4") for name, shape in shapes.items()}
    _, store = write(arrays, values, rows)
    batch = store.read(KEY).read(ids)
    for name in shapes:
        np.testing.assert_array_equal(batch[name], values[name][ids])


def test_a_gather_checks_only_what_it_reads():
    arrays, values, rows = big()
    backend, store = write(arrays, values, rows)
    data = bytearray(backend.read(NAME))
    start = Segment(backend, NAME).extents["fc.prefix"].start
    data[start + 100 * 12000] ^= 1  # in row 100
    backend._values[NAME] = bytes(data)
    np.testing.assert_array_equal(
        store.read(KEY).read([99])["fc.prefix"][0], values["fc.prefix"][99]
    )
    with pytest.raises(DamagedError, match=r"tensor 'fc\.prefix'") as caught:
        store.read(KEY).read([100])
    assert caught.value.tensor == "fc.prefix"
    with pytest.raises(DamagedError, match=r"tensor 'fc\.prefix'"):
        list(store.read(KEY).stream(["fc.prefix"]))
    assert len(store.read(KEY).column("loss")) == rows


def test_a_stream_hands_out_nothing_of_a_damaged_block():
    arrays, values, rows = big()
    backend, store = write(arrays, values, rows)
    data = bytearray(backend.read(NAME))
    data[Segment(backend, NAME).extents["fc.prefix"].stop - 1] ^= 1
    backend._values[NAME] = bytes(data)
    seen = []
    with pytest.raises(DamagedError):
        seen.extend(store.read(KEY).stream(["fc.prefix"], batch_rows=10))
    actual = np.concatenate([batch["fc.prefix"] for batch in seen])
    assert 0 < len(actual) < rows
    np.testing.assert_array_equal(actual, values["fc.prefix"][: len(actual)])


def test_underflow_is_noted():
    values = {"x": np.array([[1.0, 1e-30]], np.float32)}
    backend, _ = write([gk.store.Array("x", shape=(2,), encoding="int8-scaled")], values, 1)
    assert Segment(backend, NAME).metadata["underflow:x"] == "1/2"


def test_rows_and_parts_of_a_stream_open_no_other_segments(monkeypatch):
    store = gk.open(Memory())
    arrays = (
        gk.store.Array("loss"),
        gk.store.Array("tokens", "int64", ragged=True, kind="data"),
        gk.store.Array("fc", shape=(5,), encoding="int8-scaled"),
    )
    ids = np.arange(100)[::-1] * 2
    values = {
        "loss": np.arange(100, dtype=np.float32),
        "tokens": [np.arange(n % 4) + n for n in range(100)],
        "fc": RNG.normal(size=(100, 5)).astype(np.float32),
    }
    with store.write(KEY, gk.store.Schema(arrays, rows_per_segment=10)) as writer:
        writer.append(ids, values)
    whole = store.read(KEY).read(ids)
    block, opened = store.read(KEY), []
    real = type(block)._open
    monkeypatch.setattr(
        type(block), "_open", lambda self, entry: opened.append(entry.file) or real(self, entry)
    )
    rows = np.array([57, 3, 57, 8, 91])
    some = block.read_rows(rows)
    assert len(opened) == 3
    assert some.ids.tolist() == ids[rows].tolist()
    assert some["loss"].tolist() == rows.tolist()
    assert [some["tokens"][at].tolist() for at in range(5)] == [
        values["tokens"][row].tolist() for row in rows
    ]
    assert np.array_equal(some["fc"], whole["fc"][rows])
    assert block.read_rows([])["loss"].shape == (0,)
    opened.clear()
    parts = list(block.stream(["loss"], batch_rows=4, segments=range(2, 4)))
    assert len(opened) == 2
    assert [part.first_row for part in parts] == [20, 24, 28, 30, 34, 38]
    assert np.concatenate([part["loss"] for part in parts]).tolist() == list(range(20, 40))
