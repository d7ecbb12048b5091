"""Memory that others write into: loaders that fill it for every batch, models that change their inputs.

Each row is that of its own batch all the same, and nobody's data changes.
"""

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import gradkeep as gk
from gradkeep.capturing._batches import batches_within, copied
from gradkeep.data import GPT


class Fresh:
    """A loader whose batches have tensors of their own."""

    def __init__(self, parts):
        self.parts = parts

    def __iter__(self):
        for part in self.parts:
            yield {name: self.filled(name, value) for name, value in part.items()}

    def filled(self, name, value):
        return value.clone()


class Refilled(Fresh):
    """The same in memory that it uses again, as loaders do that map or pin it."""

    def __init__(self, parts):
        super().__init__(parts)
        self.held = {}

    def filled(self, name, value):
        most = max(part[name].numel() for part in self.parts)
        held = self.held.setdefault(name, torch.empty(most, dtype=value.dtype))
        return held[: value.numel()].view(value.shape).copy_(value)


class Pictures(gk.Classification):
    """Batches that are mappings."""

    def measure(self, model, batch):
        return super().measure(model, (batch["x"], batch["y"]))


def pictures(rows):
    return {"x": torch.randn(rows, 2, 6, 6), "y": torch.randint(3, (rows,))}


def words(rows):
    tokens = torch.randint(11, (rows, 7))
    return {"input_ids": tokens, "labels": tokens.clone()}


WORLDS = {
    "images": (
        lambda: nn.Sequential(
            nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 5), nn.Linear(5, 3)
        ),
        Pictures(),
        pictures,
    ),
    "text": (
        lambda: GPT(vocabulary=11, length=7, dim=8, heads=2, layers=1, tied=False).eval(),
        gk.LanguageModeling(),
        words,
    ),
}


def arrays(store):
    (key,) = store.captures()
    block, result = store.read(key), {}
    for batch in block.stream(list(block.names)):
        for name in block.names:
            values = batch[name]
            result.setdefault(name, []).append(np.asarray(getattr(values, "values", values)))
    return {name: np.concatenate([one.ravel() for one in parts]) for name, parts in result.items()}


@pytest.mark.parametrize("keep", ["exact", "dense", "factors", "losses", "1KiB"])
@pytest.mark.parametrize("sizes", [(3,) * 7, (1,) * 40, (8, 8, 5), (2,)], ids=len)
@pytest.mark.parametrize("world", WORLDS)
def test_every_row_is_that_of_its_own_batch(tmp_path, world, sizes, keep):
    torch.manual_seed(0)
    build, task, make = WORLDS[world]
    model, parts = build(), [make(size) for size in sizes]
    result = []
    for kind in (Fresh, Refilled):
        store = gk.open(tmp_path / kind.__name__)
        gk.capture(store, model, kind(parts), task=task, split="train", keep=keep, progress=False)
        result.append(arrays(store))
    assert result[0].keys() == result[1].keys()
    for name, values in result[0].items():
        assert np.array_equal(values, result[1][name]), name


def test_ids_that_come_with_the_batch_are_its_own_too(tmp_path):
    torch.manual_seed(0)
    build, task, make = WORLDS["images"]
    parts = [make(3) | {"id": torch.arange(3) + 10 * number} for number in range(4)]
    result = []
    for kind in (Fresh, Refilled):
        torch.manual_seed(0)
        store = gk.open(tmp_path / kind.__name__)
        options = {"task": task, "split": "train", "ids": "id", "progress": False}
        gk.capture(store, build(), kind(parts), **options)
        (key,) = store.captures()
        assert store.read(key).ids.tolist() == [
            10 * part + row for part in range(4) for row in range(3)
        ]
        result.append(arrays(store))
    assert all(np.array_equal(result[0][name], result[1][name]) for name in result[0])


def test_a_collate_function_may_fill_the_same_tensors(tmp_path):
    torch.manual_seed(0)
    build, task, make = WORLDS["images"]
    model, whole = build(), make(20)
    rows = [{name: value[row] for name, value in whole.items()} for row in range(20)]
    held = {"x": torch.empty(4, 2, 6, 6), "y": torch.empty(4, dtype=torch.int64)}

    def collate(samples):
        for row, sample in enumerate(samples):
            for name, value in sample.items():
                held[name][row] = value
        return {name: value[: len(samples)] for name, value in held.items()}

    result = []
    for name, options in (("own", {}), ("same", {"collate_fn": collate})):
        store, loader = gk.open(tmp_path / name), DataLoader(rows, batch_size=4, **options)
        gk.capture(store, model, loader, task=task, split="train", progress=False)
        result.append(arrays(store))
    for name, values in result[0].items():
        assert np.array_equal(values, result[1][name]), name


