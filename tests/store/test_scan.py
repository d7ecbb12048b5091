"""Scans of the files: runs, checkpoints and blocks."""

import os
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import gradkeep as gk
from gradkeep.store import LocalDisk, Memory, Store, gc, verify
from gradkeep.store._keys import CATALOG
from gradkeep.store.backends._disk import Syscalls
from gradkeep.store.catalog._scan import scan_blocks, scan_checkpoints, scan_runs

LAYERS = (gk.store.Layer("fc", "Linear", 100),)
FACTOR = gk.store.Array("fc.prefix", shape=(4,), kind="prefix", layer="fc")


def schema(**options):
    return gk.store.Schema(
        (FACTOR, gk.store.Array("loss")), rows_per_segment=4, layers=LAYERS, **options
    )


def key(checkpoint="final", **parts):
    return gk.store.CaptureKey(checkpoint=checkpoint, split="train", **parts)


def rows(start, stop):
    count = stop - start
    return np.arange(start, stop), {
        "fc.prefix": np.ones((count, 4), "f4"),
        "loss": np.ones(count, "f4"),
    }


def write(store, where, count, **options):
    with store.write(where, schema(), **options) as writer:
        start = writer.position
        writer.append(*rows(start, start + count))


def write_open(store, where, count):
    writer = store.write(where, schema(num_rows=1000))
    writer.append(*rows(0, count // 4 * 4))
    writer.flush()
    writer.close()


@pytest.fixture
def store(tmp_path):
    return gk.open(tmp_path / "store", durability="process")


def facts(store, *kinds):
    return scan_blocks(store.backend, *kinds)


class ReadOnlyCalls(Syscalls):
    """A filesystem mounted for reading only."""

    def create(self, path):
        raise OSError(30, "Read-only file system")

    make_folder = unlink = create


def test_facts_of_a_sealed_capture(store):
    write(store, key(), 10)
    (actual,) = facts(store)
    assert (actual.state, actual.version, actual.rows, actual.num_segments) == ("sealed", 0, 10, 3)
    assert actual.data_bytes == store.read(key()).manifest.bytes
    assert actual.dense_bytes == 10 * 4 * 100
    assert actual.ratio == actual.dense_bytes / actual.data_bytes
    assert actual.bytes > actual.data_bytes
    assert actual.schema_hash == schema().hash
    assert [layer.row_bytes for layer in actual.layers] == [16.0]
    assert actual.arrays == schema().arrays
    assert abs(actual.modified - time.time()) < 60


def test_facts_of_a_capture_under_way(store):
    write_open(store, key(), 10)
    (actual,) = facts(store)
    assert (actual.state, actual.version, actual.rows, actual.num_rows) == ("open", None, 8, 1000)
    assert actual.data_bytes == sum(
        file.stat().st_size for file in Path(store.location).rglob("*.safetensors")
    )


def test_rows_after_the_newest_version_count_apart(store):
    write(store, key(), 8)
    writer = store.write(key(), schema(), extend=True)
    writer.append(*rows(8, 16))
    writer.flush()
    writer.close()
    (actual,) = facts(store)
    assert (actual.state, actual.rows, actual.unsealed_rows, actual.num_segments) == (
        "sealed",
        8,
        8,
        2,
    )


def test_ragged_and_compressed_layers_are_measured(store):
    array = gk.store.Array("fc.prefix", shape=(4,), kind="prefix", layer="fc", ragged=True)
    where = key()
    with store.write(where, gk.store.Schema((array,), layers=LAYERS)) as writer:
        writer.append([0, 1], {"fc.prefix": [np.ones((3, 4), "f4"), np.ones((5, 4), "f4")]})
    (actual,) = facts(store)
    assert actual.layers[0].row_bytes == (8 * 16 + 3 * 8) / 2  # values and offsets


def test_facts_of_scores_and_row_sets(store):
    write(store, gk.store.ScoresKey("kernel"), 4)
    many = store.rows("farm", gk.store.Schema((gk.store.Array("loss"),)), num_rows=5)
    for row in range(3):
        many.put(row, {"loss": np.float32(row)})
    many.compact(rows_per_file=2)
    (scores,) = facts(store, "scores")
    (farm,) = facts(store, "rows")
    assert (scores.address.name, scores.rows) == ("kernel", 4)
    assert (farm.rows, farm.num_rows, farm.num_segments) == (3, 5, 1)


@pytest.mark.parametrize(
    ("victim", "text"),
    [
        ("schema.json", "does not match its checksum"),
        ("manifest/000000.json", "does not match its checksum"),
        ("seg/000001.safetensors", "bytes instead of"),
    ],
)
@pytest.mark.parametrize("how", ["truncated", "gone"])
def test_a_damaged_block_is_unreadable_with_the_reason(store, victim, text, how):
    write(store, key(), 10)
    write(store, key("other"), 4)
    file = Path(store.location, key().folder, victim)
    if how == "gone":
        file.unlink()
    else:
        file.write_bytes(file.read_bytes()[:-20])
    actual = {block.address.checkpoint: block for block in facts(store)}
    assert actual["other"].state == "sealed"
    assert actual["final"].state == "unreadable"
    assert f"{key().folder}/{victim}: " in actual["final"].problem
    assert (text if how == "truncated" else "missing") in actual["final"].problem


def test_a_damaged_header_of_an_open_block_is_unreadable(store):
    write_open(store, key(), 8)
    file = Path(store.location, key().folder, "seg/000001.safetensors")
    data = bytearray(file.read_bytes())
    data[60] ^= 1
    file.write_bytes(data)
    (actual,) = facts(store)
    assert (actual.state, actual.rows) == ("unreadable", 4)
    assert "seg/000001.safetensors: the header" in actual.problem


def test_damaged_records_are_found_too(store):
    store.add_run(gk.store.Run("main"))
    store.add_checkpoint(gk.store.Checkpoint("main", "final", "w"))
    for name in ("run.json", "ckpt/final/ckpt.json"):
        Path(store.location, "runs/main", name).write_text("{}")
    (run,), (checkpoint,) = scan_runs(store.backend), scan_checkpoints(store.backend)
    assert "run.json: " in run.problem
    assert "ckpt.json: " in checkpoint.problem


def test_folders_that_gradkeep_did_not_make_are_passed_over(store):
    write(store, key(), 4)
    for name in ("blocks/.trash/a/b/c", "blocks/main/final/train/a b", "scores/empty"):
        Path(store.location, name).mkdir(parents=True)
    assert len(facts(store)) == 1
    assert store.captures() == [key()]


def test_a_deleted_capture_is_not_listed(store):
    write(store, key(), 4)
    assert facts(store)
    store.delete(key())
    assert not facts(store)


@pytest.mark.parametrize("how", ["file", "folder"])
def test_a_catalog_of_earlier_versions_does_no_harm(store, how):
    write(store, key(), 4)
    catalog = Path(store.location, CATALOG)
    catalog.mkdir() if how == "folder" else catalog.write_bytes(b"SQLite format 3")
    assert len(facts(store)) == 1
    assert verify(store.backend).healthy
    assert not verify(store.backend).unknown


def test_a_store_that_may_only_be_read_is_scanned(store):
    write(store, key(), 10)
    frozen = Store(LocalDisk(store.location, syscalls=ReadOnlyCalls()))
    assert facts(frozen)[0].rows == 10


def test_a_store_in_memory_is_scanned():
    store = gk.open(Memory())
    write(store, key(), 10)
    assert facts(store)[0].rows == 10
    write(store, key(), 4, extend=True)
    assert facts(store)[0].rows == 14


def test_a_change_within_one_tick_of_the_clock_is_seen(store):
    write_open(store, key(), 4)
    folder = Path(store.location, key().folder, "seg")
    before = folder.stat().st_mtime_ns
    assert facts(store)[0].rows == 4
    write_open(store, key(), 8)
    os.utime(folder, ns=(before, before))
    assert facts(store)[0].rows == 8


def test_two_thousand_segments_are_scanned_quickly(store):
    writer = store.write(key(), gk.store.Schema((FACTOR,), rows_per_segment=1, layers=LAYERS))
    for start in range(0, 2000, 500):
        ids = np.arange(start, start + 500)
        writer.append(ids, {"fc.prefix": np.ones((500, 4), "f4")})
    writer.flush()
    writer.close()
    begin = time.process_time()
    assert facts(store)[0].num_segments == 2000
    assert time.process_time() - begin < 2  # about 0.1 when nothing else runs


NAMES = st.sampled_from(["a", "b"])
OPERATIONS = st.one_of(
    st.tuples(st.just("write"), NAMES, st.integers(1, 9)),
    st.tuples(st.just("open"), NAMES, st.integers(1, 12)),
    st.tuples(st.just("extend"), NAMES, st.integers(1, 6)),
    st.tuples(st.sampled_from(["drop", "delete", "scores", "checkpoint", "lose"]), NAMES),
    st.tuples(st.just("row"), st.integers(0, 5)),
    st.tuples(st.sampled_from(["compact", "grow", "gc", "repair"])),
)


def apply(store, name, *values):
    """One change of the store; those that the store refuses change nothing."""
    farm = gk.store.Schema((gk.store.Array("loss"),))
    if name == "write":
        write(store, key(values[0]), values[1])
    elif name == "open":
        write_open(store, key(values[0], capture="open"), values[1])
    elif name == "extend":
        write(store, key(values[0]), values[1], extend=True)
    elif name == "drop":
        store.drop_rows(key(values[0]), store.read(key(values[0])).ids[:1])
    elif name == "delete":
        store.delete(key(values[0]))
    elif name == "scores":
        write(store, gk.store.ScoresKey(values[0]), 4)
    elif name == "checkpoint":
        store.add_run(gk.store.Run(values[0]))
        store.add_checkpoint(gk.store.Checkpoint(values[0], "final", "w", step=1))
    elif name == "lose":
        store.backend.move_aside(f"{key(values[0]).folder}/seg/000000.safetensors")
    elif name == "row":
        store.rows("farm", farm, num_rows=4).put(values[0], {"loss": np.float32(1)})
    elif name == "compact":
        store.rows("farm").compact(rows_per_file=2)
    elif name == "grow":
        store.rows("farm").grow(6)
    elif name == "gc":
        gc(store)
    elif name == "repair":
        verify(store.backend, repair=True)


@settings(
    max_examples=settings().max_examples // 4,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
    deadline=None,
)
@given(operations=st.lists(OPERATIONS, max_size=12))
def test_facts_are_what_reading_finds(tmp_path_factory, operations):
    store = gk.open(tmp_path_factory.mktemp("store"), durability="process")
    for operation in operations:
        with suppress(gk.GradkeepError, FileNotFoundError):
            apply(store, *operation)
        blocks = {block.address.folder: block for block in facts(store)}
        farm = [f"datamodels/{name}" for name in store.row_sets()]
        assert set(blocks) >= {*(block.folder for block in store.blocks()), *farm}
        for name in store.row_sets():
            rows_, block = store.rows(name), blocks[f"datamodels/{name}"]
            assert (block.rows, block.num_rows) == (len(rows_.done()), rows_.num_rows)
        for where in store.blocks():
            block = blocks[where.folder]
            if block.state == "sealed":
                manifest, live = store.read(where).manifest, store.read(where, live=True)
                assert (block.rows, block.version) == (manifest.rows, manifest.version)
                assert block.data_bytes == manifest.bytes
                assert block.unsealed_rows == len(live) - manifest.rows
            elif block.state == "open":
                assert block.rows == len(store.read(where, live=True))
