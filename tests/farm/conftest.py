"""A set of rows to fill, and the module of jobs where worker processes find it."""

from pathlib import Path

import pytest

import gradkeep as gk

SCHEMA = gk.store.Schema((gk.store.Array("value", shape=(3,)), gk.store.Array("number", "int64")))


@pytest.fixture(autouse=True)
def _jobs_can_be_imported(monkeypatch):
    # Spawned processes are given the path of the one that starts them.
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


@pytest.fixture
def rows_of(tmp_path):
    def make(count, name="models", folder=tmp_path):
        store = gk.open(folder / "store", durability="process")
        store.rows(name, SCHEMA, num_rows=count)
        return store

    return make
