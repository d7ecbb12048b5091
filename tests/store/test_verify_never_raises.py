"""verify says what is wrong, whatever is wrong: it never raises and never calls a loss healthy."""

import contextlib
import errno
import os
import shutil
from pathlib import Path

import numpy as np
import pytest

import gradkeep as gk
from gradkeep.errors import GradkeepError, NotAStoreError
from gradkeep.store import LocalDisk, Memory, verify

KEY = gk.store.CaptureKey(checkpoint="final", split="train")
OPEN = gk.store.CaptureKey(checkpoint="final", split="open")


def fill(store):
    store.add_run(gk.store.Run("main"))
    schema = gk.store.Schema((gk.store.Array("loss"),), rows_per_segment=2)
    with store.write(KEY, schema) as writer:
        writer.append(np.arange(4), {"loss": np.arange(4, dtype=np.float32)})
    rows = store.rows("models", gk.store.Schema((gk.store.Array("out"),)), num_rows=4)
    for row in range(3):
        rows.put(row, {"out": np.float32(row)})
    rows.compact(rows_per_file=2)
    rows.fail(rows.claim()[0], "no")
    rows.claim()
    return store


@pytest.fixture
def store(tmp_path):
    return fill(gk.open(tmp_path / "store", durability="process"))


def keys_of(store):
    root = Path(store.backend.root)
    return sorted(str(x.relative_to(root)) for x in root.rglob("*") if x.is_file())


NOT_RECORDED = ("/claims/", "/failed/", ".parquet", "heads/")
"""Files whose loss is not noticed by name: leases, derived files, second records, and failed attempts, of which the
record is named."""


@pytest.mark.parametrize("how", ["gone", "dangling", "folder", "loop"])
def test_nothing_of_value_is_lost_without_a_word(store, how):
    for key in keys_of(store):
        file = Path(store.backend.root, key)
        good = file.read_bytes()
        file.unlink()
        if how == "dangling":
            file.symlink_to("../.git/annex/objects/1/2/none")
        elif how == "folder":
            file.mkdir()
        elif how == "loop":
            file.symlink_to(file.name)
        actual = verify(store.location)
        excused = how == "gone" and any(part in key for part in NOT_RECORDED)
        assert (key in [item.path for item in actual.damage]) is not excused, key
        assert actual.healthy is (excused and not key.startswith("datamodels/models/failed/")), key
        shutil.rmtree(file) if how == "folder" else file.unlink(missing_ok=True)
        file.write_bytes(good)
    assert verify(store.location).healthy


QUESTIONS = (
    lambda store: store.read(KEY, live=True).column("loss"),
    lambda store: store.read(OPEN, live=True).column("loss"),
    lambda store: store.rows("models").read(store.rows("models").done()),
)


def test_files_that_lost_their_ending_are_as_good_as_gone(store):
    writer = store.write(OPEN, gk.store.Schema((gk.store.Array("loss"),), rows_per_segment=2))
    writer.append(np.arange(4), {"loss": np.arange(4, dtype=np.float32)})
    for key in keys_of(store):
        file = Path(store.backend.root, key)
        bare = file.rename(file.with_suffix(""))
        actual = verify(store.location)
        excused = any(part in key for part in (*NOT_RECORDED, "final/open/main/seg"))
        assert (key in [item.path for item in actual.damage]) is not excused, key
        for ask in QUESTIONS if key != "STORE.json" else ():
            with contextlib.suppress(GradkeepError):
                ask(gk.open(store.location, durability="process"))
        bare.rename(file)
    assert verify(store.location).healthy


