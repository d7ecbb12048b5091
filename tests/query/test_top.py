"""The largest products: against a sort of all of them, and refined by another capture."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from raises import raises
from torch import nn

import gradkeep as gk
from gradkeep.errors import QueryError
from gradkeep.query._products import LargestRows

ROWS, ASKED = 60, 7


@given(
    st.integers(1, 4),
    st.integers(1, 6),
    st.lists(st.integers(1, 9), min_size=1, max_size=8),
    st.integers(1, 5),
    st.integers(0, 99),
)
def test_the_largest_of_tiles_are_those_of_a_stable_sort(queries, k, widths, levels, seed):
    torch.manual_seed(seed)
    values = torch.randint(-levels, levels, (queries, sum(widths))).float()
    k = min(k, values.shape[1])
    best = LargestRows(queries, k)
    start = 0
    for width in widths:
        for query in range(queries):  # tiles of one query each
            best.add(values[query : query + 1, start : start + width], query, start)
        start += width
    expected = values.sort(dim=1, descending=True, stable=True)
    assert torch.equal(best.values, expected.values[:, :k])
    assert torch.equal(best.rows, expected.indices[:, :k])


def world():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 30), nn.Tanh(), nn.Linear(30, 5))
    splits = {"train": ROWS, "test": ASKED}
    return model, {s: (torch.randn(n, 40), torch.randint(5, (n,))) for s, n in splits.items()}


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """Rows in few bytes, the same whole, and unrounded."""
    model, data = world()
    store = gk.open(tmp_path_factory.mktemp("top"))
    few = gk.Keep(200, coordinates="random")
    fine = gk.Keep("3KiB", bits=32, coordinates="random")
    for split, batch in data.items():
        ids = np.arange(len(batch[1])) * 10 + 3
        options = {"task": gk.Classification(), "split": split, "progress": False}
        gk.capture(
            store, model, [batch], keep=few if split == "train" else "queries", ids=ids, **options
        )
        gk.capture(store, model, [batch], name="whole", ids=ids, **options)
        gk.capture(store, model, [batch], name="fine", keep=fine, ids=ids, **options)
    return store


def sides(store, name="main", of="loss"):
    return [gk.gradients(store, split=s, name=name, of=of) for s in ("test", "train")]


@pytest.mark.parametrize("smallest", [False, True])
@pytest.mark.parametrize("name", ["main", "whole"])
@pytest.mark.parametrize("of", ["loss", "output"])
def test_top_is_a_sort_of_all_products(store, smallest, name, of):
    test, train = sides(store, name, of)
    every = gk.query.dot(test, train)
    order = every.values.sort(dim=1, descending=not smallest, stable=True)
    actual = gk.query.top(test, train, 9, smallest=smallest)
    assert torch.equal(actual.ids, torch.from_numpy(every.train_ids.copy())[order.indices[:, :9]])
    torch.testing.assert_close(actual.values, order.values[:, :9])


@pytest.mark.parametrize("smallest", [False, True])
@pytest.mark.parametrize("of", ["loss", "output"])
@pytest.mark.parametrize("name", ["whole", "fine"])
def test_refined_rows_are_the_best_candidates_by_the_other_capture(store, smallest, of, name):
    test, train = sides(store, of=of)
    whole = gk.query.dot(*sides(store, name, of)).values
    first = gk.query.top(test, train, 20, smallest=smallest)
    actual = gk.query.top(test, train, 4, smallest=smallest, refine=name, candidates=20)
    for query in range(ASKED):
        places = sorted((first.ids[query] // 10).tolist())
        best = sorted(places, key=lambda row: float(whole[query, row]) * (1 if smallest else -1))[
            :4
        ]
        assert (actual.ids[query] // 10).tolist() == best
        torch.testing.assert_close(actual.values[query], whole[query, best])
    passed = gk.query.top(
        test, train, 4, smallest=smallest, refine=tuple(sides(store, name, of)), candidates=20
    )
    assert torch.equal(passed.ids, actual.ids)


def test_all_rows_as_candidates_are_the_exact_answer_and_fewer_come_near(store):
    test, train = sides(store)
    expected = gk.query.top(*sides(store, "whole"), 5)
    actual = gk.query.top(test, train, 5, refine="whole", candidates=ROWS)
    assert torch.equal(actual.ids, expected.ids)
    rough, near = (
        np.mean(
            [
                len(set(a) & set(b))
                for a, b in zip(x.ids.tolist(), expected.ids.tolist(), strict=True)
            ]
        )
        for x in (gk.query.top(test, train, 5), gk.query.top(test, train, 5, refine="whole"))
    )
    assert near >= rough


def test_picked_queries_are_refined_alone(store):
    test, train = sides(store)
    every = gk.query.top(test, train, 3, refine="whole")
    actual = gk.query.top(test, train, 3, refine="whole", ids=[33, 13])
    assert actual.query_ids.tolist() == [33, 13]
    assert torch.equal(actual.ids, every.ids[[3, 1]])


def test_a_capture_of_the_candidates_alone_is_enough(store):
    test, train = sides(store)
    model, data = world()
    actual = np.unique(gk.query.top(test, train, 4).ids.numpy())
    some = [part[actual // 10] for part in data["train"]]
    for split, batch, ids in (
        ("train", some, actual),
        ("test", data["test"], test.ids),
    ):
        gk.capture(
            store,
            model,
            [tuple(batch)],
            task=gk.Classification(),
            split=split,
            name="found",
            ids=ids,
        )
    refined = gk.query.top(test, train, 2, refine="found", candidates=4)
    assert torch.equal(refined.ids, gk.query.top(test, train, 2, refine="whole", candidates=4).ids)
    with raises(QueryError, "query.missing_candidates"):
        gk.query.top(test, train, 2, refine="found", candidates=ROWS)


def test_what_cannot_refine_is_refused(store):
    test, train = sides(store)
    with raises(QueryError, "query.no_capture"):
        gk.query.top(test, train, 2, refine="nothing")
    with pytest.raises(QueryError, match="candidates"):
        gk.query.top(test, train, 2, refine="whole", candidates=0)
    with raises(QueryError, "query.refine_checkpoints"):
        gk.query.top([test, test], [train, train], 2, refine="whole")
