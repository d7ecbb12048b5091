"""Suspects: planted wrong labels are the truth that thresholds and rates are held against."""

import json

import numpy as np
import pytest
import torch
from raises import raises
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import gradkeep as gk
from gradkeep.attribution._label_noise import LabelNoise
from gradkeep.cli._app import run
from gradkeep.data import dataset
from gradkeep.errors import AttributionError


def flipped(labels, kind, rate, seed):
    draw = np.random.default_rng(seed)
    at = draw.random(len(labels)) < rate
    step = draw.integers(1, 10, len(labels)) if kind == "any" else 1
    return np.where(at, (labels + step) % 10, labels)


def simulated(kind, rate, seed, *, rows=2000, doubt=0.3, warp=1.0):
    """Rows whose true class is drawn from known probabilities; a model that is off by `warp`."""
    draw = np.random.default_rng(seed)
    logits = draw.normal(0, 1, (rows, 10))
    logits[np.arange(rows), draw.integers(0, 10, rows)] += 1.2 / doubt
    right = np.exp(2 * logits)
    right /= right.sum(1, keepdims=True)
    true = (right.cumsum(1) < draw.random((rows, 1))).sum(1)
    outputs = right**warp + 1e-9
    return outputs / outputs.sum(1, keepdims=True), true, flipped(true, kind, rate, seed + 1)


def inside(share, interval):
    return interval[0] <= share <= interval[1]


@pytest.mark.parametrize("kind", ["any", "next"])
@pytest.mark.parametrize("rate", [0.05, 0.1, 0.2])
def test_the_precision_lies_in_its_interval_where_the_truth_is_known(kind, rate):
    missed = tried = 0
    for seed in range(2):
        for warp in (0.6, 1.0, 1.5):
            outputs, true, passed = simulated(kind, rate, seed, warp=warp)
            ranked = gk.suspects(probabilities=outputs, labels=passed)
            wrong = (true != passed)[ranked.ids]
            assert inside(wrong.mean(), ranked.noise.rate_interval)
            for precision in (0.7, 0.9):
                threshold = ranked.noise.threshold(precision)
                if threshold is None:
                    continue
                tried += 1
                missed += not inside(wrong[: threshold.rows].mean(), threshold.interval)
                assert (ranked.flagged(precision) == ranked.ids[: threshold.rows]).all()
    assert tried >= 8
    assert missed <= 1  # 95 % are promised


@pytest.mark.parametrize("kind", ["any", "next"])
def test_weak_models_do_not_promise_too_much(kind):
    """Of a model that is wrong more often than right, confusions look like noise."""
    for seed in range(3):
        outputs, true, passed = simulated(kind, 0.05, seed, doubt=1.0)
        draw = np.random.default_rng(seed)
        likely = outputs**0.5 * draw.gamma(1.0, 1.0, outputs.shape)  # it errs by itself, too
        likely /= likely.sum(1, keepdims=True)
        assert (likely.argmax(1) == true).mean() < 0.5
        ranked = gk.suspects(probabilities=likely, labels=passed)
        threshold = ranked.noise.threshold(0.8)
        if threshold is not None:
            assert inside((true != passed)[ranked.flagged(0.8)].mean(), threshold.interval)


def out_of_fold(x, labels, *, folds=4, epochs=10):
    """Probabilities of each row by a model that has not seen it."""
    place = torch.arange(len(x)) % folds
    outputs = torch.zeros(len(x), 10)
    for fold in range(folds):
        net = trained(x[place != fold], labels[place != fold], epochs=epochs, seed=fold)[-1]
        with torch.no_grad():
            outputs[place == fold] = net(x[place == fold]).softmax(1)
    return outputs


def trained(x, labels, *, epochs, seed):
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.Adam(net.parameters(), 5e-3)
    stored = []
    for _ in range(epochs):
        for batch in torch.randperm(len(x)).split(64):
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(x[batch]), labels[batch]).backward()
            optimizer.step()
        copy = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
        copy.load_state_dict(net.state_dict())
        stored.append(copy)
    return stored


@pytest.mark.parametrize(("kind", "rate"), [("any", 0.05), ("any", 0.2), ("next", 0.1)])
def test_planted_labels_of_digits_are_counted_and_found(tmp_path, kind, rate):
    x, y = dataset("digits")[:]
    x = x.flatten(1)
    passed = torch.from_numpy(flipped(y.numpy(), kind, rate, 0))
    truth = (passed != y).numpy()
    ranked = gk.suspects(probabilities=out_of_fold(x, passed), labels=passed)
    wrong = truth[ranked.ids]
    threshold = ranked.noise.threshold(0.8)
    assert inside(wrong.mean(), ranked.noise.rate_interval)
    assert inside(wrong[: threshold.rows].mean(), threshold.interval)
    assert wrong[: threshold.rows].sum() > 0.6 * wrong.sum()
    assert ranked.noise.pattern == ("any class" if kind == "any" else "certain classes")
    right = np.zeros((10, 10))
    np.add.at(right, (passed.numpy(), y.numpy()), 1)
    off = ~np.eye(10, dtype=bool)
    assert np.corrcoef(ranked.noise.confusion[off], right[off])[0, 1] > 0.5
    assert ranked.noise.confusion.sum() == pytest.approx(len(y))

    # The same from a store: captures of the middle of training, of rows that were trained on.
    data, task = DataLoader(TensorDataset(x, passed), 256), gk.Classification()
    store = gk.open(tmp_path / "store")
    for step, net in enumerate(trained(x, passed, epochs=4, seed=9)[1:], 2):
        gk.capture(store, net, data, task=task, split="train", checkpoints=f"epoch-{step}",
                   keep="losses", progress=False)  # fmt: skip
    stored_ranked = gk.suspects(store)
    wrong = truth[stored_ranked.ids]
    threshold = stored_ranked.noise.threshold(0.8)
    assert not stored_ranked.noise.held_out
    assert inside(wrong.mean(), stored_ranked.noise.rate_interval)
    if threshold is not None:
        assert inside(truth[stored_ranked.flagged(0.8)].mean(), threshold.interval)
    by_noise = gk.suspects(store, by="noise")
    assert (np.diff(by_noise.values) <= 0).all()
    assert wrong[: truth.sum()].mean() > 0.5


