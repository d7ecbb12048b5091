"""Fits are the minima that slow, obvious solvers find, and say how near they are."""

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from raises import raises
from sklearn.linear_model import ElasticNet, Lasso, Ridge

import gradkeep as gk
from gradkeep.datamodels import Masks, fit, load, planted
from gradkeep.errors import DatamodelsError

SIZES = st.tuples(st.integers(12, 80), st.integers(2, 40), st.integers(1, 4))


def standard(masks):
    """Columns of mean 0 and variance 1; constant ones are 0."""
    x = masks.astype(np.float64)
    sd = x.std(0)
    scale = np.divide(1, sd, out=np.zeros_like(sd), where=sd > 0)
    return (x - x.mean(0)) * scale, scale


def by_sklearn(masks, y, lam, kind, share=0.5):
    """Weights and bias in mask units by coordinate descent, one target at a time."""
    z, scale = standard(masks)
    if kind == "ridge":
        model = Ridge(alpha=lam * len(y), solver="svd")
    elif kind == "elastic":
        model = ElasticNet(alpha=lam / y.std(), l1_ratio=share, tol=1e-12, max_iter=200_000)
    else:
        model = Lasso(alpha=lam / y.std(), tol=1e-12, max_iter=200_000)
    model.fit(z, y / y.std())
    weights = model.coef_ * scale * y.std()
    return weights, y.mean() - masks.mean(0) @ weights


def objective(masks, y, weights, bias, lam, kind, share=0.5):
    """(1/2m) |y - b - Xv|^2 + penalty of the standard weights."""
    x = masks.astype(np.float64)
    w = weights * x.std(0)
    error = ((y - bias - x @ weights) ** 2).mean() / 2
    l1, l2 = {"l1": (1, 0), "elastic": (share, (1 - share) / y.std()), "ridge": (0, 1)}[kind]
    return error + lam * (l1 * np.abs(w).sum() + l2 * (w**2).sum() / 2)


@settings(max_examples=30)
@given(
    size=SIZES,
    kind=st.sampled_from(["l1", "elastic", "ridge"]),
    part=st.sampled_from([0.5, 0.1, 0.02]),
    alpha=st.sampled_from([0.1, 0.5, 0.8]),
    seed=st.integers(0, 10**6),
)
def test_weights_are_those_of_sklearn(size, kind, part, alpha, seed):
    m, n, t = size
    data = planted(m, n, t, seed=seed, alpha=alpha)
    z, _ = standard(data.masks)
    largest = np.abs(z.T @ (data.outputs - data.outputs.mean(0)) / m).max(0)
    assume((largest > 1e-6).all())
    lam = part * largest
    fitted = fit(data.masks, data.outputs, penalty=kind, lam=lam, dtype="float64", tolerance=1e-11)
    for target in range(t):
        y = data.outputs[:, target]
        weights, bias = by_sklearn(data.masks, y, lam[target], kind)
        ours = objective(
            data.masks, y, fitted.weights[:, target], fitted.bias[target], lam[target], kind
        )
        theirs = objective(data.masks, y, weights, bias, lam[target], kind)
        assert ours <= theirs + 1e-9 * y.var()
        # A minimum of nearly equal value may have other weights where columns depend.
        predicted = data.masks @ fitted.weights[:, target] + fitted.bias[target]
        assert np.allclose(predicted, data.masks @ weights + bias, atol=2e-4 * y.std())


@settings(max_examples=25)
@given(size=SIZES, seed=st.integers(0, 10**6), kind=st.sampled_from(["l1", "elastic", "ridge"]))
def test_the_gap_bounds_the_distance_from_the_minimum(size, seed, kind):
    m, n, t = size
    data = planted(m, n, t, seed=seed)
    lam = 0.1 * data.outputs.std(0)
    rough = fit(data.masks, data.outputs, penalty=kind, lam=lam, tolerance=1e-3)
    fine = fit(data.masks, data.outputs, penalty=kind, lam=lam, dtype="float64", tolerance=1e-12)
    assert (rough.gap <= 1e-3).all()
    assert (fine.gap <= 1e-12).all()
    for target in range(t):
        y = data.outputs[:, target]
        values = [
            objective(data.masks, y, one.weights[:, target], one.bias[target], lam[target], kind)
            for one in (rough, fine)
        ]
        assert values[0] - values[1] <= (rough.gap[target] + 2e-6) * y.var() / 2


