"""Scores token by token: sums against scores, tokens of a second run against autograd in float64."""

import copy

import numpy as np
import pytest
import torch
from raises import raises
from torch import nn

import gradkeep as gk
from gradkeep.data import GPT
from gradkeep.errors import AttributionError, CaptureError, QueryError

VOCABULARY, LENGTH = 11, 7
TASK = gk.LanguageModeling()


@pytest.fixture
def store(tmp_path):
    return gk.open(tmp_path / "store")


class Recurrent(nn.Module):
    """A layer that no rule covers, between two that one does."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, 6, padding_idx=0)
        self.cells = nn.GRU(6, 7, batch_first=True)
        self.head = nn.Linear(7, VOCABULARY)

    def forward(self, tokens):
        return self.head(self.cells(self.table(tokens))[0])


class Repeated(nn.Module):
    """One layer that every token passes twice."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, 6)
        self.twice = nn.Linear(6, 6)
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, VOCABULARY)

    def forward(self, tokens):
        x = self.table(tokens)
        for _ in range(2):
            x = self.norm(x + self.twice(x).tanh()).cumsum(1)
        return self.head(x)


def make_model(kind):
    torch.manual_seed(0)
    if kind == "recurrent":
        return Recurrent()
    if kind == "repeated":
        return Repeated()
    tied = kind == "tied"
    return GPT(vocabulary=VOCABULARY, length=LENGTH, dim=8, heads=2, layers=1, tied=tied).eval()


def batches(rows, seed):
    drawn = torch.Generator().manual_seed(seed)
    tokens = torch.randint(VOCABULARY, (rows, LENGTH), generator=drawn)
    labels = tokens.clone()
    for row in range(rows):
        labels[row, : row % 3] = -100
        labels[row, LENGTH - row % 2 :] = -100
    parts = zip(tokens.split(4), labels.split(4), strict=True)
    return [{"input_ids": t, "labels": y} for t, y in parts]


def capture(store, kind, keep="factors", query_keep=None, dtype=torch.float32, **options):
    model = make_model(kind).to(dtype)
    for split, rows, way in (("train", 10, keep), ("test", 3, query_keep or keep)):
        gk.capture(
            store,
            model,
            batches(rows, seed=rows),
            task=TASK,
            split=split,
            keep=way,
            progress=False,
            **options,
        )
    return model


def near(actual, expected, by=1e-5):
    return np.abs(actual - expected).max() <= by * np.abs(expected).max()


@pytest.mark.parametrize("method", ["dot", "kfac", "ekfac"])
def test_tokens_from_factors_add_up_to_the_scores(store, method):
    capture(store, "tied")
    scores = gk.attribute(store, method=method).numpy()
    actual = gk.attribute_tokens(store, method=method)
    assert near(actual.sums, scores)
    some = gk.attribute_tokens(store, method=method, ids=[2, 1], train_ids=[7, 0])
    assert near(some.sums, scores[[2, 1]][:, [7, 0]])
    assert some.train_ids.tolist() == [7, 0]
    assert not some.replayed
    assert (some.approximate is None) == (method == "dot")


@pytest.mark.parametrize(("dtype", "by"), [(torch.float32, 1e-5), (torch.float64, 1e-6)])
@pytest.mark.parametrize("method", ["dot", "ekfac"])
@pytest.mark.parametrize("kind", ["tied", "untied", "recurrent", "repeated"])
def test_tokens_of_a_second_run_add_up_to_the_scores(store, kind, method, dtype, by):
    model = capture(store, kind, dtype=dtype)
    scores = gk.attribute(store, method=method).numpy()
    actual = gk.attribute_tokens(
        store, method=method, train_ids=[9, 2, 3], model=model, loader=batches(10, 10), task=TASK
    )
    assert near(actual.sums, scores[:, [9, 2, 3]], by)
    assert actual.replayed
    if kind == "recurrent":
        assert len(actual.rest_layers) > 0
        assert all("cells" in name for name in actual.rest_layers)
    else:
        assert actual.rest_layers == ()
        assert not actual.rest.any()


def by_token(model, batch, row, direction):
    """`[T]` in float64: every module's output moves along the direction, times its gradient."""
    model = copy.deepcopy(model).double()
    names = {id(p): name for name, p in model.named_parameters()}
    stored = []

    def keep(module, args, output):
        output.retain_grad()
        stored.append((module, args[0].detach(), output))

    handles = [
        module.register_forward_hook(keep)
        for module in model.modules()
        if isinstance(module, nn.Linear | nn.Embedding | nn.LayerNorm)
    ]
    one = {name: value[row : row + 1] for name, value in batch.items()}
    TASK.losses(model, one).sum().backward()
    for handle in handles:
        handle.remove()
    total = torch.zeros(LENGTH, dtype=torch.float64)
    for module, x, output in stored:
        moved = {n: p + direction[names[id(p)]] for n, p in module.named_parameters()}
        # Each of them is linear in its weights: the change is the derivative.
        change = torch.func.functional_call(module, moved, (x,)) - output
        part = (change.detach() * output.grad).sum(-1)
        total += part[0] if part.dim() == 2 else part
    return total


