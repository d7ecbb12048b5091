"""What is told about fits is what slow, obvious computations tell."""

import itertools
from math import comb

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from raises import raises
from sklearn.cluster import SpectralClustering
from sklearn.decomposition import PCA
from sklearn.metrics import adjusted_rand_score

from gradkeep.datamodels import (
    by_group,
    clusters,
    compare,
    components,
    correlation,
    counterfactual,
    data_support,
    fit,
    leakage,
    learning_curve,
    memorization,
    near_duplicates,
    neighbors,
    planted,
    similarity,
    top,
    values,
    verify_removals,
)
from gradkeep.errors import DatamodelsError

SEEDS = st.integers(0, 10**6)


def fitted(m=120, n=12, t=4, *, seed=0):
    data = planted(m, n, t, seed=seed)
    return data, fit(data.masks, data.outputs, lam=0.02)


def cosine(a, b):
    length = np.linalg.norm(a) * np.linalg.norm(b)
    return a @ b / length if length else 0.0


@settings(max_examples=20)
@given(seed=SEEDS, count=st.integers(1, 15))
def test_top_examples_are_the_sorted_ones_of_the_right_sign(seed, count):
    _, outcome = fitted(seed=seed)
    result = top(outcome, count)
    for target in range(4):
        pairs = sorted((-float(w), i) for i, w in enumerate(outcome.weights[:, target]))
        expected = [i for w, i in pairs if w < 0][:count]
        assert [i for i in result.positive[target].tolist() if i >= 0] == expected
        pairs = sorted((float(w), i) for i, w in enumerate(outcome.weights[:, target]))
        expected = [i for w, i in pairs if w < 0][:count]
        assert [i for i in result.negative[target].tolist() if i >= 0] == expected
        assert np.isnan(result.negative_weights[target][result.negative[target] < 0]).all()
    some = top(outcome, count, targets=[2])
    assert np.array_equal(some.positive[0], result.positive[2])


@settings(max_examples=20)
@given(seed=SEEDS)
def test_a_counterfactual_is_the_difference_of_two_predictions(seed):
    _, outcome = fitted(seed=seed)
    rng = np.random.default_rng(seed)
    base = rng.random(12) < 0.7
    removed = rng.permutation(12)[:5]
    result = counterfactual(outcome, removed, base=base)
    without = base.copy()
    without[removed] = False
    assert np.allclose(result.before, outcome.predict(base[None])[0], atol=1e-5)
    assert np.allclose(result.after, outcome.predict(without[None])[0], atol=1e-5)
    assert base[result.removed].all()


@settings(max_examples=15)
@given(seed=SEEDS, threshold=st.floats(-3, 3))
def test_the_support_is_the_smallest_of_all_removals(seed, threshold):
    _, outcome = fitted(60, 5, 2, seed=seed)
    result = data_support(outcome, threshold=threshold)
    everything = [np.array(gone) for gone in itertools.product([False, True], repeat=5)]
    for target in range(2):
        weights = outcome.weights[:, target].astype(np.float64)
        remaining = {
            int(gone.sum()): min(
                weights[~other].sum() + outcome.bias[target]
                for other in everything
                if other.sum() == gone.sum()
            )
            for gone in everything
        }
        flips = [size for size in sorted(remaining) if remaining[size] <= threshold]
        assert result.size[target] == (flips[0] if flips else -1)
        if flips:
            gone = result.removed[target]
            assert len(gone) == flips[0]
            after = weights.sum() - weights[gone].sum() + outcome.bias[target]
            assert result.after[target] == pytest.approx(after)


def test_verification_trains_every_set_and_compares():
    data, outcome = fitted(600, 12, 3)
    calls = []

    def retrain(mask, seed):
        calls.append((mask.tobytes(), seed))
        noise = np.random.default_rng([seed, *mask.astype(int)]).normal(0, 0.01, 3)
        return mask @ data.weights + data.bias + noise

    removals = [[0, 1, 2], [3], [4, 5, 6, 7]]
    result = verify_removals(outcome, removals, retrain, repeats=3)
    assert len(calls) == len(set(calls)) == 4 * 3
    for index, removed in enumerate(removals):
        assert np.allclose(result.measured[index], -data.weights[removed].sum(0), atol=0.05)
        assert np.allclose(result.predicted[index], -outcome.weights[removed].sum(0), atol=1e-5)
    expected = np.corrcoef(result.predicted.ravel(), result.measured.ravel())[0, 1]
    assert result.correlation == pytest.approx(expected)
    assert (result.standard_error < 0.05).all()
    assert np.isnan(verify_removals(outcome, [[0]], retrain).standard_error).all()


