"""Savers: arrays that are assigned to, classes that others wrote, and nothing lost."""

import inspect
import json
import logging
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import own_saver
import pytest
import quickstart
import torch
from own_saver import FolderSaver
from raises import raises
from torch import nn

from gradkeep.compat.trak import TRAKer
from gradkeep.compat.trak import savers as ours
from gradkeep.compat.trak.savers import MmapSaver, ModelIDException
from gradkeep.errors import AttributionError, DamagedError

N, K, M = 12, 4, 3
ABOUT = {"JL dimension": K, "JL matrix type": "normal", "train set size": N}
RNG = np.random.default_rng(0)
GRADS = RNG.normal(size=(N, K)).astype(np.float32)
WEIGHTS = RNG.uniform(size=(N, 1)).astype(np.float32)
TARGETS = RNG.normal(size=(M, K)).astype(np.float32)


def opened(folder, kind=MmapSaver, **options):
    options = {"load_from_save_dir": True, "use_half_precision": False} | options
    return kind(
        save_dir=folder,
        metadata=ABOUT,
        train_set_size=N,
        proj_dim=K,
        logging_level=logging.ERROR,
        **options,
    )


def featurized(folder, kind=MmapSaver, **options):
    saver = opened(folder, kind, **options)
    saver.register_model_id(0, False)
    saver.load_current_store(0)
    for rows in (np.arange(5), np.arange(5, N)):
        saver.current_store["grads"][rows] = torch.from_numpy(GRADS[rows])
        saver.current_store["out_to_loss"][rows] = torch.from_numpy(WEIGHTS[rows])
        saver.current_store["is_featurized"][rows] = 1
        saver.serialize_current_model_id_metadata()
    return saver


def test_what_is_assigned_is_there_in_the_next_process(tmp_path):
    saver = opened(tmp_path)
    saver.register_model_id(0, False)
    saver.current_store["grads"][:] = 1
    assert (saver.current_store["grads"] == 1).all()
    saver.current_store["grads"][3:5, 1] = 7
    saver.current_store["grads"][torch.tensor([0, 2])] = torch.full((2, K), 5).half()
    mask = np.zeros((N, K), bool)
    mask[9, 2] = True
    saver.current_store["grads"][mask] = -1
    expected = np.ones((N, K))
    expected[3:5, 1], expected[[0, 2]], expected[9, 2] = 7, 5, -1
    for one in (saver, opened(tmp_path)):
        one.load_current_store(0)
        array = one.current_store["grads"]
        assert isinstance(array, np.memmap)
        assert np.array_equal(array, expected)


def test_rows_that_were_not_written_are_no_numbers(tmp_path):
    saver = opened(tmp_path)
    saver.register_model_id(0, False)
    saver.init_experiment("e", M, 0)
    for name, shape in {
        "grads": (N, K),
        "features": (N, K),
        "out_to_loss": (N, 1),
        "e_grads": (M, K),
        "e_scores": (N, M),
    }.items():
        assert np.isnan(saver.current_store[name]).all(), name
        assert saver.current_store[name].shape == shape
    assert not saver.current_store["is_featurized"].any()
    saver.current_store["grads"][2, 0] = 1
    saver.current_store["out_to_loss"][:] = 1
    with raises(AttributionError, "compat.rows_incomplete", fix="'grads'") as caught:
        saver.current_store["is_featurized"][:] = 1
    assert caught.value.message.startswith("12 rows ")
    assert caught.value.found == "rows 0, 1, 2, 3, 4 ..."
    saver.current_store["grads"][:] = 1
    with raises(AttributionError, "compat.invalid_flag"):
        saver.current_store["is_featurized"][:] = 2
    assert not saver.current_store["is_featurized"].any()
    saver.current_store["is_featurized"][:4] = 1
    assert saver.done().tolist() == [True] * 4 + [False] * (N - 4)


