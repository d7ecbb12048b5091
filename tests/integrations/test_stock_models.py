"""Stock configurations of transformers in tiny sizes: no pass per sample, and gradients of autograd."""

import pytest
import torch
from torch import nn

import gradkeep as gk
from gradkeep.capturing import _proofs, _tracer

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
pytestmark = pytest.mark.filterwarnings("ignore")  # those of the libraries
ROWS, VOCABULARY = 12, 40
IMAGES = {"image_size": 16, "patch_size": 4, "num_channels": 3}
SIZES = {
    "hidden_size": 24,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
TEXTS = SIZES | {"vocab_size": VOCABULARY, "max_position_embeddings": 20}
SWIN = {"embed_dim": 8, "depths": [2, 2], "num_heads": [2, 2], "window_size": 2}
CONVNEXT = {"image_size": 16, "hidden_sizes": [8, 12], "depths": [1, 1], "num_stages": 2}
MODELS = {
    "vit": ("ViTForImageClassification", "ViTConfig", IMAGES | SIZES),
    "deit": ("DeiTForImageClassification", "DeiTConfig", IMAGES | SIZES),
    "deit, teacher": ("DeiTForImageClassificationWithTeacher", "DeiTConfig", IMAGES | SIZES),
    "swin": ("SwinForImageClassification", "SwinConfig", IMAGES | {"patch_size": 2} | SWIN),
    "dinov2": ("Dinov2ForImageClassification", "Dinov2Config", IMAGES | SIZES | {"mlp_ratio": 2}),
    "beit": ("BeitForImageClassification", "BeitConfig", IMAGES | SIZES),
    "convnext": ("ConvNextForImageClassification", "ConvNextConfig", CONVNEXT),
    "clip, images": ("CLIPVisionModelWithProjection", "CLIPVisionConfig", IMAGES | SIZES),
    "clip, texts": ("CLIPTextModelWithProjection", "CLIPTextConfig", TEXTS | {"eos_token_id": 2}),
    "siglip, images": ("SiglipVisionModel", "SiglipVisionConfig", IMAGES | SIZES),
    "bert": ("BertForSequenceClassification", "BertConfig", TEXTS),
    "distilbert": (
        "DistilBertForSequenceClassification",
        "DistilBertConfig",
        {"vocab_size": VOCABULARY, "dim": 24, "hidden_dim": 32, "n_layers": 2, "n_heads": 2},
    ),
}


class Outputs(gk.Task):
    """The cross-entropy of the first output, whatever it means."""

    def losses(self, model, batch):
        inputs = {name: value for name, value in batch.items() if name != "target"}
        output = model(**inputs)
        names = ("logits", "image_embeds", "text_embeds", "pooler_output")
        values = next(output[name] for name in names if name in output)
        return nn.functional.cross_entropy(
            values, batch["target"] % values.shape[1], reduction="none"
        )


def build(kind):
    torch.manual_seed(0)
    model, config, sizes = MODELS[kind]
    net = getattr(transformers, model)(getattr(transformers, config)(**sizes)).eval()
    for parameter in net.parameters():  # tokens and scales begin at zero or one
        parameter.data += 0.02 * torch.randn_like(parameter)
    targets = torch.arange(ROWS) % 2
    if "vocab_size" in sizes:
        tokens = torch.randint(3, VOCABULARY, (ROWS, 9))
        tokens[:, -1] = 2
        return net, {"input_ids": tokens, "target": targets}
    return net, {"pixel_values": torch.randn(ROWS, 3, 16, 16), "target": targets}


@pytest.mark.parametrize("kind", MODELS)
def test_no_layer_needs_a_pass_per_sample(tmp_path, kind, monkeypatch):
    model, batch = build(kind)
    passes = []
    for module in (_proofs, _tracer):
        original = module.whole_model_gradients
        monkeypatch.setattr(
            module,
            "whole_model_gradients",
            lambda units, *rest, original=original, **options: (
                passes.extend(unit.name for unit in units) or original(units, *rest, **options)
            ),
        )
    store, task = gk.open(tmp_path), Outputs()
    thirds = [{name: value[at : at + 5] for name, value in batch.items()} for at in (0, 5, 10)]
    gk.capture(store, model, thirds, task=task, split="train", progress=False)
    assert passes == []
    restored = gk.gradients(store, split="train").restore(range(ROWS))
    for row in range(ROWS):
        model.zero_grad()
        one = {name: value[row : row + 1] for name, value in batch.items()}
        task.losses(model, one).sum().backward()
        scale = max(float(p.grad.norm()) for p in model.parameters() if p.grad is not None)
        for name, parameter in model.named_parameters():
            if parameter.grad is None:  # such as a token for masked patches
                assert not restored.get(name, torch.zeros(ROWS, 1))[row].any()
                continue
            error = float((restored[name][row] - parameter.grad).norm())
            # Some gradients, such as those of a key's bias, are zero but for rounding.
            assert error < 1e-5 * max(float(parameter.grad.norm()), 0.01 * scale), name
