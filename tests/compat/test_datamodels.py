"""The datamodels library's commands, flags and files: scripts of its users run as they are."""

import importlib.util
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
import pytest
from raises import raises

from gradkeep.compat.datamodels.training import initialize_store

SPEC = {
    "num_models": 6,
    "schema": {
        "masks": {"shape": [8], "dtype": "bool_"},
        "margins": {"shape": [3], "dtype": "float16"},
    },
}
SCRIPT = """
import argparse, os, sys, time
import numpy as np
from datamodels.training.utils import load_memmap
from datamodels.training.spec import COMPLETED

def main(*_, index, logdir):
    parser = argparse.ArgumentParser()
    parser.add_argument("--trainer.multiple", dest="multiple", type=float, required=True)
    parser.add_argument("--trainer.how", dest="how", default="well")
    known, _ = parser.parse_known_args()
    assert load_memmap(os.path.join(logdir, "..", ".."), COMPLETED, "r").dtype == bool
    open(os.path.join(logdir, "artefact"), "a").write("x")
    answer = {
        "masks": np.random.default_rng(index).random(8) < 0.5,
        "margins": np.full(3, known.multiple * (index + 1)),
    }
    if known.how == "hang":
        time.sleep(1000)
    if known.how == "raise":
        raise RuntimeError("no luck")
    if known.how == "exit":
        sys.exit(0)
    if known.how == "empty":
        return {}
    if known.how == "missing":
        del answer["margins"]
    if known.how == "extra":
        answer["more"] = 1
    if known.how == "shape":
        answer["margins"] = np.ones(4)
    if known.how == "kind":
        answer["masks"] = np.ones(8)
    if known.how == "huge":
        answer["margins"] = np.full(3, 1e9)
    if known.how == "nan":
        answer["margins"] = np.full(3, np.nan)
    return answer
"""


@pytest.fixture
def place(tmp_path):
    """A folder with a script and a spec, and a new store directory."""
    (tmp_path / "examples").mkdir()
    (tmp_path / "examples" / "train.py").write_text(textwrap.dedent(SCRIPT))
    (tmp_path / "spec.json").write_text(json.dumps(SPEC))
    (tmp_path / "out").mkdir()
    return tmp_path


def command(place, name, *flags, **options):
    return subprocess.Popen(
        [sys.executable, "-m", f"gradkeep.compat.datamodels.{name}", *flags],
        cwd=place,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", **options},
    )


def call(place, name, *flags, **options):
    process = command(place, name, *flags, **options)
    out, err = process.communicate(timeout=100)
    return subprocess.CompletedProcess(name, process.returncode, out, err)


def initialize(place, name="training.initialize_store"):
    return call(place, name, "--logging.logdir=out", "--logging.spec=spec.json")


def begin(place):
    """The same without a process, where the command is not what is tested."""
    from gradkeep.compat.datamodels import NpyFolder
    from gradkeep.datamodels._spec import Spec

    return NpyFolder.create(place / "out", Spec.read(place / "spec.json"))


def worker_flags(index, *more, multiple=2):
    where = ("--worker.logdir=out", "--worker.main_import=examples.train")
    return (f"--worker.index={index}", *where, f"--trainer.multiple={multiple}", *more)


def arrays(place):
    return {file.stem: np.load(file) for file in (place / "out").glob("*.npy")}


