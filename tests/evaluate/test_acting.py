"""From answer to act: groups, selections, leaks, suggested labels, and removals that are checked."""

import csv
import dataclasses

import numpy as np
import pytest
import torch
from raises import raises

import gradkeep as gk
from gradkeep import evaluate
from gradkeep.errors import EvaluationError
from tests.evaluate.conftest import ROWS, make, recipe


@pytest.fixture(scope="module")
def planted(tmp_path_factory):
    """A world in which eight rows are noisy copies of query 3 with another label."""
    how = recipe()
    inputs, labels = (part.clone() for part in how.train)
    rows = np.arange(4, 76, 9)
    noise = 0.05 * torch.randn(len(rows), 6, generator=torch.Generator().manual_seed(1))
    inputs[rows] = how.queries[0][3] + noise
    labels[rows] = (how.queries[1][3] + 1) % 3
    how = dataclasses.replace(how, train=(inputs, labels))
    store = gk.open(tmp_path_factory.mktemp("planted"), durability="process")
    model = dataclasses.replace(how.training, epochs=6).train_one(inputs, labels, seed=1).eval()
    for split, batch in (("train", how.train), ("test", how.queries)):
        gk.capture(store, model, [batch], task=gk.Classification(), split=split, progress=False)
    return store, how, rows


def test_a_planted_group_is_found_named_and_checked(planted):
    store, how, rows = planted
    scores = gk.attribute(store)
    sources = ["forum" if row in rows else "book" for row in range(ROWS)]
    texts = [f"the {source} of row {row}" for row, source in enumerate(sources)]
    row_groups = gk.groups(scores, 3, columns={"source": sources, "text": texts})
    shared = [
        2 * len({*group.ids} & {*rows}) / (len(group.ids) + len(rows))
        for group in row_groups.groups
    ]
    best = row_groups.groups[int(np.argmax(shared))]
    assert max(shared) >= 0.9
    assert not best.helps
    assert best.effect > 0
    assert "source forum (100%)" in best.name
    assert "text with forum" in best.name
    assert str(len(best.ids)) in str(row_groups)
    assert 0 < best.share <= 1
    reported = gk.groups(scores, 3, count=1, recipe=how, seeds=2, workers=0)
    verified = [group.verified for group in reported.groups if not group.helps]
    assert verified[0].value > 0  # without what harmed it, the query is answered better


def test_groups_of_features_and_of_given_scores(planted):
    store, how, _rows = planted
    scores = gk.attribute(store)
    by_inputs = gk.groups(scores, [3], features=how.train[0].numpy())
    passed = dataclasses.replace(scores, store=None)
    for actual in (by_inputs, gk.groups(passed, 3), gk.groups(scores)):
        listed = np.concatenate([group.ids for group in actual.groups])
        assert len(listed) == len({*listed.tolist()})
        helped = [group.helps for group in actual.groups]
        assert helped == sorted(helped, reverse=True)
    with raises(EvaluationError, "evaluate.not_scored"):
        gk.groups(scores, 99)
    with raises(EvaluationError, "evaluate.wrong_column"):
        gk.groups(scores, 3, columns={"source": ["a"]})
    with raises(EvaluationError, "evaluate.wrong_features"):
        gk.groups(scores, 3, features=np.ones((3, 3)))


def test_a_removal_is_checked_against_random_rows_by_hand(planted):
    store, how, rows = planted
    scores = gk.attribute(store)
    evaluation = evaluate.check_removal(scores, rows, how, seeds=2, workers=0)
    assert evaluation.change.items[3] > 0
    assert evaluation.change.sizes.rows == len(rows)
    assert evaluation.agreement.value > 0
    assert ("prediction held" in str(evaluation)) == evaluation.held
    second_evaluation = evaluate.verify_rows(
        rows, how, scores=scores, queries=[3], seeds=2, workers=0
    )
    assert second_evaluation.value == pytest.approx(evaluation.change.items[3])
    only = evaluate.verify_rows(
        np.setdiff1d(np.arange(ROWS), rows), how, store=store, train="with only", seeds=2, workers=0
    )
    assert np.isfinite(only.value)
    for bad in ([], [ROWS + 1], np.arange(ROWS)):
        with raises(EvaluationError, "evaluate.invalid_rows"):
            evaluate.check_removal(scores, bad, how)


