"""A question asked once, against captures of the same rows and against autograd."""

import contextlib
import os
import sys

import numpy as np
import pytest
import torch
from raises import raises
from torch import nn

import gradkeep as gk
from gradkeep.data import GPT
from gradkeep.errors import AttributionError, BudgetError, CaptureError
from gradkeep.factors._outer import Outer


@pytest.fixture
def language():
    torch.manual_seed(0)
    model = GPT(vocabulary=13, length=7, dim=8, heads=2, layers=1, tied=False).eval()
    tokens = torch.randint(13, (20, 7))
    return model, list(tokens.split(6)), list(torch.randint(13, (3, 7)).split(2))


def captured(store, model, train, queries, keep):
    for split, batches in (("train", train), ("test", queries)):
        gk.capture(
            store,
            model,
            batches,
            task=gk.LanguageModeling(),
            split=split,
            keep=keep,
            progress=False,
        )


def near(actual, expected, bound):
    assert actual.shape == expected.shape
    assert np.linalg.norm(actual.numpy() - expected.numpy()) < bound * np.linalg.norm(
        expected.numpy()
    )


def test_products_are_those_of_autograd(language):
    model, train, queries = language
    task = gk.LanguageModeling()
    scores = gk.attribute_once(model, train, queries, task=task, method="dot")
    gradients = []
    for batch in (*train, *queries):
        for row in batch:
            model.zero_grad()
            task.losses(model, row[None]).sum().backward()
            gradients.append(torch.cat([p.grad.double().flatten() for p in model.parameters()]))
    whole = torch.stack(gradients)
    expected = (whole[20:] @ whole[:20].t()).numpy()
    assert np.linalg.norm(scores.numpy() - expected) < 1e-5 * np.linalg.norm(expected)
    assert scores.exact
    assert scores.train_ids.tolist() == list(range(20))


def test_it_says_what_a_capture_says(language, tmp_path):
    model, train, queries = language
    captured(tmp_path, model, train, queries, "factors")
    task = gk.LanguageModeling()
    scores = gk.attribute_once(model, train, queries, task=task, method="kfac", damping=0.3)
    # Layers that share a prefix keep positions that only one of them uses: other moments, a little.
    near(scores, gk.attribute(tmp_path, method="kfac", damping=0.3), 0.03)
    assert not scores.exact


def test_convolutions_and_norms_too(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3)
    )
    train = [(torch.randn(5, 1, 6, 6), torch.randint(3, (5,))) for _ in range(3)]
    queries = [(torch.randn(2, 1, 6, 6), torch.randint(3, (2,)))]
    task = gk.Classification()
    for split, rows in (("train", train), ("test", queries)):
        gk.capture(
            tmp_path, model, rows, task=task, split=split, keep="factors", of="loss", progress=False
        )
    for method, options in (("dot", {}), ("kfac", {"damping": 0.1})):
        expected = gk.attribute(tmp_path, method=method, **options)
        near(gk.attribute_once(model, train, queries, task=task, method=method), expected, 1e-3)


@pytest.mark.parametrize(
    ("method", "options"),
    [
        *(
            ("kernel", {"damping": 0.2}),
            ("cos", {}),
            ("tracin", {"lrs": [0.1]}),
            ("ekfac", {"damping": 0.3}),
        ),
        *(("trak", {"dim": 64}), ("logra", {}), ("self", {})),
    ],
)
def test_every_other_method_says_what_a_store_says_and_nothing_is_written(
    tmp_path, method, options, written_files
):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    train = [(torch.randn(20, 6), torch.randint(3, (20,))) for _ in range(2)]
    queries = [(torch.randn(4, 6), torch.randint(3, (4,)))]
    task = gk.Classification()
    for split, rows in (("train", train), ("test", queries)):
        gk.capture(tmp_path, model, rows, task=task, split=split, progress=False)
    expected = gk.attribute(tmp_path, method=method, **options)
    with written_files() as written:
        scores = gk.attribute_once(model, train, queries, task=task, method=method, **options)
    assert np.array_equal(scores.values, expected.values)
    assert (scores.method, scores.options) == (expected.method, expected.options)
    assert scores.store is None
    assert written == []


_watching: list[list[str]] = []


