"""`gradkeep plan`, `capture`, `attribute` and `why`, from a configuration file to an answer."""

import json

import numpy as np
import pytest
import torch

import gradkeep as gk
from gradkeep.cli._app import run
from gradkeep.data import model

CONFIG = """
store: kept
model: {name: mlp, hidden: [16]}
checkpoints:
  early: {path: early.pt, step: 1, lr: 0.1}
  late: {path: late.pt, step: 2, lr: 0.1}
data:
  train: {kind: digits, rows: 40}
  test: {kind: digits, rows: 6}
batch_size: 16
"""


@pytest.fixture
def config(tmp_path):
    for seed, name in enumerate(("early", "late")):
        torch.save(model("mlp", hidden=[16], seed=seed).state_dict(), tmp_path / f"{name}.pt")
    path = tmp_path / "digits.yaml"
    path.write_text(CONFIG)
    return path


@pytest.fixture
def call(capsys):
    """Run the command in this process: importing torch anew for each would take minutes."""

    def called(*arguments, code=0):
        with pytest.raises(SystemExit) as ended:
            run([str(argument) for argument in arguments])
        told = capsys.readouterr()
        assert (ended.value.code or 0) == code, told.err
        return told.out + told.err if code else told.out

    return called


def test_plan_tells_bytes_operations_and_seconds_without_writing(config, call):
    told = call("plan", config)
    assert "l1" in told
    assert "on disk" in told
    assert "seconds" in told
    found = json.loads(call("plan", config, "--json"))
    assert found["rows"] == 40
    assert found["queries"] == 6
    assert not (config.parent / "kept").exists()


def test_capture_then_attribute_then_why(config, call):
    told = call("capture", config)
    assert "train at early: 40 rows" in told
    assert "test at late: 6 rows" in told
    assert "nothing to do" in call("capture", config)
    store = config.parent / "kept"
    told = call("attribute", store, "--checkpoint", "late", "--out", store.parent / "scores.npz")
    assert "positive helps" in told
    assert "factored" in told
    saved = np.load(store.parent / "scores.npz")
    direct = gk.attribute(gk.open(store), checkpoints="late")
    assert np.array_equal(saved["scores"], direct.numpy())
    traced = json.loads(call("attribute", store, "--method", "tracin", "--json"))
    assert traced["shape"] == [6, 40]
    answer = json.loads(call("why", store, 3, "--checkpoint", "late", "--json"))
    assert [row["id"] for row in answer["helped"]] == direct.top(5, query=3).ids.tolist()
    assert "helped most by" in call("why", store, 3, "--checkpoint", "late")


def test_options_saved_scores_and_suspects(config, call):
    call("capture", config)
    store = config.parent / "kept"
    told = call(
        "attribute", store, "--option", "damping=3", "--option", "weight=q(1-q)", "--save", "k"
    )
    assert "saved as k" in told
    opened = gk.open(store)
    direct = gk.attribute(opened, damping=3.0, weight="q(1-q)")
    assert np.array_equal(gk.Scores.load(opened, "k").values, direct.values)
    assert "is not NAME=VALUE" in call("attribute", store, "--option", "damping", code=2)
    assert "did you mean damping" in call("attribute", store, "--option", "dampin=3", code=2)
    found = json.loads(call("suspects", store, "--json", "--top", 4))["suspects"]
    ranked = gk.suspects(opened)
    assert [row["id"] for row in found] == ranked.ids[:4].tolist()
    losses = [opened.read(gk.CaptureKey(c, "train")).column("loss") for c in ("early", "late")]
    assert ranked.ids.tolist() == np.argsort(-np.mean(losses, 0), kind="stable").tolist()
    assert "the model says" in call("suspects", store, "--by", "self")
    assert "suspects by 'looks'" in call("suspects", store, "--by", "looks", code=2)


def test_methods_are_listed_with_what_they_need(call):
    told = call("methods")
    listed = json.loads(call("methods", "--json"))
    assert [method["name"] for method in listed] == [method.name for method in gk.methods()]
    assert all(method["reference"] in told for method in listed)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("store: kept", "stor: kept"), "did you mean store"),
        (("name: mlp", "name: mlpp"), "mlp"),
        (("kind: digits, rows: 40", "kind: digit"), "digits"),
        (("early.pt", "none.pt"), "no such checkpoint"),
        (("batch_size: 16", "task: guessing"), "no task 'guessing'"),
    ],
)
def test_mistakes_in_the_file_are_told(config, call, change, words):
    config.write_text(CONFIG.replace(*change))
    assert words in call("capture", config, code=2)
