"""Documents of strangers: bounded before they are parsed, with no field that gradkeep does not write."""

import tracemalloc
from pathlib import Path

import pytest
from raises import raises

import gradkeep as gk
from gradkeep.errors import DamagedError, StoreError
from gradkeep.store import _document, verify
from tests.store.test_strangers import at, fill, forge, look, sealed

KEY = gk.store.CaptureKey(checkpoint="final", split="train")


@pytest.fixture
def store(tmp_path):
    return fill(gk.open(tmp_path / "store", durability="process"))


def documents(store):
    root = Path(store.backend.root)
    return sorted(str(path.relative_to(root)) for path in root.rglob("*.json"))


def test_a_field_that_gradkeep_does_not_write_is_damage_in_every_document(store):
    store.decide(gk.store.Decision("train", 1, "accept"))
    for key in documents(store):
        good = at(store, key).read_bytes()
        forge(store, key, lambda fields: {**fields, "more": [[], []]})
        verdict = {item.path for item in verify(store.location).damage}
        assert key in verdict, key
        at(store, key).write_bytes(good)
    assert verify(store.location).healthy


@pytest.mark.parametrize("where", ["schema", "segments of a manifest"])
def test_an_unknown_field_is_refused_when_a_block_is_read(store, where):
    if where == "schema":
        forge(store, f"{KEY.folder}/schema.json", lambda fields: {**fields, "more": 1})
    else:
        key = f"{KEY.folder}/manifest/000001.json"

        def change(fields):
            return {**fields, "segments": [{**one, "more": 1} for one in fields["segments"]]}

        forge(store, key, change)
    with raises(DamagedError, "store.malformed_document"):
        gk.open(store.location, create=False).read(KEY)


def test_values_are_counted_before_they_are_made(store):
    fields = at(store, f"{KEY.folder}/schema.json").read_text().rpartition(",\n")[0]
    forged = sealed(fields + ',\n  "more": [' + "[]," * 2_200_000 + "[]]")
    forge(store, f"{KEY.folder}/schema.json", lambda _: forged)
    tracemalloc.start()
    raised = look(store.location)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert {"read", "samples"} <= raised
    assert "info" not in raised  # it says what is unreadable
    assert peak < 100e6


def test_a_document_of_fixed_fields_is_small(store):
    large = at(store, "datamodels/models/size/000000000005.json")
    with open(large, "r+b") as file:
        file.truncate(1 << 40)  # sparse
    assert {item.path for item in verify(store.location).damage} >= {
        "datamodels/models/size/000000000005.json"
    }


def test_what_could_not_be_read_back_is_not_written(store, monkeypatch):
    monkeypatch.setattr(_document, "LARGE_DOCUMENT", 10_000)
    with raises(StoreError, "store.document_too_large"):
        store.add_run(gk.store.Run("large", {"text": "x" * 20_000}))
    schema = gk.store.Schema((gk.store.Array("loss"),), fingerprints={"text": "x" * 20_000})
    with raises(StoreError, "store.document_too_large"):
        store.write(gk.store.CaptureKey("final", "other"), schema)
    assert verify(store.location).healthy