def test_any_other_change_in_place_is_refused(tmp_path):
    saver = featurized(tmp_path)
    array = saver.current_store["grads"]

    def view():
        array[0][1] = 3

    def added():
        saver.current_store["grads"] += 1

    changes = [
        view,
        added,
        lambda: array.fill(1),
        lambda: array.sort(),
        lambda: array.T.__setitem__(0, 1),
        lambda: np.copyto(array, 1),
        lambda: np.add(array, 1, out=array),
        lambda: np.asarray(array).__setitem__(0, 1),
    ]
    for change in changes:
        with pytest.raises(ValueError, match="read-only"):
            change()
    copied = array.copy()
    copied[:] = 3  # one's own
    assert np.array_equal(saver.current_store["grads"], GRADS)
    with raises(AttributionError, "compat.array_replaced", fix="[rows] = values"):
        saver.current_store["grads"] = np.ones(3)
    with raises(AttributionError, "compat.array_deleted", fix="del_grads"):
        del saver.current_store["grads"]
    saver.current_store["grads"] = 2 * GRADS
    assert np.array_equal(opened_store(tmp_path)["grads"], 2 * GRADS)
    saver.current_store["mine"] = [1]
    assert saver.current_store.pop("mine") == [1]


def opened_store(folder, **options):
    saver = opened(folder, **options)
    saver.load_current_store(0)
    return saver.current_store


def test_an_assignment_that_fails_changes_nothing(tmp_path, monkeypatch):
    saver = featurized(tmp_path)
    array = saver.current_store["grads"]
    with pytest.raises(ValueError, match="broadcast"):
        array[:2] = np.ones((3, K))

    def full(*_, **__):
        raise OSError(28, "no space left on device")

    monkeypatch.setattr(saver.store.backend, "put_if_absent", full)
    with pytest.raises(OSError, match="no space"):
        array[:2] = 9
    assert np.array_equal(array, GRADS)


def test_a_flipped_byte_of_an_assignment_is_noticed(tmp_path):
    featurized(tmp_path)
    folder = tmp_path / "store" / "datamodels" / "trak.id_0.train" / "rows"
    file = next(folder.rglob("0.*"))
    damaged = bytearray(file.read_bytes())
    damaged[-9] ^= 1
    file.chmod(0o644)
    file.write_bytes(damaged)
    with pytest.raises(DamagedError):
        np.array(opened_store(tmp_path)["grads"])


@pytest.mark.parametrize("kind", [MmapSaver, FolderSaver])
def test_an_id_is_registered_once(tmp_path, kind):
    saver = featurized(tmp_path, kind)
    with pytest.raises(ModelIDException, match="0 is"):
        saver.register_model_id(0, False)
    with pytest.raises(ModelIDException, match="0 is"):
        opened(tmp_path, kind).register_model_id(0, False)
    assert np.array_equal(saver.current_store["grads"], GRADS)
    saver.register_model_id(0, True)
    assert not saver.current_store["is_featurized"].any()
    assert saver.model_ids == {0: {"is_featurized": 0, "is_finalized": 0}}


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("kind", [MmapSaver, FolderSaver])
def test_driven_by_hand_from_registering_to_scores(tmp_path, kind, half):
    saver = featurized(tmp_path, kind, use_half_precision=half)
    assert saver.model_ids[0] == {"is_featurized": 1, "is_finalized": 0}
    x = np.array(saver.current_store["grads"], np.float64)
    features = x @ np.linalg.inv(x.T @ x)
    saver.current_store["features"][:] = features
    saver.model_ids[0]["is_finalized"] = 1
    saver.serialize_current_model_id_metadata()
    saver.init_experiment("e", M, 0)
    saver.current_store["e_grads"][:] = TARGETS
    scores = features @ TARGETS.T * WEIGHTS
    saver.current_store["e_scores"][:] = scores
    saver.save_scores("e")
    if kind is MmapSaver:
        saver.del_grads(0)
    reopened = opened(tmp_path, kind, use_half_precision=half)
    assert reopened.model_ids[0] == {"is_featurized": 1, "is_finalized": 1}
    assert reopened.experiments["e"]["scores_finalized"] == 1
    assert reopened.experiments["e"]["num_targets"] == M
    close = {"rtol": 2e-3 if half else 1e-5, "atol": 2e-3 if half else 1e-5}
    assert np.allclose(np.load(reopened.experiments["e"]["scores_path"]), scores, **close)
    reopened.load_current_store(0)
    assert np.allclose(reopened.current_store["features"], features, **close)
    assert np.allclose(reopened.current_store["out_to_loss"], WEIGHTS, **close)
    reopened.load_current_store(0, "e", M)
    assert np.allclose(reopened.current_store["e_grads"], TARGETS, **close)
    assert np.allclose(reopened.current_store["e_scores"], scores, **close)


