"""Gradients kept in few bytes of the models people have: as those of the plain model."""

import copy

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

import gradkeep as gk

pytestmark = pytest.mark.filterwarnings("ignore::gradkeep.CaptureWarning")
KEEP = "256B"


class Speaker(nn.Module):
    def __init__(self, *, checkpointed=False):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.up = nn.Embedding(23, 16), nn.Linear(16, 32)
        self.down, self.head = nn.Linear(32, 16), nn.Linear(16, 23, bias=False)
        self.head.weight = self.embed.weight
        self.checkpointed = checkpointed

    def body(self, x):
        return x + self.down(self.up(x).tanh())

    def forward(self, input_ids, attention_mask=None, position_ids=None):
        x = self.embed(input_ids).cumsum(1)
        x = checkpoint(self.body, x, use_reentrant=True) if self.checkpointed else self.body(x)
        return self.head(x)


def data(rows=40):
    order = torch.Generator().manual_seed(0)
    return [{"input_ids": torch.randint(23, (7,), generator=order)} for _ in range(rows)]


def bits(store, model, loader, name, **options):
    gk.capture(
        store,
        model,
        loader,
        task=gk.LanguageModeling(),
        split="train",
        keep=KEEP,
        checkpoints=name,
        progress=False,
        **options,
    )
    block = store.read(gk.store.CaptureKey(name, "train"))
    small = [a.name for a in block.schema.arrays if a.kind == "projection" and a.dtype != "float32"]
    assert small, [a.name for a in block.schema.arrays]
    return {array: np.asarray(block.column(array)) for array in small}, block


def agreement(ours, theirs):
    return min(float((ours[name] == theirs[name]).mean()) for name in theirs)


def test_16_bit_and_checkpointed_models_keep_the_coordinates_of_plain_ones(store):
    low = Speaker().bfloat16()
    expected, _ = bits(store, copy.deepcopy(low).float(), DataLoader(data(), 8), "wide")
    result, _ = bits(store, low, DataLoader(data(), 8), "low")
    assert agreement(result, expected) > 0.99
    plain, _ = bits(store, Speaker(), DataLoader(data(), 8), "plain")
    hidden, _ = bits(store, Speaker(checkpointed=True), DataLoader(data(), 8), "hidden")
    assert agreement(hidden, plain) > 0.99


def test_documents_of_packs_and_columns_are_kept_small_too(store):
    expected, _ = bits(store, Speaker(), DataLoader(data(), 8), "plain")

    def packed(rows):
        tokens = torch.cat([row["input_ids"] for row in rows])[None]
        places = torch.arange(7).repeat(len(rows))[None]
        return {"input_ids": tokens, "position_ids": places, "text": [row["text"] for row in rows]}

    text = [row | {"text": f"story {at}"} for at, row in enumerate(data())]
    loader = DataLoader(text, 8, collate_fn=packed)
    result, block = bits(store, Speaker(), loader, "packs", columns=["text"])
    assert block.column("text") == [f"story {at}" for at in range(40)]
    assert len(block) == 40
    assert result.keys() == expected.keys()
