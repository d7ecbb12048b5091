"""Rows in files of their own and failed attempts are recorded: one that is gone is missed."""

import os
from pathlib import Path

import numpy as np
import pytest

import gradkeep as gk
from gradkeep.store import gc, verify

SCHEMA = gk.store.Schema((gk.store.Array("out"),))


@pytest.fixture
def store(tmp_path):
    return gk.open(tmp_path / "store", durability="process")


@pytest.fixture
def rows(store):
    rows = store.rows("models", SCHEMA, num_rows=6)
    for row in range(4):
        rows.put(row, {"out": np.float32(row)})
    for lease in rows.claim(owner="a", count=2):
        rows.fail(lease, "no")
    return rows


def files(store, pattern):
    return sorted(Path(store.location).glob(pattern))


def records(store):
    return files(store, "heads/datamodels/models/*/*/*")


@pytest.mark.parametrize("what", ["rows/*/2.safetensors", "failed/*/4-*.json"])
def test_a_row_or_a_failed_attempt_that_is_gone_is_missed(store, rows, what):
    assert verify(store.backend).healthy
    (gone,) = files(store, f"datamodels/models/{what}")
    gone.unlink()
    verdict = verify(store.backend)
    assert ["missing" in item.what for item in verdict.damage] == [True]
    assert not verify(store.backend, sample=1).healthy
    verify(store.backend, repair=True)
    assert verify(store.backend).healthy
    store.rows("models").put(2, {"out": np.float32(7)}, differing="keep")
    assert verify(store.backend).healthy


def test_a_row_that_another_file_replaced_is_noticed(store, rows):
    other = store.rows("other", SCHEMA, num_rows=6)
    other.put(2, {"out": np.float32(99)})
    (gone,), (new,) = (files(store, f"datamodels/{x}/rows/*/2.*") for x in ("models", "other"))
    os.replace(new, gone)
    assert {Path(item.path).name for item in verify(store.backend).damage} == {"2.safetensors"}


def test_what_is_packed_retried_or_deleted_has_no_record(store, rows):
    assert len(records(store)) == 6
    rows.compact(rows_per_file=4)
    assert len(records(store)) == 2
    assert verify(store.backend).healthy
    rows.retry()
    assert records(store) == []
    assert verify(store.backend).healthy
    rows.put(5, {"out": np.float32(5)})
    store.delete_rows("models")
    assert not [path for path in files(store, "heads/**/*") if path.is_file()]
    assert verify(store.backend).healthy


def test_a_record_that_a_kill_left_of_a_packed_row_is_no_damage_and_goes(store, rows):
    before = {path: path.read_bytes() for path in records(store)}
    rows.compact(rows_per_file=4)
    for path, data in before.items():
        path.write_bytes(data)
    assert verify(store.backend).healthy
    gc(store)
    assert len(records(store)) == 2


def test_rows_of_earlier_versions_have_no_records(store, rows):
    for path in records(store):
        path.unlink()
    assert verify(store.backend).healthy
    (gone,) = files(store, "datamodels/models/rows/*/2.safetensors")
    gone.unlink()
    assert verify(store.backend).healthy  # nobody knows of it


def test_bytes_in_a_record_are_noticed(store, rows):
    records(store)[0].write_bytes(b"x")
    assert len(verify(store.backend).damage) == 1
    verify(store.backend, repair=True)
    assert verify(store.backend).healthy
