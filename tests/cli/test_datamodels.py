"""`gradkeep datamodels`: from a spec to fitted datamodels, and everything that can go wrong."""

import json
import textwrap

import numpy as np
import pytest

import gradkeep as gk

SPEC = {
    "num_models": 60,
    "schema": {
        "masks": {"shape": [6], "dtype": "bool_"},
        "margins": {"shape": [2], "dtype": "float32"},
    },
}
SCRIPT = """
import os, sys
import numpy as np

FACTOR = float(sys.argv[1].partition("=")[2]) if len(sys.argv) > 1 and "=" in sys.argv[1] else 1.0

def main(*_, index, logdir):
    if index in (3, 5) and not os.path.exists("repaired"):
        raise ValueError(f"{index} has no luck")
    mask = np.random.default_rng(index).random(6) < 0.5
    with open(os.path.join(logdir, "note"), "w") as file:
        file.write(str(sys.argv))
    return {"masks": mask, "margins": FACTOR * np.array([2.0 * mask[0] - mask[4], mask[1]])}
"""


@pytest.fixture
def place(tmp_path):
    (tmp_path / "train_model.py").write_text(textwrap.dedent(SCRIPT))
    (tmp_path / "spec.json").write_text(json.dumps(SPEC))
    return tmp_path


def answer(run, code=0):
    assert run.returncode == code, run.stderr + run.stdout
    return json.loads(run.stdout)


def test_from_a_spec_to_what_the_data_did(gradkeep, inline, place):
    assert answer(inline("datamodels", "init", "store", "--spec", "spec.json", "--json")) == {
        "store": "store",
        "num_models": 60,
        "imported": 0,
    }
    main = ("--main", "train_model")
    first = gradkeep(
        "datamodels", "run", "store", *main, "--workers", 1, "--json", "--", "--factor=2"
    )
    output = answer(first, 3)
    assert (output["total"], output["done"], output["failed"]) == (60, 58, 2)
    assert [(item["model"], item["attempts"]) for item in output["failures"]] == [(3, 3), (5, 3)]
    assert "ValueError: 3 has no luck" in output["failures"][0]["error"]
    assert "--factor=2" in (place / "store.files/workers/7/note").read_text()

    status = inline("datamodels", "status", "store")
    assert status.returncode == 0
    for text in ("margins  float32 [2]", "58 of 60 done, 2 failed", "5 has no luck"):
        assert text in status.stdout
    fields = answer(inline("datamodels", "status", "store", "--json"))
    assert {key: fields[key] for key in ("total", "done", "failed", "leased", "pending")} == {
        "total": 60,
        "done": 58,
        "failed": 2,
        "leased": 0,
        "pending": 0,
    }

    (place / "repaired").touch()
    assert "58 of 60" in gradkeep("datamodels", "work", "store", *main).stdout
    repeated = gradkeep("datamodels", "work", "store", *main, "--retry-failed", "--", "--factor=2")
    assert (repeated.returncode, repeated.stdout) == (0, "60 of 60 done\n"), repeated.stderr

    fitted = answer(inline("datamodels", "fit", "store", "--save", "margins", "--json"))
    assert (fitted["models"], fitted["examples"], fitted["targets"]) == (60, 6, 2)
    assert fitted["held_out"]["mean"] > 0.95
    top = answer(inline("datamodels", "analyze", "store", "top", "--fit", "margins", "--json"))
    assert [ids[0] for ids in top["positive"]] == [0, 1]
    assert top["negative"][0][0] == 4
    shown = inline("datamodels", "analyze", "store", "top", "--fit", "margins", "--targets", "0")
    assert "helped by 0 (+" in shown.stdout
    removal = ("removal", "--fit", "margins", "--remove", "0,4", "--json")
    change = answer(inline("datamodels", "analyze", "store", *removal))["change"]
    assert abs(change[0] - -2) < 0.3
    for what in ("support", "leakage", "duplicates", "components"):
        run = inline("datamodels", "analyze", "store", what, "--fit", "margins", "--count", "1")
        assert run.returncode == 0, run.stderr
        assert run.stdout
    curve = answer(inline("datamodels", "analyze", "store", "curve", "--sizes", "20,40", "--json"))
    assert curve
    assert answer(inline("datamodels", "analyze", "store", "values", "--json"))

    assert "60 models" in inline("datamodels", "export", "store", "arrays").stdout
    assert np.load(place / "arrays/_completed.npy").all()
    imported = answer(inline("datamodels", "init", "copy", "--from", "arrays", "--json"))
    assert imported["imported"] == 60
    grown = answer(inline("datamodels", "init", "copy", "--grow", 70, "--json"))
    assert grown["num_models"] == 70