def test_working_sets_give_the_fit_of_all_examples(monkeypatch):
    from gradkeep.datamodels import _path

    data = planted(300, 200, 6, seed=3)
    with_sets = fit(data.masks, data.outputs, dtype="float64", tolerance=1e-9)
    monkeypatch.setattr(_path, "_WORTH", 0.0)
    without = fit(data.masks, data.outputs, dtype="float64", tolerance=1e-9)
    assert np.array_equal(with_sets.lam, without.lam)
    assert np.allclose(with_sets.weights, without.weights, atol=1e-4)


def test_held_out_rows_choose_the_penalty_that_predicts_them_best():
    data = planted(200, 30, 5, seed=1)
    rows = np.arange(150, 200)
    fractions = [1.0, 0.3, 0.1, 0.03, 0.01]
    fitted = fit(data.masks, data.outputs, held_out=rows, lambdas=fractions)
    train, test = data.masks[:150], data.masks[150:]
    z, _ = standard(train)
    for target in range(5):
        y = data.outputs[:150, target]
        largest = np.abs(z.T @ (y - y.mean()) / 150).max()
        errors = []
        for fraction in fractions:
            weights, bias = by_sklearn(train, y, fraction * largest, "l1")
            errors.append(((test @ weights + bias - data.outputs[150:, target]) ** 2).mean())
        best = fractions[int(np.argmin(errors))] * largest
        assert fitted.lam[target] == pytest.approx(best, rel=1e-4)
        weights, _ = by_sklearn(data.masks, data.outputs[:, target], best, "l1")
        assert np.allclose(fitted.weights[:, target], weights, atol=0.02)
    assert fitted.held_out.models == 50
    assert fitted.held_out_rows.tolist() == rows.tolist()


def test_folds_choose_the_penalty_of_a_brute_force_cross_validation():
    from gradkeep.datamodels._options import fold_rows

    data = planted(120, 20, 3, seed=5)
    fractions = [0.5, 0.1, 0.02]
    fitted = fit(data.masks, data.outputs, folds=4, lambdas=fractions, seed=9)
    z, _ = standard(data.masks)
    for target in range(3):
        y = data.outputs[:, target]
        out = np.zeros((3, 120))
        for rows in fold_rows(4, 120, seed=9):
            stored = np.setdiff1d(np.arange(120), rows)
            inner, _ = standard(data.masks[stored])
            largest = np.abs(inner.T @ (y[stored] - y[stored].mean()) / len(stored)).max()
            for index, fraction in enumerate(fractions):
                weights, bias = by_sklearn(data.masks[stored], y[stored], fraction * largest, "l1")
                out[index, rows] = data.masks[rows] @ weights + bias
        best = int(((out - y) ** 2).mean(1).argmin())
        largest = np.abs(z.T @ (y - y.mean()) / 120).max()
        assert fitted.lam[target] == pytest.approx(fractions[best] * largest, rel=1e-4)
        expected = np.corrcoef(out[best], y)[0, 1]
        assert fitted.held_out.value[target] == pytest.approx(expected, abs=5e-3)


@pytest.mark.parametrize("kind", ["l1", "elastic", "ridge", "means"])
def test_permuted_targets_give_the_permuted_fit(kind):
    data = planted(150, 25, 7, seed=2)
    order = np.random.default_rng(0).permutation(7)
    plain = fit(data.masks, data.outputs, penalty=kind)
    moved = fit(data.masks, data.outputs[:, order], penalty=kind)
    assert np.allclose(moved.lam, plain.lam[order], rtol=1e-5, equal_nan=True)
    assert np.allclose(moved.weights, plain.weights[:, order], atol=0.02)


@pytest.mark.parametrize("kind", ["l1", "elastic", "ridge", "means"])
def test_the_same_call_gives_the_same_bits(kind):
    data = planted(100, 30, 4)
    first, second = (fit(data.masks, data.outputs, penalty=kind) for _ in range(2))
    assert first.weights.tobytes() == second.weights.tobytes()
    assert first.bias.tobytes() == second.bias.tobytes()
    assert np.array_equal(first.held_out.low, second.held_out.low)


def test_means_are_differences_of_means():
    data = planted(90, 12, 3)
    fitted = fit(data.masks, data.outputs, penalty="means")
    for example in range(12):
        with_it = data.outputs[data.masks[:, example]].mean(0)
        without = data.outputs[~data.masks[:, example]].mean(0)
        assert np.allclose(fitted.weights[example], with_it - without, atol=1e-5)
    assert np.isnan(fitted.lam).all()


