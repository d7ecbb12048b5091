"""What version 0.1.0 called differently still works for one version, and says what it is called now."""

import warnings

import numpy as np
import pytest
import torch
from torch import nn

import gradkeep as gk


@pytest.fixture
def store(tmp_path):
    torch.manual_seed(0)
    opened = gk.open(tmp_path)
    batch = (torch.randn(5, 4), torch.arange(5) % 3)
    for split in ("train", "test"):
        gk.capture(
            opened,
            nn.Linear(4, 3),
            [batch],
            task=gk.Classification(),
            split=split,
            checkpoints="final" if split == "train" else "other",
            progress=False,
        )
    return opened


def test_arguments_of_capture(tmp_path):
    model, batch = nn.Linear(4, 3), (torch.randn(5, 4), torch.arange(5) % 3)
    task = gk.Classification()
    with pytest.warns(DeprecationWarning, match=r"capture\(checkpoint=\) is now checkpoints="):
        kept = gk.capture(
            tmp_path, model, [batch], task=task, split="a", checkpoint="first", progress=False
        )
    assert kept.key.checkpoint == "first"
    with pytest.warns(DeprecationWarning, match=r"capture\(plan=\) is now keep="):
        kept = gk.capture(
            tmp_path, model, [batch], task=task, split="b", plan="dense", progress=False
        )
    assert kept.layers[0].storage == "dense"
    with pytest.raises(TypeError, match="old name"):
        gk.capture(tmp_path, model, [batch], task=task, split="c", plan="dense", keep="dense")


def test_arguments_of_layers_and_plan():
    model, batch = nn.Sequential(nn.Linear(4, 3)), (torch.randn(5, 4), torch.arange(5) % 3)
    with pytest.warns(DeprecationWarning, match=r"layers\(select=\) is now layers="):
        assert len(gk.layers(model, select="0")) == 1
    with pytest.warns(DeprecationWarning, match="is now") as told:
        planned = gk.plan(
            model, batch, task=gk.Classification(), rows=9, storage="dense", scoring="naive"
        )
    assert planned.layers[0].layer.storage == "dense"
    assert {str(one.message).split("(")[1].split("=")[0] for one in told} == {"storage", "scoring"}


def test_arguments_of_questions(store):
    with pytest.warns(DeprecationWarning, match=r"gradients\(checkpoint=\) is now checkpoints="):
        rows = gk.gradients(store, split="train", checkpoint="final")
    for ask in (
        lambda: gk.query.dot(rows, rows, plan="half").values,
        lambda: gk.query.cosine(rows, rows, plan="half").values,
        lambda: gk.query.gram(rows, plan="half").values,
        lambda: gk.query.top(rows, rows, 2, plan="half").values,
    ):
        with pytest.warns(DeprecationWarning, match=r"\(plan=\) is now compute="):
            assert ask().isfinite().all()
    with pytest.warns(DeprecationWarning, match=r"attribute\(plan=\) is now compute="):
        gk.attribute(store, queries="train", method="dot", plan="half")


def test_recording_takes_the_model_first_as_it_did(tmp_path):
    model = nn.Linear(4, 3)
    with (
        pytest.warns(DeprecationWarning, match=r"now recording\(store, model\)"),
        gk.recording(model, tmp_path, checkpoints="one") as record,
        record.batch([0, 1]),
    ):
        model(torch.randn(2, 4)).square().sum(1).mean().backward()
    assert len(gk.gradients(tmp_path, split="train")) == 2


@pytest.mark.parametrize(
    ("old", "new"), [("Plan", "QueryPlan"), ("Step", "QueryStep"), ("Top", "TopRows")]
)
def test_names_of_answers(old, new):
    with pytest.warns(DeprecationWarning, match=f"gradkeep.query.{old} is now"):
        assert getattr(gk.query, old) is getattr(gk.query, new)


def test_attributes_of_answers(store):
    rows = gk.gradients(store, split="train")
    step = gk.query.dot(rows, rows).plan.steps[0]
    with pytest.warns(DeprecationWarning, match=r"QueryStep.how is now .compute"):
        assert step.how == step.compute
    masks = np.random.default_rng(0).random((30, 8)) < 0.5
    fit = gk.datamodels.fit(masks, masks.sum(1, keepdims=True) * 1.0)
    with pytest.warns(DeprecationWarning, match=r"Datamodels.recipe is now .options"):
        assert fit.recipe is fit.options
    block = store.info().blocks[0]
    with pytest.warns(DeprecationWarning, match=r"BlockFacts.place is now .address"):
        assert block.place == block.address


def test_new_names_warn_of_nothing(store):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        both = gk.gradients(store, split="train", checkpoints=["final"])
        assert [rows.key.checkpoint for rows in both] == ["final"]
        assert gk.gradients(store, split="train", checkpoints="final", layers=nn.Linear).size == 15
        assert gk.gradients(store.location, split="train", layers="Linear").size == 15