def test_clean_labels_are_left_alone():
    outputs, true, _ = simulated("any", 0.0, 3)
    ranked = gk.suspects(probabilities=outputs, labels=true)
    assert ranked.noise.rate < 0.01
    threshold = ranked.noise.threshold(0.8)
    assert threshold is None or threshold.interval[0] == 0


def test_few_rows_tell_nothing(tmp_path):
    outputs, _, passed = simulated("any", 0.1, 0, rows=50)
    ranked = gk.suspects(probabilities=outputs, labels=passed, by="loss")
    assert ranked.noise is None
    assert ranked.values[0] == pytest.approx(
        -np.log(outputs[np.arange(50), passed]).min() * -1 or 0, abs=99
    )
    with raises(AttributionError, "attribute.no_noise"):
        ranked.flagged()
    with raises(AttributionError, "attribute.measure_unavailable"):
        gk.suspects(probabilities=outputs, labels=passed)


def test_ids_and_kinds_of_arrays():
    outputs, _, passed = simulated("any", 0.1, 0, rows=500)
    plain = gk.suspects(probabilities=outputs, labels=passed)
    other = gk.suspects(
        probabilities=torch.from_numpy(outputs),
        labels=torch.from_numpy(passed),
        ids=np.arange(500) + 7,
    )
    assert (other.ids == plain.ids + 7).all()
    assert isinstance(plain.noise, LabelNoise)
    assert (plain.values == plain.noise.wrong).all()
    assert (plain.labels == passed[plain.ids]).all()
    assert (plain.predicted == outputs.argmax(1)[plain.ids]).all()


SAID, _, GIVEN = simulated("any", 0.1, 0, rows=200)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"probabilities": SAID},
        {"probabilities": SAID, "labels": GIVEN[:-1]},
        {"probabilities": SAID, "labels": GIVEN + 5},
        {"probabilities": SAID, "labels": GIVEN - 1},
        {"probabilities": SAID, "labels": GIVEN * 1.0},
        {"probabilities": np.log(SAID), "labels": GIVEN},
        {"probabilities": SAID * 2, "labels": GIVEN},
        {"probabilities": SAID * np.nan, "labels": GIVEN},
        {"probabilities": SAID[0], "labels": GIVEN},
        {"probabilities": "text", "labels": GIVEN},
        {"probabilities": SAID, "labels": GIVEN, "by": "self"},
        {"probabilities": SAID, "labels": GIVEN, "by": "looks"},
        {"probabilities": SAID, "labels": GIVEN, "ids": np.arange(200) + 0.5},
        {"probabilities": SAID, "labels": GIVEN, "ids": [1, 2]},
    ],
    ids=str,
)
def test_what_cannot_be_judged_is_refused(options):
    with pytest.raises(AttributionError):
        gk.suspects(**options)


def test_precisions_that_are_none_are_refused():
    ranked = gk.suspects(probabilities=SAID, labels=GIVEN)
    for bad in (0, -1, 1.5, float("nan"), "much", None):
        with pytest.raises(AttributionError, match="precision"):
            ranked.noise.threshold(bad)


def test_the_command_says_how_many(tmp_path, capsys):
    x, y = dataset("digits")[:]
    passed = torch.from_numpy(flipped(y.numpy(), "any", 0.1, 0))
    net = trained(x.flatten(1), passed, epochs=3, seed=0)[-1]
    data = DataLoader(TensorDataset(x.flatten(1), passed), 256)
    store = str(tmp_path / "store")
    gk.capture(
        store, net, data, task=gk.Classification(), split="train", keep="losses", progress=False
    )

    def output(*options):
        with pytest.raises(SystemExit) as ended:
            run(["suspects", store, *options])
        assert not ended.value.code
        return capsys.readouterr().out

    assert "of the labels are wrong" in output("--top", "3")
    answer = json.loads(output("--json", "--by", "noise", "--precision", "0.7"))
    assert 0 < answer["noise"]["rate"] < 0.3
    assert answer["noise"]["threshold"]["rows"] == len(answer["noise"]["threshold"]["ids"])