@settings(max_examples=15)
@given(seed=SEEDS, count=st.integers(1, 8))
def test_similarity_neighbours_and_duplicates_are_cosines(seed, count):
    _, outcome = fitted(seed=seed, t=6)
    expected = np.array([[cosine(a, b) for b in outcome.weights.T] for a in outcome.weights.T])
    assert np.allclose(similarity(outcome), expected, atol=1e-5)
    assert np.allclose(similarity(outcome, outcome), expected, atol=1e-5)
    result = neighbors(outcome, count)
    for target in range(6):
        others = sorted((-similarity(outcome)[target, i], i) for i in range(6) if i != target)
        assert result.ids[target].tolist() == [i for _, i in others][:count]
    pairs = near_duplicates(outcome, threshold=0.1)
    brute = {(i, j) for i in range(6) for j in range(i + 1, 6) if similarity(outcome)[i, j] >= 0.1}
    assert set(zip(pairs.first.tolist(), pairs.second.tolist(), strict=True)) == brute
    assert (np.diff(pairs.strength) <= 0).all()


def test_leaked_test_examples_are_found_and_nothing_else():
    data = planted(1500, 80, 12, large=0, tail=0.05)
    outputs = data.outputs.copy()
    leaks = {3: 17, 8: 60}
    for target, example in leaks.items():
        outputs[:, target] += 2.5 * data.masks[:, example]
    for kind in ("l1", "ridge"):
        result = leakage(fit(data.masks, outputs, penalty=kind))
        assert dict(zip(result.first.tolist(), result.second.tolist(), strict=True)) == leaks
    assert len(leakage(fit(data.masks, data.outputs))) == 0


@settings(max_examples=10)
@given(seed=SEEDS)
def test_components_are_those_of_sklearn(seed):
    _, outcome = fitted(seed=seed, t=9)
    rows = np.stack([w / (np.linalg.norm(w) or 1) for w in outcome.weights.T.astype(np.float64)])
    model = PCA(n_components=3).fit(rows)
    result = components(outcome, 3, extremes=2)
    assert np.allclose(result.share, model.explained_variance_ratio_, atol=1e-6)
    along = model.transform(rows)
    for k in range(3):
        sign = np.sign(result.targets[:, k] @ along[:, k])
        assert np.allclose(result.targets[:, k], sign * along[:, k], atol=1e-4)
        assert result.targets[result.highest[k, 0], k] == result.targets[:, k].max()
        assert result.targets[result.lowest[k, 0], k] == result.targets[:, k].min()
        assert result.examples[np.abs(result.examples[:, k]).argmax(), k] > 0


def grouped(seed, groups=3, each=12, n=30):
    """Targets that share the weights of their group, but for noise."""
    rng = np.random.default_rng(seed)
    truth = rng.permutation(np.repeat(np.arange(groups), each))
    centres = rng.standard_normal((n, groups))
    weights = centres[:, truth] + 0.6 * rng.standard_normal((n, len(truth)))
    masks = rng.random((500, n)) < 0.5
    return truth, fit(masks, masks @ weights, penalty="ridge")


@pytest.mark.parametrize("seed", range(4))
def test_spectral_clusters_are_the_planted_groups_and_those_of_sklearn(seed):
    truth, fitted = grouped(seed)
    result = clusters(fitted, 3)
    assert adjusted_rand_score(truth, result.labels) == 1
    theirs = SpectralClustering(3, affinity="precomputed", random_state=0).fit_predict(
        np.maximum(similarity(fitted), 0)
    )
    assert adjusted_rand_score(theirs, result.labels) == 1
    assert result.sizes.tolist() == sorted(result.sizes, reverse=True)
    assert result.labels.tolist() == clusters(fitted, 3).labels.tolist()


@settings(max_examples=20)
@given(seed=SEEDS, m=st.integers(1, 60))
def test_memorization_is_a_difference_of_two_plain_means(seed, m):
    rng = np.random.default_rng(seed)
    masks, outputs = rng.random((m, 5)) < 0.5, rng.standard_normal((m, 5)) + 100
    result = memorization(masks, outputs)
    for i in range(5):
        seen, unseen = outputs[masks[:, i], i], outputs[~masks[:, i], i]
        if len(seen) == 0 or len(unseen) == 0:
            assert np.isnan(result.value[i])
            continue
        assert result.value[i] == pytest.approx(seen.mean() - unseen.mean(), abs=1e-9)
        if min(len(seen), len(unseen)) > 1:
            error = np.sqrt(seen.var(ddof=1) / len(seen) + unseen.var(ddof=1) / len(unseen))
            assert result.standard_error[i] == pytest.approx(error, rel=1e-6)


