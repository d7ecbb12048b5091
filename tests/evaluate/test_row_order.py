"""A ground truth is held against captures of the same rows in the same order only."""

import dataclasses

import numpy as np
import pytest
import torch
from raises import raises
from torch import nn

import gradkeep as gk
from gradkeep import evaluate
from gradkeep.capturing._batches import digests
from gradkeep.datamodels import Output
from gradkeep.errors import AttributionError, EvaluationError
from gradkeep.evaluate._truth import check_order, fingerprint_rows
from tests.evaluate.conftest import recipe as small_recipe

ROWS, QUERIES = 24, 6


class Squares(gk.Task):
    """A task without labels."""

    def losses(self, model, batch):
        return model(batch).square().sum(1)


def outputs(queries):
    def of(model):
        with torch.no_grad():
            return -model(queries).square().sum(1).numpy()

    return Output((len(queries),), of)


@pytest.fixture(scope="module")
def truth(tmp_path_factory):
    draw = torch.Generator().manual_seed(0)
    train, queries = (torch.randn(n, 4, generator=draw) for n in (ROWS, QUERIES))
    store = gk.open(tmp_path_factory.mktemp("store"), durability="process")

    def training(subset, seed):
        model = nn.Linear(4, 2)
        with torch.no_grad():
            model.weight.fill_(1).mul_(sum(float(subset[at].mean()) for at in range(len(subset))))
        return model

    recipe = evaluate.Recipe(train, queries, training, output=outputs(queries))
    evaluate.ground_truth(store, recipe, subsets=10, seeds=1, workers=0)
    return store, train, queries


def scored(store, name, train, queries):
    torch.manual_seed(1)
    model = nn.Linear(4, 2)
    for split, rows in (("train", train), ("test", queries)):
        common = {"task": Squares(), "split": split, "name": name, "progress": False}
        gk.capture(store, model, list(rows.split(8)), **common)
    return gk.attribute(store, method="dot", name=name)


def test_the_same_order_is_judged_without_labels(truth):
    store, train, queries = truth
    scores = scored(store, "same", train, queries)
    actual = evaluate.load_truth(store)
    assert np.isfinite(evaluate.lds(scores, actual, part="all").value)


@pytest.mark.parametrize("what", ["training rows", "queries"])
def test_another_order_is_refused_naming_the_first_row(truth, what):
    store, train, queries = truth
    swapped = {"training rows": (train.flip(0), queries), "queries": (train, queries.flip(0))}
    scores = scored(store, what.replace(" ", "-"), *swapped[what])
    with pytest.raises(EvaluationError, match=f"the {what} of the capture") as error:
        evaluate.lds(scores, evaluate.load_truth(store), part="all")
    assert "row 0 " in str(error.value)
    assert error.value.code == "evaluate.other_order"


def test_every_row_is_compared_and_the_first_that_differs_named():
    draw = torch.Generator().manual_seed(0)
    rows = torch.randn(5_000, 3, generator=draw)
    labels = torch.arange(5_000) % 2
    fingerprints = fingerprint_rows((rows, labels))
    check_order(fingerprints, digests((rows, labels)), what="rows")
    order = torch.arange(5_000)
    order[[1_235, 1_237]] = order[[1_237, 1_235]]  # within their class, between sampled rows
    with pytest.raises(EvaluationError, match="row 1235 ") as error:
        check_order(fingerprints, digests((rows[order], labels[order])), what="rows")
    assert error.value.code == "evaluate.other_order"
    other = rows.clone()
    other[4_321] += 1
    with pytest.raises(EvaluationError, match="row 4321 "):
        check_order(fingerprints, digests((other, labels)), what="rows")


@pytest.mark.parametrize("what", ["rows within classes", "queries"])
def test_a_recipe_of_other_rows_is_not_retrained(world, what):
    scores, how = gk.attribute(world, method="dot", ids=[0, 2, 3, 5, 7, 8]), small_recipe()
    (x, y), (qx, qy) = how.train, how.queries
    order = torch.arange(len(y))
    order[[3, 6]] = order[[6, 3]]  # both of class 0
    changes = {
        "rows within classes": {"train": (x[order], y[order])},
        "queries": {"queries": (qx.flip(0), qy.flip(0))},
    }
    how = dataclasses.replace(how, **changes[what])
    for check in (
        lambda: evaluate.verify_rows([1, 2], how, scores=scores, workers=0),
        lambda: evaluate.removal_curve(scores, how, sizes=[3], workers=0),
        lambda: evaluate.leave_one_out(scores, how, rows=5, workers=0),
        lambda: evaluate.check_removal(scores, [1, 2], how, workers=0),
    ):
        with raises(EvaluationError, "evaluate.other_order"):
            check()


def test_rows_that_cannot_be_compared_are_no_mismatch(truth):
    """Padding or other columns change every digest; order cannot be told then."""
    store, train, queries = truth
    scores = scored(store, "wide", train.double().float() + 0, queries + 1e-6)
    assert np.isfinite(evaluate.lds(scores, evaluate.load_truth(store), part="all").value)


def test_checkpoints_captured_in_different_orders_are_not_joined(tmp_path):
    store, model = gk.open(tmp_path), nn.Linear(4, 3)
    x, y = torch.randn(6, 4), torch.zeros(6, dtype=torch.long)
    for checkpoint, order in (("a", range(6)), ("b", [1, 0, 2, 3, 4, 5])):
        for split in ("train", "test"):
            data = [(x[list(order)], y)]
            common = {"task": gk.Classification(), "split": split, "progress": False}
            gk.capture(store, model, data, checkpoints=checkpoint, **common)
    with pytest.raises(AttributionError, match="row 0"):
        gk.attribute(store)
    assert gk.attribute(store, checkpoints="b").shape == (6, 6)
