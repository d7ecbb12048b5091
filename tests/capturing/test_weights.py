"""Checkpoints of tied models: files that name a weight once, and files that contradict themselves."""

import pytest
import torch
from raises import raises
from torch import nn

import gradkeep as gk
from gradkeep.capturing._weights import load_weights, put_weights
from gradkeep.errors import CaptureError


class Tied(nn.Module):
    """A language model whose head is its embedding."""

    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(11, 4)
        self.body = nn.Linear(4, 4)
        self.head = nn.Linear(4, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        return self.head(self.body(self.embed(tokens)))


@pytest.mark.parametrize("left_out", ["head.weight", "embed.weight"])
def test_a_tied_weight_may_be_left_out_under_one_name(tmp_path, left_out):
    from safetensors.torch import save_file

    source = Tied(1)
    state = {k: v.clone() for k, v in source.state_dict().items() if k != left_out}
    save_file(state, tmp_path / "model.safetensors")
    model = Tied(2)
    put_weights(model, load_weights(tmp_path), name="final")
    assert model.head.weight is model.embed.weight
    for ours, theirs in zip(model.parameters(), source.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_a_wrapper_s_prefix_does_not_hide_that_weights_are_tied():
    source = Tied(1)
    state = {f"module.{k}": v for k, v in source.state_dict().items() if k != "head.weight"}
    model = Tied(2)
    put_weights(model, state, name="final")
    assert torch.equal(model.head.weight, source.embed.weight)


def test_two_values_for_one_parameter_are_refused():
    model, state = Tied(2), dict(Tied(1).state_dict())
    state["head.weight"] = state["head.weight"] + 1
    before = {k: v.clone() for k, v in model.state_dict().items()}
    with raises(
        CaptureError, "capture.tied_weights_differ", mentions="embed.weight than for head.weight"
    ):
        put_weights(model, state, name="final")
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


def test_what_is_not_tied_is_still_missing():
    model = Tied(2)
    model.head.weight = nn.Parameter(model.embed.weight.detach().clone())
    state = {k: v for k, v in Tied(1).state_dict().items() if k != "head.weight"}
    with raises(CaptureError, "capture.weights_do_not_fit", mentions="missing ['head.weight']"):
        put_weights(model, state, name="final")


def test_a_folder_of_a_tied_model_is_captured_as_its_weights_are(tmp_path, store):
    from safetensors.torch import save_file

    source = Tied(1)
    state = {k: v.clone() for k, v in source.state_dict().items() if k != "head.weight"}
    save_file(state, tmp_path / "model.safetensors")
    tokens = torch.arange(24).remainder(11).view(6, 4)
    task = gk.LanguageModeling()
    options = {"task": task, "split": "train", "progress": False}
    gk.capture(store, Tied(2), [(tokens, tokens)], checkpoints={"folder": tmp_path}, **options)
    gk.capture(store, source, [(tokens, tokens)], checkpoints="here", **options)
    folder, here = (store.read(gk.store.CaptureKey(name, "train")) for name in ("folder", "here"))
    assert folder.schema.fingerprints["weights"] == here.schema.fingerprints["weights"]
    assert folder.column("loss").tolist() == here.column("loss").tolist()
