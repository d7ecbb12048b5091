"""Scores by workers are those of one process, block by block of queries."""

import threading

import numpy as np
import pytest
import torch

import gradkeep as gk
from gradkeep import farm
from gradkeep.errors import AttributionError, FarmError, QueryError


class Threads:
    """Two workers in this process."""

    threads, num_workers = 1, 2

    def run(self, spec, report):
        pool = [threading.Thread(target=farm.work, args=(spec,)) for _ in range(2)]
        for one in pool:
            one.start()
        for one in pool:
            one.join()
        report()


class Nobody(Threads):
    def run(self, spec, report):
        report()


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    torch.manual_seed(0)
    opened = gk.open(tmp_path_factory.mktemp("scores") / "store")
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
    first = model.state_dict()
    later = {name: value + 0.1 for name, value in first.items()}
    for split, rows in (("train", 40), ("test", 7)):
        data = [(torch.randn(rows, 6), torch.arange(rows) % 3)]
        gk.capture(
            opened,
            model,
            data,
            task=gk.Classification(),
            split=split,
            checkpoints={
                "one": gk.Weights(first, step=1, lr=0.1),
                "two": gk.Weights(later, step=2, lr=0.1),
            },
            progress=False,
        )
    return opened


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("dot", {"checkpoints": "one"}),
        ("cos", {"checkpoints": "one"}),
        ("tracin", {"per_layer": True}),
        ("kernel", {"ids": [5, 2, 3]}),
        ("trak", {"dim": 64}),
        ("ekfac", {"checkpoints": "two"}),
        ("self", {"checkpoints": "two"}),
    ],
)
def test_workers_score_as_one_process_does(store, method, options):
    alone = gk.attribute(store, method=method, **options)
    shared = gk.attribute(store, method=method, engine=Threads(), **options)
    assert np.allclose(
        shared.values, alone.values, rtol=1e-5, atol=1e-6 * np.abs(alone.values).max()
    )
    for name in ("query_ids", "train_ids", "query_labels", "train_labels"):
        assert np.array_equal(getattr(shared, name), getattr(alone, name))
    for name in ("method", "checkpoints", "layers", "scale", "exact", "approximate", "options"):
        assert getattr(shared, name) == getattr(alone, name), name
    if alone.confidence is not None:
        assert np.allclose(shared.confidence, alone.confidence, atol=1e-4)
    if alone.per_layer is not None:
        scale = np.abs(alone.per_layer).max()
        assert np.allclose(shared.per_layer, alone.per_layer, rtol=1e-5, atol=1e-6 * scale)
    assert store.row_sets() == []


def test_the_largest_products_by_workers(store):
    queries, train = (
        gk.gradients(store, split=split, checkpoints=["one", "two"]) for split in ("test", "train")
    )
    for options in ({}, {"ids": [6, 1], "smallest": True, "weights": [0.3, 0.7]}):
        alone = gk.query.top(queries, train, 5, **options)
        shared = gk.query.top(queries, train, 5, engine=Threads(), **options)
        assert torch.equal(shared.ids, alone.ids)
        assert torch.allclose(shared.values, alone.values, rtol=1e-5, atol=1e-6)
        assert (shared.query_ids == alone.query_ids).all()
    assert store.row_sets() == []


def test_workers_that_are_gone_or_refuse_are_an_error(store):
    with pytest.raises(AttributionError, match="2 of 2 parts are missing"):
        gk.attribute(store, method="tracin", engine=Nobody())
    with pytest.raises(QueryError, match="no layer"):
        gk.attribute(store, method="tracin", layers="nothing", engine=Threads())
    with pytest.raises(FarmError, match="workers"):
        gk.attribute(store, method="tracin", workers=0)
    queries, train = (
        gk.gradients(store, split=split, checkpoints="one") for split in ("test", "train")
    )
    with pytest.raises(QueryError, match="2 of 2 parts"):
        gk.query.top(queries, train, 3, engine=Nobody())
    with pytest.raises(FarmError, match="engine"):
        gk.query.top(queries, train, 3, engine="ray")
    assert store.row_sets() == []


@pytest.mark.slow
def test_real_processes_score(store):
    alone = gk.attribute(store, method="tracin")
    shared = gk.attribute(store, method="tracin", workers=2)
    assert np.allclose(shared.values, alone.values, rtol=1e-5, atol=1e-6)
