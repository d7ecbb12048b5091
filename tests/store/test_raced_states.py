"""States that races and kills leave: `delete`, `gc` and `verify --repair` end each of them."""

import os
import time
from pathlib import Path

import numpy as np
import pytest
from raises import raises

import gradkeep as gk
from gradkeep.errors import StoreError
from gradkeep.store import gc, verify

KEY = gk.store.CaptureKey(checkpoint="final", split="train")
SCHEMA = gk.store.Schema((gk.store.Array("loss"),), rows_per_segment=2)


@pytest.fixture
def store(tmp_path):
    return gk.open(tmp_path / "store", durability="process")


def age(store, seconds=2 * 3600):
    """Let all files be that old."""
    then = time.time() - seconds
    for path in Path(store.location).rglob("*"):
        os.utime(path, (then, then))


def rows_of(count):
    return np.arange(count), {"loss": np.zeros(count, "f4")}


@pytest.fixture
def raced(store):
    """A capture that was deleted while its writer went on."""
    writer = store.write(KEY, SCHEMA)
    writer.append(*rows_of(4))
    store.delete(KEY)
    writer.append(np.arange(4, 9), {"loss": np.zeros(5, "f4")})
    with pytest.raises(StoreError):
        writer.seal()
    assert not verify(store.backend).healthy
    return store


def test_a_capture_deleted_under_its_writer_can_be_deleted_again(raced, inline):
    done = inline("delete", raced.location, "main/final/train/main", "--yes")
    assert done.returncode == 0, done.stderr
    assert verify(raced.backend).healthy
    with raises(StoreError, "store.no_such_block"):
        raced.delete(KEY)


def test_gc_collects_it_once_it_is_old(raced):
    assert not gc(raced).files  # its writer may be at work
    age(raced)
    assert len(gc(raced).files) > 0
    assert verify(raced.backend).healthy


def test_repair_moves_it_aside(raced):
    assert any("moved" in reported for reported in verify(raced.backend, repair=True).repaired)
    assert verify(raced.backend).healthy
    with raced.write(KEY, SCHEMA) as writer:
        writer.append(*rows_of(3))
    assert verify(raced.backend).healthy


def test_a_sealed_capture_without_its_schema_is_no_waste(store):
    with store.write(KEY, SCHEMA) as writer:
        writer.append(*rows_of(5))
    os.unlink(Path(store.location, KEY.folder, "schema.json"))
    age(store)
    gc(store)
    assert len(list(Path(store.location, KEY.folder, "seg").iterdir())) == 3
    verify(store.backend, repair=True)
    assert verify(store.backend).healthy
    assert len(list(Path(store.location, "quarantine").rglob("*.safetensors"))) == 3


def shared_set(store, *, begun):
    rows = store.rows("shared-" + "0" * 16 + "-" + "1" * 8, SCHEMA, num_rows=4)
    if begun:
        rows.put(0, {"loss": np.float32(1)})
        rows.claim(seconds=20)
    return rows.folder.rpartition("/")[2]


@pytest.mark.parametrize(
    ("seconds", "begun", "goes"),
    [(60, True, False), (2 * 3600, True, True), (2 * 3600, False, False), (8 * 86400, False, True)],
)
def test_parts_of_killed_work_go_when_nobody_holds_them(store, seconds, begun, goes):
    name = shared_set(store, begun=begun)
    store.rows("mine", SCHEMA, num_rows=2)
    age(store, seconds)
    lease = next(iter(Path(store.location, "datamodels", name).rglob("claims/*/*.json")), None)
    if lease is not None and goes:
        gc(store)
        assert name in store.row_sets()  # a lease that has not ended
        lease.unlink()
    age(store, seconds)
    gc(store)
    assert (name not in store.row_sets()) == goes
    assert "mine" in store.row_sets()
    assert verify(store.backend).healthy


def test_a_set_of_rows_is_deleted_by_command_also_without_its_schema(store, inline):
    name = shared_set(store, begun=True)
    assert inline("delete", store.location, f"datamodels/{name}").returncode == 2
    os.unlink(Path(store.location, "datamodels", name, "schema.json"))
    assert not verify(store.backend).healthy
    done = inline("delete", store.location, f"datamodels/{name}", "--yes")
    assert done.returncode == 0, done.stderr
    assert verify(store.backend).healthy
    assert not Path(store.location, "heads", "datamodels", name).exists() or not any(
        path.is_file() for path in Path(store.location, "heads", "datamodels", name).rglob("*")
    )


def test_a_set_of_rows_whose_schema_was_lost_is_no_waste(store):
    rows = store.rows("study", SCHEMA, num_rows=2)
    rows.put(0, {"loss": np.float32(1)})
    os.unlink(Path(store.location, rows.folder, "schema.json"))
    age(store)
    assert not gc(store).files
    assert not verify(store.backend).healthy


def test_a_row_put_while_its_set_was_deleted_goes(store):
    rows = store.rows("study", SCHEMA, num_rows=2)
    store.delete_rows("study")
    rows._backend.put_if_absent(
        f"{rows.folder}/size/000000000002.json", [b""], durability="process"
    )
    rows.put(0, {"loss": np.float32(1)})
    store.backend.delete([f"{rows.folder}/size/000000000002.json"], durability="process")
    assert not verify(store.backend).healthy
    age(store)
    gc(store)
    assert verify(store.backend).healthy
    assert not Path(store.location, rows.folder, "rows", "000000", "0.safetensors").exists()
