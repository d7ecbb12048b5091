"""A small store of everything, and the command as a user types it."""

import os
import shutil
import subprocess
import sys

import numpy as np
import pytest

import gradkeep as gk


@pytest.fixture(scope="session")
def master(tmp_path_factory):
    """Two captures, scores, and a set of rows in all four states."""
    folder = tmp_path_factory.mktemp("master") / "store"
    store = gk.open(folder, durability="process")
    store.add_run(gk.store.Run("main", config={"lr": 0.1}))
    store.add_checkpoint(gk.store.Checkpoint("main", "final", "w1", step=30))
    arrays = (
        gk.store.Array("fc.prefix", shape=(8,), kind="prefix", layer="fc", encoding="bfloat16"),
        gk.store.Array("loss", nan="keep"),
        gk.store.Array("label", "int64"),
    )
    layers = (gk.store.Layer("fc", "Linear", 650),)
    for split, count in (("train", 40), ("test", 8)):
        schema = gk.store.Schema(arrays, num_rows=count, rows_per_segment=16, layers=layers)
        with store.write(gk.store.CaptureKey("final", split), schema) as writer:
            loss = np.arange(count, dtype="f4")
            values = {"fc.prefix": np.ones((count, 8), "f4"), "loss": loss}
            writer.append(np.arange(count), {**values, "label": np.arange(count) % 2})
    with store.write(
        gk.store.ScoresKey("dot"), gk.store.Schema((gk.store.Array("score"),))
    ) as writer:
        writer.append([0, 1], {"score": np.zeros(2, "f4")})
    farm = store.rows("farm", gk.store.Schema((gk.store.Array("out"),)), num_rows=4)
    farm.put(0, {"out": np.float32(1)})
    farm.claim(count=1, seconds=10**6)
    for _ in range(3):
        (lease,) = farm.claim(owner="one", count=1)
        farm.fail(lease, "no luck")
    return folder


@pytest.fixture
def folder(master, tmp_path):
    """A copy of the store, to be changed at will."""
    return shutil.copytree(master, tmp_path / "store")


@pytest.fixture
def gradkeep(tmp_path):
    """Run `gradkeep ARGUMENTS` in a process of its own, away from the checkout."""

    def run(*arguments, **options):
        return subprocess.run(
            [sys.executable, "-m", "gradkeep", *map(str, arguments)],
            capture_output=True,
            text=True,
            check=False,
            timeout=100,
            cwd=tmp_path,
            env={**os.environ, "COLUMNS": "100", "NO_COLOR": "1"},
            **options,
        )

    return run