@settings(max_examples=15)
@given(
    kind=st.sampled_from(["l1", "elastic", "ridge", "means"]),
    first=st.integers(10, 60),
    second=st.integers(1, 60),
    seed=st.integers(0, 10**6),
)
def test_added_models_give_the_fit_of_all(kind, first, second, seed):
    data = planted(first + second, 15, 2, seed=seed)
    lam = None if kind == "means" else [0.05, 0.1]
    options = {"penalty": kind, "lam": lam, "dtype": "float64", "tolerance": 1e-10}
    start = fit(data.masks[:first], data.outputs[:first], **options)
    stored = start.weights.copy(), start.counts.pairs.copy()
    grown = start.add(data.masks[first:], data.outputs[first:])
    whole = fit(data.masks, data.outputs, **options)
    assert grown.num_models == first + second
    assert np.allclose(grown.weights, whole.weights, atol=1e-3)
    assert np.array_equal(grown.counts.pairs, whole.counts.pairs)
    assert np.array_equal(start.weights, stored[0])
    assert np.array_equal(start.counts.pairs, stored[1])
    if second >= 10:
        expected = start.score(data.masks[first:], data.outputs[first:])
        assert np.array_equal(grown.held_out.value, expected.value, equal_nan=True)


def test_predictions_are_masks_times_weights_plus_bias():
    data = planted(100, 20, 3, seed=4)
    data.outputs[:] += 1e5
    fitted = fit(data.masks, data.outputs)
    expected = data.masks @ fitted.weights.astype(np.float64) + fitted.bias
    assert np.allclose(fitted.predict(data.masks), expected, atol=1e-4)
    assert fitted.score(data.masks, data.outputs).mean > 0.8


def test_a_fit_finds_the_planted_weights_with_enough_models():
    data = planted(3000, 60, 8, explained=0.95)
    fitted = fit(data.masks, data.outputs)
    errors = fitted.weights - data.weights
    assert np.abs(errors).max() < 0.1
    assert fitted.held_out.mean > 0.95
    assert not fitted.unfinished


@pytest.mark.parametrize("penalty", ["l1", "ridge", "means"])
def test_a_constant_target_has_no_weights_and_its_constant_as_bias(penalty):
    data = planted(60, 10, 3)
    data.outputs[:, 1] = 1e6 + 0.1
    fitted = fit(data.masks, data.outputs, penalty=penalty)
    assert fitted.constant_targets == (1,)
    assert not fitted.weights[:, 1].any()
    assert fitted.bias[1] == pytest.approx(1e6 + 0.1, rel=1e-15)
    assert fitted.gap[1] == 0
    assert np.isnan(fitted.held_out.value[1])
    assert not np.isnan(fitted.held_out.mean)


def test_examples_in_all_subsets_or_none_and_repeated_masks_are_noted():
    data = planted(60, 10, 2)
    data.masks[:, 3], data.masks[:, 8] = True, False
    data.masks[5] = data.masks[4]
    fitted = fit(data.masks, data.outputs)
    assert fitted.constant_examples == (3, 8)
    assert not fitted.weights[[3, 8]].any()
    assert fitted.repeated_masks >= 1


def test_subsets_of_one_size_and_duplicated_columns_are_no_trouble():
    rng = np.random.default_rng(0)
    masks = np.zeros((80, 20), bool)
    for row in masks:
        row[rng.choice(20, 10, replace=False)] = True
    masks[:, 19] = masks[:, 18]
    outputs = masks @ rng.standard_normal(20) + 0.1 * rng.standard_normal(80)
    for kind in ("l1", "elastic", "ridge"):
        fitted = fit(masks, outputs, penalty=kind)
        assert not fitted.unfinished
        assert fitted.held_out.mean > 0.8


def test_progress_goes_up_to_its_total():
    data = planted(60, 10, 2)
    for options in ({}, {"folds": 3}):
        seen = []
        fit(data.masks, data.outputs, progress=lambda *at: seen.append(at), **options)  # noqa: B023
        done = [at for at, _ in seen]
        assert done == sorted(done)
        assert seen[-1][0] == seen[-1][1] == max(done)


