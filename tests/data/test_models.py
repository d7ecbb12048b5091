"""The reference models are the published ones, their layers have the names that others use."""

import math
import subprocess
import sys

import pytest
import torch
from raises import raises
from torch import nn
from torch.nn import functional

import gradkeep.data
from gradkeep.data import dataset, model, models
from gradkeep.errors import DataError

# What is known of the published models, at their published sizes.
BASE = {"vocabulary": 30522, "length": 512, "dim": 768, "heads": 12, "layers": 12, "inner": 3072}
PUBLISHED = [
    ("mlp", {}, 85_002),
    ("cnn", {}, 29_066),
    ("resnet9", {"width": 16}, 412_954),
    ("resnet9", {}, 6_573_130),
    ("resnet20", {}, 269_722),
    ("resnet50", {}, 25_557_032),
    ("vgg16", {}, 14_728_266),
    ("bert", {**BASE, "segments": 2, "pooler": True, "classes": 2}, 109_483_778),
    (
        "gpt",
        {"vocabulary": 50257, "length": 1024, "dim": 768, "heads": 12, "layers": 12},
        124439808,
    ),
]
SMALL = {
    "bert": ({"vocabulary": 20, "length": 8, "dim": 8, "inner": 16}, (3, 8)),
    "cnn": ({"width": 4}, (3, 1, 8, 8)),
    "gpt": ({"vocabulary": 20, "length": 8, "dim": 8}, (3, 8)),
    "mlp": ({"hidden": [8]}, (3, 1, 8, 8)),
    "resnet9": ({"width": 2}, (3, 3, 16, 16)),
    "resnet20": ({"width": 2}, (3, 3, 16, 16)),
    "resnet50": ({"width": 2, "classes": 10}, (3, 3, 64, 64)),
    "vgg16": ({"width": 2}, (3, 3, 32, 32)),
}


def small(name, **more):
    sizes, shape = SMALL[name]
    built = model(name, **{**sizes, **more})
    generator = torch.Generator().manual_seed(0)
    words = name in ("bert", "gpt")
    x = (
        torch.randint(4, 20, shape, generator=generator)
        if words
        else torch.randn(shape, generator=generator)
    )
    return built, x


@pytest.mark.parametrize(("name", "sizes", "expected"), PUBLISHED)
def test_the_models_have_as_many_parameters_as_the_published_ones(name, sizes, expected):
    with torch.device("meta"):
        built = model(name, **sizes)
    assert sum(parameter.numel() for parameter in built.parameters()) == expected


@pytest.mark.parametrize(
    ("name", "sizes", "path", "shape"),
    [
        ("VGG16", {}, "conv13", (512, 512, 3, 3)),
        ("VGG16", {}, "l1", (10, 512)),
        ("VGG16", {"hidden": [128, 64]}, "l3", (10, 64)),
        ("ResNet50", {}, "model_base.layer4.2.conv2", (512, 512, 3, 3)),
        ("ResNet50", {}, "model_base.layer1.0.downsample.0", (256, 64, 1, 1)),
        ("ResNet50", {}, "l1", (1000, 2048)),
        ("Bert", {"layers": 12}, "bert.encoder.layer.11.attention.self.query", (128, 128)),
        ("Bert", {}, "bert.encoder.layer.0.attention.output.dense", (128, 128)),
        ("Bert", {}, "bert.encoder.layer.0.intermediate.dense", (512, 128)),
        ("Bert", {}, "classifier", (4, 128)),
        ("GPT", {}, "h.1.attn.query", (64, 64)),
        ("ResNet20", {}, "layer3.2.conv2", (64, 64, 3, 3)),
        ("MLP", {}, "l3", (10, 256)),
    ],
)
def test_layers_have_the_names_that_others_use(name, sizes, path, shape):
    with torch.device("meta"):
        layer = model(name, **sizes).get_submodule(path)
    assert type(layer) in (nn.Linear, nn.Conv2d)
    assert layer.weight.shape == shape


@pytest.mark.parametrize("name", models())
def test_every_parameter_gets_a_gradient_and_every_layer_is_called_once(name):
    built, x = small(name)
    calls = {}
    for path, layer in built.named_modules():
        if isinstance(layer, nn.Linear | nn.Conv2d | nn.Embedding):
            layer.register_forward_hook(
                lambda *_, path=path: calls.update({path: calls.get(path, 0) + 1})
            )
    logits = built(x)
    assert logits.shape == ((3, 8, 20) if name == "gpt" else (3, 4 if name == "bert" else 10))
    logits.logsumexp(-1).sum().backward()
    assert all(parameter.grad is not None for parameter in built.parameters())
    assert set(calls.values()) == {1}


@pytest.mark.parametrize("name", models())
def test_the_same_seed_builds_the_same_and_another_seed_another(name):
    state = torch.get_rng_state()
    first, same, other = (small(name, seed=seed)[0].state_dict() for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), state), "building must not touch torch's own state"
    assert all(torch.equal(first[key], same[key]) for key in first)
    assert not all(torch.equal(first[key], other[key]) for key in first)


