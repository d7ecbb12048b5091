"""Documents of a language model are ranked by their loss per token, not by their length."""

import numpy as np
import pytest
import torch
from raises import raises
from scipy.stats import spearmanr
from torch import nn

import gradkeep as gk
from gradkeep.errors import AttributionError

DOCUMENTS, WORDS = 60, 12


class Bigrams(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(WORDS, WORDS)

    def forward(self, input_ids, attention_mask=None):
        return self.table(input_ids)


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """Documents that count upwards, some of them random, of very different lengths."""
    draw = np.random.default_rng(0)
    lengths = draw.integers(4, 60, DOCUMENTS)
    random = np.zeros(DOCUMENTS, bool)
    random[::10] = True
    width = lengths.max()
    tokens = np.zeros((DOCUMENTS, width), np.int64)
    for row, length in enumerate(lengths):
        counting = (draw.integers(WORDS) + np.arange(length)) % WORDS
        tokens[row, :length] = draw.integers(0, WORDS, length) if random[row] else counting
    mask = np.arange(width)[None] < lengths[:, None]
    model = Bigrams()
    with torch.no_grad():
        model.table.weight.copy_(4.0 * torch.roll(torch.eye(WORDS), 1, 1))
    labels = torch.from_numpy(np.where(mask, tokens, -100))
    batch = {
        "input_ids": torch.from_numpy(tokens),
        "attention_mask": torch.from_numpy(mask.astype(np.int64)),
        "labels": labels,
    }
    store = gk.open(tmp_path_factory.mktemp("store"))
    common = {"task": gk.LanguageModeling(), "split": "train", "progress": False}
    gk.capture(store, model, [batch], **common)
    gk.capture(store, model, [batch], keep="losses", name="losses", **common)
    gk.capture(store, model, [batch], keep=gk.Keep(256, seed=1), name="small", **common)
    return store, lengths, random


@pytest.mark.parametrize("by", ["loss", "self"])
def test_length_does_not_decide(world, by):
    store, lengths, random = world
    ranked = gk.suspects(store, by=by)
    assert ranked.documents
    assert "token" in ranked.measure
    assert abs(spearmanr(ranked.values, lengths[ranked.ids]).statistic) < 0.7
    if by == "loss":
        assert set(ranked.ids[: random.sum()]) == set(np.flatnonzero(random))


def test_a_capture_of_losses_ranks_documents_too(world):
    store, _, random = world
    ranked = gk.suspects(store, name="losses")
    assert set(ranked.ids[: random.sum()]) == set(np.flatnonzero(random))


def test_summed_losses_are_refused(world):
    store, *_ = world
    with raises(AttributionError, "attribute.missing_column", fix="keep="):
        gk.suspects(store, name="small")
