"""Architectures of transformers that nothing here was made for: kept coordinates against autograd."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

import gradkeep as gk
import gradkeep.store as gs
from gradkeep.capturing._first_batch import CaptureSettings, prepare_capture
from gradkeep.capturing._readiness import ready

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
pytestmark = pytest.mark.filterwarnings("ignore")  # those of the libraries
VOCABULARY, LENGTH, ROWS = 64, 12, 16
COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
SPECIAL = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
GROUPED = COMMON | SPECIAL | {"num_key_value_heads": 2}


class Labels(gk.Task):
    """A classifier of Hugging Face."""

    def losses(self, model, batch):
        inputs = {name: value for name, value in batch.items() if name != "labels"}
        logits = model(**inputs).logits
        return nn.functional.cross_entropy(logits, batch["labels"], reduction="none")


MODELS = {
    "qwen2, left": ("Qwen2ForCausalLM", "Qwen2Config", GROUPED),
    "qwen2, tied": ("Qwen2ForCausalLM", "Qwen2Config", GROUPED | {"tie_word_embeddings": True}),
    "gemma2, left": ("Gemma2ForCausalLM", "Gemma2Config", GROUPED | {"head_dim": 8}),
    "mixtral": ("MixtralForCausalLM", "MixtralConfig", GROUPED | {"num_local_experts": 4}),
    "phi, left": ("PhiForCausalLM", "PhiConfig", GROUPED),
    "mamba": (
        "MambaForCausalLM",
        "MambaConfig",
        {"vocab_size": VOCABULARY, "hidden_size": 32, "state_size": 4, "num_hidden_layers": 2}
        | SPECIAL,
    ),
    "t5": (
        "T5ForConditionalGeneration",
        "T5Config",
        {
            "vocab_size": VOCABULARY,
            "d_model": 32,
            "d_kv": 8,
            "d_ff": 48,
            "num_layers": 1,
            "num_heads": 4,
            "decoder_start_token_id": 0,
            "pad_token_id": 0,
        },
    ),
    "bert": ("BertForSequenceClassification", "BertConfig", COMMON | {"num_labels": 3}),
    "qwen2, fp16": ("Qwen2ForCausalLM", "Qwen2Config", GROUPED),
}


def made(kind):
    """A model with random weights, a batch of rows of several lengths, and a task."""
    torch.manual_seed(0)
    model, config, sizes = MODELS[kind]
    net = getattr(transformers, model)(getattr(transformers, config)(**sizes)).eval()
    tokens = torch.randint(3, VOCABULARY, (ROWS, LENGTH))
    mask = torch.ones_like(tokens)
    for row in range(ROWS):
        padding = row % 4
        mask[row, : padding if "left" in kind else 0] = 0
        mask[row, LENGTH if "left" in kind else LENGTH - padding :] = 0
    tokens = tokens * mask
    labels = tokens.masked_fill(mask == 0, -100)
    batch = {"input_ids": tokens, "attention_mask": mask, "labels": labels}
    if kind == "t5":
        batch["labels"] = batch["labels"][:, :7].contiguous()
    if kind == "bert":
        return net, batch | {"labels": torch.arange(ROWS) % 3}, Labels()
    return net.half() if "fp16" in kind else net, batch, gk.LanguageModeling()


def by_autograd(model, batch, task):
    """Every parameter's gradient of every row `[B, P]`, one row at a time, in float32."""
    net = copy.deepcopy(model).float()
    results = {name: [] for name, _ in net.named_parameters()}
    for row in range(ROWS):
        net.zero_grad()
        task.losses(net, {name: value[row : row + 1] for name, value in batch.items()}).backward()
        for name, parameter in net.named_parameters():
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            results[name].append(gradient.flatten())
    return {name: torch.stack(parts).double() for name, parts in results.items()}


def assert_near(actual, expected, name):
    error = (actual.double() - expected).norm() / expected.norm().clamp(min=1e-5)
    assert error < 1e-5, (name, float(error))


@pytest.mark.parametrize("kind", MODELS)
def test_what_is_kept_is_what_autograd_says(tmp_path, kind):
    model, batch, task = made(kind)
    whole = by_autograd(model, batch, task)
    store = gk.open(tmp_path)
    halves = [{name: value[at : at + 8] for name, value in batch.items()} for at in (0, 8)]
    for name, split, keep in (
        ("exact", "train", "exact"),
        ("small", "train", "4KiB"),
        ("small", "test", "queries"),
    ):
        options = {"task": task, "split": split, "keep": keep, "name": name, "progress": False}
        gk.capture(store, model, halves, **options)
    restored = gk.gradients(store, split="train", name="exact").restore(range(ROWS))
    assert set(restored) == set(whole)
    for name, actual in restored.items():
        assert_near(actual.flatten(1), whole[name], name)
    with ready(model):  # forms before anything is stored dense
        pieces = prepare_capture(model, task, halves[0], CaptureSettings()).pieces
    forms = {unit.name: piece.form for unit, piece in pieces.items()}
    basis = store.read(gs.BasisKey("final", "main", "small"))
    arrays = basis.read_rows(np.zeros(1, np.int64), list(basis.names))
    stored = store.read(gs.CaptureKey("final", "test", "main", "small"))
    values = stored.read_rows(np.arange(ROWS), [f"{one.name}.bits" for one in stored.schema.layers])
    for layer in stored.schema.layers:
        form = forms[layer.name]
        dense = torch.cat([whole[parameter.name] for parameter in form.parameters], 1)
        parts = []
        for at, piece in enumerate(form.weight_blocks()):
            if f"{layer.name}.{at}.left" not in arrays:
                continue
            first, right, weights, chosen = (
                torch.from_numpy(np.array(arrays[f"{layer.name}.{at}.{part}"])[0])
                for part in ("left", "right", "weights", "chosen")
            )
            moved = (first.double().mT @ piece.matrices(dense) @ right.double()).flatten(1)
            parts.append((moved[:, chosen] * weights.double()).sum(1))
        assert_near(
            torch.from_numpy(np.array(values[f"{layer.name}.bits"])),
            torch.cat(parts, 1),
            layer.name,
        )
    assert gk.attribute(store, name="small").numpy().shape == (ROWS, ROWS)
