"""A store shows what it holds: to people, to notebooks, to programs."""

import json
import pickle
from pathlib import Path

import numpy as np
import pytest

import gradkeep as gk
from gradkeep.store import LocalDisk, Store
from gradkeep.store.backends._disk import Syscalls

LAYERS = (gk.store.Layer("fc<1>", "Linear", 1000),)
ARRAYS = (
    gk.store.Array("fc.prefix", shape=(4,), kind="prefix", layer="fc<1>"),
    gk.store.Array("loss"),
)
SCHEMA = gk.store.Schema(ARRAYS, rows_per_segment=4, layers=LAYERS, fingerprints={"weights": "w1"})


def rows(start, stop):
    count = stop - start
    return np.arange(start, stop), {
        "fc.prefix": np.ones((count, 4), "f4"),
        "loss": np.ones(count, "f4"),
    }


@pytest.fixture
def store(tmp_path):
    store = gk.open(tmp_path / "<store>", durability="process")
    store.add_run(gk.store.Run("main", config={"lr": 0.1}))
    for step, name in ((20, "b"), (10, "a")):
        store.add_checkpoint(gk.store.Checkpoint("main", name, "w", step=step))
    for checkpoint in ("a", "b", "unrecorded"):
        with store.write(gk.store.CaptureKey(checkpoint, "train"), SCHEMA) as writer:
            writer.append(*rows(0, 10))
    with store.write(gk.store.ScoresKey("dot"), SCHEMA) as writer:
        writer.append(*rows(0, 4))
    farm = store.rows("farm", gk.store.Schema((gk.store.Array("loss"),)), num_rows=6)
    farm.put(0, {"loss": np.float32(1)})
    farm.claim(count=2)
    for _ in range(3):
        for lease in farm.claim(count=1, max_attempts=4):
            farm.fail(lease, "no luck")
    return store


def test_the_tree_holds_runs_checkpoints_and_captures_in_order(store):
    info = store.info()
    (run,) = info.runs
    assert run.record.config == {"lr": 0.1}
    assert [checkpoint.name for checkpoint in run.checkpoints] == ["a", "b", "unrecorded"]
    assert [checkpoint.record is None for checkpoint in run.checkpoints] == [False, False, True]
    assert [len(checkpoint.captures) for checkpoint in run.checkpoints] == [1, 1, 1]
    assert [scores.address.name for scores in info.scores] == ["dot"]


def test_ratios_compare_with_dense_gradients(store):
    info = store.info()
    assert info.dense_bytes == 3 * 10 * 4 * 1000
    assert info.ratio == info.dense_bytes / sum(block.data_bytes for block in info.captures)
    assert info.scores[0].dense_bytes > 0
    assert all(block.ratio > 1 for block in info.captures)


def test_row_sets_say_how_far_their_workers_are(store):
    (farm,) = store.info().row_sets
    counts = (farm.done, farm.leased, farm.failed, farm.pending)
    assert sum(counts) == 6
    assert counts[:2] == (1, 2)


def test_the_store_is_shown_as_a_table_with_sizes_and_ratios(store):
    lines = repr(store).splitlines()
    assert lines[0].startswith("Store ")
    assert "3 captures, 1 scores, 1 row set" in lines[0]
    assert lines[1].split() == [
        *("kind", "name", "rows", "size", "dense", "ratio", "state", "modified", "(UTC)")
    ]
    capture = next(line for line in lines if "main/a/train/main" in line)
    assert "40.0 kB" in capture
    assert "x  sealed" in capture


def test_html_is_escaped(store):
    html = store._repr_html_()
    assert "&lt;store&gt;" in html
    assert "<store>" not in html
    assert html.count("<tr>") == 6


def test_an_empty_store_is_one_line(tmp_path):
    store = gk.open(tmp_path / "empty")
    assert repr(store).endswith("0 captures, 0 scores, 0 row sets, 0 B")
    assert store.info().ratio is None
    assert "<table>" not in store._repr_html_()


def test_work_in_progress_is_told_apart(tmp_path):
    store = gk.open(tmp_path / "store", durability="process")
    key = gk.store.CaptureKey("a", "train")
    with store.write(key, SCHEMA) as writer:
        writer.append(*rows(0, 8))
    more = store.write(key, SCHEMA, extend=True)
    more.append(*rows(8, 12))
    more.flush()
    more.close()
    (block,) = store.info().captures
    assert block.rows_text == "8 + 4 open"
    store.drop_rows(key, [0])
    assert store.info().captures[0].state_text == "sealed, version 1"


def test_damage_is_shown_and_does_not_hide_the_rest(store):
    Path(store.location, "blocks/main/a/train/main/schema.json").write_text("{}")
    Path(store.location, "datamodels/farm/schema.json").write_text("{}")
    info = store.info()
    states = [block.state for block in info.blocks]
    assert states.count("unreadable") == 2
    assert "unreadable" in repr(store)


def test_json_fields_can_be_written_and_name_everything(store):
    fields = json.loads(json.dumps(store.info().to_fields()))
    assert list(fields) == [
        *(
            "location",
            "uuid",
            "bytes",
            "dense_bytes",
            "ratio",
            "runs",
            "scores",
            "row_sets",
            "bases",
            "moments",
            "evaluations",
        )
    ]
    capture = fields["runs"][0]["checkpoints"][0]["captures"][0]
    assert {"run", "checkpoint", "split", "name", "rows", "layers", "ratio"} <= set(capture)
    assert fields["row_sets"][0]["leased"] == 2


class ReadOnlyCalls(Syscalls):
    def create(self, path):
        raise OSError(30, "Read-only file system")

    make_folder = unlink = create


def test_a_store_that_may_only_be_read_shows_itself(store):
    shown = repr(store)
    assert repr(Store(LocalDisk(store.location, syscalls=ReadOnlyCalls()))) == shown


def test_a_store_travels_to_other_processes_after_it_was_looked_at(store):
    shown = repr(store)
    assert repr(pickle.loads(pickle.dumps(store))) == shown