def test_finalizing_by_hand_needs_all_features(tmp_path):
    saver = featurized(tmp_path)
    saver.current_store["features"][:5] = 1
    saver.model_ids[0]["is_finalized"] = 1
    with pytest.raises(ModelIDException, match="5 of 12 rows"):
        saver.serialize_current_model_id_metadata()
    assert opened(tmp_path).model_ids == {0: {"is_featurized": 1, "is_finalized": 0}}


def test_scores_by_hand_need_all_rows(tmp_path):
    saver = featurized(tmp_path)
    saver.init_experiment("e", M, 0)
    with raises(AttributionError, "compat.no_scores", fix="finalize_scores"):
        saver.save_scores("e")
    saver.current_store["e_scores"][1:] = 2
    with raises(AttributionError, "compat.scores_incomplete") as caught:
        saver.save_scores("e")
    assert caught.value.message.startswith("1 rows ")
    assert caught.value.found == "rows 0"
    saver.current_store["e_scores"][0] = 1
    saver.save_scores("e")
    saver.current_store["e_scores"][3] = 5  # over what was saved
    saver.save_scores("e")
    scores = np.load(saver.experiments["e"]["scores_path"])
    assert scores[:, 0].tolist() == [1, 2, 2, 5] + [2] * (N - 4)


def test_flags_can_be_taken_back_until_the_id_is_finalized(tmp_path):
    saver = featurized(tmp_path)
    saver.current_store["is_featurized"][2] = 0
    saver.serialize_current_model_id_metadata()
    assert opened(tmp_path).model_ids[0]["is_featurized"] == 0
    saver.current_store["is_featurized"][2] = 1
    saver.current_store["features"][:] = 1
    saver.model_ids[0]["is_finalized"] = 1
    saver.serialize_current_model_id_metadata()
    with raises(AttributionError, "compat.finalized", fix="register_model_id"):
        saver.current_store["is_featurized"][2] = 0


# With TRAKer.

D, C = 5, 3


def network(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(D, 7), nn.Tanh(), nn.Linear(7, C))


MADE = torch.Generator().manual_seed(3)
X, Y = torch.randn(40, D, generator=MADE), torch.randint(C, (40,), generator=MADE)


def traker(folder, **options):
    options = {"proj_dim": 16, "use_half_precision": False} | options
    return TRAKer(
        network(),
        "image_classification",
        40,
        folder,
        device="cpu",
        logging_level=logging.ERROR,
        **options,
    )


def whole(t, ids=(0,), **options):
    for number in ids:
        t.load_checkpoint(network(number).state_dict(), number)
        for start in range(0, 40, 10):
            t.featurize((X[start : start + 10], Y[start : start + 10]), num_samples=10)
    t.finalize_features(**options)
    for number in ids:
        t.start_scoring_checkpoint("e", network(number).state_dict(), number, 6)
        t.score((X[:6], Y[:6]), num_samples=6)
    return np.array(t.finalize_scores("e"), np.float32)


def test_rows_of_a_script_and_of_traker_together(tmp_path):
    expected = whole(traker(tmp_path / "plain"))
    t = traker(tmp_path / "mixed")
    t.load_checkpoint(t.model.state_dict(), 0)
    saver = traker(tmp_path / "plain").saver
    saver.load_current_store(0)
    for name in ("grads", "out_to_loss", "is_featurized"):
        t.saver.current_store[name][7:30] = saver.current_store[name][7:30]
    before = t.saver.current_store["grads"]
    assert np.isnan(before[30:]).all()
    scores = whole(t)  # computes the others only
    assert np.allclose(scores, expected, atol=1e-5 * np.abs(expected).max())
    assert np.array_equal(t.saver.current_store["grads"], saver.current_store["grads"])


