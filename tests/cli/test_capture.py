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
        output = capsys.readouterr()
        assert (ended.value.code or 0) == code, output.err
        return output.out + output.err if code else output.out

    return called


def test_plan_tells_bytes_operations_and_seconds_without_writing(config, call):
    output = call("plan", config)
    assert "l1" in output
    assert "on disk" in output
    assert "seconds" in output
    result = json.loads(call("plan", config, "--json"))
    assert result["rows"] == 40
    assert result["queries"] == 6
    assert not (config.parent / "kept").exists()


def test_plan_answers_for_any_number_of_rows_and_names_what_would_fit(config, call):
    large = ("--rows", 10**9, "--disk-budget", "200GB")
    output = call("plan", config, *large)
    assert "on disk are more than the 200.00 GB" in output
    assert "fits:" in output
    result = json.loads(call("plan", config, *large, "--keep", "192B", "--json"))
    assert (result["rows"], result["fits"]) == (10**9, True)
    assert result["row_bytes"] <= 192


def test_capture_then_attribute_then_why(config, call):
    output = call("capture", config)
    assert "train at early: 40 rows" in output
    assert "test at late: 6 rows" in output
    assert "nothing to do" in call("capture", config)
    store = config.parent / "kept"
    output = call("attribute", store, "--checkpoints", "late", "--out", store.parent / "scores.npz")
    assert "positive helps" in " ".join(output.split())
    assert "factored" in output
    saved = np.load(store.parent / "scores.npz")
    direct = gk.attribute(gk.open(store), checkpoints="late")
    assert np.array_equal(saved["scores"], direct.numpy())
    traced = json.loads(call("attribute", store, "--method", "tracin", "--json"))
    assert traced["shape"] == [6, 40]
    answer = json.loads(call("why", store, 3, "--checkpoints", "late", "--json"))
    assert [row["id"] for row in answer["helped"]] == direct.top(5, query=3).ids.tolist()
    assert "helped most:" in call("why", store, 3, "--checkpoints", "late")


def test_options_saved_scores_and_suspects(config, call):
    call("capture", config)
    store = config.parent / "kept"
    output = call(
        "attribute", store, "--option", "damping=3", "--option", "weight=q(1-q)", "--save", "k"
    )
    assert "saved as k" in output
    opened = gk.open(store)
    direct = gk.attribute(opened, damping=3.0, weight="q(1-q)")
    assert np.array_equal(gk.Scores.load(opened, "k").values, direct.values)
    assert "is not NAME=VALUE" in call("attribute", store, "--option", "damping", code=2)
    assert "Did you mean damping" in call("attribute", store, "--option", "dampin=3", code=2)
    result = json.loads(call("suspects", store, "--json", "--top", 4))["suspects"]
    ranked = gk.suspects(opened)
    assert [row["id"] for row in result] == ranked.ids[:4].tolist()
    losses = [
        opened.read(gk.store.CaptureKey(c, "train")).column("loss") for c in ("early", "late")
    ]
    assert ranked.ids.tolist() == np.argsort(-np.mean(losses, 0), kind="stable").tolist()
    assert "predicted" in call("suspects", store, "--by", "self")
    assert "by must be" in call("suspects", store, "--by", "looks", code=2)


def test_methods_are_listed_with_what_they_need(call):
    output = call("methods")
    listed = json.loads(call("methods", "--json"))
    assert [method["name"] for method in listed] == [method.name for method in gk.methods()]
    flat = " ".join(output.split())
    assert all(" ".join(method["reference"].split()) in flat for method in listed)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("store: kept", "stor: kept"), "Did you mean 'store'?"),
        (("name: mlp", "name: mlpp"), "mlp"),
        (("kind: digits, rows: 40", "kind: digit"), "digits"),
        (("early.pt", "none.pt"), "checkpoint does not exist"),
        (("batch_size: 16", "task: guessing"), "task 'guessing'"),
    ],
)
def test_mistakes_in_the_file_are_told(config, call, change, words):
    config.write_text(CONFIG.replace(*change))
    assert words in call("capture", config, code=2)


def store_with_runs(folder, *runs):
    torch.manual_seed(0)
    net = torch.nn.Linear(4, 3)
    for run_name in runs:
        for split, count in (("train", 6), ("test", 2)):
            batch = torch.randn(count, 4), torch.arange(count) % 3
            task = gk.Classification()
            gk.capture(folder, net, [batch], task=task, split=split, run=run_name, progress=False)
    return folder


def test_the_only_run_is_the_one_that_is_meant(tmp_path, call):
    store = store_with_runs(tmp_path / "one", "mine")
    assert "helped most:" in call("why", store, 1)
    assert "positive helps" in " ".join(call("attribute", store).split())
    assert "6 rows of train" in call("suspects", store)


def test_of_several_runs_the_message_names_them(tmp_path, call):
    store = store_with_runs(tmp_path / "two", "first", "second")
    output = call("why", store, 1, code=2)
    assert "--run" in output
    assert "first: test, train; second: test, train" in output
    assert "--run first" in output
    assert "helped most:" in call("why", store, 1, "--run", "second")
    output = call("why", store, 1, "--queries", "later", code=2)
    assert "no run has captures of later and train" in output
    output = call("why", store, 1, "--run", "nosuch", code=2)
    assert "first" in output
    assert "second" in output


def test_main_is_the_usual_run(tmp_path, call):
    store = store_with_runs(tmp_path / "two", "main", "second")
    assert "helped most:" in call("why", store, 1)


WRONG = {
    "batch_size": ["-1", "0", "x", "1.5", "[1]"],
    "tolerance": [".nan", "-1", "x", ".inf"],
    "store": ["3", "''", "[a]"],
    "run": ["3", "''"],
    "device": ["nowhere", "3"],
    "task": ["3", "{name: [1]}", "{name: classification, odd: 1}", "nosuch", "'json:loads'"],
    "checkpoints": ["3", "{a: {odd: 1}}", "{a: {path: early.pt, step: x}}", "{a: {path: 3}}"],
    "layers": ["5", "{a: 1}"],
    "embeddings": ["3", "[3]"],
    "model": ["{name: [mlp]}", "{name: mlp, hidden: x}", "{3: 4}", "{from: 3}", "{from: 'json:'}"],
    "data": ["{train: 3}", "{train: {kind: 7}}", "{train: {kind: digits, rows: x}}", "{train: {}}"],
    "memory_budget": ["-1", "x", "[1]"],
    "mode": ["x", "3"],
    "uncovered": ["zzz", "3"],
    "of": ["zzz", "3"],
}


@pytest.mark.parametrize("key", WRONG)
def test_what_a_key_cannot_be_is_one_message(config, call, key):
    lines = [line for line in CONFIG.splitlines() if not line.startswith((key, "  "))]
    rest = {"data": "{train: {kind: digits, rows: 8}}", "checkpoints": "{a: early.pt}"}
    lines = [line for line in lines if not line.startswith(tuple(rest))]
    lines += [f"{name}: {text}" for name, text in rest.items() if name != key]
    for text in WRONG[key]:
        config.write_text("\n".join([*lines, f"{key}: {text}"]))
        output = call("capture", config, "--split", "train", code=2)
        assert output.startswith("gradkeep: "), (key, text)
        assert "Traceback" not in output