def test_wrong_labels_lead_the_suspects():
    rng = np.random.default_rng(0)
    masks = rng.random((300, 40)) < 0.5
    wrong = rng.choice(40, 6, replace=False)
    outputs = rng.normal(2, 1, (300, 40))
    outputs[:, wrong] = np.where(masks[:, wrong], 1.0, -2.0) + rng.normal(0, 1, (300, 6))
    result = memorization(masks, outputs)
    assert set(result.suspects[:6]) == set(wrong)
    with raises(DatamodelsError, "datamodels.memorization_outputs"):
        memorization(masks, outputs[:, :3])


def test_comparison_finds_the_example_that_only_one_class_uses():
    rng = np.random.default_rng(0)
    masks = rng.random((800, 25)) < 0.5
    weights = rng.normal(0, 0.3, (25, 8))
    other = weights.copy()
    other[11] += rng.choice([-2, 2], 8)
    noise = 0.05 * rng.standard_normal((2, 800, 8))
    plain = fit(masks, masks @ weights + noise[0])
    shortcut = fit(masks, masks @ other + noise[1])
    result = compare(shortcut, plain)
    assert np.abs(result.only_first.examples[:, 0]).argmax() == 11
    expected = [cosine(a, b) for a, b in zip(shortcut.weights.T, plain.weights.T, strict=True)]
    assert np.allclose(result.agreement, expected, atol=1e-5)
    assert np.allclose(compare(plain, plain).agreement, 1)
    with raises(DatamodelsError, "datamodels.not_comparable"):
        compare(plain, fit(masks, masks @ weights[:, :2]))


def test_the_learning_curve_is_made_of_plain_fits():
    data = planted(500, 20, 3)
    rows = np.arange(400, 500)
    curve = learning_curve(data.masks, data.outputs, [60, 400], held_out=rows)
    for index, size in enumerate((60, 400)):
        fitted = fit(data.masks[:size], data.outputs[:size])
        expected = fitted.score(data.masks[rows], data.outputs[rows])
        assert curve.mean[index] == expected.mean
    assert curve.mean[1] > curve.mean[0]
    assert (curve.low <= curve.mean).all()
    assert (curve.mean <= curve.high).all()
    assert learning_curve(data.masks, data.outputs, penalty="means").models[-1] == 450
    with raises(DatamodelsError, "datamodels.curve_sizes"):
        learning_curve(data.masks, data.outputs, [401], held_out=rows)


@settings(max_examples=15)
@given(seed=SEEDS)
def test_group_sums_are_loops_over_members(seed):
    _, outcome = fitted(seed=seed)
    rng = np.random.default_rng(seed)
    groups, kinds = rng.choice(["a", "b", "c"], 12), rng.choice([0, 1], 4)
    result = by_group(outcome, groups, target_groups=kinds)
    for i, name in enumerate(result.names):
        for j, kind in enumerate(result.columns):
            part = outcome.weights[groups == name][:, kinds == kind].astype(np.float64)
            assert result.total[i, j] == pytest.approx(part.sum(0).mean(), abs=1e-6)
            assert result.mean[i, j] == pytest.approx(part.mean(), abs=1e-6)
    used = np.abs(outcome.weights).sum() > 0
    assert not used or np.allclose(result.share.sum(0)[result.share.sum(0) > 0], 1)
    with raises(DatamodelsError, "datamodels.group_count"):
        by_group(outcome, groups[:3])


@settings(max_examples=15)
@given(seed=SEEDS, n=st.integers(1, 6))
def test_values_of_all_subsets_are_the_exact_banzhaf_and_shapley_values(seed, n):
    rng = np.random.default_rng(seed)
    masks = np.array(list(itertools.product([0, 1], repeat=n)))
    utility = rng.standard_normal(len(masks))
    of = {tuple(mask): u for mask, u in zip(masks.tolist(), utility, strict=True)}
    banzhaf, shapley = np.zeros(n), np.zeros(n)
    for i in range(n):
        for mask in masks.tolist():
            if mask[i]:
                continue
            gain = of[(*mask[:i], 1, *mask[i + 1 :])] - of[tuple(mask)]
            banzhaf[i] += gain / 2 ** (n - 1)
            shapley[i] += gain / (n * comb(n - 1, sum(mask)))
    assert np.allclose(values(masks, utility).value[:, 0], banzhaf)
    result = values(masks, utility, kind="shapley")
    assert np.allclose(result.value[:, 0], shapley)
    assert np.allclose(result.covered, 1)


