"""Stores of every released format stay readable.

`data/format-1.zip` was written once by `write_golden` below and is never written again: a change that
cannot read it needs a new format version and a way to read the old one.
"""

import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest

import gradkeep as gk
from gradkeep.store import gc, verify

GOLDEN = Path(__file__).parent / "data" / "format-1.zip"
KEY = gk.store.CaptureKey(checkpoint="final", split="train", run="golden")
ROWS = 6


def arrays():
    return (
        gk.store.Array("loss"),
        gk.store.Array("label", "int64"),
        gk.store.Array("fc.prefix", shape=(4,), kind="prefix", layer="fc"),
        gk.store.Array("fc.suffix", shape=(3,), kind="suffix", layer="fc", encoding="bfloat16"),
        gk.store.Array("half", shape=(3,), kind="suffix", encoding="float16-scaled"),
        gk.store.Array("byte", shape=(3,), kind="suffix", encoding="int8-scaled"),
        gk.store.Array("cold", shape=(3,), compression="zstd"),
        gk.store.Array("mask", "bool", (11,), "mask", "bits"),
        gk.store.Array("tokens", shape=(2,), kind="prefix", ragged=True),
    )


def values():
    """Numbers that every encoding holds exactly."""
    ramp = np.arange(ROWS, dtype=np.float32)
    three = np.stack([ramp, -ramp, 127 * np.ones(ROWS)], axis=1).astype(np.float32)
    return {
        "loss": ramp / 2,
        "label": np.arange(ROWS) % 3,
        "fc.prefix": np.stack([ramp, ramp + 0.5, -ramp, ramp * 0], axis=1).astype(np.float32),
        "fc.suffix": three,
        "half": three,
        "byte": three,
        "cold": three,
        "mask": np.arange(ROWS * 11).reshape(ROWS, 11) % 3 == 0,
        "tokens": [np.full((row % 3, 2), row, np.float32) for row in range(ROWS)],
    }


def write_golden(folder):
    store = gk.open(folder)
    store.add_run(gk.store.Run("golden", {"epochs": 1}, code="abc", data="def"))
    store.add_checkpoint(gk.store.Checkpoint("golden", "final", "1234", step=7, lr=0.1))
    layers = (gk.store.Layer("fc", "Linear", 15),)
    schema = gk.store.Schema(arrays(), rows_per_segment=2, layers=layers, fingerprints={"seed": 1})
    with store.write(KEY, schema) as writer:
        writer.append(np.arange(ROWS) * 10, values())
    with store.write(KEY, schema, extend=True) as writer:
        more = values()
        writer.append([100], {name: column[:1] for name, column in more.items()})
    store.drop_rows(KEY, [30])
    with store.write(
        gk.store.ScoresKey("dot"), gk.store.Schema((gk.store.Array("scores", shape=(2,)),))
    ) as writer:
        writer.append([0, 1], {"scores": np.eye(2, dtype=np.float32)})
    spec = gk.store.Schema(
        (gk.store.Array("mask", "bool", (9,), "mask", "bits"), gk.store.Array("out", shape=(2,)))
    )
    rows = store.rows("subsets", spec, num_rows=5)
    for row in range(4):
        rows.put(row, {"mask": np.arange(9) % (row + 1) == 0, "out": np.full(2, row, np.float32)})
        if row == 2:
            rows.compact(partial=True)
    (lease,) = rows.claim(owner="golden")
    rows.fail(lease, "a traceback")


@pytest.fixture
def store(tmp_path):
    with zipfile.ZipFile(GOLDEN) as archive:
        archive.extractall(tmp_path / "store")
    return gk.open(tmp_path / "store", create=False)


def test_the_old_store_is_healthy_and_readable(store):
    assert verify(store.backend).healthy
    assert [run.name for run in store.runs()] == ["golden"]
    assert store.checkpoints("golden")[0].weights == "1234"
    block = store.read(KEY)
    assert block.ids.tolist() == [0, 10, 20, 40, 50, 100]
    stored = [0, 1, 2, 4, 5, 0]
    for name, column in values().items():
        actual = block.column(name)
        for got, row in zip(actual, stored, strict=True):
            np.testing.assert_array_equal(got, column[row])
    assert len(store.read(KEY, version=0)) == ROWS
    assert store.read(gk.store.ScoresKey("dot")).column("scores").tolist() == [[1, 0], [0, 1]]
    assert store.sql("select sum(loss) from samples").rows() == [(6.0,)]


def test_the_old_rows_are_readable_and_can_be_finished(store):
    rows = store.rows("subsets")
    assert rows.read([3, 0])["out"].tolist() == [[3, 3], [0, 0]]
    assert rows.read([2])["mask"][0].tolist() == [at % 3 == 0 for at in range(9)]
    states = rows.states()
    assert [state.state for state in states] == ["done"] * 4 + ["pending"]
    assert states[4].error == "a traceback"
    rows.put(4, {"mask": np.zeros(9, bool), "out": np.zeros(2, np.float32)})
    assert rows.compact(partial=True) == 2
    gc(store)
    assert verify(store.backend).healthy


if __name__ == "__main__":
    write_golden(sys.argv[1])
