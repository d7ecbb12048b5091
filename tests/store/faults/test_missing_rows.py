"""A missing row never reads as a number, whatever is missing and however it is asked for."""

import dataclasses
import math
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from raises import raises

from gradkeep import store as gs
from gradkeep.errors import InvalidRowsError, MissingRowsError

FLOATS = ("loss", "wide", "bf16", "scaled")
SCHEMA = gs.Schema(
    (
        gs.Array("loss"),
        gs.Array("wide", "float64", shape=(2,), kind="data"),
        gs.Array("bf16", shape=(3,), kind="suffix", encoding="bfloat16"),
        gs.Array("scaled", shape=(2, 2), kind="suffix", encoding="float16-scaled"),
        gs.Array("label", "int64"),
        gs.Array("bits", "bool", shape=(5,), kind="mask", encoding="bits"),
        gs.Array("tokens", shape=(2,), kind="data", ragged=True),
    ),
    rows_per_segment=3,
)
KEY = gs.CaptureKey("final", "train")
SHAPES = {array.name: array.shape for array in SCHEMA.arrays}


def values(ids):
    """Values that are never zero and never NaN, exact in each encoding."""
    ids = np.asarray(ids, np.int64).reshape(-1)
    number = (ids % 61 + 1).astype(np.float32)
    actual = {
        name: np.broadcast_to(
            number.reshape(-1, *(1,) * len(SHAPES[name])), (len(ids), *SHAPES[name])
        )
        for name in FLOATS
    }
    actual["wide"] = actual["wide"].astype(np.float64)
    actual["label"] = ids + 1
    actual["bits"] = np.ones((len(ids), 5), np.bool_)
    actual["tokens"] = [
        np.full((1 + i % 2, 2), n, np.float32) for i, n in zip(ids, number, strict=True)
    ]
    return actual


ids_of_a_block = st.lists(st.integers(0, 60), min_size=1, max_size=14, unique=True)


@st.composite
def blocks(draw):
    """Ids in the order they are written, and the segments of them that are missing."""
    ids = draw(ids_of_a_block)
    last = (len(ids) - 1) // 3
    return ids, draw(st.sets(st.integers(0, last)))


def there(ids, holes):
    return [i for at, i in enumerate(ids) if at // 3 not in holes]


def write_some(store, ids, holes):
    """Write the segments that are not to be missing, each by a writer of its own."""
    count, schema = (len(ids) + 2) // 3, dataclasses.replace(SCHEMA, num_rows=len(ids))
    for number in set(range(count)) - holes:
        with store.write(KEY, schema, segments=range(number, number + 1)) as writer:
            writer.append(ids, values(ids))
    if not holes:
        with store.write(KEY, schema) as writer:
            writer.skip(ids)


def ask(reader, row_ids, present):
    """Asked for in every way, what is present is right and what is missing is not a number."""
    missing = [i for i in row_ids if i not in present]
    if missing:
        with pytest.raises(MissingRowsError) as raised:
            reader.read(row_ids)
        assert set(missing) & {int(number) for number in re.findall(r"\d+", raised.value.found)}
        with pytest.raises(MissingRowsError):
            reader.read(missing[:1], [])
    else:
        assert_right(reader.read(row_ids))
    for number in (0, -1.0, math.inf):
        with raises(InvalidRowsError, "store.invalid_fill"):
            reader.read(row_ids, ["loss"], fill=number)
    for names in (["label"], ["bits"], ["tokens"], None):
        with raises(InvalidRowsError, "store.invalid_fill"):
            reader.read(row_ids, names, fill=math.nan)
    filled = reader.read(row_ids, FLOATS, fill=math.nan)
    absent = np.isin(row_ids, missing)
    for name in FLOATS:
        empty = np.isnan(filled[name].reshape(len(row_ids), -1))
        np.testing.assert_array_equal(empty.all(axis=1), absent)
        np.testing.assert_array_equal(empty.any(axis=1), absent)
        right = values(row_ids)[name]
        np.testing.assert_array_equal(filled[name][~absent], right[~absent])


def assert_right(batch):
    expected = values(batch.ids)
    for name in batch:
        if name == "tokens":
            for row, right in enumerate(expected[name]):
                np.testing.assert_array_equal(batch[name][row], right)
        else:
            np.testing.assert_array_equal(batch[name], expected[name])


asked_for = st.lists(st.integers(0, 65), min_size=1, max_size=10)


@given(blocks(), asked_for)
def test_holes_in_the_live_view(block, queries):
    ids, holes = block
    store = gs.open(gs.Memory())
    write_some(store, ids, holes)
    # What has a hole was not sealed.
    assert bool(store.backend.list(f"{KEY.folder}/manifest")) == (not holes)
    present = there(ids, holes)
    if not present:
        return  # nothing was written at all
    live = store.read(KEY, live=True)
    assert live.ids.tolist() == present
    for batch in live.stream():
        assert_right(batch)
    assert live.column("label").tolist() == [i + 1 for i in present]
    ask(live, queries + ids, present)


@given(ids_of_a_block, st.data())
def test_rows_that_were_dropped(ids, data):
    store = gs.open(gs.Memory())
    write_some(store, ids, set())
    dropped = data.draw(st.lists(st.sampled_from(ids), unique=True, max_size=len(ids) - 1))
    store.drop_rows(KEY, dropped)
    present = [i for i in ids if i not in dropped]
    block = store.read(KEY)
    assert block.ids.tolist() == present
    ask(block, data.draw(asked_for) + ids, present)
    assert_right(store.read(KEY, version=0).read(ids))


@given(blocks(), asked_for)
def test_segments_in_quarantine(block, queries):
    ids, holes = block
    store = gs.open(gs.Memory())
    write_some(store, ids, set())
    for number in holes:
        store.backend.move_aside(f"{KEY.folder}/seg/{number:06d}.safetensors")
    actual = store.read(KEY)
    if not holes:
        ask(actual, queries, ids)
        return
    # Which ids are gone is not known: nothing is answered, not even with NaN.
    for fill in (None, math.nan):
        with raises(MissingRowsError, "store.missing_segment"):
            store.read(KEY).read(queries, ["loss"], fill=fill)
    with raises(MissingRowsError, "store.missing_segment"):
        store.read(KEY).column("loss")
    seen = []
    with raises(MissingRowsError, "store.missing_segment"):
        seen.extend(store.read(KEY).stream())
    before = [i for batch in seen for i in batch.ids.tolist()]
    assert before == ids[: len(before)]
    assert len(before) <= 3 * min(holes)
    for batch in seen:
        assert_right(batch)
    # The work brings back exactly what is missing.
    with store.write(KEY, actual.schema) as writer:
        writer.append(ids, values(ids))
    ask(store.read(KEY), queries, ids)


@given(
    st.integers(1, 12).flatmap(
        lambda total: st.tuples(
            st.just(total), st.sets(st.integers(0, total - 1)), st.integers(0, 4)
        )
    ),
    asked_for,
)
def test_rows_that_are_not_done(size, queries):
    total, done, pack = size
    rows = gs.open(gs.Memory()).rows("models", SCHEMA, num_rows=total)
    for row in sorted(done):
        rows.put(row, {name: _one(name, value) for name, value in values([row]).items()})
    if pack:
        rows.compact(rows_per_file=pack)
    assert rows.done().tolist() == sorted(done)
    ask(rows, [*queries, *range(total)], done)


def _one(name, value):
    return gs.Ragged.of(value) if name == "tokens" else value[0]
