"""Bases of compressed captures: blocks of one row that are listed, verified, deleted and repaired."""

import numpy as np
import pytest

import gradkeep as gk
import gradkeep.store as gs
from gradkeep.errors import DamagedError

KEY = gs.BasisKey("final", run="main", capture="small")


@pytest.fixture
def store(tmp_path):
    opened = gk.open(tmp_path / "store")
    schema = gs.Schema((gs.Array("fc.left", shape=(3, 2), kind="data"),), num_rows=1)
    with opened.write(KEY, schema) as writer:
        writer.append([0], {"fc.left": np.arange(6, dtype=np.float32).reshape(1, 3, 2)})
    return opened


def test_it_is_listed_and_told_apart_from_captures(store):
    assert store.bases() == [KEY]
    assert store.blocks() == [KEY]
    assert store.captures() == []
    info = store.info()
    assert [block.address.basis for block in info.bases] == [KEY]
    assert "1 basis" in info.title
    assert info.to_fields()["bases"][0]["folder"] == "bases/main/final/small"
    assert gs.verify(store.location).healthy
    assert store.read(KEY).column("fc.left").shape == (1, 3, 2)


def test_damage_is_found(store, tmp_path):
    (file,) = (tmp_path / "store" / KEY.folder / "seg").glob("*.safetensors")
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    assert not gs.verify(store.location).healthy
    with pytest.raises(DamagedError):
        store.read(KEY).column("fc.left")


def test_a_lost_one_is_missed_and_a_deleted_one_is_not(store, tmp_path):
    (manifest,) = (tmp_path / "store" / KEY.folder / "manifest").iterdir()
    stored = manifest.read_bytes()
    manifest.unlink()
    assert not gs.verify(store.location).healthy
    manifest.write_bytes(stored)
    gk.open(store.location).delete(KEY)
    assert gs.verify(store.location).healthy
    assert gk.open(store.location).bases() == []
