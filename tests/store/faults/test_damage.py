"""One flipped bit or one cut, anywhere: `verify` names it, and a read that meets it raises."""

import io
import itertools
import json
import os
import random
import re
from pathlib import Path

import faultkit as kit
import numpy as np
import pytest

from gradkeep import store as gs
from gradkeep.errors import DamagedError, MissingRowsError, StoreError
from gradkeep.store.catalog import _sql

pytestmark = pytest.mark.slow
ARRAYS = (
    gs.Array("loss"),
    gs.Array("label", "int64"),
    gs.Array("wide", shape=(520,), kind="embedding"),  # above 64 KiB: has checks of row groups
    gs.Array("bf16", shape=(6,), kind="suffix", encoding="bfloat16"),
    gs.Array("fp16", shape=(6,), kind="prefix", encoding="float16"),
    gs.Array("fp16s", shape=(6,), kind="suffix", encoding="float16-scaled"),
    gs.Array("int8s", shape=(6,), kind="suffix", encoding="int8-scaled"),
    gs.Array("bits", "bool", shape=(20,), kind="mask", encoding="bits"),
    gs.Array("tokens", shape=(3,), kind="data", ragged=True, encoding="int8-scaled"),
    gs.Array("packed", shape=(40,), kind="data", compression="zstd"),
    gs.Array("packed_tokens", "int32", shape=(4,), kind="data", ragged=True, compression="zstd"),
)
ROWS = 33  # a segment; `wide` then takes 67 KiB
CAPTURE = gs.CaptureKey("final", "train")
SCORES = gs.ScoresKey("kernel")
CHANGES = 1000  # of each kind
PARTS = 8  # in which they are made, for several processes


def arrays(ids):
    ids = np.asarray(ids)
    chance = np.random.default_rng(ids)
    actual = {}
    for array in ARRAYS:
        shape = (len(ids), *array.shape)
        if array.ragged:
            lengths = 1 + ids % 3
            actual[array.name] = [
                chance.integers(0, 99, (n, *array.shape)).astype(array.dtype) for n in lengths
            ]
        elif array.dtype == "bool":
            actual[array.name] = chance.random(shape) < 0.5
        else:
            actual[array.name] = chance.integers(0, 99, shape).astype(array.dtype)
    return actual


def make_store(path):
    """A store with every kind of file."""
    store = gs.open(path, durability="process")
    store.add_run(gs.Run("main", config={"lr": 0.1}))
    store.add_checkpoint(gs.Checkpoint("main", "final", weights="1a", step=60))
    schema = gs.Schema(ARRAYS, rows_per_segment=ROWS, fingerprints={"weights": "1a"})
    with store.write(CAPTURE, schema) as writer:
        writer.append(range(ROWS), arrays(range(ROWS)))
    with store.write(CAPTURE, schema, extend=True) as writer:
        writer.append(range(40, 45), arrays(range(40, 45)))
    store.drop_rows(CAPTURE, [41, 44])
    scores = gs.Schema((gs.Array("scores", shape=(3,), kind="data"),), rows_per_segment=4)
    with store.write(SCORES, scores) as writer:
        writer.append(range(4), {"scores": np.ones((4, 3), np.float32)})
    small = gs.Schema((gs.Array("outputs", shape=(4,)), gs.Array("seed", "int64")))
    rows = store.rows("models", small, num_rows=6)
    for row in range(3):
        rows.put(row, {"outputs": np.full(4, row, np.float32), "seed": row})
    rows.compact(rows_per_file=2, partial=True)
    rows.put(3, {"outputs": np.full(4, 3, np.float32), "seed": 3})
    (lease,) = rows.claim(owner="a")
    rows.fail(lease, "ValueError: no")
    rows.claim(owner="b", seconds=1e6)
    return path


def kind_of(key):
    """Files of one kind are damaged as often as those of every other."""
    parts = key.split("/")
    if parts[0] == "heads":
        return "heads"
    if "claims" in parts or "failed" in parts or "size" in parts:
        return parts[2]
    return re.sub(r"[0-9a-f]{6,}|\d", "#", "/".join(parts[-2:]))


