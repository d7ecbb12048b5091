"""verify, repair and gc."""

import os

import numpy as np
import pytest
from raises import raises

import gradkeep as gk
from gradkeep.errors import MissingRowsError, NotAStoreError
from gradkeep.store import LocalDisk, gc, verify

KEY = gk.store.CaptureKey(checkpoint="final", split="train")


def fill(store):
    with store.write(
        KEY, gk.store.Schema((gk.store.Array("loss"),), num_rows=6, rows_per_segment=2)
    ) as writer:
        writer.append(np.arange(6), {"loss": np.arange(6, dtype=np.float32)})


@pytest.fixture
def store(tmp_path):
    store = gk.open(tmp_path / "store", durability="process")
    fill(store)
    return store


def path_of(store, name):
    return os.path.join(store.backend.root, KEY.folder, name)


def flip(path, at=-1):
    with open(path, "r+b") as file:
        data = bytearray(file.read())
        data[at] ^= 1
        file.seek(0)
        file.write(data)


def test_a_healthy_store(store):
    seen = []
    verdict = verify(store.backend, progress=lambda done, total: seen.append((done, total)))
    assert verdict.healthy
    assert verdict.files == seen[-1][0] == seen[-1][1]
    assert verdict.bytes > 0


def test_a_damaged_segment_is_named_moved_and_made_again(store):
    before = verify(store.backend)
    flip(path_of(store, "seg/000001.safetensors"))
    damage = verify(store.backend).damage
    assert [(item.path, item.tensor) for item in damage] == [
        (f"{KEY.folder}/seg/000001.safetensors", "loss")
    ]
    assert verify(store.backend, repair=True).repaired
    missing = verify(store.backend)
    assert "missing" in missing.damage[0].what
    with raises(MissingRowsError, "store.missing_segment", fix="run the work again"):
        store.read(KEY).read([2])
    assert store.read(KEY).manifest.rows == 6
    fill(store)
    after = verify(store.backend)
    assert after.healthy
    assert (after.files, after.bytes) == (before.files, before.bytes)


@pytest.mark.parametrize("name", ["schema.json", "manifest/000000.json"])
def test_a_damaged_document_is_named_moved_and_made_again(store, name):
    flip(path_of(store, name), 30)
    assert [item.path for item in verify(store.backend).damage] == [f"{KEY.folder}/{name}"]
    verify(store.backend, repair=True)
    fill(store)
    assert verify(store.backend).healthy
    assert store.read(KEY).column("loss").tolist() == list(range(6))


def test_a_damaged_identity_gets_a_new_one(store):
    flip(os.path.join(store.backend.root, "STORE.json"), 20)
    assert not verify(LocalDisk(store.location)).healthy
    verify(LocalDisk(store.location), repair=True)
    assert gk.open(store.location).uuid != store.uuid
    assert verify(store.backend).healthy


def test_a_store_is_named_as_it_likes(store):
    path = store.location
    for named in (store, store.backend, path, f"file://{store.backend.root}"):
        assert verify(named).healthy
    assert gc(path, dry_run=True) == gc(store, dry_run=True)
    with pytest.raises(NotAStoreError):
        gc(f"{path}-not")


def test_a_segment_in_the_wrong_place_is_noticed(store):
    one, two = path_of(store, "seg/000000.safetensors"), path_of(store, "seg/000001.safetensors")
    os.rename(one, two + ".x")
    os.rename(two, one)
    os.rename(two + ".x", two)
    assert {item.path for item in verify(store.backend).damage} == {
        f"{KEY.folder}/seg/000000.safetensors",
        f"{KEY.folder}/seg/000001.safetensors",
    }


def test_unfinished_writes_are_swept_and_foreign_files_left_alone(store):
    dead = path_of(store, f"seg/.tmp-{_host()}-999999999-aa")
    alive = path_of(store, f"seg/.tmp-{_host()}-{os.getpid()}-bb")
    note = path_of(store, "notes.txt")
    for path in (dead, alive, note):
        with open(path, "w") as file:
            file.write("x")
    verdict = verify(store.backend, repair=True)
    assert verdict.healthy
    assert verdict.unknown == (f"{KEY.folder}/notes.txt",)
    assert not os.path.exists(dead)
    assert os.path.exists(alive)
    assert os.path.exists(note)


def _host():
    from gradkeep.store.backends import _disk

    return _disk._HOST


def test_nothing_to_verify(tmp_path):
    with pytest.raises(NotAStoreError):
        verify(LocalDisk(tmp_path / "none"))


def test_gc_removes_what_no_kept_version_needs(store):
    store.drop_rows(KEY, [0])
    store.drop_rows(KEY, [5])
    assert gc(store, keep_versions=3).files == ()
    planned = gc(store, dry_run=True)
    assert store.read(KEY, version=0).ids.tolist() == list(range(6))
    assert gc(store) == planned
    assert planned.bytes > 0
    assert verify(store.backend).healthy
    assert store.read(KEY).ids.tolist() == [1, 2, 3, 4]
    assert store.read(KEY).column("loss").tolist() == [1, 2, 3, 4]
    with pytest.raises(MissingRowsError, match="no version 0"):
        store.read(KEY, version=0)
    assert gc(store).files == ()


def test_gc_leaves_work_in_progress_alone(store):
    schema = gk.store.Schema((gk.store.Array("loss"),), rows_per_segment=2)
    key = gk.store.CaptureKey(checkpoint="later", split="train")
    with store.write(key, schema) as writer:
        writer.append([0, 1], {"loss": [0.0, 1.0]})
    writer = store.write(key, schema, extend=True)
    writer.append([2, 3], {"loss": [2.0, 3.0]})
    writer.flush()
    assert gc(store).files == ()
    writer.append([4], {"loss": [4.0]})
    writer.seal()
    assert store.read(key).column("loss").tolist() == [0, 1, 2, 3, 4]


def test_gc_wants_at_least_one_version(store):
    with pytest.raises(gk.GradkeepError):
        gc(store, keep_versions=0)


def test_scalars_of_another_version_are_told_by_the_name_of_their_file(store):
    store.drop_rows(KEY, [3])
    store.sql("select id from samples").rows()  # makes those of the newest version
    files = sorted(name for name in os.listdir(path_of(store, "")) if name.endswith(".parquet"))
    old, new = (name.split("-", 2) for name in files)
    os.rename(path_of(store, files[0]), path_of(store, "-".join([new[0], new[1], old[2]])))
    os.remove(path_of(store, files[1]))
    (damage,) = verify(store.backend).damage
    assert "differs from version 1" in damage.what


def test_scalars_whose_name_does_not_tell_are_compared_with_the_segments(store):
    store.drop_rows(KEY, [3])
    store.sql("select id from samples").rows()
    files = sorted(name for name in os.listdir(path_of(store, "")) if name.endswith(".parquet"))
    names = [name.split("-") for name in files]
    for file, (word, version, _, digest) in zip(files, names, strict=True):
        os.rename(path_of(store, file), path_of(store, f"{word}-{version}-{digest}"))
    assert verify(store.backend).healthy  # as stores of before have them
    os.remove(path_of(store, f"samples-000001-{names[1][3]}"))
    os.rename(
        path_of(store, f"samples-000000-{names[0][3]}"),
        path_of(store, f"samples-000001-{names[0][3]}"),
    )
    (damage,) = verify(store.backend).damage
    assert "differs from version 1" in damage.what