def test_changed_gradients_change_the_scores(tmp_path):
    t = traker(tmp_path)
    before = whole(t)
    t.saver.current_store["grads"][0] = 0
    after = np.array(t.finalize_scores("e"))
    assert (after[0] == 0).all()
    assert not (before[0] == 0).any()


@pytest.mark.parametrize("when", ["new", "featurized", "finalized"])
def test_gradients_are_deleted_at_any_time(tmp_path, when):
    expected = whole(traker(tmp_path / "kept"))
    t = traker(tmp_path / "deleted")
    t.load_checkpoint(t.model.state_dict(), 0)
    if when != "new":
        t.featurize((X, Y), num_samples=40)
    if when == "finalized":
        t.finalize_features()
    t.saver.del_grads(0)
    if when == "finalized":
        t.saver.load_current_store(0)
        assert t.saver.current_store["grads"] is None
        with raises(AttributionError, "compat.gradients_deleted"):
            t.saver.current_store["out_to_loss"][0] = 1
    else:
        assert t.saver.model_ids[0] == {"is_featurized": 0, "is_finalized": 0}
        assert np.isnan(t.saver.current_store["grads"]).all()
    assert np.allclose(whole(t), expected, atol=1e-5 * np.abs(expected).max())


def test_targets_are_deleted(tmp_path):
    t = traker(tmp_path)
    whole(t)
    t.saver.del_grads(0, target=True)
    with raises(AttributionError, "compat.missing_targets"):
        t.finalize_scores("e")
    t.saver.current_store["e_grads"][:] = 1
    assert t.finalize_scores("e").shape == (40, 6)


class Told(MmapSaver):
    """Adds to what the released class does."""

    def save_scores(self, exp_name):
        super().save_scores(exp_name)
        self.calls = [*getattr(self, "calls", []), f"saved {exp_name}"]

    def register_model_id(self, model_id, _allow_featurizing_already_registered):
        super().register_model_id(model_id, _allow_featurizing_already_registered)
        self.calls = [*getattr(self, "calls", []), f"registered {model_id}"]


def test_methods_that_a_derived_class_overrides_are_called(tmp_path):
    t = traker(tmp_path, saver=Told)
    whole(t)
    assert t.saver.calls == ["registered 0", "saved e"]


@pytest.mark.parametrize("ridge", [None, 0.5])
@pytest.mark.parametrize("del_grads", [False, True])
def test_a_saver_of_ones_own(tmp_path, ridge, del_grads):
    expected = whole(traker(tmp_path / "ours", lambda_reg=ridge), (0, 1))
    t = traker(tmp_path / "own", lambda_reg=ridge, saver=FolderSaver)
    scores = whole(t, (0, 1), del_grads=del_grads)
    assert np.allclose(scores, expected, atol=1e-4 * np.abs(expected).max())
    assert (tmp_path / "own" / "0" / "grads.mmap").exists() != del_grads
    assert json.loads((tmp_path / "own" / "metadata.json").read_text())["JL dimension"] == 16
    reopened = traker(tmp_path / "own", lambda_reg=ridge, saver=FolderSaver)
    assert reopened.saver.model_ids == {i: {"is_featurized": 1, "is_finalized": 1} for i in (0, 1)}
    assert np.array_equal(reopened.finalize_scores("e"), scores)
    with raises(AttributionError, "compat.other_settings", fix="save_dir") as caught:
        traker(tmp_path / "own", saver=FolderSaver, proj_dim=8)
    assert caught.value.path.endswith("metadata.json")
    assert "JL dimension: stored '16', requested '8'" in caught.value.found


def test_a_saver_in_half_precision_refuses_what_does_not_fit(tmp_path):
    t = traker(tmp_path, saver=FolderSaver, use_half_precision=True)
    assert np.isfinite(whole(t)).all()
    other = traker(tmp_path / "large", saver=FolderSaver, use_half_precision=True)
    other.load_checkpoint(network().state_dict(), 0)
    other.normalize_factor = torch.tensor(1e-9)
    with raises(AttributionError, "compat.half_precision", fix="use_half_precision=False"):
        other.featurize((X, Y), num_samples=40)
    assert not other.saver.current_store["is_featurized"].any()