@pytest.mark.parametrize("kind", ["l1", "means"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_saved_fit_is_loaded_as_it_was_and_grows(tmp_path, kind, dtype):
    data = planted(80, 12, 3)
    data.outputs[:, 2] = 7.0
    store = gk.open(tmp_path)
    variances = {"variances": np.arange(1, 13)} if kind == "l1" else {}
    fitted = fit(data.masks, data.outputs, penalty=kind, dtype=dtype, **variances)
    fitted.save(store, "margins")
    repeated = load(store, "margins")
    for name in ("weights", "bias", "lam", "gap"):
        assert getattr(repeated, name).tobytes() == getattr(fitted, name).tobytes(), name
    assert repeated.constant_targets == (2,)
    assert repeated.held_out.constant_outputs == fitted.held_out.constant_outputs == (2,)
    assert repeated.held_out.constant_predictions == fitted.held_out.constant_predictions
    assert np.array_equal(repeated.held_out.value, fitted.held_out.value, equal_nan=True)
    assert repeated.held_out.mean_low == fitted.held_out.mean_low
    more = planted(40, 12, 3, seed=1)
    here, there = fitted.add(more.masks, more.outputs), repeated.add(more.masks, more.outputs)
    assert here.weights.tobytes() == there.weights.tobytes()
    assert repr(repeated) == repr(fitted)


def test_scores_that_are_no_datamodels_are_not_loaded(tmp_path):
    store = gk.open(tmp_path)
    with store.write(
        gk.store.ScoresKey("other"), gk.store.Schema((gk.store.Array("loss"),))
    ) as writer:
        writer.append([0], {"loss": [1.0]})
    with raises(DatamodelsError, "datamodels.not_a_fit"):
        load(store, "other")


def bad(**changes):
    data = planted(30, 6, 2)
    return {"masks": data.masks, "outputs": data.outputs, **changes}


def with_nan():
    outputs = planted(30, 6, 2).outputs
    outputs[7, 1] = np.nan
    return outputs


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"outputs": with_nan()}, "nan for model 7, target 1; 1 of 30 models"),
        ({"outputs": np.zeros((29, 2))}, r"outputs \[29, 2\], masks \[30, 6\]"),
        ({"outputs": np.zeros((30, 2, 2))}, "column per target"),
        ({"outputs": np.full((30, 1), "x")}, "must be numbers"),
        ({"penalty": "l2"}, "penalty"),
        ({"lambdas": [0.1, 0.0]}, "without a penalty no gap"),
        ({"lambdas": 0}, "one penalty or more"),
        ({"lambdas": "many"}, "lambdas must be"),
        ({"lambdas": [-1.0]}, "positive"),
        ({"lam": [0.1, 0.0]}, "one positive number per target"),
        ({"penalty": "means", "folds": 3}, "no penalty"),
        ({"held_out": 0.1, "folds": 3}, "exclude each other"),
        ({"held_out": 1.5}, "between 0 and 1"),
        ({"held_out": [40]}, r"0\.\.29"),
        ({"held_out": [1]}, "3 or more on either side"),
        ({"folds": 20}, "2 to 10"),
        ({"dtype": "float16"}, "float32"),
        ({"tolerance": 1e-9}, "float64"),
        ({"tolerance": -1.0}, "tolerance must be a finite number above 0"),
        ({"share": 0.0}, "share must be a finite number above 0 and at most 1"),
        ({"prior": np.zeros((2, 5))}, r"\[2, 6\]"),
        ({"prior": np.full((2, 6), np.nan)}, "finite"),
        ({"variances": np.zeros(6)}, "positive number per training example"),
        ({"penalty": "means", "prior": np.ones((2, 6))}, "no prior"),
        ({"masks": np.full((30, 6), 3)}, "zeros and ones"),
    ],
)
def test_what_cannot_be_fitted_is_refused_with_what_to_do(changes, message):
    with pytest.raises(DatamodelsError, match=message):
        fit(**bad(**changes))


def test_fewer_models_than_examples_need_a_penalty():
    data = planted(20, 40, 1)
    with raises(DatamodelsError, "datamodels.no_penalty"):
        fit(data.masks, data.outputs, lambdas=[0.0], penalty="ridge")


def test_other_examples_or_targets_than_fitted_are_refused():
    data = planted(40, 6, 2)
    fitted = fit(data.masks, data.outputs)
    with raises(DatamodelsError, "datamodels.other_examples"):
        fitted.predict(data.masks[:, :5])
    with raises(DatamodelsError, "datamodels.other_targets"):
        fitted.add(data.masks, data.outputs[:, :1])
    with pytest.raises(ValueError, match="read-only"):
        fitted.weights[0] = 1


def test_packed_masks_and_tensors_are_taken_as_they_are():
    import torch

    data = planted(50, 9, 2)
    plain = fit(data.masks, data.outputs)
    packed = fit(Masks.of(data.masks), torch.tensor(data.outputs))
    tensors = fit(torch.tensor(data.masks), data.outputs)
    assert plain.weights.tobytes() == packed.weights.tobytes() == tensors.weights.tobytes()
