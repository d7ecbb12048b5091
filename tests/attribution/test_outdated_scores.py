"""Saved scores, evaluations and decisions know which captures they are of."""

import dataclasses

import numpy as np
import pytest
import torch
from raises import raises
from torch import nn

import gradkeep as gk
from gradkeep import evaluate
from gradkeep.errors import AttributionError, DamagedError, EvaluationError
from gradkeep.evaluate._truth import GroundTruth


@pytest.fixture
def world(tmp_path):
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    data = {
        split: (torch.randn(n, 4), torch.arange(n) % 3) for split, n in (("train", 9), ("test", 4))
    }
    store = gk.open(tmp_path)

    def capture(split, labels=None):
        x, y = data[split]
        batch = [(x, y if labels is None else labels)]
        gk.capture(store, model, batch, task=gk.Classification(), split=split, progress=False)

    for split in data:
        capture(split)
    return store, data, capture


def recapture(store, capture, split, labels):
    store.delete(gk.store.CaptureKey("final", split))
    capture(split, labels)


@pytest.mark.parametrize("split", ["train", "test"])
def test_scores_of_a_capture_that_was_made_again_are_refused(world, split):
    store, data, capture = world
    gk.attribute(store, save="mine")
    assert gk.Scores.load(store, "mine").shape == (4, 9)
    recapture(store, capture, split, (data[split][1] + 1) % 3)
    with raises(AttributionError, "attribute.outdated", fix="gradkeep delete") as error:
        gk.Scores.load(store, "mine")
    assert "scores/mine" in str(error.value)
    with raises(AttributionError, "attribute.outdated"):
        gk.attribute(store, save="mine")
    store.delete(gk.store.ScoresKey("mine"))
    gk.attribute(store, save="mine")
    assert gk.Scores.load(store, "mine").shape == (4, 9)


def test_scores_of_the_same_rows_captured_again_are_read(world):
    store, _, capture = world
    gk.attribute(store, save="mine")
    recapture(store, capture, "train", None)
    assert gk.Scores.load(store, "mine").shape == (4, 9)


def test_scores_whose_capture_is_gone_are_read(world):
    store, *_ = world
    gk.attribute(store, save="mine")
    store.delete(gk.store.CaptureKey("final", "train"))
    assert gk.Scores.load(store, "mine").shape == (4, 9)


def test_combined_scores_know_the_captures_of_both(world):
    store, data, capture = world
    one, two = gk.attribute(store, method="dot"), gk.attribute(store, method="ekfac")
    gk.combine([one, two]).save("both", store=store)
    recapture(store, capture, "test", (data["test"][1] + 1) % 3)
    with raises(AttributionError, "attribute.outdated"):
        gk.Scores.load(store, "both")


def test_evaluations_of_a_capture_that_was_made_again_are_left_out(world):
    store, data, capture = world
    rng = np.random.default_rng(0)
    truth = GroundTruth("planted", rng.random((12, 9)) < 0.5, rng.random((12, 2, 4)))
    scores = evaluate.lds(gk.attribute(store), truth)
    scores.save("lds", store=store)
    dataclasses.replace(scores, captures={}).save("unknown", store=store)
    assert set(evaluate.evaluations(store)) == {"lds", "unknown"}
    recapture(store, capture, "train", (data["train"][1] + 1) % 3)
    with raises(EvaluationError, "evaluate.outdated", fix="gradkeep evaluate"):
        evaluate.Evaluation.load(store, "lds")
    with pytest.warns(UserWarning, match="lds"):
        assert set(evaluate.evaluations(store)) == {"unknown"}


def test_the_page_shows_no_outdated_scores_and_decisions_unless_asked(world):
    from gradkeep.store import Decision
    from gradkeep.web._http import Captures
    from gradkeep.web._score_sources import default_source, score_sources
    from gradkeep.web._served import ServedStore

    store, data, capture = world
    gk.attribute(store, save="mine")
    for row, before in ((2, 2), (3, 0)):
        store.decide(Decision("train", row, "relabel", label=1, before=before))
    served = ServedStore(store.location)
    captures = Captures("main", "test", "train", "main")
    assert default_source(served, captures) == "saved:mine"
    assert set(served.standing_decisions(served.table("main", "train", "main"))) == {2, 3}
    corrected = data["train"][1].clone()
    corrected[2] = 1
    recapture(store, capture, "train", corrected)
    served = ServedStore(store.location)
    assert default_source(served, captures) == "method:kernel"
    assert next(one for one in score_sources(served) if one.kind == "saved").outdated
    assert set(served.standing_decisions(served.table("main", "train", "main"))) == {3}


def test_unreadable_captures_are_damage(world):
    store, *_ = world
    for text in ("[", "[1]", '{"a": 1}', "[" * 100_000):
        with pytest.raises(DamagedError):
            store.changed_captures({"captures": text})
