"""Rows made from something else never mix with those that are there: each change is refused."""

from dataclasses import replace

import faultkit as kit
import pytest

from gradkeep import store as gs
from gradkeep.errors import SchemaMismatchError

STORED = gs.Schema(
    (
        gs.Array("loss"),
        gs.Array("fc1.prefix", shape=(8,), kind="prefix", layer="fc1", encoding="bfloat16"),
        gs.Array("fc1.suffix", shape=(4,), kind="suffix", layer="fc1", encoding="bfloat16"),
    ),
    num_rows=8,
    num_examples=100,
    rows_per_segment=4,
    layers=(gs.Layer("fc1", "Linear", 36), gs.Layer("fc2", "Linear", 10)),
    fingerprints={
        "weights": "1a",
        "data": "d1",
        "split": "s1",
        "seed": 7,
        "projection seed": 3,
        "dropout": False,
    },
)
LOSS, PREFIX, SUFFIX = STORED.arrays
FC1, FC2 = STORED.layers


def with_array(old, new):
    return replace(STORED, arrays=[new if array is old else array for array in STORED.arrays])


def with_prefix(**changes):
    return with_array(PREFIX, replace(PREFIX, **changes))


def with_fingerprint(name, value):
    return replace(STORED, fingerprints={**STORED.fingerprints, name: value})


def without_fingerprint(name):
    return replace(
        STORED,
        fingerprints={key: STORED.fingerprints[key] for key in STORED.fingerprints if key != name},
    )


# What changes, and the words that the refusal must contain: its name and both values.
MUTATIONS = {
    "dtype": (
        with_array(LOSS, replace(LOSS, dtype="float64")),
        ["loss: dtype", "'float32'", "'float64'"],
    ),
    "shape": (with_prefix(shape=(9,)), ["fc1.prefix: shape", "(8,)", "(9,)"]),
    "rank": (with_prefix(shape=(8, 1)), ["fc1.prefix: shape", "(8,)", "(8, 1)"]),
    "layer of an array": (with_prefix(layer="fc2"), ["fc1.prefix: layer", "'fc1'", "'fc2'"]),
    "array renamed": (
        with_prefix(name="fc9.prefix"),
        ["fc1.prefix: stored, but not requested", "fc9.prefix: requested, but not stored"],
    ),
    "encoding": (
        with_prefix(encoding="float16-scaled"),
        ["fc1.prefix: encoding", "'bfloat16'", "'float16-scaled'"],
    ),
    "compression": (with_prefix(compression="zstd"), ["fc1.prefix: compression", "None", "'zstd'"]),
    "kind": (with_prefix(kind="embedding"), ["fc1.prefix: kind", "'prefix'", "'embedding'"]),
    "ragged": (with_prefix(ragged=True), ["fc1.prefix: ragged", "False", "True"]),
    "nan policy": (with_prefix(nan="keep"), ["fc1.prefix: nan", "'refuse'", "'keep'"]),
    "array dropped": (
        replace(STORED, arrays=(LOSS, PREFIX)),
        ["fc1.suffix: stored, but not requested"],
    ),
    "array added": (
        replace(STORED, arrays=(*STORED.arrays, gs.Array("margin"))),
        ["margin: requested, but not stored"],
    ),
    "order of arrays": (
        replace(STORED, arrays=(PREFIX, LOSS, SUFFIX)),
        ["order of arrays", "['loss', 'fc1.prefix'", "['fc1.prefix', 'loss'"],
    ),
    "layer renamed": (
        replace(STORED, layers=(FC1, replace(FC2, name="head"))),
        ["layer fc2: stored, but not requested", "layer head: requested, but not stored"],
    ),
    "layer's type": (
        replace(STORED, layers=(FC1, replace(FC2, type="Conv2d"))),
        ["layer fc2: type", "'Linear'", "'Conv2d'"],
    ),
    "layer's size": (
        replace(STORED, layers=(FC1, replace(FC2, parameters=11))),
        ["layer fc2: parameters", "10", "11"],
    ),
    "order of layers": (
        replace(STORED, layers=(FC2, FC1)),
        ["order of layers", "['fc1', 'fc2']", "['fc2', 'fc1']"],
    ),
    "number of rows": (replace(STORED, num_rows=9), ["num_rows", "8", "9"]),
    "number of rows unknown": (replace(STORED, num_rows=None), ["num_rows", "8", "None"]),
    "number of examples": (replace(STORED, num_examples=101), ["num_examples", "100", "101"]),
    "rows per segment": (replace(STORED, rows_per_segment=8), ["rows_per_segment", "4", "8"]),
    "weights": (with_fingerprint("weights", "2b"), ["fingerprint weights", "'1a'", "'2b'"]),
    "data": (with_fingerprint("data", "d2"), ["fingerprint data", "'d1'", "'d2'"]),
    "split": (with_fingerprint("split", "s2"), ["fingerprint split", "'s1'", "'s2'"]),
    "seed": (with_fingerprint("seed", 8), ["fingerprint seed", "7", "8"]),
    "seed as a string": (with_fingerprint("seed", "7"), ["fingerprint seed", "7", "'7'"]),
    "seed as a float": (with_fingerprint("seed", 7.0), ["fingerprint seed", "7", "7.0"]),
    "false for zero": (with_fingerprint("dropout", 0), ["fingerprint dropout", "False", "0"]),
    "projection seed": (
        with_fingerprint("projection seed", 4),
        ["fingerprint projection seed", "3", "4"],
    ),
    "fingerprint added": (
        with_fingerprint("code", "c1"),
        ["fingerprint code", "stored nothing", "'c1'"],
    ),
    "fingerprint dropped": (
        without_fingerprint("seed"),
        ["fingerprint seed", "stored 7", "requested nothing"],
    ),
}