@pytest.mark.parametrize(
    ("begin", "worker"),
    [("training.initialize_store", "training.worker"), ("initialize_logdir", "worker")],
)
def test_a_row_is_written_by_the_commands_of_both_generations(place, begin, worker):
    assert initialize(place, begin).returncode == 0
    before = arrays(place)
    assert {name: (a.shape, a.dtype.name) for name, a in before.items()} == {
        "masks": ((6, 8), "bool"),
        "margins": ((6, 3), "float16"),
        "_completed": ((6,), "bool"),
    }
    run = call(place, worker, *worker_flags(2))
    assert run.returncode == 0, run.stderr
    after = arrays(place)
    assert after["_completed"].tolist() == [False, False, True, False, False, False]
    assert after["margins"][2].tolist() == [6.0, 6.0, 6.0]
    assert not after["margins"][[0, 1, 3, 4, 5]].any()
    assert (place / "out/workers/2/artefact").read_text() == "x"
    assert "--trainer.multiple=2" in (place / "out/cmds.txt").read_text()

    second_call = call(place, worker, *worker_flags(2, multiple=5))
    assert second_call.returncode == 0
    assert "already done" in second_call.stdout
    assert arrays(place)["margins"][2].tolist() == [6.0, 6.0, 6.0]
    redone = call(place, worker, *worker_flags(2, "--worker.do_if_complete", multiple=5))
    assert redone.returncode == 0, redone.stderr
    assert arrays(place)["margins"][2].tolist() == [15.0, 15.0, 15.0]


def test_settings_come_from_files_then_flags_then_the_environment(place):
    begin(place)
    config = {"worker": {"index": 0, "main_import": "examples.train", "logdir": "out"}}
    (place / "config.json").write_text(json.dumps(config))
    (place / "config.yaml").write_text("worker:\n  index: 1\n")
    base = ("-C", "config.json", "--trainer.multiple", "1")
    assert call(place, "training.worker", *base).returncode == 0
    assert call(place, "training.worker", *base, "-C", "config.yaml").returncode == 0
    flagged = (*base, "-C", "config.yaml", "--worker.index", "2")
    assert call(place, "training.worker", *flagged).returncode == 0
    surrounded = call(place, "training.worker", *flagged, **{"worker.index": "3"})
    assert surrounded.returncode == 0
    assert arrays(place)["_completed"].tolist() == [True] * 4 + [False] * 2


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("raise", "no luck"),
        ("exit", "exited instead of returning"),
        ("empty", "missing ['margins', 'masks']"),
        ("missing", "missing ['margins']"),
        ("extra", "unknown ['more']"),
        ("shape", "(4,)"),
        ("kind", "float64"),
        ("huge", "1000000000.0 among its values"),
        ("nan", "nan among its values"),
    ],
)
def test_what_goes_wrong_is_told_recorded_and_never_a_completed_row(place, how, words):
    begin(place)
    run = call(place, "training.worker", *worker_flags(1, f"--trainer.how={how}"))
    assert run.returncode != 0
    assert words in run.stderr
    assert not arrays(place)["_completed"].any()
    assert not arrays(place)["margins"].any()
    (record,) = (place / "out/workers/1").glob("attempt-*.json")
    assert words in json.loads(record.read_text())["error"]


def test_a_timeout_is_recorded_and_not_a_success(place):
    begin(place)
    flags = worker_flags(1, "--trainer.how=hang", "--worker.job_timeout=1")
    began = time.monotonic()
    run = call(place, "training.worker", *flags)
    assert run.returncode == 75
    assert time.monotonic() - began < 60
    assert "took longer than 1 s" in run.stderr
    assert not arrays(place)["_completed"].any()
    (record,) = (place / "out/workers/1").glob("attempt-*.json")
    assert "TimeoutError" in json.loads(record.read_text())["error"]


@pytest.mark.parametrize("index", [-1, 6])
def test_an_index_out_of_range_is_refused_before_training(place, index):
    begin(place)
    run = call(place, "training.worker", *worker_flags(index, "--worker.do_if_complete"))
    assert run.returncode == 2
    assert "0 to 5" in run.stderr
    assert not (place / "out/workers").exists()


def test_initializing_a_store_again_is_refused_and_changes_nothing(place):
    begin(place)
    call(place, "training.worker", *worker_flags(0))
    before = {file: file.read_bytes() for file in (place / "out").rglob("*") if file.is_file()}
    run = initialize(place)
    assert run.returncode == 2
    assert "1 models done" in run.stderr
    assert {f: f.read_bytes() for f in (place / "out").rglob("*") if f.is_file()} == before


