"""Candidates by small codes, ranked by exact products, against the products of all rows."""

import numpy as np
import pytest
import torch
from torch import nn

import gradkeep as gk
from gradkeep.errors import QueryError


def captured(tmp_path, model, shape, rows=300, queries=6, **options):
    torch.manual_seed(0)
    store, net = gk.open(tmp_path), model()
    # A few directions that most of every row lies along, as gradients have them.
    leading = torch.randn(5, int(np.prod(shape)))
    for split, count in (("train", rows), ("test", queries)):
        x = (torch.randn(count, 5) * torch.logspace(1, 0, 5)) @ leading
        x = (x + 0.3 * torch.randn(x.shape)).view(count, *shape)
        data = [(x / 10, torch.arange(count) % 3)]
        gk.capture(
            store, net, data, task=gk.Classification(), split=split, progress=False, **options
        )
    return tuple(gk.gradients(store, split=split) for split in ("train", "test"))


MODELS = {
    "factors": (lambda: nn.Sequential(nn.Linear(12, 6), nn.Tanh(), nn.Linear(6, 3)), (12,), {}),
    "images": (
        lambda: nn.Sequential(nn.Conv2d(1, 2, 2), nn.Flatten(), nn.Linear(12, 3)),
        (1, 3, 4),
        {"keep": "dense"},
    ),
    "bits": (lambda: nn.Linear(800, 3), (800,), {"keep": gk.Keep("512B", coordinates="random")}),
}


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("smallest", [False, True])
def test_the_best_are_those_of_all_rows(tmp_path, kind, smallest):
    model, shape, options = MODELS[kind]
    train, test = captured(tmp_path, model, shape, **options)
    codes = gk.query.small_codes(train, bytes=24)
    found = gk.query.top(test, train, 5, codes=codes, candidates=100, smallest=smallest)
    exact = gk.query.top(test, train, 5, smallest=smallest)
    shared = [
        len(set(a) & set(b)) for a, b in zip(found.ids.tolist(), exact.ids.tolist(), strict=True)
    ]
    assert sum(shared) >= 0.95 * exact.ids.numel()
    same = found.ids == exact.ids
    assert torch.allclose(found.values[same], exact.values[same], rtol=1e-4)


def test_with_all_rows_as_candidates_nothing_is_lost(tmp_path):
    train, test = captured(tmp_path, *MODELS["factors"][:2], rows=40)
    codes = gk.query.small_codes(train, bytes=4)
    found = gk.query.top(test, train, 7, codes=codes, candidates=40)
    exact = gk.query.top(test, train, 7)
    assert torch.equal(found.ids, exact.ids)
    assert torch.allclose(found.values, exact.values, rtol=1e-5)


def test_codes_are_made_once_and_read_again(tmp_path):
    train, _ = captured(tmp_path, *MODELS["factors"][:2], rows=50)
    one = gk.query.small_codes(train, bytes=8)
    files = sorted(path.name for path in tmp_path.rglob("*.safetensors"))
    again = gk.query.small_codes(train, bytes=8)
    assert np.array_equal(one.codes, again.codes)
    assert files == sorted(path.name for path in tmp_path.rglob("*.safetensors"))
    assert "50 rows, 8 bytes each" in repr(again)
    assert 0.5 < again.share <= 1.0001
    assert gk.store.verify(tmp_path).healthy
    with pytest.raises(QueryError, match="other codes"):
        gk.query.small_codes(train, bytes=8, seed=1)


def test_more_bytes_than_rows_are_empty_ones(tmp_path):
    train, test = captured(tmp_path, *MODELS["factors"][:2], rows=5)
    codes = gk.query.small_codes(train, bytes=16)
    assert not codes.codes[:, 5:].any()
    assert gk.query.top(test, train, 2, codes=codes).ids.shape == (6, 2)


def test_codes_of_other_rows_are_refused(tmp_path):
    train, test = captured(tmp_path, *MODELS["factors"][:2], rows=20)
    codes = gk.query.small_codes(test, bytes=4)
    with pytest.raises(QueryError, match="codes are of other rows"):
        gk.query.top(test, train, 2, codes=codes)
    codes = gk.query.small_codes(train, bytes=4)
    with pytest.raises(QueryError, match="one checkpoint"):
        gk.query.top(test, train, 2, codes=codes, refine="main")
    with pytest.raises(QueryError, match="candidates"):
        gk.query.top(test, train, 2, codes=codes, candidates=0)
