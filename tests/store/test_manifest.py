"""Versions of a block: which is the newest, what may be sealed, and what a seal refuses."""

import msgspec
import numpy as np
import pytest
from raises import raises

import gradkeep as gk
from gradkeep.errors import ConflictError, DamagedError, InvalidRowsError, MissingRowsError
from gradkeep.store import Memory
from gradkeep.store.blocks import _manifest
from gradkeep.store.blocks._incoming import validate_rows
from gradkeep.store.blocks._manifest import latest_manifest, load_manifest, manifest_versions
from gradkeep.store.blocks._segment import pack
from gradkeep.store.blocks._writer import encode_rows

KEY = gk.store.CaptureKey(checkpoint="final", split="train")
FOLDER = KEY.folder


class Recording(Memory):
    """Remembers what was asked to be durable."""

    def __init__(self):
        super().__init__()
        self.durable = []

    def ensure_durable(self, keys):
        self.durable += keys


@pytest.fixture
def store():
    return gk.open(Recording(), durability="process")


def schema(**options):
    return gk.store.Schema((gk.store.Array("loss"),), rows_per_segment=2, **options)


def begin(store, of=None):
    """A block of which nothing but the schema is there."""
    of = schema() if of is None else of
    store.write(KEY, of).close()
    return of


def put_segment(store, of, number, ids, *, damaged_ids=False):
    """Commit a segment as a writer does; with one bit of its ids flipped."""
    numbers = np.array(ids, np.int64)
    rows = validate_rows(of, numbers, {"loss": np.ones(len(ids), "f4")}, path="")
    stored = encode_rows(of, rows, slice(0, len(ids)))
    data = b"".join(pack(of, numbers, stored, first_row=2 * number).parts)
    if damaged_ids:
        at = data.index(numbers.tobytes())
        data = data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
    key = f"{FOLDER}/seg/{number:06d}.safetensors"
    store.backend.put_if_absent(key, [data], durability="process")
    return key


def seal(store, *, durability="process", own=(), adding=True):
    return _manifest.seal(store.backend, FOLDER, durability=durability, own=own, adding=adding)


def test_the_newest_version_is_the_one_with_the_highest_number(store):
    of = begin(store)
    assert (manifest_versions(store.backend, FOLDER), latest_manifest(store.backend, FOLDER)) == (
        [],
        None,
    )
    for number in range(11):
        put_segment(store, of, number, [2 * number, 2 * number + 1])
        assert seal(store).version == number
    # Neither other files nor the order of names decide.
    for name in ("999999.json.bak", "x.json", "-1.json"):
        store.backend.put_if_absent(f"{FOLDER}/manifest/{name}", [b"?"], durability="process")
    assert manifest_versions(store.backend, FOLDER) == list(range(11))
    newest = latest_manifest(store.backend, FOLDER)
    assert (newest.version, newest.rows, newest.next_row, newest.next_segment) == (10, 22, 22, 11)
    assert newest.bytes == sum(entry.bytes for entry in newest.segments)
    assert len(store.read(KEY)) == 22
    assert len(store.read(KEY, version=3)) == 8


def test_a_version_that_is_not_there_is_named_with_those_that_are(store):
    of = begin(store)
    with pytest.raises(MissingRowsError, match="no version 0"):
        load_manifest(store.backend, FOLDER, 0)
    put_segment(store, of, 0, [0, 1])
    seal(store)
    with pytest.raises(MissingRowsError, match="no version 7") as caught:
        store.read(KEY, version=7)
    assert caught.value.found == "versions 0"


def test_a_manifest_under_another_number_is_damage(store):
    of = begin(store)
    put_segment(store, of, 0, [0, 1])
    seal(store)
    data = store.backend.read(f"{FOLDER}/manifest/000000.json")
    store.backend.put_if_absent(f"{FOLDER}/manifest/000001.json", [data], durability="process")
    with raises(DamagedError, "store.misnamed_manifest") as caught:
        store.read(KEY)
    assert "version 0" in caught.value.message
    assert len(store.read(KEY, version=0)) == 2


def test_a_manifest_of_another_schema_is_damage(store):
    of = begin(store)
    put_segment(store, of, 0, [0, 1])
    seal(store)
    store.backend.delete([f"{FOLDER}/schema.json"], durability="process")
    store.write(KEY, schema(fingerprints={"seed": 2})).close()
    with raises(DamagedError, "store.other_schema"):
        store.read(KEY)


