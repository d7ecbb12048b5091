"""Retraining without what scores name: held against trainings done by hand."""

import numpy as np
import pytest
from raises import raises

import gradkeep as gk
from gradkeep import evaluate
from gradkeep.datamodels._masks import training_seed
from gradkeep.errors import EvaluationError
from tests.evaluate.conftest import QUERIES, ROWS, recipe


def by_hand(mask, seed):
    how = recipe()
    rows = np.flatnonzero(mask)
    model = how.training.train_one(how.train[0][rows], how.train[1][rows], training_seed(0, seed))
    return how.query_output()(model)


def test_a_removal_curve_is_what_retraining_by_hand_says(world):
    scores = gk.attribute(world, method="kernel")
    evaluation = evaluate.removal_curve(
        scores, recipe(), sizes=[8, 20], queries=[1, 5], seeds=2, workers=0
    )
    whole = np.stack([by_hand(np.ones(ROWS, bool), seed) for seed in range(2)])
    for column, size in enumerate((8, 20)):
        drops = []
        for query in (1, 5):
            mask = np.ones(ROWS, bool)
            mask[np.argsort(-scores.values[query])[:size]] = False
            without = np.stack([by_hand(mask, seed) for seed in range(2)])
            drops.append((whole - without)[:, query].mean())
        assert evaluation.change.curve.values[0, column] == pytest.approx(np.mean(drops), rel=1e-3)
    assert evaluation.change.curve.names[-1] == "random rows"
    assert evaluation.change.sizes.queries == 2
    assert "20 rows" in str(evaluation.change.sizes)


def test_removing_what_helped_hurts_more_than_removing_at_random(world):
    scores = gk.attribute(world, method="kernel")
    evaluation = evaluate.removal_curve(scores, recipe(), sizes=[16], workers=0)
    assert evaluation.change.value > 0
    assert evaluation.change.interval[0] > 0
    alone = evaluate.removal_curve(scores, recipe(), sizes=[16], train="with only", workers=0)
    assert alone.change.metric == "retention"
    assert alone.change.value > 0
    assert (
        0
        <= evaluation.flipped.interval[0]
        <= evaluation.flipped.value
        <= evaluation.flipped.interval[1]
        <= 1
    )
    random = gk.attribute(world, method="random")
    reported = evaluate.removal_curve(random, recipe(), sizes=[16], workers=0)
    assert not evaluate.compare(evaluation.change, evaluation.change).differs
    assert evaluate.compare(evaluation.change, reported.change).value > 0


def test_trainings_are_kept(world, monkeypatch):
    scores = gk.attribute(world, method="kernel")
    first = evaluate.removal_curve(scores, recipe(), sizes=[4], queries=[0, 2], workers=0)
    monkeypatch.setattr("gradkeep.datamodels._training.train_many", None)
    monkeypatch.setattr("gradkeep.datamodels.Training.train_one", None)
    second_evaluation = evaluate.removal_curve(
        scores, recipe(), sizes=[4], queries=[0, 2], workers=0
    )
    np.testing.assert_array_equal(first.change.table, second_evaluation.change.table)


def test_leave_one_out_is_what_leaving_out_by_hand_says(world):
    scores = gk.attribute(world, method="kernel")
    evaluation = evaluate.leave_one_out(scores, recipe(), rows=list(range(8)), seeds=2, workers=0)
    whole = np.stack([by_hand(np.ones(ROWS, bool), seed) for seed in range(2)]).mean(0)
    drops = []
    for row in range(8):
        mask = np.ones(ROWS, bool)
        mask[row] = False
        drops.append(whole - np.stack([by_hand(mask, seed) for seed in range(2)]).mean(0))
    from gradkeep._ranks import rank_correlation

    each = [rank_correlation(scores.values[q, :8], np.stack(drops)[:, q]) for q in range(QUERIES)]
    assert evaluation.value == pytest.approx(np.mean(each), abs=0.02)
    many = evaluate.leave_one_out(scores, recipe(), rows=10, seeds=1, workers=0)
    assert many.ceiling is None
    assert many.sizes.rows == 10


def test_what_cannot_be_retrained_is_refused(world):
    scores = gk.attribute(world, method="kernel")
    with raises(EvaluationError, "evaluate.not_scored"):
        evaluate.removal_curve(scores, recipe(), queries=[99])
    with pytest.raises(EvaluationError, match="sizes"):
        evaluate.removal_curve(scores, recipe(), sizes=[ROWS])
    passed = gk.Scores(scores.values[:, :9], scores.query_ids, np.arange(9))
    with raises(EvaluationError, "evaluate.no_store", fix="store="):
        evaluate.removal_curve(passed, recipe())
    with raises(EvaluationError, "evaluate.other_rows"):
        evaluate.removal_curve(passed, recipe(), store=world)
