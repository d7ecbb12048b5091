"""Ground truth in a store: trained once, in halves, for everything that asks it."""

import dataclasses

import numpy as np
import pytest
import torch
from raises import raises

import gradkeep as gk
from gradkeep import evaluate
from gradkeep.attribution._tuning import subset_digests
from gradkeep.datamodels import Study, Training, losses, margins
from gradkeep.errors import EvaluationError
from tests.evaluate.conftest import QUERIES, ROWS, data, make, recipe


def test_a_truth_is_what_its_models_said(world):
    truth = evaluate.load_truth(world)
    assert truth.masks.shape == (40, ROWS)
    assert truth.outputs.shape == (40, 2, QUERIES)
    rows = world.rows("truth")
    read = rows.read(np.arange(80), ["masks", "outputs"])
    np.testing.assert_array_equal(np.asarray(read["masks"])[1::2], truth.masks)
    np.testing.assert_array_equal(np.asarray(read["outputs"]).reshape(40, 2, -1), truth.outputs)
    assert (truth.masks.sum(1) == ROWS // 2).all()
    assert truth.parameters == sum(p.numel() for p in make().parameters())


def test_the_halves_share_no_subset_and_stay_what_they_are_as_the_truth_grows(tmp_path):
    small = evaluate.ground_truth(tmp_path, recipe(), subsets=12, seeds=1, stacked=True, workers=0)
    large = evaluate.ground_truth(tmp_path, recipe(), subsets=20, seeds=1, stacked=True, workers=0)
    for part in ("choosing", "reporting"):
        before, after = small.part(part).masks, large.part(part).masks
        np.testing.assert_array_equal(before, after[: len(before)])
    digests = [set(subset_digests(large.part(p).masks)) for p in ("choosing", "reporting")]
    assert not digests[0] & digests[1]
    assert small.seconds > 0


def test_dampings_are_chosen_by_the_choosing_half_alone(world):
    truth = evaluate.load_truth(world)
    by_store = gk.attribute(world, method="kernel", damping="auto")
    by_truth = gk.attribute(world, method="kernel", damping="auto", subsets=truth)
    expected = set(subset_digests(truth.choosing.masks))
    assert set(by_store.chosen_on) == set(by_truth.chosen_on) == expected
    np.testing.assert_array_equal(by_store.values, by_truth.values)
    assert evaluate.lds(by_store, truth).sizes.subsets == 20
    passed = gk.attribute(
        world, method="kernel", damping="auto", subsets=(truth.masks, truth.outputs.mean(1))
    )
    with raises(EvaluationError, "evaluate.tuned_on_truth"):
        evaluate.lds(passed, truth)


def test_a_loss_falls_where_a_margin_rises(tmp_path, world):
    _train, queries = data()
    how = dataclasses.replace(recipe(), output=losses(queries))
    assert how.is_falling()
    assert not recipe().is_falling()
    assert not dataclasses.replace(recipe(), output=margins(queries)).is_falling()
    truth = evaluate.ground_truth(tmp_path, how, subsets=40, stacked=True, workers=0)
    scores = gk.attribute(world, method="kernel")
    by_margin = evaluate.lds(scores, evaluate.load_truth(world))
    by_loss = evaluate.lds(scores, truth)
    assert by_loss.value > 0.2
    assert by_margin.value > 0.2


def test_any_study_and_any_training_function_can_be_the_truth(tmp_path):
    train, queries = data()
    training = recipe().training

    def train_fn(subset, seed):
        rows = torch.tensor(subset.indices)
        return training.train_one(train[0][rows], train[1][rows], seed)

    dataset = torch.utils.data.TensorDataset(*train)
    study = Study(tmp_path, dataset, train_fn, num_models=12, outputs=margins(queries))
    study.run(workers=0)
    assert len(evaluate.load_truth(tmp_path, "study").masks) == 12
    with raises(EvaluationError, "evaluate.no_truth"):
        evaluate.load_truth(tmp_path)
    how = evaluate.Recipe(dataset, queries, train_fn)
    truth = evaluate.ground_truth(tmp_path, how, subsets=10, seeds=1, workers=0)
    assert truth.parameters is None
    assert truth.num_rows == ROWS
    assert how.num_rows == ROWS


def test_scores_of_other_data_are_refused(world, tmp_path):
    how = recipe()
    inputs, labels = how.train
    flipped = dataclasses.replace(how, train=(inputs, labels.roll(1)))
    truth = evaluate.ground_truth(tmp_path, flipped, subsets=10, stacked=True, workers=0)
    with raises(EvaluationError, "evaluate.other_labels"):
        evaluate.lds(gk.attribute(world, method="dot"), truth)


def test_a_truth_made_differently_or_failing_says_so(tmp_path):
    evaluate.ground_truth(tmp_path, recipe(), subsets=10, stacked=True, workers=0)
    other = dataclasses.replace(recipe(), training=Training(make, epochs=3))
    with pytest.raises(gk.GradkeepError, match="exists with other settings"):
        evaluate.ground_truth(tmp_path, other, subsets=10, stacked=True, workers=0)

    def broken(subset, seed):
        raise RuntimeError("no luck")

    with pytest.raises(gk.GradkeepError, match="attempts all failed") as caught:
        evaluate.ground_truth(
            tmp_path,
            dataclasses.replace(recipe(), training=broken),
            name="b",
            subsets=10,
            workers=0,
        )
    assert "no luck" in str(caught.value)
    with pytest.raises(EvaluationError, match="subsets"):
        evaluate.ground_truth(tmp_path, recipe(), subsets=3)


def test_models_trained_without_chosen_rows_choose_nothing(tmp_path, world):
    import shutil

    store = gk.open(shutil.copytree(world.location, tmp_path / "kept"))
    before = gk.attribute(store, method="kernel", damping="auto").chosen_on
    scores = gk.attribute(store, method="kernel")
    evaluate.removal_curve(scores, recipe(), sizes=[8], queries=[1, 5], workers=0)
    assert "retraining" not in store.row_sets()
    assert any(name.startswith("retraining.removals.") for name in store.row_sets())
    assert gk.attribute(store, method="kernel", damping="auto").chosen_on == before
