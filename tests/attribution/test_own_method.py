"""A method from outside: found by its name, in Python and on the command line, with options of its own."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from raises import raises
from torch import nn

import gradkeep as gk
from gradkeep.attribution._registry import unregister_method
from gradkeep.cli import main
from gradkeep.errors import AttributionError


@dataclass(frozen=True)
class SignOptions:
    """Options of `signs`."""

    scale: float = 1.0


def signs(view, options):
    """Products of the signs of loss gradients, restored: slow, and nobody's idea but ours."""
    train, query_gradients = view.train(), view.queries()
    rows = torch.cat([v.flatten(1) for v in train.restore(train.ids).values()], 1).sign()
    queries = torch.cat(
        [v.flatten(1) for v in query_gradients.restore(query_gradients.ids).values()], 1
    ).sign()
    queries = queries[view.question.positions]
    return gk.Scorer(lambda start, stop: options.scale * queries[start:stop] @ rows.T)


SIGNS = gk.Method(
    "signs",
    "inner product of the signs of the loss gradients",
    "gradients of both splits",
    "Q x N products of restored gradients",
    exact=True,
    reference="this test",
    prepare=signs,
    options=SignOptions,
)


@pytest.fixture
def registered():
    gk.register_method(SIGNS)
    yield
    unregister_method("signs")


@pytest.fixture
def created(make_world):
    return make_world(lambda: nn.Linear(4, 3), (4,), rows=7, queries=3)


def test_it_scores_as_ours_do(registered, created):
    scores = gk.attribute(created.store, method="signs", scale=2.0, ids=[2, 0])
    train, query_gradients = (created.gradients(s).sign() for s in ("train", "test"))
    assert np.array_equal(scores.numpy(), (2 * query_gradients[[2, 0]] @ train.T).float().numpy())
    assert scores.method == "signs"
    assert "signs" in [method.name for method in gk.methods()]
    with raises(AttributionError, "attribute.unknown_option", fix="scale"):
        gk.attribute(created.store, method="signs", scael=1)


def test_the_commands_know_it(registered, created, capsys, monkeypatch):
    for words in (["why", created.store.location, "1", "--method", "signs"], ["methods"]):
        monkeypatch.setattr("sys.argv", ["gradkeep", *words])
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code in (0, None)
        assert "signs" in capsys.readouterr().out


def test_taken_names_and_other_things_are_refused(registered):
    with raises(AttributionError, "attribute.method_exists"):
        gk.register_method(SIGNS)
    with raises(AttributionError, "attribute.not_a_method", fix="gk.Method"):
        gk.register_method(signs)
    with raises(AttributionError, "attribute.not_registered"):
        unregister_method("kernel")