def test_beginning_again_is_refused_once_something_is_done(inline, place):
    begin = ("datamodels", "init", "store", "--spec", "spec.json")
    assert inline(*begin).returncode == 0
    assert inline(*begin).returncode == 0, "nothing is lost yet"
    rows = gk.open(place / "store").rows("models")
    rows.put(0, {"masks": np.ones(6, bool), "margins": np.ones(2, "f4")})
    run = inline(*begin)
    assert run.returncode == 2
    assert "1 of 60 models are done" in run.stderr


def test_another_spec_is_refused_with_the_difference(inline, place):
    inline("datamodels", "init", "store", "--spec", "spec.json")
    margins = {"shape": [3], "dtype": "float16"}
    other = {"num_models": 50, "schema": {**SPEC["schema"], "margins": margins}}
    (place / "spec.json").write_text(json.dumps(other))
    run = inline("datamodels", "init", "store", "--spec", "spec.json", "--json")
    output = answer(run, 2)["error"]
    assert output["type"] == "SchemaMismatchError"
    for line in (
        "array margins: dtype: stored 'float32', requested 'float16'",
        "num_models: stored 60, asked for 50",
    ):
        assert line in output["found"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["init", "store"], "--spec"),
        (["init", "store", "--spec", "none.json"], "no such file"),
        (["init", "new", "--from", "."], "no published arrays"),
        (["run", "store", "--main", "no.such"], "module not found"),
        (["run", "store", "--main", "json"], "no function main"),
        (["run", "store", "--main", "json.tool"], "with index and logdir"),
        (["run", "store", "--main", "gradkeep.compat.datamodels.worker"], "with index and logdir"),
        (["run", "store", "--main", "train_model", "--engine", "k8s"], "'local', 'ray' or 'slurm'"),
        (["run", "store", "--main", "train_model", "--address", "auto"], "--engine ray"),
        (["run", "store", "--main", "train_model", "--name", "x"], "no such study"),
        (["status", "nowhere"], "no store here"),
        (["fit", "store", "--save", "f"], "gradkeep datamodels run"),
        (["fit", "store", "--save", "f", "--output", "x"], "--masks"),
        (["analyze", "store", "top"], "--fit"),
        (["analyze", "store", "taste"], "WHAT must be"),
    ],
)
def test_mistakes_are_told_with_what_to_do(inline, place, arguments, words):
    inline("datamodels", "init", "store", "--spec", "spec.json")
    run = inline("datamodels", *arguments)
    assert run.returncode == 2
    assert words in run.stderr
    assert not (place / "new" / "datamodels").exists()


@pytest.mark.parametrize(
    "line",
    [
        ["init", "store", "--grow", "99999999999999999999"],
        ["init", "store", "--grow", "-1"],
        ["status", "store", "--attempts", "nan"],
        ["run", "store", "--main", "train_model", "--timeout", "nan"],
        ["run", "store", "--main", "train_model", "--lease", "inf"],
        ["run", "store", "--main", "train_model", "--workers", "-1"],
        ["fit", "store", "--save", "f", "--seed", "-1"],
        ["fit", "store", "--save", "f", "--lambdas", "99999999999999999999"],
    ],
    ids=lambda line: " ".join(line[1:]),
)
def test_numbers_out_of_range_change_nothing(inline, place, line):
    inline("datamodels", "init", "store", "--spec", "spec.json")
    run = inline("datamodels", *line)
    assert run.returncode == 2
    assert "Traceback" not in run.stderr
    assert answer(inline("datamodels", "status", "store", "--json"))["total"] == 60
    assert inline("info", "store").returncode == 0
    assert inline("sql", "store", "select 1").returncode == 0


def test_a_spec_of_too_many_models_is_refused(inline, place):
    for count in ("99999999999999999999", '"x"', "true", "1.5"):
        (place / "spec.json").write_text(f'{{"num_models": {count}, "schema": {{"m": 1}}}}')
        run = inline("datamodels", "init", "store", "--spec", "spec.json")
        assert run.returncode == 2
        assert "num_models" in run.stderr.splitlines()[0]