@pytest.fixture(params=["begun", "sealed"])
def store(request, ram):
    """A store with a capture that is sealed, or of which one segment is written."""
    store = gs.open(ram / "store", durability="process")
    writer = store.write(kit.KEY, STORED)
    for ids in ([0, 1, 2, 3], [4, 5, 6, 7]):
        rows = {"loss": [1.0] * 4, "fc1.prefix": [[1.0] * 8] * 4, "fc1.suffix": [[1.0] * 4] * 4}
        writer.append(ids, rows)
        if request.param == "begun":
            writer.close()
            return store
    writer.seal()
    return store


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_a_changed_schema_is_refused_with_both_values(mutation, store):
    expected, words = MUTATIONS[mutation]
    before = kit.tree(store.location, without=())
    for extend in (False, True):
        with pytest.raises(SchemaMismatchError) as refused:
            store.write(kit.KEY, expected, extend=extend)
        for word in words:
            assert word in str(refused.value)
        assert "another checkpoint, split or capture name" in refused.value.fix
    assert kit.tree(store.location, without=()) == before
    # What is stored stays usable, and the unchanged schema is taken.
    assert len(store.read(kit.KEY, live=True)) in (4, 8)
    store.write(kit.KEY, STORED).close()


@pytest.mark.parametrize(
    "mutation", [name for name in MUTATIONS if not name.startswith("number of rows")]
)
def test_rows_of_a_changed_schema_are_refused(mutation, ram):
    expected, words = MUTATIONS[mutation]
    store = gs.open(ram / "store", durability="process")
    store.rows("models", STORED, num_rows=4)
    before = kit.tree(store.location, without=())
    with pytest.raises(SchemaMismatchError) as refused:
        store.rows("models", expected, num_rows=5)
    for word in words:
        assert word in str(refused.value)
    assert kit.tree(store.location, without=()) == before


RECORDS = [
    (replace(kit.RUN, config={"lr": 0.2}), ["config", "{'lr': 0.1}", "{'lr': 0.2}"]),
    (replace(kit.RUN, code="abc"), ["code", "None", "'abc'"]),
    (replace(kit.RUN, data="d2"), ["data", "'d1'", "'d2'"]),
    (replace(kit.CHECKPOINT, weights="2b"), ["weights", "'1a'", "'2b'"]),
    (replace(kit.CHECKPOINT, step=61), ["step", "60", "61"]),
    (replace(kit.CHECKPOINT, lr=0.2), ["lr", "0.1", "0.2"]),
    (replace(kit.CHECKPOINT, parent="init"), ["parent", "None", "'init'"]),
]


@pytest.mark.parametrize(("changed", "words"), RECORDS, ids=[words[0] for _, words in RECORDS])
def test_a_changed_run_or_checkpoint_is_refused_with_both_values(changed, words, ram):
    kit.make(ram, kit.capture)
    store = gs.open(ram)
    before = kit.tree(ram, without=())
    add = store.add_run if isinstance(changed, gs.Run) else store.add_checkpoint
    with pytest.raises(SchemaMismatchError) as refused:
        add(changed)
    for word in words:
        assert word in str(refused.value)
    assert kit.tree(ram, without=()) == before
    add(kit.RUN if isinstance(changed, gs.Run) else kit.CHECKPOINT)