class Target:
    """A store to damage, one file at a time."""

    def __init__(self, path):
        self.path = path
        self.files = {}
        for folder, _, names in os.walk(path):
            for name in names:
                file = Path(folder, name)
                self.files[str(file.relative_to(path))] = file.read_bytes()
        self.kinds = {}
        for key in sorted(self.files):
            self.kinds.setdefault(kind_of(key), []).append(key)

    def places(self):
        """Where to damage: both ends of every file, header and tensor, then anywhere."""
        # A record of a row is an empty file: it has no bit to flip and nothing to cut.
        spans = {key: regions(key, content) for key, content in self.files.items() if content}
        for key in sorted(spans):
            for tensor, (start, stop) in spans[key].items():
                yield from ((key, tensor, start), (key, tensor, stop - 1))
        chance = random.Random(3)
        while True:
            kind = chance.choice(sorted(self.kinds))
            key = chance.choice([key for key in self.kinds[kind] if key in spans])
            tensor, (start, stop) = chance.choice(list(spans[key].items()))
            yield key, tensor, chance.randrange(start, stop)

    def part(self, number):
        """A share of the places."""
        return itertools.islice(self.places(), number, CHANGES, PARTS)

    def damage(self, key, content):
        (self.path / key).write_bytes(content)

    def heal(self, key):
        (self.path / key).write_bytes(self.files[key])


def regions(key, content):
    """Where the header (None) and every tensor lie in a segment; another file is one region."""
    if not key.endswith(".safetensors"):
        return {None: (0, len(content))}
    length = int.from_bytes(content[:8], "little")
    actual = {None: (0, 8 + length)}
    for name, item in json.loads(content[8 : 8 + length]).items():
        if name != "__metadata__" and item["data_offsets"][0] < item["data_offsets"][1]:
            actual[name] = tuple(8 + length + offset for offset in item["data_offsets"])
    return actual


@pytest.fixture
def target(ram):
    return Target(make_store(ram / "store"))


def test_every_kind_of_file_is_there_and_healthy(target):
    assert set(target.kinds) == {
        "STORE.json",
        "heads",
        "main/run.json",
        "final/ckpt.json",
        "main/schema.json",
        "kernel/schema.json",
        "models/schema.json",
        "manifest/#.json",
        "seg/#.safetensors",
        "seg/without-#.safetensors",
        "main/samples-#-#-#.parquet",
        "kernel/samples-#-#-#.parquet",
        "packed/#.safetensors",
        "#/#.safetensors",
        "size",
        "failed",
        "claims",
    }
    verdict = gs.verify(gs.LocalDisk(target.path))
    assert verdict.healthy
    assert verdict.files == len(target.files)
    for key in target.files:
        touch(target.path, key)


@pytest.mark.parametrize("part", range(PARTS))
def test_a_flipped_bit_is_named_by_verify_and_never_read(part, target):
    chance = random.Random(part)
    for key, tensor, place in target.part(part):
        content = bytearray(target.files[key])
        content[place] ^= 1 << chance.randrange(8)
        target.damage(key, content)
        named = [(item.path, item.tensor) for item in gs.verify(gs.LocalDisk(target.path)).damage]
        assert named == [(key, tensor)], place
        assert_read_raises(target.path, key, tensor)
        target.heal(key)
    assert gs.verify(gs.LocalDisk(target.path)).healthy


@pytest.mark.parametrize("part", range(PARTS))
def test_a_cut_is_named_by_verify_and_never_read(part, target):
    for key, _, place in target.part(part):
        target.damage(key, target.files[key][:place])
        named = [item.path for item in gs.verify(gs.LocalDisk(target.path)).damage]
        assert named == [key], place
        assert_read_raises(target.path, key, None)
        target.heal(key)
    assert gs.verify(gs.LocalDisk(target.path)).healthy


def assert_read_raises(path, key, tensor):
    if "/size/" in key or "/claims/" in key or key.startswith("heads/"):
        # A size is in the name of its file, and so is all that a second record says; a lease that
        # cannot be read counts as ended.
        touch(path, key)
        return
    with pytest.raises(DamagedError) as raised:
        touch(path, key)
    assert raised.value.path.endswith(key)
    assert raised.value.tensor in (None, tensor)
    if "/seg/" in key and not (tensor or "").endswith("#check"):
        with pytest.raises(DamagedError):
            stream(path, key)


def touch(path, key):
    """Read what is in a file through the interface that a user has."""
    store = gs.open(path, create=False)
    if key.startswith("heads/"):
        repr(store)
    elif key.endswith("run.json"):
        assert len(store.runs()) == 1
    elif key.endswith("ckpt.json"):
        assert len(store.checkpoints()) == 1
    elif key.startswith("datamodels/"):
        rows = store.rows("models")
        assert rows.num_rows == 6
        np.testing.assert_array_equal(rows.read(rows.done())["seed"], [0, 1, 2, 3])
        rows.states()
        if "/manifest/" in key:
            gs.Block(store.backend, "datamodels/models", version=int(Path(key).stem))
    elif key.endswith(".parquet"):
        block, version = block_of(key), int(key.rpartition("/")[2].split("-")[1])
        _sql.ensure_samples(
            store.backend, store.read(block, version=version), block.labels, durability="process"
        )
    elif "/" in key:
        for block in blocks_with(store, key):
            block.read(block.ids)