def test_a_saver_without_an_array_is_told_which(tmp_path):
    class Forgetful(FolderSaver):
        def load_current_store(self, *args, **named):
            super().load_current_store(*args, **named)
            self.current_store["out_to_loss"] = None

    t = traker(tmp_path, saver=Forgetful)
    t.load_checkpoint(network().state_dict(), 0)
    with pytest.raises(AttributionError, match=r"Forgetful\.current_store has no 'out_to_loss'"):
        t.featurize((X, Y), num_samples=40)


@pytest.mark.parametrize("name", ["id_0.json", "experiments.json", "metadata.json"])
def test_documents_that_were_cut_off(tmp_path, name):
    expected = whole(traker(tmp_path, saver=FolderSaver))
    (tmp_path / name).write_text('{"0": {"is_fea')
    if name == "metadata.json":
        with pytest.raises(AttributionError, match=r"metadata\.json"):
            traker(tmp_path, saver=FolderSaver)
        return
    assert np.allclose(whole(traker(tmp_path, saver=FolderSaver)), expected)


# The released classes, if they are installed.


def released_saver(base):
    """The released class as it is, on its own base class or on ours."""
    released = pytest.importorskip("trak.savers", reason="traker is not installed")
    if base == "released":
        return released.MmapSaver
    names = dict(vars(released), AbstractSaver=ours.AbstractSaver)
    exec(inspect.getsource(released.MmapSaver), names)
    return names["MmapSaver"]


@pytest.mark.parametrize("base", ["released", "ours"])
def test_the_released_saver_as_it_is(tmp_path, base):
    kind = released_saver(base)
    expected = whole(traker(tmp_path / "ours"), (0, 1))
    scores = whole(traker(tmp_path / "theirs", saver=kind), (0, 1), del_grads=True)
    assert np.allclose(scores, expected, atol=1e-4 * np.abs(expected).max())
    reopened = traker(tmp_path / "theirs", saver=kind)
    assert np.array_equal(reopened.finalize_scores("e"), scores)


# Nothing is lost.


def test_the_example_runs(tmp_path):
    assert own_saver.main(tmp_path).shape == (200, 10)


def test_killed_at_any_moment_nothing_that_was_told_is_lost(tmp_path):
    quickstart.main(["train", str(tmp_path)])
    stages = "featurize,finalize,score,gather"
    quickstart.main([stages, str(tmp_path), str(tmp_path / "whole"), "2", "own"])
    other, moments = tmp_path / "killed", random.Random(0)
    command = [sys.executable, quickstart.__file__, stages, str(tmp_path), str(other), "2", "own"]
    for _ in range(2):
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            lines = [process.stdout.readline() for _ in range(moments.randint(1, 6))]
            time.sleep(moments.uniform(0, 0.01))
            process.kill()
            lines += list(process.stdout)
        assert process.returncode == -signal.SIGKILL
        flags = [np.load(path).sum() for path in other.glob("*/is_featurized.mmap")]
        assert sum(flags) >= 2 * lines.count("featurized\n")
    quickstart.main([stages, str(tmp_path), str(other), "2", "own"])
    expected = np.load(tmp_path / "whole" / "scores" / "quickstart.mmap")
    assert np.allclose(np.load(other / "scores" / "quickstart.mmap"), expected, atol=1e-6)


ASSIGNING = """
import os, sys, numpy as np
sys.path.insert(0, os.path.dirname(sys.argv[1]))
from test_savers import opened
saver = opened(sys.argv[2])
saver.register_model_id(0, True)
for step in range(1, 1000):
    saver.current_store["grads"][:] = step
    print(step, flush=True)
"""


def test_an_assignment_is_there_as_a_whole_or_not_at_all(tmp_path):
    command = [sys.executable, "-c", ASSIGNING, __file__, str(tmp_path)]
    path = [str(Path(__file__).parent), str(Path(own_saver.__file__).parent), *sys.path]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        for _ in range(5):
            last = int(process.stdout.readline())
        process.kill()
        last = max([last, *map(int, process.stdout)])
    array = np.unique(opened_store(tmp_path)["grads"])
    assert len(array) == 1
    assert array[0] in (last, last + 1)