@pytest.mark.parametrize(
    ("spec", "field"),
    [
        ("[]", "object"),
        ("{", "not JSON"),
        ({"schema": SPEC["schema"]}, "num_models"),
        ({**SPEC, "more": 1}, "more"),
        ({**SPEC, "num_models": 0}, "num_models"),
        ({**SPEC, "num_models": "6"}, "num_models"),
        ({**SPEC, "schema": {}}, "schema"),
        ({**SPEC, "schema": {"m": {"shape": 3, "dtype": "float16"}}}, "schema.m.shape"),
        ({**SPEC, "schema": {"m": {"shape": [-1], "dtype": "float16"}}}, "schema.m.shape"),
        ({**SPEC, "schema": {"m": {"shape": [3], "dtype": "flaot"}}}, "schema.m.dtype"),
        ({**SPEC, "schema": {"m": {"shape": [3], "dtype": "complex64"}}}, "schema.m.dtype"),
        ({**SPEC, "schema": {"m": {"shape": [3]}}}, "schema.m"),
        ({**SPEC, "schema": {"_completed": {"shape": [], "dtype": "bool"}}}, "_completed"),
        ({**SPEC, "schema": {"a/b": {"shape": [], "dtype": "bool"}}}, "schema.a/b"),
    ],
)
def test_a_bad_spec_is_refused_by_the_name_of_its_field(tmp_path, spec, field):
    from gradkeep.datamodels._spec import Spec
    from gradkeep.errors import DatamodelsError

    file = tmp_path / "spec.json"
    file.write_text(spec if isinstance(spec, str) else json.dumps(spec))
    with pytest.raises(DatamodelsError) as refused:
        Spec.read(file)
    assert field in refused.value.message


@pytest.mark.parametrize("flags", [[], ["--worker.index=x"], ["-C", "no-such-file.yaml"]])
def test_wrong_settings_do_not_look_like_success(place, flags):
    begin(place)
    assert call(place, "training.worker", *flags).returncode == 2


def test_a_kill_while_a_row_is_redone_leaves_it_not_done(place):
    """The flag goes down before the first byte is changed."""
    from gradkeep.compat.datamodels import NpyFolder

    begin(place)
    call(place, "training.worker", *worker_flags(0))
    script = (
        "import os, signal, numpy as np\n"
        "from gradkeep.compat.datamodels import NpyFolder\n"
        "folder = NpyFolder.open('out')\n"
        "real, calls = NpyFolder._write, []\n"
        "def dying(self, field, index, value):\n"
        "    calls.append(field.name)\n"
        "    if len(calls) == 3: os.kill(os.getpid(), signal.SIGKILL)\n"
        "    real(self, field, index, value)\n"
        "NpyFolder._write = dying\n"
        "folder.write(0, {'masks': np.ones(8, bool), 'margins': np.zeros(3)})\n"
    )
    run = subprocess.run([sys.executable, "-c", script], cwd=place, check=False, timeout=100)
    assert run.returncode == -signal.SIGKILL
    assert not NpyFolder.open(place / "out").completed().any()


def test_a_full_disk_is_told_and_the_row_is_not_done(place, monkeypatch):
    import errno

    from gradkeep.errors import WriteFailedError

    folder = begin(place)

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with raises(WriteFailedError, "compat.model_not_written"):
        folder.write(0, {"masks": np.ones(8, bool), "margins": np.zeros(3)})
    assert not folder.completed().any()


FASTARGS = """
from argparse import ArgumentParser
import numpy as np
from fastargs import Param, Section, get_current_config
from fastargs.decorators import param

Section("trainer").params(multiple=Param(int, "factor", required=True))

@param("trainer.multiple")
def compute(*_, index, multiple):
    return {"masks": np.ones(8, bool), "margins": np.full(3, multiple)}

def main(*_, index, logdir):
    config = get_current_config()
    parser = ArgumentParser()
    config.augment_argparse(parser)
    config.collect_argparse_args(parser)
    config.validate(mode="stderr")
    config.summary()
    return compute(index=index)
"""


