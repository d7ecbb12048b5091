"""Intervals that hold the truth as often as they say: a sample of `./x bench coverage`, and their edges."""

import sys
from pathlib import Path

import numpy as np
import pytest
from raises import raises

import gradkeep as gk
from gradkeep import evaluate
from gradkeep.errors import EvaluationError
from gradkeep.evaluate._evaluation import evaluated
from tests.evaluate.conftest import recipe


@pytest.fixture(scope="module")
def lines():
    sys.path.insert(0, str(Path(__file__).parents[2]))
    import bench.coverage

    yield {line.what: line for line in bench.coverage.lines()}
    sys.path.pop(0)
    for name in ("bench.coverage", "bench"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize(
    "what",
    [
        "gain over random rows, null, 3 seeds, 1 queries",
        "gain over random rows, effect, 5 seeds, 10 queries",
        "brittleness 0.5, 5 seeds, 20 queries",
        "leakage 0.1, 20 queries",
        "LDS, high (0.97), 20 subsets",
        "LDS, middle (0.65), 50 subsets",
        "LDS difference, null, middle, 50 subsets",
        "agreement, null, 50 queries",
        "ceiling, 3 seeds, 50 subsets",
    ],
)
def test_intervals_cover_the_truth(lines, what):
    # 100 experiments at 95 %: fewer than 89 are three standard deviations away.
    assert lines[what].coverage(100) >= 0.89


def test_fewer_than_three_seeds_have_no_interval_and_one_is_refused(world):
    scores = gk.attribute(world, method="kernel")
    with raises(EvaluationError, "argument.invalid", mentions="at least 2"):
        evaluate.verify_rows([1, 2], recipe(), scores=scores, seeds=1, workers=0)
    with raises(EvaluationError, "argument.invalid", mentions="at least 2"):
        evaluate.removal_curve(scores, recipe(), sizes=[4], seeds=1, workers=0)
    with raises(EvaluationError, "argument.invalid", mentions="at least 2"):
        evaluate.check_removal(scores, [1, 2], recipe(), seeds=1, workers=0)
    with raises(EvaluationError, "argument.invalid", mentions="at least 2"):
        gk.groups(scores, 3, recipe=recipe(), seeds=1, workers=0)
    two = evaluate.verify_rows([1, 2], recipe(), scores=scores, seeds=2, workers=0)
    assert two.interval is None
    assert not two.from_zero
    assert "no interval" in str(two)
    three = evaluate.verify_rows([1, 2], recipe(), scores=scores, seeds=3, workers=0)
    assert three.interval[0] < three.value < three.interval[1]
    checked = evaluate.check_removal(scores, [1, 2], recipe(), seeds=2, workers=0)
    assert checked.agreement.interval is None
    assert not checked.held


def test_an_evaluation_without_an_interval_is_saved_and_compared(world, tmp_path):
    scores = gk.attribute(world, method="kernel")
    curve = evaluate.removal_curve(scores, recipe(), sizes=[4], queries=[0, 2], seeds=2, workers=0)
    assert np.isnan(curve.change.curve.low).all()
    assert "[" not in str(curve.change.curve)
    store = gk.open(tmp_path)
    curve.change.save("two-seeds", store=store)
    back = evaluate.Evaluation.load(store, "two-seeds")
    assert back.interval is None
    np.testing.assert_array_equal(back.table, curve.change.table)
    assert evaluate.compare(back, curve.change).interval is None
    assert not evaluate.compare(back, curve.change).differs


def test_none_of_ten_is_not_certainly_none():
    scores = gk.Scores(np.eye(10, 12, dtype=np.float32), np.arange(10), np.arange(12))
    share = evaluate.leakage(scores, np.full(10, 11))
    assert share.value == 0
    assert share.interval == pytest.approx((0, 0.278), abs=1e-3)


def test_one_query_has_no_interval_over_queries():
    assert evaluated("m", "s", np.array([0.5]), universe="u", truth="t").interval is None


def test_a_removal_check_has_the_ceiling_of_its_seeds(world):
    scores = gk.attribute(world, method="kernel")
    checked = evaluate.check_removal(scores, list(range(12)), recipe(), seeds=4, workers=0)
    low, high = checked.agreement.ceiling_interval
    assert 0 <= low <= checked.agreement.ceiling <= high <= 1
    assert "ceiling" in str(checked)


def test_the_ceiling_of_a_score_has_an_interval(world, tmp_path):
    scores = gk.attribute(world, method="kernel")
    evaluation = evaluate.lds(scores, evaluate.load_truth(world))
    low, high = evaluation.ceiling_interval
    assert low <= evaluation.ceiling <= high
    assert low < high
    evaluation.save("lds", store=gk.open(tmp_path))
    back = evaluate.Evaluation.load(gk.open(tmp_path), "lds")
    assert back.ceiling_interval == evaluation.ceiling_interval
