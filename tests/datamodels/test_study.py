"""A study gives the same rows whoever trains them; stacked models equal those trained alone."""

import functools

import numpy as np
import pytest
import torch
from autograd_reference import per_sample_gradients
from raises import raises

import gradkeep as gk
from gradkeep.datamodels import (
    Masks,
    Study,
    Training,
    confidences,
    draw_masks,
    losses,
    margins,
    output,
)
from gradkeep.datamodels._masks import training_seed
from gradkeep.datamodels._training import TOLERANCE, stacks_well, train_many
from gradkeep.errors import DatamodelsError, SchemaMismatchError

GENERATOR = torch.Generator().manual_seed(3)
X = torch.randn(40, 5, generator=GENERATOR)
Y = (X[:, 0] + 0.5 * X[:, 1] > 0).long()
TEST = (torch.randn(7, 5, generator=GENERATOR), torch.tensor([0, 1, 1, 0, 1, 0, 1]))


def linear():
    return torch.nn.Linear(5, 2)


def mlp():
    return torch.nn.Sequential(torch.nn.Linear(5, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))


TRAINING = Training(mlp, epochs=3, batch_size=6, options={"momentum": 0.9})


def study(folder, training=TRAINING, **options):
    values = {"num_models": 10, "outputs": margins(TEST), "stacked": False, **options}
    return Study(gk.open(folder, durability="process"), (X, Y), training, **values)


def test_masks_follow_from_seed_and_index_alone():
    all_at_once = draw_masks(4, range(20), num_examples=33, alpha=0.3)
    backwards = [draw_masks(4, [n], num_examples=33, alpha=0.3)[0] for n in reversed(range(20))]
    np.testing.assert_array_equal(all_at_once, backwards[::-1])
    assert set(all_at_once.sum(1)) == {10}
    assert len({mask.tobytes() for mask in all_at_once}) == 20
    assert not np.array_equal(all_at_once, draw_masks(5, range(20), num_examples=33, alpha=0.3))


def test_independent_subsets_have_the_share_on_average():
    masks = draw_masks(0, range(400), num_examples=200, alpha=0.2, subsets="independent")
    assert abs(masks.mean() - 0.2) < 0.01
    assert len(set(masks.sum(1))) > 10


@pytest.mark.parametrize("alpha", [0.0, 1.0, -1, float("nan")])
def test_a_share_that_leaves_nothing_is_refused(alpha):
    with pytest.raises(DatamodelsError, match="alpha"):
        draw_masks(0, [0], num_examples=10, alpha=alpha)


@pytest.mark.parametrize("stacked", [False, True])
def test_order_workers_and_restarts_do_not_change_a_bit(tmp_path, stacked):
    """Here in one go; there in pieces, with another batch, and grown later."""
    one = study(tmp_path / "one", stacked=stacked)
    assert one.run(workers=0).complete
    other = study(tmp_path / "other", num_models=4, stacked=stacked)
    other.run(workers=0, batch=3)
    other = study(tmp_path / "other", num_models=10, stacked=stacked)
    assert other.done().tolist() == [0, 1, 2, 3]
    other.run(workers=0, batch=5)
    np.testing.assert_array_equal(one.masks().bits, other.masks().bits)
    np.testing.assert_array_equal(one.outputs(), other.outputs())


@pytest.mark.slow
def test_workers_give_the_same_rows_as_this_process(tmp_path):
    # Of torch alone: worker processes cannot import the tests.
    training = Training(functools.partial(torch.nn.Linear, 5, 2), epochs=3, batch_size=6)
    here = study(tmp_path / "here", training)
    here.run(workers=0, threads=1)
    there = study(tmp_path / "there", training)
    assert there.run(workers=2, threads=1).complete
    np.testing.assert_array_equal(here.outputs(), there.outputs())


def test_the_kept_masks_are_the_subsets_the_models_saw(tmp_path):
    seen = {}

    def train(subset, seed):
        seen[seed] = sorted(subset.indices)
        return linear()

    fitted = study(tmp_path, train)
    fitted.run(workers=0)
    masks = fitted.masks().numpy()
    assert sorted(map(tuple, seen.values())) == sorted(
        tuple(np.flatnonzero(mask).tolist()) for mask in masks
    )
    np.testing.assert_array_equal(masks, draw_masks(0, range(10), num_examples=40))


def test_what_a_training_draws_from_the_global_generators_is_reproducible(tmp_path):
    def train(subset, seed):
        return float(torch.rand(()) + np.random.rand())

    stored = output(lambda model: [model], 1)
    runs = [study(tmp_path / name, train, outputs=stored, num_models=4) for name in ("a", "b")]
    runs[0].run(workers=0)
    torch.rand(7)
    runs[1].run(workers=0, batch=4)
    np.testing.assert_array_equal(runs[0].outputs(), runs[1].outputs())
    assert len(np.unique(runs[0].outputs())) == 4


