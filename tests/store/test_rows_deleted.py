"""A set of rows that is deleted leaves nothing behind, wherever it lay."""

import numpy as np
import pytest
from raises import raises

import gradkeep as gk
from gradkeep.errors import StoreError

SCHEMA = gk.store.Schema((gk.store.Array("value", shape=(2,)),))


@pytest.mark.parametrize("place", ["folder", "memory"])
def test_a_deleted_set_of_rows_leaves_nothing(tmp_path, place):
    store = gk.open(tmp_path / "store" if place == "folder" else gk.store.Memory())
    store.rows("stays", SCHEMA, num_rows=2)
    rows = store.rows("goes", SCHEMA, num_rows=40)
    for row in range(30):
        rows.put(row, {"value": np.float32([row, 1])})
    rows.compact()
    rows.claim(count=2)
    rows.fail(rows.claim()[0], "no")
    store.delete_rows("goes")
    assert store.row_sets() == ["stays"]
    verdict = gk.store.verify(store)
    assert verdict.healthy
    assert not verdict.orphans
    assert store.rows("goes", SCHEMA, num_rows=5).done().tolist() == []
    store.delete_rows("goes")
    with raises(StoreError, "store.no_such_rows"):
        store.delete_rows("goes")