def test_rows_are_selected_for_every_kind(planted, tmp_path):
    store, _how, rows = planted
    scores = gk.attribute(store)
    actual = evaluate.select_rows(scores, 0.25)
    assert len(actual) == ROWS // 4
    assert len({*actual.ids.tolist()}) == len(actual)
    served = {reason.rsplit(" ", 1)[1] for reason in actual.reasons}
    assert served == {"0", "1", "2"}
    assert not {*actual.ids.tolist()} & {*rows.tolist()}
    actual.write(tmp_path / "rows.csv")
    with (tmp_path / "rows.csv").open() as file:
        read = list(csv.DictReader(file))
    assert [int(row["id"]) for row in read] == actual.ids.tolist()
    assert read[0]["reason"] == actual.reasons[0]
    for bad in (0, 0.0, 1.5, ROWS + 1, True):
        with pytest.raises(EvaluationError):
            evaluate.select_rows(scores, bad)


def test_copies_of_queries_are_leaks(planted, tmp_path):
    _store, how, _rows = planted
    inputs, labels = (part.clone() for part in how.train)
    inputs[7], labels[7] = how.queries[0][5], how.queries[1][5]
    model = make().eval()
    stored_store = gk.open(tmp_path)
    for split, batch in (("train", (inputs, labels)), ("test", how.queries)):
        gk.capture(
            stored_store, model, [batch], task=gk.Classification(), split=split, progress=False
        )
    actual = evaluate.find_leaks(gk.attribute(stored_store, method="cos"), above=0.9999)
    assert actual.ids.tolist() == [7]
    assert "with test 5" in actual.reasons[0]
    with raises(EvaluationError, "evaluate.not_cosines", fix="cos"):
        evaluate.find_leaks(gk.attribute(stored_store, method="dot"))


def test_labels_are_suggested_by_models_that_never_saw_them(tmp_path):
    torch.manual_seed(0)
    centres = 3 * torch.randn(3, 6)
    labels = torch.arange(240) % 3
    inputs = centres[labels] + torch.randn(240, 6)
    passed = labels.clone()
    flipped = np.arange(0, 240, 11)
    passed[flipped] = (passed[flipped] + 1) % 3
    how = dataclasses.replace(recipe(), train=(inputs, passed), queries=(inputs[:6], labels[:6]))
    reported = evaluate.out_of_fold(how, store=gk.open(tmp_path), folds=4, workers=0)
    assert reported.shape == (240, 3)
    np.testing.assert_allclose(reported.sum(1), 1, atol=1e-5)
    # By hand: the first fold's rows, by a model trained on the others.
    fold = np.random.default_rng(0).permutation(240) % 4
    from gradkeep.datamodels._masks import training_seed

    rows = np.flatnonzero(fold != 0)
    model = how.training.train_one(inputs[rows], passed[rows], training_seed(0, 0)).eval()
    with torch.no_grad():
        by_hand = model(inputs[fold == 0]).softmax(-1).numpy()
    np.testing.assert_allclose(reported[fold == 0], by_hand, atol=2e-3)
    actual = evaluate.suggest_labels(how, store=gk.open(tmp_path), folds=4, workers=0)
    hits = {*actual.ids.tolist()} & {*flipped.tolist()}
    assert len(hits) >= 0.8 * len(flipped)
    assert len(hits) >= 0.75 * len(actual)  # 80 % are expected
    right = [
        int(s) == int(labels[row]) for row, s in zip(actual.ids, actual.suggested, strict=True)
    ]
    assert np.mean(right) > 0.8
