"""Names of earlier versions still work, and name the one that replaced them."""

import pytest

import gradkeep.store
from gradkeep import _display
from gradkeep.store import backends, blocks, catalog

OLD = {
    "BlockFacts": catalog.BlockFacts,
    "Catalog": catalog.Catalog,
    "CheckpointFacts": catalog.CheckpointFacts,
    "CheckpointInfo": catalog.CheckpointInfo,
    "Column": blocks.Column,
    "Info": catalog.StoreInfo,
    "LayerFacts": catalog.LayerFacts,
    "Manifest": blocks.Manifest,
    "Place": catalog.BlockAddress,
    "Result": catalog.SqlResult,
    "RowSetInfo": catalog.RowSetInfo,
    "RunFacts": catalog.RunFacts,
    "RunInfo": catalog.RunInfo,
    "Segment": blocks.Segment,
    "SegmentEntry": blocks.SegmentEntry,
    "SegmentFacts": catalog.SegmentFacts,
    "Share": blocks.WriterShare,
    "Swept": gradkeep.store.GcReport,
    "Syscalls": backends.Syscalls,
    "describe_rows": _display.describe_rows,
    "describe_state": _display.describe_state,
    "format_ratio": _display.format_ratio,
    "format_size": _display.format_size,
}


@pytest.mark.parametrize("name", OLD)
def test_an_old_name_works_and_warns(name):
    with pytest.warns(DeprecationWarning, match=f"gradkeep.store.{name} is now "):
        assert getattr(gradkeep.store, name) is OLD[name]
    assert name not in gradkeep.store.__all__


def test_the_place_of_a_block_is_its_address(tmp_path):
    store = gradkeep.store.open(tmp_path, durability="process")
    key = gradkeep.store.ScoresKey("dot")
    with store.write(key, gradkeep.store.Schema((gradkeep.store.Array("score"),))) as writer:
        writer.append([0], {"score": [1.0]})
    (found,) = store.info().blocks
    with pytest.warns(DeprecationWarning, match="address"):
        assert found.place == found.address == catalog.BlockAddress("scores", "dot")