def stream(path, key):
    for block in blocks_with(gs.open(path, create=False), key):
        for batch in block.stream():
            dict(batch)


def block_of(key):
    return CAPTURE if key.startswith("blocks/") else SCORES


def blocks_with(store, key):
    """The versions that need the file."""
    name = "/".join(key.split("/")[-2:])
    block = block_of(key)
    versions = [0, 1, 2] if block is CAPTURE else [0]
    if name.startswith("manifest/"):
        versions = [int(Path(name).stem)]
    for version in versions:
        actual = store.read(block, version=version)
        if not name.startswith("seg/") or name in [
            entry.file for entry in actual.manifest.segments
        ]:
            yield actual


def test_sql_raises_on_a_damaged_parquet_file(target):
    pytest.importorskip("duckdb")
    chance = random.Random(1)
    files = sorted(key for key in target.files if key.endswith(".parquet") and "-000002-" in key)
    for key in files * 5:
        content = bytearray(target.files[key])
        content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
        target.damage(key, content)
        with pytest.raises(StoreError):
            gs.open(target.path).sql("select avg(loss) from samples")
        target.heal(key)


@pytest.mark.parametrize("work", [[kit.capture], [kit.rows]], ids=["capture", "rows"])
def test_after_a_repair_the_work_recreates_the_file_byte_for_byte(work, ram):
    kit.make(ram / "whole", *work)
    expected = kit.tree(ram / "whole")
    chance = random.Random(2)
    for number, key in enumerate(["STORE.json", *(key for key in expected if expected[key])]):
        path = ram / f"store-{number}"
        kit.make(path, *work)
        (file,) = path.glob(key.replace("token", "*"))
        content = bytearray(file.read_bytes())
        content[chance.randrange(len(content))] ^= 1
        file.write_bytes(content)
        verdict = gs.verify(gs.LocalDisk(path), repair=True)
        assert [item.path for item in verdict.damage] == [str(file.relative_to(path))]
        (target_value,) = (path / "quarantine").iterdir()
        assert target_value.read_bytes() == content
        kit.make(path, *work)
        kit.assert_same_tree(path, expected)
        assert gs.verify(gs.LocalDisk(path)).healthy


@pytest.mark.parametrize("how", ["damaged", "gone"])
def test_rows_of_a_packed_file_that_is_lost_are_made_again(how, ram):
    reported = kit.finish([kit.rows, kit.compact], gs.LocalDisk(ram))
    packed = ram / "datamodels/models/packed/000000.safetensors"
    lost = gs.open(ram).rows("models").read([0, 1]).ids.tolist()
    if how == "damaged":
        packed.write_bytes(packed.read_bytes()[:-1])
    else:
        packed.unlink()
    with pytest.raises((DamagedError, MissingRowsError)):
        gs.open(ram).rows("models")
    assert "its rows count as not done" in gs.verify(gs.LocalDisk(ram), repair=True).repaired[-1]
    rows = gs.open(ram).rows("models")
    assert not set(lost) & set(rows.done().tolist())
    with pytest.raises(MissingRowsError):
        rows.read(lost)
    kit.finish([kit.rows, kit.compact], gs.LocalDisk(ram))
    kit.check(ram, reported)
    assert gs.verify(gs.LocalDisk(ram)).healthy


def test_a_version_number_given_again_does_not_find_the_old_table(ram):
    kit.make(ram, kit.capture, kit.drop)
    manifest = ram / kit.KEY.folder / "manifest/000001.json"
    manifest.write_bytes(b"{}")
    assert not gs.verify(gs.LocalDisk(ram), repair=True).healthy
    store = gs.open(ram, durability="process")
    store.drop_rows(kit.KEY, [kit.IDS[0]])
    block = store.read(kit.KEY)
    data = _sql.ensure_samples(store.backend, block, kit.KEY.labels, durability="process")
    table = pytest.importorskip("pyarrow.parquet").read_table(io.BytesIO(data))
    assert table["id"].to_pylist() == block.ids.tolist() == kit.IDS[1:]