@pytest.mark.skipif(importlib.util.find_spec("fastargs") is None, reason="fastargs not installed")
def test_a_script_with_sections_of_fastargs_finds_its_arguments(place):
    (place / "examples" / "train.py").write_text(FASTARGS)
    begin(place)
    run = call(place, "training.worker", *worker_flags(1))
    assert run.returncode == 0, run.stderr
    assert arrays(place)["margins"][1].tolist() == [2.0, 2.0, 2.0]


def data_root():
    root = os.environ.get("GRADKEEP_DATA")
    return Path(root) if root else Path(__file__).resolve().parents[3] / "shared" / "data"


CIFAR = data_root() / "cifar10" / "cifar10_10k_2k.npz"
CIFAR_SCRIPT = """
import os
import numpy as np

def load():
    found = np.load(os.environ["CIFAR"])
    x, y, tx, ty = (found[k] for k in ("x_train", "y_train", "x_test", "y_test"))
    # Two classes, means of 8 x 8 pixels: small enough to train by solving.
    def features(images):
        images = images.reshape(len(images), *images.shape[1:]).astype(float) / 255
        if images.shape[1] == 3: images = images.transpose(0, 2, 3, 1)
        small = images.reshape(len(images), 4, 8, 4, 8, 3).mean((2, 4)).reshape(len(images), -1)
        return np.c_[small - small.mean(1, keepdims=True), np.ones(len(small))]
    keep, test = np.flatnonzero(y.ravel() < 2)[:60], np.flatnonzero(ty.ravel() < 2)[:20]
    return features(x[keep]), 2.0 * y.ravel()[keep] - 1, features(tx[test]), 2.0 * ty.ravel()[test] - 1

def main(*_, index, logdir):
    x, y, tx, ty = load()
    mask = np.random.default_rng([1, index]).random(len(y)) < 0.5
    a, b = x[mask], y[mask]
    weights = np.linalg.solve(a.T @ a + 0.3 * np.eye(a.shape[1]), a.T @ b)
    return {"masks": mask, "margins": ty * (tx @ weights)}
"""


@pytest.mark.slow
@pytest.mark.skipif(not CIFAR.exists(), reason="CIFAR-10 is not here: set GRADKEEP_DATA")
def test_cifar10_from_an_empty_folder_to_datamodels_by_the_compatible_commands(place):
    count = 24
    (place / "examples" / "train.py").write_text(CIFAR_SCRIPT)
    spec = {
        "masks": {"shape": [60], "dtype": "bool_"},
        "margins": {"shape": [20], "dtype": "float16"},
    }
    (place / "spec.json").write_text(json.dumps({"num_models": count, "schema": spec}))
    assert initialize(place).returncode == 0
    for start in range(0, count, 2):  # two at a time, as `parallel -j2` would
        pair = [
            command(place, "training.worker", *worker_flags(index), CIFAR=str(CIFAR))
            for index in (start, start + 1)
        ]
        for process in pair:
            _, err = process.communicate(timeout=100)
            assert process.returncode == 0, err
    assert arrays(place)["_completed"].all()
    wrote = call(
        place,
        "regression.write_dataset",
        *("--cfg.data_dir", "out", "--cfg.out_path", "out/reg_data.beton"),
        *("--cfg.y_name", "margins", "--cfg.x_name", "masks"),
    )
    assert wrote.returncode == 0, wrote.stderr
    (place / "config.yaml").write_text(
        "data:\n    data_path: 'OUT/data.beton'\n    num_train: 20\n    num_val: 4\n    seed: 0\n"
        "    target_start_ind: 0\n    target_end_ind: -1\n"
        "cfg:\n    k: 10\n    batch_size: 10\n    lr: 1e-4\n    eps: 1e-2\n    out_dir: OUT\n"
        "    num_workers: 8\nearly_stopping:\n    check_every: 3\n    eps: 5e-1\n"
    )
    flags = ("--data.data_path", "out/reg_data.beton", "--cfg.out_dir", "out/reg_results")
    fitted = call(place, "regression.compute_datamodels", "-C", "config.yaml", *flags)
    assert fitted.returncode == 0, fitted.stderr

    from gradkeep.compat.datamodels import load_weights

    weights = load_weights(place / "out/reg_results/datamodels.pt")
    assert weights["weight"].shape == (60, 20)
    assert weights["bias"].shape == weights["lam"].shape == (20,)
    masks, margins = arrays(place)["masks"], arrays(place)["margins"].astype(float)
    predicted = masks @ weights["weight"] + weights["bias"]
    learnt = 1 - ((predicted - margins) ** 2).sum() / ((margins - margins.mean(0)) ** 2).sum()
    assert learnt > 0.3, "weights in mask units predict as they are"

    second_call = call(place, "regression.compute_datamodels", "-C", "config.yaml", *flags)
    assert second_call.returncode == 2
    assert "already exists" in second_call.stderr