def test_kept_models_answer_as_they_did(tmp_path):
    for stacked in (False, True):
        fitted = study(tmp_path / str(stacked), keep_models=True, stacked=stacked, num_models=3)
        fitted.run(workers=0)
        for index in range(3):
            repeated = margins(TEST)(fitted.model(index))
            np.testing.assert_allclose(repeated, fitted.outputs()[index], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("stacked", [False, True])
def test_captured_gradients_are_autograds_of_the_models_that_gave_the_outputs(tmp_path, stacked):
    fitted = study(tmp_path, keep_models=True, stacked=stacked, num_models=3)
    fitted.run(workers=0)
    task = gk.Classification()
    done = fitted.capture(batch_size=16)
    assert [(stored.key.checkpoint, stored.key.split, stored.rows) for stored in done] == [
        (str(index), split, rows)
        for index in range(3)
        for split, rows in (("train", 40), ("test", 7))
    ]
    for index in range(3):
        model = fitted.model(index)
        if not stacked:  # the very model: trained once more from its mask and seed
            mask = fitted.masks([index]).numpy()[0]
            repeated = TRAINING.train_one(X[mask], Y[mask], training_seed(0, index))
            model = repeated.eval()
        for split, batch in (("train", (X, Y)), ("test", TEST)):
            where = {"split": split, "checkpoints": str(index), "run": "study"}
            stored = gk.query.gradients(fitted.store, **where)
            assert stored.ids.tolist() == list(range(len(batch[1])))
            truth = per_sample_gradients(model, task.losses, batch)
            restored = stored.restore(stored.ids)
            assert set(restored) == set(truth)
            for name, gradient in truth.items():
                scale = float(gradient.abs().max())
                assert float((restored[name] - gradient).abs().max()) <= 1e-5 * scale, name


def test_a_capture_of_a_study_resumes_and_takes_some_models_and_examples(tmp_path):
    fitted = study(tmp_path, keep_models=True, num_models=3)
    fitted.run(workers=0)
    (train, test) = fitted.capture((TEST[0][:2], TEST[1][:2]), models=[1])
    assert (train.reused_rows, test.rows) == (0, 2)
    assert {key.checkpoint for key in fitted.store.captures()} == {"1"}
    (train, _) = fitted.capture((TEST[0][:2], TEST[1][:2]), models=[1])
    assert train.reused_rows == 40


def test_captures_that_a_study_cannot_make_are_refused(tmp_path):
    plain = study(tmp_path / "plain", num_models=1)
    plain.run(workers=0)
    with raises(DatamodelsError, "datamodels.models_not_saved"):
        plain.capture()
    fitted = study(tmp_path / "kept", keep_models=True, outputs=output(lambda m: [1.0], 1))
    with raises(DatamodelsError, "datamodels.output_without_examples"):
        fitted.capture()
    with raises(DatamodelsError, "datamodels.reserved_option"):
        fitted.capture(TEST, run="mine", split="other")


def test_a_study_that_keeps_no_models_says_so(tmp_path):
    with raises(DatamodelsError, "datamodels.models_not_saved"):
        study(tmp_path).model(0)
    with raises(DatamodelsError, "datamodels.untrained_model"):
        study(tmp_path, lambda subset, seed: linear(), keep_models=True, name="other")


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"alpha": 0.4}, "alpha"),
        ({"seed": 1}, "seed"),
        ({"subsets": "independent"}, "subsets"),
        ({"outputs": losses((X, Y))}, "outputs"),
        ({"training": Training(mlp, epochs=4)}, "training"),
    ],
)
def test_a_study_that_changed_is_refused_with_the_difference(tmp_path, change, word):
    study(tmp_path)
    with pytest.raises(SchemaMismatchError, match=word):
        study(tmp_path, **change)


def test_other_data_is_refused(tmp_path):
    study(tmp_path)
    with pytest.raises(SchemaMismatchError, match="fingerprint data"):
        Study(
            tmp_path,
            (X + 1, Y),
            TRAINING,
            num_models=10,
            outputs=margins(TEST),
            stacked=False,
        )


@pytest.mark.parametrize("count", [0, -1, 2.5, None])
def test_a_number_of_models_that_is_none_is_refused(tmp_path, count):
    with pytest.raises(DatamodelsError, match="num_models"):
        study(tmp_path, num_models=count)


def test_a_training_that_diverges_is_a_failure_not_a_row(tmp_path):
    fitted = study(tmp_path, Training(mlp, epochs=5, lr=1e30), num_models=3)
    outcome = fitted.run(workers=0, max_attempts=1)
    assert len(outcome.failures) == 3
    assert "NaN or infinity" in outcome.failures[0].error
    assert fitted.done().tolist() == []


def test_a_study_is_fitted(tmp_path):
    def train(subset, seed):
        mask = np.zeros(40)
        mask[subset.indices] = 1
        return mask

    stored = {
        "weight": output(lambda mask: [3 * mask[4] - 2 * mask[7]], 1),
        "size": output(np.sum, ()),
    }
    result = study(tmp_path, train, outputs=stored, num_models=300, subsets="independent")
    result.run(workers=0)
    fitted = result.fit("weight")
    assert np.abs(fitted.weights[[4, 7], 0] - [3, -2]).max() < 0.2
    assert isinstance(result.masks([0, 5]), Masks)
    with raises(DatamodelsError, "datamodels.unknown_output"):
        result.outputs()


