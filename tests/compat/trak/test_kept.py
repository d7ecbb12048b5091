"""Projected gradients in a store: any order, any parts, any number of writers."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from raises import raises

import gradkeep.store as gs
from gradkeep.compat.trak._rows import RowLog
from gradkeep.errors import AttributionError, MissingRowsError, SchemaMismatchError

N, K = 12, 3


def opened(store, **options):
    options = {"count": N, "dim": K, "half": False, "fingerprints": {}} | options
    return RowLog(store, "rows", **options)


def values(ids, by=1.0):
    return by * torch.tensor([[float(i), -i, i * i] for i in ids])


class Blind(RowLog):
    """Began before the others had ended: sees their files when it meets one."""

    looks = 0

    def refresh(self):
        self.looks += 1
        if self.looks > 2:  # not on opening, and not before it puts
            super().refresh()


@given(
    st.lists(
        st.tuples(st.booleans(), st.lists(st.integers(0, N - 1), min_size=1, unique=True)),
        max_size=8,
    )
)
def test_the_first_of_two_writers_wins_and_no_row_is_lost(puts):
    store = gs.open(gs.Memory())
    writers = [opened(store), opened(store)]
    first = {}
    for second, ids in puts:
        by = 2.0 if second else 1.0
        writers[second].put(np.array(ids), values(ids, by), torch.tensor(ids) * by)
        for number in ids:
            first.setdefault(number, by)
    log = opened(store)
    assert np.flatnonzero(log.done).tolist() == sorted(first)
    order = list(first)[::-1]
    expected = values(order, 1.0) * torch.tensor([first[i] for i in order])[:, None]
    if order:
        assert torch.equal(log.read(np.array(order)), expected)
    if len(first) == N:
        assert log.weight.tolist() == [i * first[i] for i in range(N)]


@given(st.lists(st.lists(st.integers(0, N - 1), min_size=1, unique=True), max_size=6))
def test_all_readers_agree_on_rows_that_were_computed_at_the_same_time(puts):
    store = gs.open(gs.Memory())
    early = opened(store)
    for by, ids in enumerate(puts, 1):
        Blind(store, "rows", count=N, dim=K, half=False, fingerprints={}).put(
            np.array(ids), values(ids, by), None
        )
        early.refresh()
    late = opened(store)
    written = np.flatnonzero(late.done)
    assert written.tolist() == sorted(set().union(*puts))
    assert torch.equal(early.read(written), late.read(written))


def test_rows_that_are_not_there_are_not_read(tmp_path):
    log = opened(gs.open(tmp_path))
    log.put(np.array([3]), values([3]), None)
    with raises(MissingRowsError, "store.missing_rows") as caught:
        log.read(np.array([2, 3, 4]))
    assert caught.value.found == "2, 4"
    assert np.isnan(log.weight[2])


def test_half_precision_keeps_large_and_small_rows(tmp_path):
    log = opened(gs.open(tmp_path), half=True)
    grads = torch.tensor([[1e6, -2e6, 3e6], [1e-9, 2e-9, -3e-9]])
    log.put(np.array([0, 1]), grads, None)
    assert torch.allclose(log.read(np.array([0, 1])), grads, rtol=1e-3, atol=0)


def test_what_was_begun_differently_is_refused(tmp_path):
    store = gs.open(tmp_path)
    opened(store)
    for change in ({"count": N + 1}, {"dim": K + 1}, {"half": True}, {"fingerprints": {"a": "b"}}):
        with pytest.raises(SchemaMismatchError):
            opened(store, **change)


def test_dropped_and_deleted_rows(tmp_path):
    store = gs.open(tmp_path)
    log = opened(store)
    log.put(np.arange(N), values(range(N)), None)
    log.clear()
    assert not log.done.any()
    assert not opened(store).done.any()
    log.put(np.array([1]), values([1], 5.0), None)
    assert torch.equal(opened(store).read(np.array([1])), values([1], 5.0))
    store.delete_rows("rows")
    assert store.row_sets() == []
    assert not opened(store, dim=K + 1).done.any()


def test_rows_of_the_earlier_layout_are_read_and_completed(tmp_path):
    store = gs.open(tmp_path / "store")
    arrays = (
        gs.Array("rows", "int64", kind="data", ragged=True),
        gs.Array("grads", shape=(3,), kind="projection", ragged=True),
        gs.Array("weight", kind="data", ragged=True),
    )
    schema = gs.Schema(arrays, rows_per_segment=1, fingerprints={"count": "6"})
    grads = torch.arange(18.0).reshape(6, 3)
    earlier = {"rows": np.arange(2, 4), "grads": grads[2:4].numpy(), "weight": np.ones(2, "f4")}
    store.rows("earlier", schema, num_rows=6).put(2, earlier)
    log = RowLog(store, "earlier", count=6, dim=3)
    assert log.done.tolist() == [False, False, True, True, False, False]
    log.put(np.arange(6), grads, torch.full((6,), 2.0))
    for reader in (log, RowLog(store, "earlier", count=6, dim=3)):
        assert reader.done.all()
        assert torch.equal(reader.read(np.arange(6)), grads)
        assert reader.weight.tolist() == [2, 2, 1, 1, 2, 2]
    with pytest.raises(AttributionError):
        log.assign(np.arange(1), grads[:1])
