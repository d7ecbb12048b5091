"""The scripts in examples/, and what a regression logs on its way."""

import csv
import importlib
import json
import os
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
from raises import raises

import gradkeep as gk
from gradkeep.compat.datamodels import (
    NpyFolder,
    RegressionData,
    compute_datamodels,
    load_weights,
    read_log,
    save_weights,
)
from gradkeep.compat.datamodels.regression import compute_datamodels as fitting
from gradkeep.compat.datamodels.regression import write_dataset
from gradkeep.compat.datamodels.training import initialize_store, worker
from gradkeep.errors import DatamodelsError

ROOT = Path(__file__).parents[2]
BASH = shutil.which("bash")


def environment():
    path = os.pathsep.join([str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "PYTHON": sys.executable, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}


@pytest.mark.skipif(BASH is None, reason="there is no bash")
@pytest.mark.parametrize("spelling", [[], ["old"]])
def test_the_minimal_example_with_both_spellings(spelling):
    run = subprocess.run(
        [BASH, "examples/minimal/example.sh", *spelling],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.endswith("checks all passed!\n")
    assert "model 0: done" in run.stdout
    assert run.stderr == ""


@pytest.mark.skipif(BASH is None, reason="there is no bash")
@pytest.mark.parametrize(
    "script",
    sorted(ROOT.glob("examples/*/*.sh")),
    ids=lambda path: f"{path.parent.name}/{path.name}",
)
def test_scripts_are_well_formed_and_name_modules_that_are_there(script):
    assert subprocess.run([BASH, "-n", script], check=False).returncode == 0
    text = script.read_text()
    for word in text.replace("$init", "initialize_logdir").replace("$worker", "worker").split():
        if word.startswith("gradkeep.compat."):
            importlib.import_module(word)
        elif word.startswith("--worker.main_import="):
            module = word.partition("=")[2].replace(".", "/")
            assert (ROOT / f"{module}.py").exists()


@pytest.fixture
def cifar(tmp_path):
    """Pictures as the published archive has them, few and small in what they show."""
    rng = np.random.default_rng(0)
    folder = tmp_path / "cifar-10-batches-bin"
    folder.mkdir()
    for name in [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]:
        labels = rng.integers(0, 10, (6, 1)).astype(np.uint8)
        pictures = rng.integers(0, 256, (6, 3072)).astype(np.uint8)
        (folder / f"{name}.bin").write_bytes(np.concatenate([labels, pictures], 1).tobytes())
    return tmp_path


def test_the_cifar_example_from_pictures_to_datamodels(cifar, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    monkeypatch.syspath_prepend(str(ROOT))
    spec = json.loads((ROOT / "examples/cifar10/spec.json").read_text())
    assert {name: about["dtype"] for name, about in spec["schema"].items()} == {
        "masks": "bool_",
        "margins": "float16",
    }
    spec["num_models"] = 12
    spec["schema"]["masks"]["shape"], spec["schema"]["margins"]["shape"] = [30], [6]
    (cifar / "spec.json").write_text(json.dumps(spec))
    out = cifar / "out"
    out.mkdir()
    initialize_store.main([f"--logging.logdir={out}", f"--logging.spec={cifar / 'spec.json'}"])
    own = [f"--trainer.data={cifar}", "--trainer.epochs=2", "--trainer.width=2"]
    own += ["--trainer.batch_size=8", "--trainer.lr=0.05"]
    for index in range(12):
        flags = [f"--worker.index={index}", f"--worker.logdir={out}", *own]
        flags += ["--worker.main_import=examples.cifar10.train_cifar"]
        monkeypatch.setattr(sys, "argv", ["worker", *flags])
        worker.main(flags)
    folder = NpyFolder.open(out)
    assert folder.completed().all()
    masks = folder.array("masks")
    assert 0.3 < masks.mean() < 0.7
    assert len(np.unique(masks, axis=0)) == 12
    assert np.ptp(folder.array("margins"), axis=0).min() > 0
    data = out / "reg_data.beton"
    write_dataset.main([f"--cfg.data_dir={out}", f"--cfg.out_path={data}", "--cfg.y_name=margins"])
    flags = ["-C", "examples/cifar10/regression_config.yaml", f"--data.data_path={data}"]
    flags += [f"--cfg.out_dir={out / 'results'}", "--data.num_train=9", "--data.num_val=3"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", gk.errors.EvidenceWarning)  # of twelve models, rightly
        fitting.main(flags)
    assert load_weights(out / "results/datamodels.pt")["weight"].shape == (30, 6)
    assert read_log(out / "results/regularization_path")["lambda"].shape == (10, 6)
    assert "datamodels.pt" in capsys.readouterr().out


# What a regression logs.

PLANTED = gk.datamodels.planted(400, 20, 5)
DATA = RegressionData(
    gk.datamodels.Masks.of(PLANTED.masks), PLANTED.outputs.astype(np.float32), np.arange(400)
)


def fitted(out, **options):
    options = {"num_train": 300, "num_val": 100, "lambdas": 8, "least": 1e-2, "out": out} | options
    return compute_datamodels(DATA, **options)


def standardised(rows):
    z = np.asarray(PLANTED.masks, float)[rows]
    return (z - z.mean(0)) / z.std(0)


def test_every_penalty_of_the_path_is_logged(tmp_path):
    """Against lasso fits of scikit-learn at the logged penalties, all in mean squares."""
    from sklearn.linear_model import Lasso

    datamodels = fitted(tmp_path / "out")
    log = read_log(tmp_path / "out/regularization_path")
    rows = len(log["lambda"])
    assert rows <= 8
    train, rest = np.arange(300), np.arange(300, 400)
    z, every = standardised(train), np.asarray(PLANTED.masks, float)
    scale = every[train].std(0)
    for target in range(5):
        y = PLANTED.outputs[:, target]
        for row in np.flatnonzero(log["still_optimizing_outer"][:, target]):
            lam = log["lambda"][row, target]
            if row == 0:
                assert log["weight_nz"][row, target] == 0
                continue
            slow = Lasso(alpha=lam, tol=1e-10, max_iter=100_000).fit(z, y[train])
            expected = ((slow.predict(z) - y[train]) ** 2).mean()
            assert np.isclose(log["train_mse"][row, target], expected, rtol=1e-2, atol=1e-4)
            shown = (every[rest] - every[train].mean(0)) / scale
            expected = ((slow.predict(shown) - y[rest]) ** 2).mean()
            assert np.isclose(log["val_mse"][row, target], expected, rtol=1e-2, atol=1e-4)
            assert np.isclose(log["weight_norm"][row, target], np.abs(slow.coef_).sum(), rtol=2e-2)
        errors = np.where(
            log["still_optimizing_outer"][:, target], log["val_mse"][:, target], np.inf
        )
        best = errors.argmin()
        assert log["best_mse"][-1, target] == errors[best]
        assert log["best_lambda"][-1, target] == log["lambda"][best, target]
    assert np.allclose(log["best_lambda"][-1], datamodels.lam, rtol=1e-6)
    assert log["done_optimizing_inner"].all()


def test_the_last_fit_is_logged(tmp_path):
    datamodels = fitted(tmp_path / "out")
    log = read_log(tmp_path / "out/final_lambda")
    assert len(log["lambda"]) == 1
    assert np.allclose(log["lambda"][0], datamodels.lam, rtol=1e-6)
    predicted = np.asarray(PLANTED.masks, float) @ datamodels.weights + datamodels.bias
    errors = ((predicted - PLANTED.outputs) ** 2).mean(0)
    assert np.allclose(log["train_mse"][0], errors, rtol=1e-2)
    assert np.array_equal(log["weight_nz"][0], (datamodels.weights != 0).sum(0))
    assert np.allclose(log["deltas"][0], datamodels.gap, rtol=1e-5)
    assert np.isnan(log["val_mse"]).all()


def test_the_layout_is_the_published_one(tmp_path):
    fitted(tmp_path / "out")
    for name in ("regularization_path", "final_lambda"):
        folder = tmp_path / "out" / name
        with (folder / "metadata.csv").open() as file:
            lines = list(csv.DictReader(file))
        assert list(lines[0]) == ["field", "max_chunk", "counter"]
        for line in lines:
            array = np.load(folder / f"{line['field']}_{line['max_chunk']}.npy", mmap_mode="r")
            assert array.shape == (10_000, 5)
        mapping = np.load(folder / "index_mapping_0.npy", mmap_mode="r")
        used = int(lines[0]["counter"])
        assert (mapping[:used] == np.arange(5)).all()
        assert not mapping[used:].any()  # how its reader knows where rows end


def test_targets_that_moved_are_put_back(tmp_path):
    """A log of the other solver, in chunks, whose targets were reordered on the way."""
    order = np.array([[0, 1, 2], [2, 0, 1], [2, 1, 0]])
    truth = np.arange(9.0).reshape(3, 3)
    moved = np.take_along_axis(truth, order, 1)
    lines = ["field,max_chunk,counter", "lambda,1,1", "index_mapping,1,1"]
    (tmp_path / "metadata.csv").write_text("\n".join(lines) + "\n")
    for name, values in {"lambda": moved, "index_mapping": order}.items():
        np.save(tmp_path / f"{name}_0.npy", values[:2])
        np.save(tmp_path / f"{name}_1.npy", np.concatenate([values[2:], 0 * values[:1]]))
    assert np.array_equal(read_log(tmp_path)["lambda"], truth)


def test_what_is_no_log_is_refused(tmp_path):
    with raises(DatamodelsError, "compat.log_unreadable") as caught:
        read_log(tmp_path)
    assert "metadata.csv" in caught.value.found
    (tmp_path / "metadata.csv").write_text("field,max_chunk,counter\nlambda,0,1\n")
    with raises(DatamodelsError, "compat.log_unreadable") as caught:
        read_log(tmp_path)
    assert "lambda_0.npy" in caught.value.found


def test_a_fit_that_was_cut_off_can_be_done_again(tmp_path, monkeypatch):
    def stop(done, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fitted(tmp_path / "out", progress=stop)
    assert not (tmp_path / "out/datamodels.pt").exists()
    fitted(tmp_path / "out")
    with raises(DatamodelsError, "compat.out_exists"):
        fitted(tmp_path / "out")
    (tmp_path / "file").write_text("")
    with raises(DatamodelsError, "compat.out_exists"):
        fitted(tmp_path / "file")


def test_targets_and_penalties_that_cannot_be(tmp_path):
    with raises(DatamodelsError, "compat.no_such_target") as caught:
        fitted(tmp_path / "out", columns=slice(7, None))
    assert "target_start_ind 7" in caught.value.found
    assert "0 to 4" in caught.value.expected
    with raises(DatamodelsError, "compat.too_many_penalties"):
        fitted(tmp_path / "out", lambdas=10_000)
    assert not (tmp_path / "out").exists()


def test_arrays_that_must_not_be_written_to_are_saved_without_a_warning(tmp_path):
    fixed = np.ones((3, 2), np.float32)
    fixed.setflags(write=False)
    save_weights(tmp_path / "a.pt", fixed, fixed[0], np.broadcast_to(np.float32(1), (2,)))
    assert np.array_equal(load_weights(tmp_path / "a.pt")["weight"], fixed)
    assert os.listdir(tmp_path) == ["a.pt"]


MAIN = """
import numpy as np
from datamodels.training.utils import load_memmap
from datamodels.training.spec import COMPLETED

def main(*_, index, logdir):
    assert COMPLETED == "_completed" and callable(load_memmap)
    return {"margins": np.full(2, index)}
"""


def test_scripts_that_import_the_package_by_its_own_name_run(tmp_path):
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "train.py").write_text(MAIN)
    spec = {"num_models": 3, "schema": {"margins": {"shape": [2], "dtype": "float32"}}}
    (tmp_path / "spec.json").write_text(json.dumps(spec))

    def gradkeep(*words):
        return subprocess.run(
            [sys.executable, "-m", "gradkeep", "datamodels", *words],
            cwd=tmp_path,
            env=environment(),
            capture_output=True,
            text=True,
            timeout=100,
        )

    assert gradkeep("init", "store", "--spec", "spec.json").returncode == 0
    run = gradkeep("run", "store", "--main", "own.train", "--workers", "1")
    assert (run.returncode, run.stderr) == (0, ""), run.stderr
    assert run.stdout == "3 of 3 done\n"