def test_parts_of_a_pass_are_copies_too():
    parts = [pictures(2) for _ in range(5)]
    at, some = batches_within(Refilled(parts), 4, 8)
    assert at == 0
    for expected, batch in zip(parts, list(some), strict=True):
        assert torch.equal(expected["x"], batch["x"])


def test_a_copy_has_the_same_nesting_and_memory_of_its_own():
    tokens = torch.arange(6).view(2, 3)
    weights = torch.ones(2, requires_grad=True)
    batch = {"a": [tokens, np.zeros(2)], "b": (tokens, weights, ["x", "y"]), "c": None}
    built = copied(batch)
    assert built["a"][0] is not tokens
    assert built["b"][1].requires_grad
    assert built["b"][1].is_leaf
    tokens.zero_()
    batch["a"][1][:] = 1
    assert built["a"][0].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert built["a"][1].tolist() == [0, 0]
    assert built["b"][2] == ["x", "y"]
    assert built["c"] is None


class Writing(nn.Module):
    """Normalises its input in place, as some do."""

    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, x):
        return self.outer(torch.relu(self.inner(x.sub_(0.5).mul_(2.0))))


class Read(torch.utils.data.Dataset):
    def __init__(self, x, y):
        self.x, self.y = x, y

    def __len__(self):
        return len(self.y)

    def __getitem__(self, at):
        return self.x[at], self.y[at]


LOADERS = {
    "list": lambda x, y: list(zip(x.split(3), y.split(3), strict=True)),
    "tuple": lambda x, y: tuple(zip(x.split(3), y.split(3), strict=True)),
    "arrays": lambda x, y: [
        (one.numpy(), two.numpy()) for one, two in zip(x.split(3), y.split(3), strict=True)
    ],
    "tensors": lambda x, y: DataLoader(TensorDataset(x, y), batch_size=3),
    "own": lambda x, y: DataLoader(Read(x, y), batch_size=3),
    "batched": lambda x, y: DataLoader(Read(x.view(4, 3, 4), y.view(4, 3)), batch_size=None),
}


@pytest.mark.parametrize("keep", ["exact", "dense", "losses", "1KiB"])
@pytest.mark.parametrize("loader", LOADERS)
def test_a_model_that_writes_into_its_input_changes_no_data_and_no_row(tmp_path, loader, keep):
    torch.manual_seed(0)
    model, x, y = Writing(), torch.randn(12, 4), torch.randint(3, (12,))
    before = x.clone()
    with torch.no_grad():
        expected = nn.functional.cross_entropy(model(x.clone()), y, reduction="none")
    store, data = gk.open(tmp_path), LOADERS[loader](x, y)
    options = {"task": gk.Classification(), "split": "train", "keep": keep, "progress": False}
    for _ in range(2):  # and when it is run again, which makes some rows once more
        gk.capture(store, model, data, **options)
        assert torch.equal(x, before)
    (key,) = store.captures()
    assert np.allclose(store.read(key).column("loss"), expected, atol=1e-6)
    if keep == "exact":
        result = gk.gradients(store, split="train")
        products = gk.query.dot(result, result).values
        assert torch.allclose(products, by_autograd(model, x, y), rtol=1e-4, atol=1e-5)


def by_autograd(model, x, y):
    rows = []
    for one, label in zip(x, y, strict=True):
        loss = nn.functional.cross_entropy(model(one.clone()[None]), label[None])
        parts = torch.autograd.grad(loss, list(model.parameters()))
        rows.append(torch.cat([part.flatten() for part in parts]))
    return torch.stack(rows) @ torch.stack(rows).T


@pytest.mark.parametrize("method", ["dot", "kfac", "kernel"])
def test_so_it_is_when_nothing_is_kept(method):
    torch.manual_seed(0)
    model, x, y = Writing(), torch.randn(12, 4), torch.randint(3, (12,))
    before, options = x.clone(), {"task": gk.Classification(), "method": method}
    result = []
    for name in ("own", "list"):
        data = LOADERS[name](x, y)
        result.append(gk.attribute_once(model, data, data, **options).numpy())
        assert torch.equal(x, before)
    assert np.array_equal(result[0], result[1])
    if method == "dot":
        assert np.allclose(result[0], by_autograd(model, x, y), rtol=1e-4, atol=1e-5)