def test_removals_are_verified_by_trainings_that_the_store_keeps(tmp_path):
    trained = []

    def train(subset, seed):
        trained.append(seed)
        mask = np.zeros(40)
        mask[subset.indices] = 1
        return mask

    stored = output(lambda mask: [3 * mask[4] - 2 * mask[7], mask[9]], 2)
    result = study(tmp_path, train, outputs=stored, num_models=300, subsets="independent")
    result.run(workers=0)
    fitted = result.fit()
    trained.clear()
    removals = [[4], [7, 20], range(9, 12)]
    checked = result.verify_removals(fitted, removals, repeats=2, workers=0)
    assert len(trained) == 8
    np.testing.assert_allclose(checked.measured, [[-3, 0], [2, 0], [0, -1]])
    assert checked.correlation > 0.99
    repeated = result.verify_removals(fitted, removals, repeats=3, workers=0)
    assert len(trained) == 12, "only the third repeat is trained"
    np.testing.assert_allclose(repeated.measured, checked.measured)


def test_stacked_training_equals_training_alone():
    """Within the stated tolerance, after every step has had its say; also with a smaller last batch."""
    subsets = torch.from_numpy(
        np.stack([np.flatnonzero(m) for m in draw_masks(0, range(9), num_examples=40)])
    )
    for optimizer, lr in (("SGD", 0.1), ("AdamW", 0.01)):
        training = Training(mlp, epochs=8, batch_size=6, lr=lr, optimizer=optimizer)
        weights, ask = train_many(training, X, Y, subsets, list(range(9)))
        alone = [training.train_one(X[rows], Y[rows], n) for n, rows in enumerate(subsets)]
        with torch.no_grad():
            expected = torch.stack([model(TEST[0]) for model in alone])
        assert (ask(TEST[0]) - expected).abs().max() <= TOLERANCE * expected.abs().max()
        moved = alone[0].state_dict()["0.weight"] - training.begin(0).state_dict()["0.weight"]
        assert moved.abs().max() > 0.01, "something was learnt"
        assert weights["0.weight"].shape == (9, 8, 5)


@pytest.mark.parametrize(
    "layer", [torch.nn.BatchNorm1d(5), torch.nn.Dropout(0.5)], ids=["statistics", "random"]
)
def test_models_that_would_differ_are_not_stacked(layer):
    training = Training(lambda: torch.nn.Sequential(layer, torch.nn.Linear(5, 2)))
    assert not stacks_well(training, X, Y, 20)


def test_stacking_what_cannot_be_stacked_is_refused(tmp_path):
    for options in ({"subsets": "independent"}, {"outputs": output(lambda model: [1.0], 1)}):
        with raises(DatamodelsError, "datamodels.not_stackable"):
            study(tmp_path, stacked=True, **options)


def test_a_study_goes_on_as_it_began(tmp_path):
    assert study(tmp_path, stacked=True).job.stacked
    assert study(tmp_path, stacked=None).job.stacked
    assert study(tmp_path, stacked=None, num_models=20).rows.num_rows == 20


def test_outputs_are_what_their_names_say():
    logits = torch.tensor([[2.0, 0.5, 1.0], [0.0, 0.0, 3.0]])
    examples = (torch.zeros(2, 1), torch.tensor([0, 1]))

    class Fixed(torch.nn.Module):
        def forward(self, x):
            return logits

    model = Fixed()
    probability = torch.softmax(logits, -1)[[0, 1], [0, 1]]
    np.testing.assert_allclose(margins(examples)(model), [1.0, -3.0])
    np.testing.assert_allclose(confidences(examples)(model), probability, rtol=1e-6)
    np.testing.assert_allclose(losses(examples)(model), -probability.log(), rtol=1e-6)
    assert margins(examples, dtype="float16")(model).dtype == np.float16


@pytest.mark.parametrize("optimizer", ["adamw", "AdamW", torch.optim.AdamW], ids=str)
def test_optimizers_are_accepted_by_name_in_any_case_and_by_class(optimizer):
    x, y = torch.eye(4), torch.tensor([0, 1, 0, 1])
    training = Training(lambda: torch.nn.Linear(4, 2), epochs=1, optimizer=optimizer, lr=0.01)
    assert type(training.make_optimizer([torch.zeros(2, requires_grad=True)])) is torch.optim.AdamW
    assert "AdamW(lr=0.01)" in training.describe()
    assert training.train_one(x, y, 0) is not None


@pytest.mark.parametrize("optimizer", ["nothing", "Optimizers", "lr_scheduler"])
def test_unknown_optimizers_are_refused(optimizer):
    with raises(DatamodelsError, "datamodels.unknown_optimizer"):
        Training(lambda: torch.nn.Linear(4, 2), optimizer=optimizer)
