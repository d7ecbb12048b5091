"""Adapter folders: names without the adapter's, and adapters that are not the model's."""

import json

import pytest
import torch
from raises import raises
from safetensors.torch import save_file
from torch import nn

import gradkeep as gk
from gradkeep.capturing._weights import load_weights, put_weights
from gradkeep.errors import CaptureError


class LowRank(nn.Module):
    """A frozen linear layer and its adapter, with the names that PEFT gives them."""

    def __init__(self, rank, width=4):
        super().__init__()
        self.base_layer = nn.Linear(width, width).requires_grad_(False)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(width, rank, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(rank, width, bias=False)})

    def forward(self, x):
        return self.base_layer(x) + self.lora_B["default"](self.lora_A["default"](x))


def adapted(seed, *, rank=2, layers=2, width=4):
    torch.manual_seed(0)
    model = nn.Sequential(*(LowRank(rank, width) for _ in range(layers)), nn.Linear(width, 3))
    model[-1].requires_grad_(False)
    torch.manual_seed(seed)
    for parameter in model.parameters():
        if parameter.requires_grad:
            nn.init.normal_(parameter)
    return model


def saved(folder, model, **settings):
    folder.mkdir(exist_ok=True)
    state = {
        "base_model.model." + name.replace(".default.", "."): value.clone()
        for name, value in model.state_dict().items()
        if "lora_" in name
    }
    save_file(state, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", **settings}))
    return folder


def test_an_adapter_s_folder_replaces_the_adapter_and_nothing_else(tmp_path):
    source, model = adapted(1), adapted(2)
    put_weights(model, load_weights(saved(tmp_path, source)), name="final")
    for name, value in source.state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name


def test_the_adapter_s_file_alone_and_its_state_dict_are_taken_too(tmp_path):
    source = adapted(1)
    file = saved(tmp_path, source) / "adapter_model.safetensors"
    plain = {n.replace(".default.", "."): v for n, v in source.state_dict().items() if "lora" in n}
    for values in (file, plain):
        model = adapted(2)
        put_weights(model, load_weights(values), name="final")
        assert torch.equal(model[1].lora_B["default"].weight, source[1].lora_B["default"].weight)


@pytest.mark.parametrize(
    ("other", "code", "mentions"),
    [
        ({"rank": 3}, "capture.adapter_shapes", "another rank"),
        ({"width": 5}, "capture.adapter_shapes", "another size"),
        ({"layers": 1}, "capture.other_adapter", "missing ['1.lora_A"),
        ({"layers": 3}, "capture.other_adapter", "unknown ['2.lora_A"),
    ],
)
def test_another_adapter_is_refused_and_nothing_is_loaded(tmp_path, other, code, mentions):
    model = adapted(2)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with raises(CaptureError, code, mentions=mentions):
        put_weights(model, load_weights(saved(tmp_path, adapted(1, **other))), name="final")
    assert all(torch.equal(v, before[n]) for n, v in model.state_dict().items())


def test_an_adapter_needs_a_model_that_has_one(tmp_path):
    plain = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
    with raises(CaptureError, "capture.model_without_adapter"):
        put_weights(plain, load_weights(saved(tmp_path, adapted(1))), name="final")


def test_settings_that_are_no_json_are_refused(tmp_path):
    (saved(tmp_path, adapted(1)) / "adapter_config.json").write_text("{")
    with raises(CaptureError, "capture.adapter_not_json"):
        load_weights(tmp_path)


def test_adapters_are_captured_on_the_base_that_the_model_came_with(tmp_path, store):
    source = adapted(1)
    folder = saved(tmp_path / "folder", source)
    other = {n: v + 1 for n, v in adapted(3).state_dict().items()}
    data = [(torch.randn(5, 4), torch.tensor([0, 1, 2, 0, 1]))]
    options = {"task": gk.Classification(), "split": "train", "progress": False}
    model = adapted(2)
    gk.capture(store, model, data, checkpoints={"whole": other, "adapter": folder}, **options)
    gk.capture(store, source, data, checkpoints="here", **options)
    result, here = (store.read(gk.store.CaptureKey(name, "train")) for name in ("adapter", "here"))
    assert result.schema.fingerprints["weights"] == here.schema.fingerprints["weights"]
    assert result.column("loss").tolist() == here.column("loss").tolist()
