"""Answers that know their limits: few models, priors that are hard to better, chosen removals, chance."""

import time

import numpy as np
import pytest
import torch
from raises import raises

from gradkeep import datamodels
from gradkeep.datamodels import Study, Training, fit, margins, planted, verify_removals
from gradkeep.errors import DatamodelsError, EvidenceWarning


def few(models=30, examples=1500, targets=100):
    rng = np.random.default_rng(0)
    masks = rng.random((models, examples)) < 0.5
    truth = rng.standard_normal((examples, targets)) * (rng.random((examples, targets)) < 0.02)
    noise = rng.standard_normal((models, targets))
    return masks, masks @ truth + noise, truth


def test_few_models_are_fitted_by_ridge_in_seconds():
    masks, outputs, _ = few()
    began = time.process_time()
    fitted = fit(masks, outputs)
    assert fitted.options.penalty == "ridge"
    assert time.process_time() - began < 20
    assert fit(masks[:, :200], outputs).options.penalty == "l1"


def test_a_sparse_fit_of_few_models_says_that_it_picks_noise():
    masks, outputs, _ = few(examples=400, targets=2)
    with pytest.warns(
        EvidenceWarning, match="30 models for 400 examples: a sparse fit picks noise"
    ):
        fit(masks, outputs, penalty="l1", lambdas=3)


def lds(weights, masks, outputs):
    """The mean correlation over targets of predicted and real outputs of models not seen."""
    predicted = masks @ weights
    p, y = predicted - predicted.mean(0), outputs - outputs.mean(0)
    return float(((p * y).sum(0) / np.sqrt((p**2).sum(0) * (y**2).sum(0) + 1e-30)).mean())


@pytest.mark.parametrize("split", range(5))
@pytest.mark.parametrize("models", [40, 120])
def test_a_hybrid_does_not_fall_below_its_prior(split, models):
    rng = np.random.default_rng(split)
    masks = rng.random((models + 500, 300)) < 0.5
    truth = rng.standard_normal((300, 20)) * 0.3
    # Much of an output is chance of the training, and the prior is good: little to gain.
    outputs = masks @ truth + 4 * rng.standard_normal((len(masks), 20))
    prior = truth + 0.2 * rng.standard_normal(truth.shape)
    fitted = fit(masks[:models], outputs[:models], prior=prior.T)
    real = masks[models:].astype(float), (masks[models:] @ truth)
    assert lds(fitted.weights, *real) >= lds(prior, *real) - 0.005


def test_the_prior_alone_is_a_choice_that_is_saved_and_grows(tmp_path):
    import gradkeep.store as stores

    rng = np.random.default_rng(0)
    masks = rng.random((60, 200)) < 0.5
    truth = rng.standard_normal((200, 8))
    outputs = masks @ truth + 20 * rng.standard_normal((60, 8))
    fitted = fit(masks, outputs, prior=truth.T)
    assert np.isinf(fitted.lam).all()
    np.testing.assert_allclose(fitted.weights, truth * fitted.prior_scale, rtol=1e-5)
    store = stores.open(tmp_path / "s")
    fitted.save(store, "alone")
    repeated = datamodels.load(store, "alone")
    assert np.isinf(repeated.lam).all()
    np.testing.assert_array_equal(repeated.weights, fitted.weights)


def test_a_prior_that_can_be_bettered_is():
    data = planted(600, 40, 6)
    prior = data.weights + np.random.default_rng(0).standard_normal(data.weights.shape)
    fitted = fit(data.masks, data.outputs, prior=prior.T)
    assert np.isfinite(fitted.lam).all()


def test_removals_chosen_for_large_weights_are_shown_with_a_control_and_what_is_left():
    rng = np.random.default_rng(0)
    masks = rng.random((150, 120)) < 0.5
    truth = 0.3 * rng.standard_normal((120, 4))
    outputs = masks @ truth + 3 * rng.standard_normal((150, 4))
    fitted = fit(masks, outputs, penalty="ridge", lam=0.05)
    best = datamodels.top(fitted, 10).positive

    def real(mask, seed):
        return mask @ truth

    with pytest.warns(EvidenceWarning, match="large by chance too"):
        result = verify_removals(fitted, list(best), real, control=True)
    assert 0 < result.shrinkage < 0.5
    assert result.control.shape == result.measured.shape == (4, 4)
    chosen = np.abs(np.diag(result.measured)).mean()
    assert chosen > np.abs(np.diag(result.control)).mean()
    lines = str(result).splitlines()
    assert lines[0].split() == ["removal", "target", "predicted", "measured", "control"]
    assert len(lines) == 18
    assert lines[-1].endswith(f"{result.shrinkage:.0%} of what was predicted")
    repeated = verify_removals(fitted, [[0]], lambda mask, seed: mask @ fitted.weights)
    assert repeated.shrinkage == pytest.approx(1)
    assert repeated.control is None


def digits():
    torch.manual_seed(0)
    x = torch.randn(40, 6)
    return x, (x[:, 0] > 0).long()


def make(tmp_path, **options):
    x, y = digits()
    training = Training(lambda: torch.nn.Linear(6, 2), epochs=2, batch_size=8)
    return Study(tmp_path / "s", (x, y), training, outputs=margins((x, y)), **options)


@pytest.mark.parametrize("stacked", [False, True])
def test_repeats_train_several_models_on_each_subset(tmp_path, stacked):
    study = make(tmp_path, num_models=12, repeats=3, stacked=stacked)
    study.run(workers=0)
    masks, outputs = study.masks().numpy(), study.outputs()
    for first in range(0, 12, 3):
        assert (masks[first : first + 3] == masks[first]).all()
        assert not np.array_equal(outputs[first], outputs[first + 1])
    assert len({mask.tobytes() for mask in masks}) == 4
    ceiling = study.ceiling()
    assert ceiling.shape == (40,)
    assert ((ceiling >= 0) & (ceiling <= 1)).all()


def test_the_ceiling_is_that_of_a_known_noise(tmp_path, monkeypatch):
    study = make(tmp_path, num_models=400, repeats=2, stacked=False)
    rng = np.random.default_rng(0)
    signal = np.repeat(rng.standard_normal((200, 1)), 2, axis=0)
    monkeypatch.setattr(study, "done", lambda: np.arange(400))
    noisy = signal + 0.5 * rng.standard_normal((400, 1))
    monkeypatch.setattr(study, "outputs", lambda name=None, models=None: noisy[models])
    assert study.ceiling()[0] == pytest.approx(np.sqrt(1 / 1.25), abs=0.05)


def test_repeats_and_ceilings_that_make_no_sense_are_refused(tmp_path):
    with pytest.raises(DatamodelsError, match="repeats must be"):
        make(tmp_path, num_models=4, repeats=0)
    study = make(tmp_path, num_models=4)
    with raises(DatamodelsError, "datamodels.ceiling_needs_repeats"):
        study.ceiling()
    with pytest.raises(Exception, match="other settings"):
        make(tmp_path, num_models=4, repeats=2)
