"""Documents of several chunks: sums over their rows, by a loop, and everything refused."""

import numpy as np
import pytest
import torch
from raises import raises

import gradkeep as gk
from gradkeep.errors import AttributionError


def brute(values, lines, columns):
    rows, cols = list(dict.fromkeys(lines)), list(dict.fromkeys(columns))
    out = np.zeros((len(rows), len(cols)))
    for q, line in enumerate(lines):
        for n, column in enumerate(columns):
            out[rows.index(line), cols.index(column)] += float(values[q, n])
    return rows, cols, out


@pytest.mark.parametrize("kind", [int, str])
def test_chunks_are_summed_to_documents(kind):
    rng = np.random.default_rng(0)
    values = rng.normal(size=(150, 40)).astype(np.float32)
    scores = gk.Scores(values, np.arange(150), np.arange(40))
    columns = [kind(number) for number in rng.integers(-4, 9, 40)]
    lines = [kind(number) for number in rng.integers(5, 60, 150)]
    rows, cols, expected = brute(values, lines, columns)
    actual = scores.by_document(columns, queries=lines)
    np.testing.assert_allclose(actual.numpy(), expected, rtol=1e-5, atol=1e-5)
    if kind is int:
        assert actual.train_ids.tolist() == cols
        assert actual.query_ids.tolist() == rows
    else:
        assert actual.train_labels.tolist() == cols
        assert actual.query_labels.tolist() == rows
        assert actual.train_ids.tolist() == list(range(len(cols)))
    one = scores.by_document(columns)
    np.testing.assert_allclose(one.numpy(), brute(values, range(150), columns)[2], atol=1e-5)
    assert one.query_ids.tolist() == list(range(150))
    other = scores.by_document(queries=lines)
    np.testing.assert_allclose(other.numpy(), brute(values, lines, range(40))[2], atol=1e-4)


def test_documents_given_to_attribute_are_those_of_the_scores(make_world):
    world = make_world(lambda: torch.nn.Linear(4, 3), (4,), rows=6, queries=4)
    chunks = [7, 7, 3, 7, 3, 9]
    plain = gk.attribute(world.store, method="dot", per_layer=True)
    actual = gk.attribute(
        world.store, method="dot", documents=chunks, per_layer=True, save="documents"
    )
    assert actual.train_ids.tolist() == [7, 3, 9]
    np.testing.assert_allclose(actual.numpy(), plain.by_document(chunks).numpy())
    np.testing.assert_allclose(actual.per_layer.sum(0), actual.numpy(), rtol=1e-5, atol=1e-6)
    assert actual.top(1, query=0).ids[0] in (7, 3, 9)
    assert "summed over the rows of a document" in repr(actual)
    second_scores = gk.Scores.load(world.store, "documents")
    assert second_scores.train_ids.tolist() == [7, 3, 9]
    both = gk.attribute(
        world.store, method="dot", documents=chunks, query_documents=np.array([1, 1, 2, 2])
    )
    assert both.shape == (2, 3)
    np.testing.assert_allclose(both.numpy()[0], actual.numpy()[:2].sum(0), rtol=1e-5)


def test_the_sum_is_the_product_with_the_documents_gradient(make_world):
    world = make_world(lambda: torch.nn.Linear(4, 3), (4,), rows=6, queries=2)
    g, q = world.gradients("train"), world.gradients("test")
    whole = torch.stack([g[[0, 1, 3]].sum(0), g[[2, 4]].sum(0), g[5]])
    actual = gk.attribute(world.store, method="dot", documents=[7, 7, 3, 7, 3, 9])
    np.testing.assert_allclose(actual.numpy(), (q @ whole.T).numpy(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "documents", [[1, 2, 3, 4], [[1], [2], [3]], [1.5, 2.0, 3.0], 3, [None] * 3]
)
def test_documents_that_do_not_fit_are_refused(documents):
    scores = gk.Scores(np.ones((2, 3), np.float32), np.arange(2), np.arange(3))
    with pytest.raises(AttributionError):
        scores.by_document(documents)
    with pytest.raises(AttributionError):
        scores.by_document(queries=documents)


def test_no_documents_are_refused():
    scores = gk.Scores(np.ones((2, 3), np.float32), np.arange(2), np.arange(3))
    with raises(AttributionError, "attribute.no_documents"):
        scores.by_document()
