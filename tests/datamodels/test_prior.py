"""Attribution scores as a prior never make a fit worse than either of its parents."""

import numpy as np
import pytest

from gradkeep.datamodels import fit, planted

EXAMPLES, TARGETS = 120, 10


def fresh_correlation(weights, data):
    """The mean correlation with what new subsets would really do, without noise."""
    masks = np.random.default_rng(99).random((800, EXAMPLES)) < 0.5
    fitted, truth = masks @ weights, masks @ data.weights
    fitted, truth = fitted - fitted.mean(0), truth - truth.mean(0)
    norms = np.sqrt((fitted**2).sum(0) * (truth**2).sum(0))
    return ((fitted * truth).sum(0) / np.where(norms > 0, norms, 1)).mean()


def scores_of(data, quality, scale=7.0, seed=5):
    noise = np.random.default_rng(seed).standard_normal(data.weights.shape)
    noise *= data.weights.std(0)
    return scale * (quality * data.weights + np.sqrt(1 - quality**2) * noise)


@pytest.mark.parametrize("models", [40, 100, 300, 1000])
@pytest.mark.parametrize("quality", [0.0, 0.3, 0.7, 0.95])
def test_a_hybrid_is_as_good_as_its_better_parent(models, quality):
    data = planted(models, EXAMPLES, TARGETS, large=15, tail=0.1, explained=0.6, seed=models)
    prior = scores_of(data, quality)
    hybrid = fresh_correlation(fit(data.masks, data.outputs, prior=prior.T).weights, data)
    ridge = fresh_correlation(fit(data.masks, data.outputs, penalty="ridge").weights, data)
    assert hybrid >= fresh_correlation(prior, data) - 0.01
    assert hybrid >= ridge - 0.01
    if quality == 0.7 and models in (100, 300):
        assert hybrid > max(fresh_correlation(prior, data), ridge) + 0.005


def test_a_prior_that_points_the_wrong_way_is_left_out():
    data = planted(300, EXAMPLES, TARGETS, seed=3)
    fitted = fit(data.masks, data.outputs, prior=-data.weights.T)
    assert not fitted.prior_scale.any()
    assert fresh_correlation(fitted.weights, data) > 0.5


def test_the_scale_of_a_perfect_prior_is_found():
    data = planted(2000, 40, 3, explained=0.9, seed=1)
    fitted = fit(data.masks, data.outputs, prior=0.25 * data.weights.T)
    assert np.allclose(fitted.prior_scale * 0.25, 1, atol=0.1)


def test_the_scale_of_scores_does_not_matter():
    data = planted(100, 30, 4, seed=2)
    one = fit(data.masks, data.outputs, prior=data.weights.T, dtype="float64")
    other = fit(data.masks, data.outputs, prior=1e6 * data.weights.T, dtype="float64")
    assert np.allclose(one.weights, other.weights, atol=1e-8)


def test_a_strong_penalty_leaves_the_prior():
    data = planted(200, 30, 2, seed=4)
    prior = scores_of(data, 0.8)
    for kind, lam in (("ridge", 1e6), ("l1", 1e3)):
        fitted = fit(data.masks, data.outputs, prior=prior.T, penalty=kind, lam=lam)
        assert np.allclose(fitted.weights, prior * fitted.prior_scale, atol=1e-3)


def test_an_example_with_a_small_variance_stays_near_the_prior():
    data = planted(400, 30, 3, seed=6)
    variances = np.ones(30)
    variances[:15] = 1e-6
    fitted = fit(data.masks, data.outputs, penalty="ridge", variances=variances)
    free = fit(data.masks, data.outputs, penalty="ridge")
    assert np.abs(fitted.weights[:15]).max() < 0.01
    assert np.abs(free.weights[:15]).max() > 0.05


def test_variances_are_those_of_an_explicit_bayesian_regression():
    data = planted(60, 12, 1, seed=7)
    variances = np.linspace(0.5, 3, 12)
    lam = 0.2
    options = {"dtype": "float64", "tolerance": 1e-13}
    fitted = fit(data.masks, data.outputs, penalty="ridge", variances=variances, lam=lam, **options)
    x = data.masks.astype(np.float64)
    z = (x - x.mean(0)) / x.std(0)
    y = data.outputs[:, 0] - data.outputs[:, 0].mean()
    relative = variances / variances.mean()
    w = np.linalg.solve(z.T @ z / 60 + lam * np.diag(1 / relative), z.T @ y / 60)
    assert np.allclose(fitted.weights[:, 0], w / x.std(0), atol=1e-6)


def test_a_grown_hybrid_is_the_hybrid_of_all():
    data = planted(150, 25, 3, seed=8)
    prior = scores_of(data, 0.7).T
    options = {"prior": prior, "lam": 0.5, "dtype": "float64", "tolerance": 1e-11}
    start = fit(data.masks[:90], data.outputs[:90], **options)
    grown = start.add(data.masks[90:], data.outputs[90:])
    whole = fit(data.masks, data.outputs, **options)
    assert np.allclose(grown.weights, whole.weights, atol=1e-4)
    assert np.allclose(grown.prior_scale, whole.prior_scale)