def test_what_is_sealed_is_what_is_committed(store):
    of = begin(store)
    put_segment(store, of, 0, [4, 2])
    put_segment(store, of, 1, [9])
    actual = seal(store)
    assert [entry.file for entry in actual.segments] == [
        "seg/000000.safetensors",
        "seg/000001.safetensors",
    ]
    assert actual.written == (2, 1)
    assert store.read(KEY).ids.tolist() == [4, 2, 9]
    assert seal(store) == actual, "nothing came since"


def test_rows_that_another_adds_are_sealed_only_when_asked_for(store):
    of = begin(store)
    put_segment(store, of, 0, [0, 1])
    first = seal(store)
    put_segment(store, of, 1, [2, 3])
    assert seal(store, adding=False) == first
    assert len(store.read(KEY, live=True)) == 4
    second = seal(store)
    assert (second.version, second.rows) == (1, 4)
    assert second.segments[:1] == first.segments


def test_an_empty_block_can_be_sealed_and_grow(store):
    of = begin(store)
    assert seal(store).segments == ()
    put_segment(store, of, 0, [5])
    assert (seal(store).version, store.read(KEY).ids.tolist()) == (1, [5])


@pytest.mark.parametrize("there", [[1], [0, 2], [0, 3], [8]])
def test_holes_are_named_and_not_sealed(store, there):
    of = begin(store)
    for number in there:
        put_segment(store, of, number, [2 * number, 2 * number + 1])
    holes = [number for number in range(max(there)) if number not in there]
    with pytest.raises(MissingRowsError, match=f"{len(holes)} segments are missing") as caught:
        seal(store)
    named = [f"seg/{number:06d}.safetensors" for number in holes]
    more = " ..." if len(holes) > 5 else ""
    assert caught.value.found == ", ".join(named[:5]) + more
    assert manifest_versions(store.backend, FOLDER) == []


def test_a_sealed_segment_that_is_gone_is_missed(store):
    of = begin(store)
    gone = put_segment(store, of, 0, [0, 1])
    put_segment(store, of, 1, [2, 3])
    seal(store)
    store.backend.delete([gone], durability="process")
    for adding in (True, False):
        with pytest.raises(MissingRowsError, match="1 segments are missing") as caught:
            seal(store, adding=adding)
        assert "recreates exactly" in caught.value.fix


def test_a_rewritten_segment_that_is_gone_cannot_be_written_again(store):
    of = begin(store)
    put_segment(store, of, 0, [0, 1])
    seal(store)
    (entry,) = store.drop_rows(KEY, [1]).segments
    store.backend.delete([f"{FOLDER}/{entry.file}"], durability="process")
    with pytest.raises(MissingRowsError) as caught:
        seal(store)
    assert "older version" in caught.value.fix
    with pytest.raises(MissingRowsError) as caught:
        store.read(KEY).read([0])
    assert "older version" in caught.value.fix


