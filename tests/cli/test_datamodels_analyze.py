"""`gradkeep datamodels analyze` for groups, two fits and retraining."""

import json
import shutil
import sys
import textwrap

import numpy as np
import pytest

import gradkeep as gk
from gradkeep import datamodels as dm

STUDY = """
import numpy as np
import gradkeep as gk
from gradkeep import datamodels as dm

def train(subset, seed):
    with open("trained", "a") as file:
        file.write("x")
    mask = np.zeros(12)
    mask[subset.indices] = 1
    return mask

def of_mask(mask):
    return [3 * mask[4] - 2 * mask[7], mask[9]]

def study():
    data = list(range(12))
    kept = dm.output(of_mask, 2)
    store = gk.open("store", durability="process")
    return dm.Study(store, data, train, num_models=200, outputs=kept, subsets="independent")

nothing = 3
"""


@pytest.fixture(scope="module")
def master(tmp_path_factory):
    """A store with two fits of the same examples, one of them of a study that a module makes."""
    folder = tmp_path_factory.mktemp("analyze")
    (folder / "my_study.py").write_text(textwrap.dedent(STUDY))
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(folder)
        patched.syspath_prepend(str(folder))
        import my_study

        study = my_study.study()
        assert study.run(workers=0).complete
        (folder / "trained").unlink()
        study.fit().save(study.store, "first")
        masks = study.masks().numpy()
        other = np.stack([3 * masks[:, 4] - 2 * masks[:, 7], masks[:, 2]], axis=1).astype("f4")
        dm.fit(masks, other).save(study.store, "second")
        dm.load(study.store, "second").save(gk.open("elsewhere"), "moved")
        del sys.modules["my_study"]
    return folder


@pytest.fixture
def place(master, tmp_path, monkeypatch):
    """A copy, where commands run and modules are found."""
    shutil.copytree(master, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    yield tmp_path
    sys.modules.pop("my_study", None)


@pytest.fixture
def analyze(inline, place):
    def run(*arguments):
        return inline("datamodels", "analyze", "store", *arguments)

    return run


def answer(run):
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


@pytest.mark.parametrize("kind", ["npy", "npz", "npz-named", "txt"])
def test_weights_are_summed_over_the_groups_of_a_file(analyze, place, kind):
    labels = np.array(["even", "odd"] * 6)
    source = {
        "npy": "labels.npy",
        "npz": "labels.npz",
        "npz-named": "both.npz:labels",
        "txt": "labels.txt",
    }[kind]
    np.save("labels.npy", labels)
    np.savez("labels.npz", anything=labels)
    np.savez("both.npz", labels=labels, images=np.zeros(3))
    (place / "labels.txt").write_text("\n".join(labels) + "\n")
    queries = ("groups", "--fit", "first", "--groups", source)
    output = answer(analyze(*queries, "--json"))
    assert output["names"] == ["even", "odd"]
    assert output["counts"] == [6, 6]
    np.testing.assert_allclose(output["total"], [[3, 0], [-2, 1]], atol=0.15)
    np.testing.assert_allclose(np.sum(output["share"], axis=0), 1)
    (place / "targets.txt").write_text("same\nsame\n")
    output = answer(analyze(*queries, "--target-groups", "targets.txt", "--json"))
    assert output["columns"] == ["same"]
    np.testing.assert_allclose(output["total"], [[1.5], [-0.5]], atol=0.15)
    shown = analyze(*queries).stdout
    assert "target 0\n    even  +2.9" in shown or "target 0\n    even  +3" in shown
    assert "by 6 examples" in shown


@pytest.mark.parametrize(
    "other", [["--with", "second"], ["--with", "moved", "--with-store", "elsewhere"]]
)
def test_two_fits_are_compared_target_by_target(analyze, other):
    queries = ("compare", "--fit", "first", *other, "--count", 1)
    output = answer(analyze(*queries, "--json"))
    assert output["agreement"][0] > 0.99
    assert abs(output["agreement"][1]) < 0.1
    assert np.argmax(np.abs(output["only_first"]["examples"])) == 9
    assert np.argmax(np.abs(output["only_second"]["examples"])) == 2
    shown = analyze(*queries)
    assert shown.returncode == 0
    assert "agreement [2]" in shown.stdout
    assert "only_second\n" in shown.stdout


def test_removals_are_verified_by_training_the_study_again(analyze, place):
    queries = ("verify", "--fit", "first", "--study", "my_study:study", "--workers", 0)
    output = answer(analyze(*queries, "--remove", "4", "--remove", "7,2", "--repeats", 2, "--json"))
    assert (place / "trained").stat().st_size == 10  # all, two removals, two controls; twice
    assert np.shape(output["control"]) == (2, 2)
    np.testing.assert_allclose(output["measured"], [[-3, 0], [2, 0]])
    np.testing.assert_allclose(output["predicted"], [[-3, 0], [2, 0]], atol=0.15)
    assert output["correlation"] > 0.99
    tops = answer(analyze(*queries, "--targets", 1, "--count", 1, "--json"))
    np.testing.assert_allclose(tops["measured"], [[0, -1]])
    shown = analyze(*queries, "--targets", 1, "--count", 1)
    assert shown.stdout.splitlines()[0].split()[2:] == ["predicted", "measured", "control"]
    assert "of what was predicted" in shown.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["groups"], "--groups"),
        (["groups", "--groups", "none.npy"], "there is no such file"),
        (["groups", "--groups", "both.npz"], "labels, images"),
        (["groups", "--groups", "both.npz:names"], "labels, images"),
        (["groups", "--groups", "both.npz:images"], "groups must have the shape"),
        (["groups", "--groups", "broken.npz"], "cannot be read"),
        (["compare"], "--with"),
        (["compare", "--with", "third"], "third"),
        (["compare", "--with", "first", "--with-store", "nowhere"], "no store here"),
        (["verify", "--remove", "4"], "--study module:name"),
        (["verify", "--study", "my_study"], "module:name"),
        (["verify", "--study", "none:study"], "cannot import"),
        (["verify", "--study", "my_study:none"], "cannot import"),
        (["verify", "--study", "my_study:nothing"], "not a Study"),
        (["verify", "--study", "my_study:study", "--remove", "x"], "whole numbers"),
        (["removal"], "one --remove"),
        (["removal", "--remove", "1", "--remove", "2"], "one --remove"),
    ],
)
def test_what_is_missing_or_wrong_is_named(analyze, place, arguments, words):
    np.savez("both.npz", labels=np.zeros(12), images=np.zeros(3))
    (place / "broken.npz").write_bytes(b"PK\x03\x04 and no more")
    run = analyze(*arguments, "--fit", "first")
    assert run.returncode == 2, run.stdout
    assert words in run.stderr
