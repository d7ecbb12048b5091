"""The linear datamodeling score: its value, its interval, and what it refuses."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from raises import raises

import gradkeep as gk
from gradkeep import evaluate
from gradkeep._ranks import rank_correlation
from gradkeep.attribution._tuning import subset_digests
from gradkeep.errors import EvaluationError
from gradkeep.evaluate._evaluation import SampleSizes
from gradkeep.evaluate._truth import GroundTruth


def planted(subsets=40, rows=30, queries=6, seeds=2, noise=0.5, seed=0):
    """A truth that is linear in the rows, and the scores that are right about it."""
    rng = np.random.default_rng(seed)
    masks = rng.random((subsets, rows)) < 0.5
    weights = rng.standard_normal((queries, rows)).astype(np.float32)
    outputs_value = (masks @ weights.T)[:, None] + noise * rng.standard_normal(
        (subsets, seeds, queries)
    )
    scores = gk.Scores(weights, np.arange(queries), np.arange(rows), method="right")
    return scores, GroundTruth("planted", masks, outputs_value)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10_000), st.integers(12, 60), st.integers(2, 20), st.integers(1, 4))
def test_the_score_is_the_mean_of_rank_correlations(seed, subsets, queries, seeds):
    scores, truth = planted(subsets, 15, queries, seeds, noise=2.0, seed=seed)
    evaluation = evaluate.lds(scores, truth)
    masks, outputs_value = truth.masks[1::2], truth.outputs[1::2].mean(1)
    each = [
        rank_correlation(masks.astype(float) @ scores.values[q].astype(float), outputs_value[:, q])
        for q in range(queries)
    ]
    assert evaluation.value == pytest.approx(np.mean(each), abs=1e-9)
    assert evaluation.items == pytest.approx(each, abs=1e-9)
    assert evaluation.interval[0] <= evaluation.value <= evaluation.interval[1]
    assert evaluation.sizes == SampleSizes(queries=queries, subsets=len(masks), seeds=seeds)
    assert "reporting half" in evaluation.truth
    assert str(evaluation.sizes) in str(evaluation)


def test_intervals_hold_the_score_of_everything_about_as_often_as_they_say():
    # The population: what 4,000 subsets and 400 queries of the same kind would say.
    rng = np.random.default_rng(1)
    weights = rng.standard_normal((400, 20)).astype(np.float32)
    wrong = weights + 1.5 * rng.standard_normal(weights.shape).astype(np.float32)
    masks = rng.random((4000, 20)) < 0.5
    outputs_value = masks @ weights.T + 2.0 * rng.standard_normal((4000, 400))
    every = GroundTruth("all", masks, outputs_value[:, None])
    whole = gk.Scores(wrong, np.arange(400), np.arange(20))
    truth = evaluate.lds(whole, every, part="all").value
    held = []
    for _trial in range(60):
        rows = rng.choice(4000, 60, replace=False)
        query_ids = rng.choice(400, 30, replace=False)
        some = GroundTruth("some", masks[rows], outputs_value[rows][:, None, query_ids])
        actual = evaluate.lds(gk.Scores(wrong[query_ids], np.arange(30), np.arange(20)), some)
        held.append(actual.interval[0] <= truth <= actual.interval[1])
    assert np.mean(held) > 0.85  # of 60 at 95 %


def test_the_ceiling_is_what_a_perfect_prediction_scores():
    scores, truth = planted(subsets=2000, rows=30, queries=20, seeds=4, noise=4.0)
    evaluation = evaluate.lds(scores, truth)
    assert evaluation.ceiling == pytest.approx(evaluation.value, abs=0.02)
    assert evaluation.share == pytest.approx(1, abs=0.05)
    assert GroundTruth("one", truth.masks, truth.outputs[:, :1]).ceiling() is None


def test_two_methods_are_compared_subset_by_subset():
    scores, truth = planted(subsets=80, queries=20, noise=3.0)
    rng = np.random.default_rng(5)
    worse = dataclasses.replace(
        scores,
        values=scores.values + 0.7 * rng.standard_normal(scores.shape).astype(np.float32),
        method="worse",
    )
    one, other = evaluate.lds(scores, truth), evaluate.lds(worse, truth)
    actual = evaluate.compare(one, other)
    assert actual.value == pytest.approx(one.value - other.value)
    assert actual.differs
    assert actual.interval[0] > 0
    # Narrower than if the two had been measured on other queries and subsets.
    assert np.diff(actual.interval) < np.hypot(np.diff(one.interval), np.diff(other.interval))
    assert not evaluate.compare(one, one).differs
    fewer = evaluate.lds(
        dataclasses.replace(scores, values=scores.values[:5], query_ids=np.arange(5)), truth
    )
    with raises(EvaluationError, "evaluate.not_comparable"):
        evaluate.compare(one, fewer)


def test_nothing_is_judged_by_what_it_was_chosen_by():
    scores, truth = planted()
    hybrid = evaluate.hybrid(scores, truth)
    assert set(hybrid.chosen_on) == set(subset_digests(truth.choosing.masks))
    assert evaluate.lds(hybrid, truth).value > 0.9
    for part in ("choosing", "all"):
        with raises(EvaluationError, "evaluate.tuned_on_truth"):
            evaluate.lds(hybrid, truth, part=part)
    mixed = gk.combine([scores, hybrid])
    with raises(EvaluationError, "evaluate.tuned_on_truth"):
        evaluate.lds(mixed, truth, part="all")
    fitted = evaluate.datamodel_scores(truth, penalty="ridge")
    with raises(EvaluationError, "evaluate.tuned_on_truth"):
        evaluate.lds(fitted, truth, part="choosing")
    assert evaluate.lds(fitted, truth).value > 0.3


def test_a_hybrid_of_few_subsets_takes_fewer_folds_or_says_what_is_missing():
    scores, truth = planted()
    few = GroundTruth("few", truth.masks[:12], truth.outputs[:12])
    by_folds = evaluate.hybrid(scores, few)
    np.testing.assert_array_equal(by_folds.values, evaluate.hybrid(scores, few, folds=2).values)
    fewest = GroundTruth("fewest", truth.masks[:10], truth.outputs[:10])
    with raises(EvaluationError, "evaluate.few_subsets", fix="subsets="):
        evaluate.hybrid(scores, fewest)


def test_what_was_chosen_by_is_remembered_with_saved_scores(tmp_path):
    scores, truth = planted()
    store = gk.open(tmp_path)
    evaluate.hybrid(scores, truth).save("hybrid", store=store)
    scores.save("plain", store=store)
    loaded = gk.Scores.load(store, "hybrid")
    assert loaded.chosen_on == evaluate.hybrid(scores, truth).chosen_on
    assert gk.Scores.load(store, "plain").chosen_on == ()
    with raises(EvaluationError, "evaluate.tuned_on_truth"):
        evaluate.lds(loaded, truth, part="all")


def test_more_models_halve_the_interval_as_was_said():
    scores, truth = planted(subsets=80, queries=100, noise=6.0, seed=3)
    evaluation = evaluate.lds(scores, truth)
    reported = truth.to_halve(evaluation)
    assert reported.models == reported.subsets * truth.seeds
    assert reported.seconds is None
    right, larger = planted(subsets=80 + reported.subsets, queries=100, noise=6.0, seed=3)
    second_evaluation = evaluate.lds(right, larger)
    before, after = (np.diff(one.interval)[0] for one in (evaluation, second_evaluation))
    assert after == pytest.approx(before / 2, rel=0.25)
    few = dataclasses.replace(evaluation, spread_by_queries=10 * evaluation.spread_by_subsets)
    assert "choice of queries" in str(truth.to_halve(few))


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (lambda s, t: (s, dataclasses.replace(t, masks=t.masks[:, :-1])), "evaluate.other_rows"),
        (
            lambda s, t: (s, dataclasses.replace(t, outputs=0 * t.outputs)),
            "evaluate.constant_outputs",
        ),
        (lambda s, t: (s, GroundTruth("few", t.masks[:8], t.outputs[:8])), "evaluate.few_subsets"),
        (lambda s, t: (dataclasses.replace(s, query_ids=s.query_ids + 1), t), None),
        (
            lambda s, t: (
                dataclasses.replace(s, values=s.values[:2], query_ids=np.array([5, 99])),
                t,
            ),
            "evaluate.other_queries",
        ),
        (lambda s, t: (dataclasses.replace(s, values=np.nan * s.values), t), "evaluate.not_finite"),
        (
            lambda s, t: (
                dataclasses.replace(s, train_labels=np.arange(30) % 3),
                dataclasses.replace(t, labels="0" * 16),
            ),
            "evaluate.other_labels",
        ),
    ],
)
def test_what_does_not_fit_is_refused(change, code):
    scores, truth = change(*planted())
    if code is None:  # all of them, under ids of their own: taken in their order
        assert evaluate.lds(scores, truth).value == evaluate.lds(*planted()).value
        return
    with raises(EvaluationError, code):
        evaluate.lds(scores, truth)


def test_constant_predictions_count_as_nothing_and_constant_outcomes_not_at_all():
    scores, truth = planted()
    values = scores.values.copy()
    values[2] = 0
    assert evaluate.lds(dataclasses.replace(scores, values=values), truth).items[2] == 0
    outputs = truth.outputs.copy()
    outputs[:, :, 3] = 7
    evaluation = evaluate.lds(scores, dataclasses.replace(truth, outputs=outputs))
    assert np.isnan(evaluation.items[3])
    assert evaluation.sizes.queries == 5
