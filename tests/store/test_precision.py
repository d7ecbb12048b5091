"""Scores from stored factors against float32, at a converged model, on real digits.

Early in training every encoding looks fine; at convergence most gradients are tiny, and an encoding
without a scale per row flushes them to zero and loses the ranking.
"""

import itertools

import numpy as np
import pytest
import torch
from raises import raises
from scipy.stats import spearmanr
from sklearn.datasets import load_digits

import gradkeep as gk
from gradkeep.store import Memory

QUERIES = 100
LAYERS = ("first", "second", "third")


@pytest.fixture(scope="module")
def factors():
    """Per layer the prefix [N, d_in] and suffix [N, d_out] of a digits MLP after 60 epochs."""
    torch.manual_seed(0)
    digits = load_digits()
    x = torch.tensor(digits.data / 16.0, dtype=torch.float32)
    y = torch.tensor(digits.target)
    sizes = (64, 256, 256, 10)
    layers = [torch.nn.Linear(a, b) for a, b in itertools.pairwise(sizes)]
    optimizer = torch.optim.Adam([p for layer in layers for p in layer.parameters()], lr=3e-3)

    def forward(rows):
        inputs, outputs = [], []
        hidden = rows
        for layer in layers:
            inputs.append(hidden)
            out = layer(hidden)
            if out.requires_grad:
                out.retain_grad()
            outputs.append(out)
            hidden = out.relu()
        return outputs[-1], inputs, outputs

    for _ in range(60):
        for batch in torch.randperm(len(x)).split(64):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(forward(x[batch])[0], y[batch]).backward()
            optimizer.step()
    logits, inputs, outputs = forward(x)
    assert (logits.argmax(1) == y).float().mean() > 0.999
    torch.nn.functional.cross_entropy(logits, y, reduction="sum").backward()
    return {
        name: (passed.detach().numpy(), out.grad.numpy())
        for name, passed, out in zip(LAYERS, inputs, outputs, strict=True)
    }


def scores(train, queries):
    """Dot products of per-sample gradients: sum over layers of (x q^T) o (g h^T)."""
    return sum(
        (queries[name][0].astype(np.float64) @ train[name][0].T.astype(np.float64))
        * (queries[name][1].astype(np.float64) @ train[name][1].T.astype(np.float64))
        for name in LAYERS
    )


def through_the_store(factors, *, encoding, kind):
    store = gk.open(Memory())
    arrays = [
        gk.store.Array(
            f"{name}.{part}", shape=factors[name][at].shape[1:], kind=kind, encoding=encoding
        )
        for name in LAYERS
        for at, part in enumerate(("prefix", "suffix"))
    ]
    rows = len(factors["first"][0])
    key = gk.store.CaptureKey(checkpoint="final", split="train")
    with store.write(key, gk.store.Schema(tuple(arrays), num_rows=rows)) as writer:
        values = {
            f"{name}.{part}": factors[name][at]
            for name in LAYERS
            for at, part in enumerate(("prefix", "suffix"))
        }
        writer.append(np.arange(rows), values)
    block = store.read(key)
    return {
        name: (block.column(f"{name}.prefix"), block.column(f"{name}.suffix")) for name in LAYERS
    }


def agreement(factors, stored):
    """Spearman's rank correlation with float32, the mean over queries."""
    queries = {name: (x[:QUERIES], g[:QUERIES]) for name, (x, g) in factors.items()}
    exact, actual = scores(factors, queries), scores(stored, queries)
    return np.mean([spearmanr(a, b).statistic for a, b in zip(exact, actual, strict=True)])


@pytest.mark.parametrize("encoding", ["plain", "bfloat16", "float16-scaled", "int8-scaled"])
def test_permitted_encodings_keep_the_ranking(factors, encoding):
    stored = through_the_store(factors, encoding=encoding, kind="suffix")
    assert agreement(factors, stored) >= 0.999


def test_bare_float16_loses_the_ranking(factors):
    stored = through_the_store(factors, encoding="float16", kind="data")
    assert agreement(factors, stored) < 0.999


def test_bare_float16_is_refused_for_gradients():
    with raises(gk.GradkeepError, "store.array_float16"):
        gk.store.Array("fc.suffix", shape=(3,), kind="suffix", encoding="float16")
    with raises(gk.GradkeepError, "store.array_float16"):
        gk.store.Array("fc.gradient", "float16", (3,), "gradient")