def begin_folder(place):
    """A folder of arrays for two models, `logs`."""
    (place / "logs").mkdir()
    spec = {"num_models": 2, "schema": {"m": {"shape": [], "dtype": "float"}}}
    (place / "spec.json").write_text(json.dumps(spec))
    folder, file = place / "logs", place / "spec.json"
    initialize_store.main([f"--logging.logdir={folder}", f"--logging.spec={file}"])


def test_a_script_whose_own_import_is_missing_shows_its_own_traceback(tmp_path):
    (tmp_path / "lacking.py").write_text("import no_such_package\n\n\ndef main(*_, **__): ...\n")
    (tmp_path / "late.py").write_text("def main(*_, index, logdir):\n    import no_such_package\n")
    begin_folder(tmp_path)
    for script in ("lacking", "late"):
        done = subprocess.run(
            [
                *(sys.executable, "-m", "gradkeep.compat.datamodels.training.worker"),
                *("--worker.index=0", f"--worker.main_import={script}", "--worker.logdir=logs"),
            ],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 1
        assert "No module named 'no_such_package'" in done.stderr
        assert f"{script}.py" in done.stderr
        assert "gradkeep" not in done.stderr.replace(str(tmp_path), "")


def test_a_folder_of_arrays_is_no_store_and_its_import_is_named(tmp_path, inline):
    begin_folder(tmp_path)
    for line in (
        ["run", "logs", "--main", "x"],
        ["work", "logs", "--main", "x"],
        ["status", "logs"],
    ):
        done = inline("datamodels", *line)
        assert done.returncode == 2
        assert "gradkeep datamodels init logs-store --from logs" in done.stderr
    assert inline("datamodels", "init", "logs-store", "--from", "logs").returncode == 0
    assert inline("datamodels", "status", "logs-store").returncode == 0


def test_a_module_that_imports_datamodels_runs_outside_of_a_worker(tmp_path):
    (tmp_path / "examples").mkdir()
    (tmp_path / "examples" / "check.py").write_text(
        "import sys\nimport datamodels\nfrom datamodels.training.utils import load_memmap\n"
        "assert callable(load_memmap)\nprint('checked', sys.argv[1:])\n"
    )
    command = [sys.executable, "-m", "gradkeep.compat.datamodels"]
    run = {"cwd": tmp_path, "capture_output": True, "text": True, "check": False}
    done = subprocess.run([*command, "examples.check", "--a=1"], **run)
    assert done.returncode == 0, done.stderr
    assert "checked ['--a=1']" in done.stdout
    assert subprocess.run(command, **run).returncode == 2