@pytest.mark.parametrize("name", models())
def test_a_row_does_not_depend_on_the_rows_beside_it(name):
    built, x = small(name)
    built.eval()
    torch.testing.assert_close(built(x)[1:2], built(x[1:2]), rtol=1e-4, atol=1e-5)


def test_the_encoder_is_that_of_torch():
    built, x = small("bert", layers=1)
    built.eval()
    layer = built.bert.encoder.layer[0]
    known = nn.TransformerEncoderLayer(
        8, 4, 16, 0.0, "gelu", layer_norm_eps=1e-12, batch_first=True
    ).eval()
    inside, attention = layer.attention.self, known.self_attn
    parts = (inside.query, inside.key, inside.value)
    with torch.no_grad():
        attention.in_proj_weight.copy_(torch.cat([part.weight for part in parts]))
        attention.in_proj_bias.copy_(torch.cat([part.bias for part in parts]))
    for ours, theirs in [
        (layer.attention.output.dense, attention.out_proj),
        (layer.intermediate.dense, known.linear1),
        (layer.output.dense, known.linear2),
        (layer.attention.output.LayerNorm, known.norm1),
        (layer.output.LayerNorm, known.norm2),
    ]:
        theirs.load_state_dict(ours.state_dict())
    hidden = torch.tensor([[0] * 8, [0] * 5 + [1] * 3, [0] * 2 + [1] * 6]).bool()
    embedded = built.bert.embeddings(x)
    expected = known(embedded, src_key_padding_mask=hidden)
    result = layer(embedded, hidden[:, None, None])
    torch.testing.assert_close(result[~hidden], expected[~hidden])


def test_what_the_mask_hides_is_not_read():
    built, x = small("bert", pooler=True, segments=2)
    built.eval()
    mask = torch.tensor([[1] * 8, [1] * 5 + [0] * 3, [1] + [0] * 7])
    changed = torch.where(mask == 0, 0, x)
    assert not torch.equal(changed, x)
    assert torch.equal(built(x, mask), built(changed, mask))
    torch.testing.assert_close(built(x[1:2, :5]), built(x, mask)[1:2])


@pytest.mark.parametrize("tied", [True, False])
def test_a_position_sees_only_what_came_before(tied):
    built, x = small("gpt", tied=tied)
    changed = x.clone()
    changed[:, 5] = (x[:, 5] + 1) % 20
    same = (built(x) == built(changed)).all(-1).all(0)
    assert same.tolist() == [True] * 5 + [False] * 3
    assert (built.lm_head.weight is built.wte.weight) == tied
    loss = functional.cross_entropy(built(x).flatten(0, 1), x.flatten())
    assert loss.item() == pytest.approx(math.log(20), abs=0.1)


def test_the_small_models_learn_the_digits():
    x, y = dataset("digits")[:]
    held, truth = dataset("digits", split="test")[:]
    for name, sizes in (("mlp", {"hidden": [64]}), ("cnn", {"width": 8})):
        built = model(name, **sizes)
        optimizer = torch.optim.Adam(built.parameters(), 1e-2)
        for _ in range(25):
            loss = functional.cross_entropy(built(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        assert (built(held).argmax(1) == truth).float().mean() > 0.9, name
        assert torch.equal(built(held), built(held.flatten(1)))


@pytest.mark.parametrize(
    ("name", "sizes", "code", "words"),
    [
        ("vgg61", {}, "data.unknown_name", "vgg16"),
        ("resnet", {}, "data.unknown_name", "resnet9"),
        ("mlp", {"hiden": [3]}, "data.unknown_name", "hidden"),
        ("mlp", {"hidden": 3}, "data.model_size", "list of whole numbers"),
        ("mlp", {"classes": 0}, "data.model_size", "whole number from 1"),
        ("mlp", {"classes": "10"}, "data.model_size", "whole number"),
        ("mlp", {"classes": True}, "data.model_size", "whole number"),
        ("gpt", {"tied": 1}, "data.model_size", "true or false"),
        ("gpt", {"dropout": 1.0}, "data.model_size", "share"),
        ("gpt", {"heads": 5}, "data.heads", "heads=5"),
        ("bert", {"segments": -1}, "data.model_size", "whole number from 0"),
    ],
)
def test_what_cannot_be_built_is_refused_with_what_could(name, sizes, code, words):
    with raises(DataError, code, mentions=words):
        model(name, **sizes)


@pytest.mark.parametrize("name", ["bert", "gpt"])
def test_sequences_longer_than_the_positions_are_refused(name):
    built, x = small(name)
    with raises(DataError, "data.sequence_length", fix="length=16"):
        built(torch.cat([x, x], 1))


def test_the_classes_are_public_and_loaded_when_used():
    assert type(model("cnn")) is gradkeep.data.CNN
    with pytest.raises(AttributeError, match="VGG17"):
        _ = gradkeep.data.VGG17
    code = "import sys, gradkeep.data as d; d.models(); dir(d); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
