"""Detection of wrong labels, against scikit-learn and by brute force."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from raises import raises
from sklearn.metrics import roc_auc_score

from gradkeep import evaluate
from gradkeep.errors import EvaluationError


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10_000), st.integers(10, 200), st.integers(1, 6))
def test_the_area_is_scikit_learns_with_ties(seed, rows, levels):
    rng = np.random.default_rng(seed)
    wrong = rng.random(rows) < 0.3
    wrong[:2], wrong[2:4] = True, False
    values = rng.integers(0, levels + 1, rows) + wrong * rng.integers(0, 2, rows)
    evaluation = evaluate.label_detection(values, wrong, resamples=100)
    assert evaluation.value == pytest.approx(roc_auc_score(wrong, values), abs=1e-12)
    listed = evaluate.label_detection(values, np.flatnonzero(wrong), resamples=100)
    assert listed.value == evaluation.value
    assert listed.universe == evaluation.universe


def test_precision_and_recall_are_those_of_the_list():
    rng = np.random.default_rng(0)
    wrong = rng.random(300) < 0.2
    values = wrong + rng.standard_normal(300)
    evaluation = evaluate.label_detection(values, wrong)
    order = np.argsort(-values)
    for at, size in enumerate(evaluation.curve.at.astype(int)):
        hits = wrong[order[:size]].sum()
        assert evaluation.curve.values[0, at] == pytest.approx(hits / size)
        assert evaluation.curve.values[1, at] == pytest.approx(hits / wrong.sum())
        assert (evaluation.curve.low[:, at] <= evaluation.curve.values[:, at]).all()
        assert (evaluation.curve.values[:, at] <= evaluation.curve.high[:, at]).all()


def test_detectors_of_the_same_labels_are_compared_in_whatever_order_they_list_rows():
    rng = np.random.default_rng(1)
    wrong = np.flatnonzero(rng.random(400) < 0.1)
    truth = np.isin(np.arange(400), wrong)
    strong, weak = truth * 2 + rng.standard_normal(400), truth * 0.5 + rng.standard_normal(400)
    order = rng.permutation(400)
    one = evaluate.label_detection(strong[order], wrong, ids=order)
    other = evaluate.label_detection(weak, wrong)
    assert evaluate.compare(one, other).differs
    straight = evaluate.label_detection(strong, wrong)
    assert one.value == pytest.approx(straight.value)
    np.testing.assert_allclose(one.draws, straight.draws)


def test_a_rank_sum_is_no_worse_than_its_parts_when_they_know_different_things():
    rng = np.random.default_rng(2)
    wrong = rng.random(1000) < 0.1
    parts = [wrong + rng.standard_normal(1000) for _ in range(2)]
    both = evaluate.label_detection(evaluate.rank_sum(parts), wrong)
    assert all(both.value > evaluate.label_detection(part, wrong).value for part in parts)


@pytest.mark.parametrize(
    ("suspicion", "wrong", "code"),
    [
        (np.ones(10), [3], "evaluate.few_labels"),
        (np.ones(10), [3, 99], "evaluate.unknown_rows"),
        (np.ones(10), np.ones(9, bool), "evaluate.wrong_shape"),
        (np.full(10, np.nan), [1, 2], "evaluate.wrong_suspicion"),
        (np.ones((10, 2)), [1, 2], "evaluate.wrong_suspicion"),
    ],
)
def test_what_cannot_be_judged_is_refused(suspicion, wrong, code):
    with raises(EvaluationError, code):
        evaluate.label_detection(suspicion, wrong)
