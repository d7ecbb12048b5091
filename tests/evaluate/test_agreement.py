"""Agreement, retrieval, planted copies, and models of random weights."""

import dataclasses

import numpy as np
import pytest
import torch
from raises import raises

import gradkeep as gk
from gradkeep import evaluate
from gradkeep._ranks import rank_correlation
from gradkeep.errors import EvaluationError
from gradkeep.evaluate._agreement import randomize
from tests.evaluate.test_lds import planted


def scores(seed=0, queries=8, rows=50, method="given"):
    values = np.random.default_rng(seed).standard_normal((queries, rows)).astype(np.float32)
    return gk.Scores(values, np.arange(queries), np.arange(rows), method=method)


def test_agreement_is_the_mean_of_rank_correlations_over_queries():
    one, other = scores(0), scores(1)
    mixed = dataclasses.replace(one, values=one.values + other.values)
    evaluation = evaluate.agreement(one, mixed, k=5)
    each = [rank_correlation(a, b) for a, b in zip(one.values, mixed.values, strict=True)]
    assert evaluation.items == pytest.approx(each)
    shared = np.mean(
        [
            len({*np.argsort(-a)[:5]} & {*np.argsort(-b)[:5]}) / 5
            for a, b in zip(one.values, mixed.values, strict=True)
        ]
    )
    assert f"{shared:.1%} of the 5" in evaluation.provenance
    assert not evaluate.agreement(one, other).from_zero
    three = evaluate.stability([one, mixed, other])
    pairs = [(one, mixed), (one, other), (mixed, other)]
    assert three.value == pytest.approx(np.mean([evaluate.agreement(a, b).value for a, b in pairs]))
    with pytest.raises(EvaluationError, match="different train ids"):
        evaluate.agreement(one, scores(rows=40))


def test_planted_copies_are_found_or_not():
    actual = scores()
    values = actual.values.copy()
    copies = np.array([3, 4, 5, -1, 7, 8, 9, 10])
    for query, row in enumerate(copies):
        if row >= 0:
            values[query, row] = 100 if query != 2 else values[query].max() - 1e-3
    evaluation = evaluate.leakage(dataclasses.replace(actual, values=values), copies)
    assert evaluation.value == pytest.approx(6 / 7)
    assert evaluation.sizes.queries == 7
    assert np.isnan(evaluation.items[3])
    second_evaluation = evaluate.leakage(dataclasses.replace(actual, values=values), copies, k=50)
    assert second_evaluation.value == 1
    constant = dataclasses.replace(actual, values=np.zeros_like(values))
    assert evaluate.leakage(constant, copies).value == 0  # ties find nothing
    with raises(EvaluationError, "evaluate.unknown_copies"):
        evaluate.leakage(actual, np.full(8, 99))


def test_class_retrieval_counts_the_class_among_the_best():
    actual = scores(rows=60)
    classes, own = np.arange(60) % 3, np.arange(8) % 3
    evaluation = evaluate.class_retrieval(actual, own, classes, k=6)
    best = [np.argsort(-row)[:6] for row in actual.values]
    each = [(classes[rows] == c).mean() for rows, c in zip(best, own, strict=True)]
    assert evaluation.items == pytest.approx(each)
    assert "chance 0.333" in evaluation.provenance
    with raises(EvaluationError, "evaluate.no_classes", fix="query_classes"):
        evaluate.class_retrieval(actual)


def test_a_random_twin_shares_nothing_but_its_shape():
    class Odd(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.own = torch.nn.Parameter(torch.arange(10.0))
            self.layer = torch.nn.Linear(3, 2)

    model = Odd()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.random.get_rng_state()
    twin = randomize(model, seed=1)
    assert torch.equal(torch.random.get_rng_state(), state)
    for name, value in twin.state_dict().items():
        assert not torch.equal(value, before[name])
        assert torch.equal(model.state_dict()[name], before[name])
    assert torch.equal(twin.own.sort().values, model.own)
    repeated = randomize(model, seed=1)
    assert all(
        torch.equal(a, b) for a, b in zip(twin.parameters(), repeated.parameters(), strict=True)
    )


def test_shuffled_scores_predict_nothing():
    right, truth = planted(subsets=200, rows=60, queries=40)
    random = dataclasses.replace(right, values=scores(3, 40, 60).values, method="random")
    evaluation = evaluate.sanity_check(right, truth, randomized=random)
    assert evaluation.passed
    assert not evaluation.shuffled.from_zero
    assert not evaluate.sanity_check(random, truth).passed
    assert not evaluate.sanity_check(right, truth, randomized=right).passed
    assert "sanity passed" in str(evaluation)