def test_a_store_without_its_own_document_is_damaged(store):
    os.unlink(f"{store.location}/STORE.json")
    actual = verify(store.location)
    assert [(item.path, "missing" in item.what) for item in actual.damage] == [("STORE.json", True)]
    with pytest.raises(NotAStoreError):
        gk.open(store.location)
    verify(store.location, repair=True)
    assert verify(store.location).healthy
    assert gk.open(store.location).read(KEY).ids.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(
    "key",
    [
        *("x.json", "blocks/x.json", f"{KEY.folder}/x.json", f"{KEY.folder}/manifest/x.json"),
        *(f"{KEY.folder}/manifest/0000001.json", f"{KEY.folder}/seg/1.safetensors"),
        *("heads/x.json", "runs/run.json", "datamodels/models/size/x.json", "a/b/c/d/e/f.json"),
        *("datamodels/models/claims/000000/x.json", f"{KEY.folder}/samples-1.parquet"),
    ],
)
@pytest.mark.parametrize("source", ["empty", "manifest"])
def test_documents_in_the_wrong_place_are_named(store, key, source):
    data = b"" if source == "empty" else store.backend.read(f"{KEY.folder}/manifest/000000.json")
    store.backend.put_if_absent(key, [data], durability="process")
    assert [item.path for item in verify(store.location).damage] == [key]
    verify(store.location, repair=True)
    assert verify(store.location).healthy


@pytest.mark.parametrize("key", [".DS_Store", "notes.txt", f"{KEY.folder}/README", "blocks/a/b"])
def test_what_is_not_ours_is_left_alone(store, key):
    store.backend.put_if_absent(key, [b"mine"], durability="process")
    actual = verify(store.location, repair=True)
    assert (actual.healthy, actual.unknown, actual.repaired) == (True, (key,), ())


@pytest.mark.parametrize("code", [errno.EACCES, errno.EIO, errno.ESTALE])
def test_what_cannot_be_read_is_damage(store, monkeypatch, code):
    real = os.open
    for key in keys_of(store):

        def refuse(path, *args, key=key, **options):
            if str(path).endswith(key):
                raise OSError(code, os.strerror(code), path)
            return real(path, *args, **options)

        with monkeypatch.context() as patch:
            patch.setattr(os, "open", refuse)
            verdict = verify(LocalDisk(store.location), repair=key.endswith("schema.json"))
        damage = verdict.damage
        assert key in [item.path for item in damage]
        assert not verdict.repaired or f"{key} was not moved" in verdict.repaired[-1]
        assert all("cannot be checked" not in item.what for item in damage)
    assert verify(store.location).healthy


@pytest.mark.parametrize("code", [errno.EACCES, errno.EIO])
def test_a_folder_that_cannot_be_listed_is_damage(store, monkeypatch, code):
    real = os.scandir
    folders = sorted({key.rpartition("/")[0] for key in keys_of(store)} - {""})
    for folder in folders:

        def refuse(path, folder=folder):
            if str(path).endswith(folder):
                raise OSError(code, os.strerror(code), path)
            return real(path)

        with monkeypatch.context() as patch:
            patch.setattr(os, "scandir", refuse)
            damage = verify(LocalDisk(store.location)).damage
        assert any(item.path == folder and os.strerror(code) in item.what for item in damage)


class Failing(Memory):
    """A backend of somebody else, which raises what it likes."""

    error: Exception | None = None

    def open(self, key):
        if self.error is not None and key != "STORE.json":
            raise self.error
        return super().open(key)


@pytest.mark.parametrize(
    "error", [OSError("no"), ValueError("no"), KeyError("no"), RecursionError(), MemoryError()]
)
def test_a_backend_that_raises_anything_ends_no_check(error):
    backend = Failing()
    fill(gk.open(backend, durability="process"))
    backend.error = error
    actual = verify(backend)
    assert len(actual.damage) >= 10
    assert verify(backend, repair=True).repaired


@pytest.mark.parametrize("part", ["rows", "claims", "failed"])
def test_rows_in_the_folder_of_others_are_named_and_not_believed(store, part):
    folder = Path(store.backend.root, "datamodels/models", part, "000000")
    folder.rename(folder.with_name("000009"))
    actual = verify(store.location)
    assert actual.damage
    assert all("folder does not match" in item.what for item in actual.damage)
    rows = store.rows("models")
    rows.read(rows.done())
    assert len(rows.states()) == 4
    verify(store.location, repair=True)
    assert verify(store.location).healthy