@pytest.mark.parametrize("rows", [2, 4, 5])
def test_a_block_with_more_or_fewer_rows_than_promised_is_not_sealed(store, rows):
    of = begin(store, schema(num_rows=3))
    for number in range(0, rows, 2):
        put_segment(store, of, number // 2, list(range(number, min(rows, number + 2))))
    with raises(MissingRowsError, "store.incomplete") as caught:
        seal(store)
    assert caught.value.found == f"{rows} of 3 rows"
    assert manifest_versions(store.backend, FOLDER) == []


def test_dropped_rows_still_count_as_written(store):
    of = begin(store, schema(num_rows=3))
    put_segment(store, of, 0, [0, 1])
    put_segment(store, of, 1, [2])
    seal(store)
    store.drop_rows(KEY, [2])
    actual = seal(store)
    assert (actual.version, actual.rows, actual.next_row) == (1, 2, 3)


@pytest.mark.parametrize(("second", "output"), [([1, 2], "id 1"), ([1, 0], "id 1 and more")])
def test_an_id_in_two_segments_is_refused(store, second, output):
    of = begin(store)
    put_segment(store, of, 0, [0, 1])
    put_segment(store, of, 1, second)
    with raises(InvalidRowsError, "store.id_in_two_segments") as caught:
        seal(store)
    assert caught.value.found == output
    assert caught.value.path.endswith("seg/000001.safetensors")


@pytest.mark.parametrize("sealed", [0, 1, 2])
def test_a_short_segment_in_the_middle_is_refused(store, sealed):
    of = begin(store)
    for number in range(sealed):
        put_segment(store, of, number, [10 * number, 10 * number + 1])
    if sealed:
        seal(store)
    put_segment(store, of, sealed, [500])
    put_segment(store, of, sealed + 1, [600, 601])
    with raises(MissingRowsError, "store.short_segment") as caught:
        seal(store)
    assert caught.value.path.endswith(f"seg/{sealed:06d}.safetensors")
    assert caught.value.found == "1 of 2 rows"


def test_a_short_segment_that_was_the_last_of_a_version_is_none_in_the_middle(store):
    of = begin(store)
    put_segment(store, of, 0, [0])
    seal(store)
    put_segment(store, of, 1, [1])
    assert seal(store).written == (1, 1)


def test_damaged_ids_are_not_sealed(store):
    of = begin(store)
    put_segment(store, of, 0, [0, 1])
    put_segment(store, of, 1, [2, 3], damaged_ids=True)
    with pytest.raises(DamagedError, match="'ids'"):
        seal(store)
    assert manifest_versions(store.backend, FOLDER) == []


def test_a_segment_of_another_schema_is_neither_sealed_nor_seen(store):
    of = begin(store)
    put_segment(store, of, 0, [0, 1])
    put_segment(store, schema(fingerprints={"seed": 2}), 1, [2, 3])
    with raises(DamagedError, "store.other_schema"):
        seal(store)
    with raises(DamagedError, "store.other_schema"):
        store.read(KEY, live=True)


def test_a_segment_that_was_replaced_is_noticed_when_it_is_read(store):
    of = begin(store)
    key = put_segment(store, of, 0, [0, 1])
    seal(store)
    store.backend.delete([key], durability="process")
    put_segment(store, of, 0, [1, 0])
    with raises(DamagedError, "store.replaced_segment"):
        store.read(KEY).read([0])


def test_a_full_seal_makes_durable_what_others_put_and_nothing_twice(store):
    of = begin(store)
    keys = [put_segment(store, of, number, [2 * number, 2 * number + 1]) for number in range(3)]
    store.backend.durable.clear()
    seal(store, durability="full", own=("seg/000001.safetensors",))
    assert store.backend.durable == [keys[0], keys[2]]
    store.backend.durable.clear()
    seal(store, durability="full")
    assert store.backend.durable == [f"{FOLDER}/manifest/000000.json"], "that of another, perhaps"
    more = put_segment(store, of, 3, [6])
    store.backend.durable.clear()
    seal(store, durability="full")
    assert store.backend.durable == [more], "older segments were seen to by their own version"
    store.backend.durable.clear()
    seal(store)
    assert store.backend.durable == []


def test_who_loses_the_race_for_a_number_takes_the_next(store, monkeypatch):
    of = begin(store)
    put_segment(store, of, 0, [0, 1])
    publish = _manifest.publish_manifest

    def beaten(backend, folder, manifest, **options):
        monkeypatch.setattr(_manifest, "publish_manifest", publish)
        _manifest.seal(backend, folder, durability="process", own=(), adding=True)
        put_segment(store, of, 1, [2, 3])
        return publish(backend, folder, msgspec.structs.replace(manifest, written=(9,)), **options)

    monkeypatch.setattr(_manifest, "publish_manifest", beaten)
    assert (seal(store).version, len(store.read(KEY))) == (1, 4)


def test_only_the_newest_version_can_lose_rows(store):
    of = begin(store)
    put_segment(store, of, 0, [0, 1])
    put_segment(store, of, 1, [2, 3])
    seal(store)
    old = store.read(KEY)
    store.drop_rows(KEY, [0])
    with raises(ConflictError, "store.not_newest") as caught:
        _manifest.drop_rows(old, [1], durability="process")
    assert "version 0" in caught.value.message
    actual = store.drop_rows(KEY, [2, 3])
    assert [entry.rows for entry in actual.segments] == [1]
    assert store.read(KEY).ids.tolist() == [1]
    assert actual.written == (2, 2)