@pytest.mark.parametrize("kind", ["tied", "repeated"])
def test_a_token_carries_what_autograd_says(store, kind):
    model = capture(store, kind)
    loader = batches(10, 10)
    actual = gk.attribute_tokens(
        store, method="dot", ids=[1], train_ids=[5, 8], model=model, loader=loader, task=TASK
    )
    double = copy.deepcopy(model).double()
    one = {name: value[1:2] for name, value in batches(3, 3)[0].items()}
    TASK.losses(double, one).sum().backward()
    direction = {name: p.grad for name, p in double.named_parameters()}
    for place, row in enumerate((5, 8)):
        expected = by_token(model, loader[row // 4], row % 4, direction).numpy()
        assert near(actual.values[0, place], expected)
        assert (
            actual.of(1, row).tolist() == actual.values[0, place, : actual.lengths[place]].tolist()
        )


@pytest.mark.parametrize("keep", [gk.Keep(700, rows=10), gk.Keep(600, bits=8, rows=10, fold=1)])
def test_coordinates_are_told_apart_by_a_second_run(store, keep):
    model = capture(store, "tied", keep, "queries", layers="*")
    loader = batches(10, 10)
    gk.capture(
        store, model, loader, task=TASK, split="plain", keep="queries", progress=False, layers="*"
    )
    unrounded = gk.attribute(store, train="plain", method="ekfac").numpy()
    actual = gk.attribute_tokens(
        store, ids=[0, 2], train_ids=[1, 6], model=model, loader=loader, task=TASK
    )
    assert actual.method == "ekfac"
    assert near(actual.sums, unrounded[[0, 2]][:, [1, 6]])
    assert "coordinates" in actual.approximate
    with raises(QueryError, "query.coordinates_only"):
        gk.attribute_tokens(store)


def test_random_coordinates_have_tokens_too(store):
    keep = gk.Keep(700, coordinates="random", bits=32, rows=10)
    model = capture(store, "untied", keep, layers="*")
    scores = gk.attribute(store, method="dot").numpy()
    actual = gk.attribute_tokens(
        store, method="dot", model=model, loader=batches(10, 10), task=TASK
    )
    assert near(actual.sums, scores)


def test_rows_with_ids_and_columns_are_found_again(store):
    model, loader = make_model("tied"), batches(6, 6)
    ids, texts = [11, 7, 3, 20, 5, 2], [f"text {row}" for row in range(6)]
    for split in ("train", "test"):
        gk.capture(
            store,
            model,
            loader,
            task=TASK,
            split=split,
            keep="factors",
            ids=ids,
            columns={"text": texts},
            progress=False,
        )
    repeated = {"model": model, "loader": loader, "task": TASK, "loader_ids": ids}
    actual = gk.attribute_tokens(
        store, method="dot", ids=[7], train_ids=[20, 2], columns={"text": texts}, **repeated
    )
    scores = gk.attribute(store, method="dot").numpy()
    assert near(actual.sums, scores[1:2, [3, 5]])
    with raises(CaptureError, "capture.rows_changed"):
        gk.attribute_tokens(store, columns={"text": texts[::-1]}, **repeated)


def test_the_largest_tokens_are_named(store):
    capture(store, "tied")
    actual = gk.attribute_tokens(store, ids=[0], train_ids=[4], method="dot")
    own = actual.of(0, 4)
    (first, value), *_ = actual.top(3, query=0, row=4)
    assert value == own.max()
    assert first == int(own.argmax())
    assert "positive helps" in repr(actual)
    with pytest.raises(AttributionError, match="no scores of row 5"):
        actual.of(0, 5)
    with pytest.raises(AttributionError, match="no scores of query 5"):
        actual.of(5, 4)


def test_what_has_no_tokens_is_refused(store):
    model = capture(store, "tied")
    loader = batches(10, 10)
    for method in ("cos", "kernel", "trak"):
        with raises(AttributionError, "attribute.not_per_token"):
            gk.attribute_tokens(store, method=method)
    with raises(AttributionError, "attribute.not_per_token"):
        gk.attribute_tokens(store, method="ekfac", unit_norm=True)
    with pytest.raises(AttributionError, match="loader and task"):
        gk.attribute_tokens(store, model=model)
    repeated = {"model": model, "loader": loader, "task": TASK, "method": "dot", "train_ids": [1]}
    with raises(CaptureError, "capture.other_task"):
        gk.attribute_tokens(store, **repeated | {"task": gk.LanguageModeling(reduction="mean")})
    with raises(CaptureError, "capture.other_weights"):
        gk.attribute_tokens(store, **repeated | {"model": make_model("untied")})
    with raises(CaptureError, "capture.rows_changed"):
        gk.attribute_tokens(store, **repeated | {"loader": batches(10, 11)})
    with raises(CaptureError, "capture.rows_missing"):
        gk.attribute_tokens(store, **repeated | {"loader": loader[:1], "train_ids": [9]})
    with pytest.raises(QueryError, match="42"):
        gk.attribute_tokens(store, **repeated | {"train_ids": [42]})
    gk.capture(store, model, loader, task=TASK, split="train", checkpoints="x", progress=False)
    gk.capture(
        store, model, batches(3, 3), task=TASK, split="test", checkpoints="x", progress=False
    )
    with raises(AttributionError, "attribute.several_checkpoints", fix="checkpoints="):
        gk.attribute_tokens(store)


def test_a_task_without_tokens_is_refused(store):
    model = nn.Linear(4, 3)
    data = [(torch.randn(5, 4), torch.arange(5) % 3)]
    task = gk.Classification()
    for split in ("train", "test"):
        gk.capture(store, model, data, task=task, split=split, progress=False)
    with raises(QueryError, "query.no_tokens"):
        gk.attribute_tokens(store)
    with raises(CaptureError, "capture.no_tokens"):
        gk.attribute_tokens(store, model=model, loader=data, task=task)