def test_values_say_which_sizes_they_rest_on():
    rng = np.random.default_rng(0)
    masks = rng.random((200, 30)) < 0.5
    result = values(masks, masks @ np.arange(30.0), kind="shapley")
    assert (result.covered < 0.7).all()
    assert np.corrcoef(result.value[:, 0], np.arange(30))[0, 1] > 0.5
    masks[:, 3] = True
    assert np.isnan(values(masks, masks.sum(1)).value[3, 0])
    with pytest.raises(DatamodelsError, match="'banzhaf' or 'shapley'"):
        values(masks, masks.sum(1), kind="owen")


@settings(max_examples=15)
@given(seed=SEEDS, m=st.integers(5, 40), ties=st.booleans())
def test_correlations_are_those_of_scipy_and_intervals_hold_them(seed, m, ties):
    from scipy.stats import pearsonr, spearmanr

    rng = np.random.default_rng(seed)
    x = rng.integers(0, 4, (m, 2)).astype(float) if ties else rng.standard_normal((m, 2))
    y = x + rng.standard_normal((m, 2)) * 1000
    if (x.std(0) == 0).any():
        return
    for kind, oracle in (("pearson", pearsonr), ("spearman", spearmanr)):
        result = correlation(x, y, kind=kind, resamples=200)
        for target in range(2):
            expected = oracle(x[:, target], y[:, target])[0]
            assert result.value[target] == pytest.approx(expected, abs=1e-9)
        assert result.mean == pytest.approx(result.value.mean())
        assert (result.low <= result.high).all()


@pytest.mark.parametrize("kind", ["pearson", "spearman"])
def test_what_is_constant_is_named_and_only_missing_predictions_count(kind):
    rng = np.random.default_rng(0)
    y = rng.standard_normal((30, 4))
    p = y.copy()
    p[:, 1] = 0.1  # thirty of these have a mean that is not 0.1
    p[:, 2] = y[:, 2] = 0.1
    y[:, 3] = 0.1
    result = correlation(p, y, kind=kind, resamples=50)
    assert result.constant_predictions == (1,)
    assert result.constant_outputs == (2, 3)
    np.testing.assert_allclose(result.value, [1, 0, np.nan, np.nan], atol=1e-12)
    np.testing.assert_allclose(result.low, [1, 0, np.nan, np.nan], atol=1e-12)
    assert result.mean == pytest.approx(0.5)
    assert result.mean_low == pytest.approx(0.5)
    assert "mean of 2 targets, 1 of them with constant predictions (0)" in str(result)
    assert "without 2 whose output is constant" in str(result)


def test_a_fit_that_no_weight_improves_says_so():
    rng = np.random.default_rng(0)
    masks = rng.random((60, 20)) < 0.5
    noise = np.stack([masks[:, 0] + 0.01 * rng.standard_normal(60), *rng.standard_normal((9, 60))])
    fitted = fit(masks, noise.T)
    silent = fitted.held_out.constant_predictions
    assert 0 < len(silent) < 10
    assert 0 not in silent
    assert (fitted.held_out.value[list(silent)] == 0).all()


def test_intervals_cover_the_truth_about_as_often_as_they_say():
    rng = np.random.default_rng(0)
    each, mean = [], []
    for seed in range(60):
        x = rng.standard_normal((60, 6))
        y = 0.6 * x + 0.8 * rng.standard_normal((60, 6))
        result = correlation(x, y, level=0.9, resamples=200, seed=seed)
        each += ((result.low <= 0.6) & (result.high >= 0.6)).tolist()
        mean.append(result.mean_low <= 0.6 <= result.mean_high)
    assert 0.82 <= np.mean(each) <= 0.96
    assert 0.78 <= np.mean(mean) <= 0.98


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda result: counterfactual(result, [12]), "0 to 11"),
        (lambda result: counterfactual(result, [-1]), ": -1"),
        (lambda result: counterfactual(result, [0.5]), "must be ids"),
        (lambda result: counterfactual(result, [1], base=np.ones(3, bool)), r"shape \[12\]"),
        (lambda result: top(result, targets=[9]), "0 to 3"),
        (lambda result: clusters(result, 9), "1 to 4"),
        (lambda result: similarity(result, fitted(60, 5)[1]), "different training sets"),
        (lambda result: verify_removals(result, [], lambda mask, seed: mask), "no removals"),
        (lambda result: verify_removals(result, [[1]], lambda mask, seed: [1.0]), r"\[4\]"),
        (lambda result: correlation([1.0, 2.0], [1.0, 2.0]), "three models"),
    ],
)
def test_what_cannot_be_analysed_is_refused_with_what_to_do(call, message):
    _, result = fitted()
    with pytest.raises(DatamodelsError, match=message):
        call(result)
