"""Opening a store, and what happens when the path holds something else."""

import multiprocessing
import os

import pytest
from raises import raises

import gradkeep as gk
from gradkeep.errors import DamagedError, FormatTooNewError, NotAStoreError
from gradkeep.store import LocalDisk, _document


def test_a_new_path_becomes_a_store_and_opens_again(tmp_path):
    first = gk.open(tmp_path / "deep" / "er" / "store")
    assert gk.open(tmp_path / "deep" / "er" / "store").uuid == first.uuid


def test_an_empty_folder_becomes_a_store(tmp_path):
    assert gk.open(tmp_path).uuid == gk.open(tmp_path, create=False).uuid


def test_a_folder_with_other_things_is_left_alone(tmp_path):
    (tmp_path / "thesis.tex").write_text("x")
    with pytest.raises(NotAStoreError, match=r"thesis\.tex") as caught:
        gk.open(tmp_path)
    assert "path of a store" in caught.value.fix
    assert os.listdir(tmp_path) == ["thesis.tex"]


def test_a_file_is_not_a_store(tmp_path):
    path = tmp_path / "file"
    path.write_text("x")
    with pytest.raises(NotAStoreError, match="a file"):
        gk.open(path)


def test_a_link_that_leads_nowhere_is_named(tmp_path):
    path = tmp_path / "link"
    path.symlink_to(tmp_path / "gone")
    with pytest.raises(NotAStoreError, match="a broken link"):
        gk.open(path)


def test_a_link_to_a_store_is_followed(tmp_path):
    store = gk.open(tmp_path / "store")
    (tmp_path / "link").symlink_to(tmp_path / "store")
    assert gk.open(tmp_path / "link").uuid == store.uuid


def test_nothing_there_and_not_to_be_made(tmp_path):
    with raises(NotAStoreError, "store.not_a_store", fix="gradkeep demo"):
        gk.open(tmp_path / "none", create=False)
    assert not (tmp_path / "none").exists()


def test_a_store_of_a_later_format_is_refused(tmp_path):
    fields = {"format": "gradkeep-store", "version": 2, "uuid": "x"}
    (tmp_path / "STORE.json").write_bytes(_document.to_bytes(fields))
    with raises(FormatTooNewError, "store.format_too_new", fix="Upgrade gradkeep"):
        gk.open(tmp_path)


def test_another_kind_of_document_is_refused(tmp_path):
    (tmp_path / "STORE.json").write_bytes(_document.to_bytes({"format": "else", "version": 1}))
    with pytest.raises(NotAStoreError, match="else"):
        gk.open(tmp_path)


def test_an_edited_identity_is_noticed(tmp_path):
    gk.open(tmp_path)
    path = tmp_path / "STORE.json"
    path.write_text(path.read_text().replace('"version": 1', '"version": 0'))
    with pytest.raises(DamagedError, match=r"STORE\.json"):
        gk.open(tmp_path)


def test_unknown_durability_is_refused(tmp_path):
    with pytest.raises(gk.GradkeepError, match=r"^durability must be"):
        gk.open(tmp_path, durability="some")


def test_names_that_are_no_names_are_refused():
    for name in ("", ".hidden", "a/b", "a b", "-x", "x" * 101, None):
        with raises(gk.GradkeepError, "store.invalid_name"):
            gk.store.CaptureKey(checkpoint=name, split="train")


def _uuid_of_new_store(path):
    return gk.open(path).uuid


def test_two_processes_that_make_it_at_once_get_the_same_store(tmp_path):
    with multiprocessing.get_context("spawn").Pool(4) as pool:
        for turn in range(5):
            uuids = pool.map(_uuid_of_new_store, [tmp_path / str(turn)] * 4)
            assert len(set(uuids)) == 1


def test_a_store_that_appears_while_the_folder_is_looked_at_is_opened(tmp_path):
    class MadeMeanwhile(LocalDisk):
        def list(self, prefix):
            LocalDisk.put_if_absent(self, "STORE.json", [other], durability="process")
            return super().list(prefix)

    other = _document.to_bytes({"format": "gradkeep-store", "version": 1, "uuid": "theirs"})
    assert gk.open(MadeMeanwhile(tmp_path)).uuid == "theirs"


def test_errors_survive_the_way_between_processes():
    import pickle

    error = pickle.loads(pickle.dumps(NotAStoreError("x", path="p", found=1, expected=2, fix="f")))
    assert (error.message, error.path, error.found, error.expected, error.fix) == (
        "x",
        "p",
        1,
        2,
        "f",
    )
    assert str(error) == "p: x: 1; expected 2\nf"