def _note(event, arguments):
    if event == "open" and _watching:
        path, mode, flags = arguments
        if (isinstance(mode, str) and set(mode) & set("wax+")) or flags & (os.O_WRONLY | os.O_RDWR):
            _watching[-1].append(str(path))


@pytest.fixture(scope="module")
def written_files():
    """Files that are opened to be written, by this process, while a block runs."""
    sys.addaudithook(_note)

    @contextlib.contextmanager
    def watched():
        _watching.append([])
        try:
            yield _watching[-1]
        finally:
            _watching.pop()

    return watched


def test_what_cannot_be_done_is_refused(language):
    model, train, queries = language
    task = gk.LanguageModeling()
    with raises(BudgetError, "budget.queries", fix="fewer queries"):
        gk.attribute_once(model, train, queries, task=task, method="kfac", memory_budget="1kB")
    with raises(AttributionError, "attribute.unknown_method"):
        gk.attribute_once(model, train, queries, task=task, method="magic")
    with raises(BudgetError, "budget.captures"):
        gk.attribute_once(model, train, queries, task=task, method="cos", memory_budget="1kB")
    with pytest.raises(AttributionError, match="no option 'dim'"):
        gk.attribute_once(model, train, queries, task=task, method="dot", dim=3)
    with pytest.raises(AttributionError, match="damping"):
        gk.attribute_once(model, train, queries, task=task, damping=0.0)
    with raises(CaptureError, "capture.not_a_loader", mentions="only once"):
        gk.attribute_once(model, iter(train), queries, task=task)


def test_a_model_in_place_of_a_store_is_told_where_to_go():
    with pytest.raises(AttributionError, match=r"gk\.attribute_once\(model, train, queries"):
        gk.attribute(torch.nn.Linear(2, 2), [], [])


class Pooled(nn.Module):
    """Linear layers that see several positions a row or one, as the batch has it."""

    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(4, 5), nn.Linear(5, 3, bias=False)

    def forward(self, x):
        return self.outer(torch.tanh(self.inner(x)).flatten(1, -2).sum(1) if x.dim() > 2 else x)


@pytest.mark.parametrize("lengths", [(1, 1), (1, 3), (3, 1)])
def test_products_by_factors_are_those_of_autograd(lengths):
    torch.manual_seed(0)
    model = Pooled().double()
    queries = [(torch.randn(2, length, 4).double(), torch.tensor([0, 1])) for length in lengths]
    train = [
        (torch.randn(rows, length, 4).double(), torch.arange(rows) % 3)
        for rows, length in ((5, 1), (4, 2), (1, 1))
    ]
    scores = gk.attribute_once(model, train, queries, task=gk.Classification(), method="dot")
    expected = dense_gradients(model, queries) @ dense_gradients(model, train).T
    assert np.allclose(scores.numpy(), expected.numpy(), rtol=1e-5, atol=1e-6)


def dense_gradients(model, batches):
    rows = []
    for x, y in batches:
        for one, label in zip(x, y, strict=True):
            loss = nn.functional.cross_entropy(model(one[None]), label[None])
            parts = torch.autograd.grad(loss, list(model.parameters()))
            rows.append(torch.cat([part.flatten() for part in parts]))
    return torch.stack(rows)


def test_a_linear_model_is_not_restored(monkeypatch):
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
    rows = [(torch.randn(7, 6), torch.arange(7) % 3)]
    expected = gk.attribute_once(model, rows, rows, task=gk.Classification(), method="dot")
    monkeypatch.setattr(Outer, "restore", None)
    scores = gk.attribute_once(model, rows, rows, task=gk.Classification(), method="dot")
    assert np.array_equal(scores.numpy(), expected.numpy())


def test_a_loader_may_fill_the_same_tensors_again():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))
    parts = [(torch.randn(2, 4), torch.tensor([0, 1])) for _ in range(3)]

    class Refilled:
        def __iter__(self):
            x, y = torch.empty(2, 4), torch.empty(2, dtype=torch.int64)
            for own, labels in parts:
                x.copy_(own), y.copy_(labels)
                yield x, y

        def __len__(self):
            return len(parts)

    options = {"task": gk.Classification(), "method": "dot"}
    expected = gk.attribute_once(model, parts, parts, **options).numpy()
    assert np.allclose(gk.attribute_once(model, parts, Refilled(), **options).numpy(), expected)
