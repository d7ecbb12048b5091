"""Pairs are counted exactly, whatever the sizes."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from raises import raises

from gradkeep.datamodels import Masks
from gradkeep.datamodels._counts import Counts, add_pairs, pair_dtype
from gradkeep.errors import DatamodelsError


def by_products(masks):
    whole = masks.astype(np.int64)
    return whole.T @ whole


@settings(max_examples=40)
@given(
    m=st.integers(1, 400),
    n=st.integers(1, 420),
    alpha=st.sampled_from([0.0, 0.1, 0.5, 0.9, 1.0]),
    seed=st.integers(0, 2**32),
)
def test_pairs_equal_the_integer_product(m, n, alpha, seed):
    masks = np.random.default_rng(seed).random((m, n)) < alpha
    out = np.zeros((n, n), pair_dtype(m))
    add_pairs(Masks.of(masks), out)
    assert np.array_equal(out, by_products(masks))


@pytest.mark.parametrize("m", [4031, 4032, 4033, 8100])
def test_no_count_overflows_its_half_of_a_float(m):
    masks = np.ones((m, 200), bool)
    masks[:, ::3] = np.random.default_rng(0).random((m, 67)) < 0.5
    out = np.zeros((200, 200), np.uint16)
    add_pairs(Masks.of(masks), out)
    assert np.array_equal(out, by_products(masks))


@settings(max_examples=30)
@given(
    sizes=st.lists(st.integers(1, 40), min_size=2, max_size=4),
    n=st.integers(1, 30),
    seed=st.integers(0, 2**32),
)
def test_counts_of_parts_add_up_and_are_taken_away(sizes, n, seed):
    rng = np.random.default_rng(seed)
    parts = [(Masks.of(rng.random((m, n)) < 0.5), rng.standard_normal((m, 2)) + 1e4) for m in sizes]
    masks, outputs = parts[0]
    whole = Counts.of(masks, outputs)
    for more, y in parts[1:]:
        whole = whole.add(more, y)
        masks, outputs = masks + more, np.concatenate([outputs, y])
    fresh = Counts.of(masks, outputs)
    assert whole.models == fresh.models
    assert np.array_equal(whole.pairs, fresh.pairs)
    assert np.allclose(whole.mean(), outputs.mean(0), rtol=1e-12)
    assert np.allclose(whole.variance(), outputs.var(0), rtol=1e-6, atol=1e-9)
    last, y = parts[-1]
    less = whole.without(last, y)
    before = outputs[: -len(y)]
    assert np.array_equal(less.pairs, by_products(masks[: -len(y)].numpy()))
    assert np.array_equal(whole.pairs, fresh.pairs), "what was asked must not change"
    assert np.allclose(less.mean(), before.mean(0), rtol=1e-12)


def test_counts_widen_when_models_no_longer_fit_their_integers():
    masks = Masks.of(np.ones((40_000, 3), bool))
    counts = Counts.of(masks, np.zeros((40_000, 1)))
    assert counts.pairs.dtype == np.uint16
    more = counts.add(masks, np.zeros((40_000, 1)))
    assert more.pairs.tolist() == [[80_000] * 3] * 3


def test_counts_in_a_file_are_those_in_memory(tmp_path):
    rng = np.random.default_rng(0)
    masks, outputs = Masks.of(rng.random((70, 33)) < 0.5), rng.standard_normal((70, 2))
    there, here = Counts.of(masks, outputs, folder=tmp_path), Counts.of(masks, outputs)
    assert isinstance(there.pairs, np.memmap)
    assert np.array_equal(there.pairs, here.pairs)
    assert not list(tmp_path.iterdir()), "the file has no name, so that a crash leaves nothing"


@settings(max_examples=50)
@given(m=st.integers(0, 9), n=st.integers(1, 40), seed=st.integers(0, 2**32))
def test_masks_come_back_as_they_went_in(m, n, seed):
    masks = np.random.default_rng(seed).random((m, n)) < 0.5
    for given_as in (masks, masks.astype(np.int8), masks.astype(np.float32)):
        packed = Masks.of(given_as)
        assert packed.shape == (m, n)
        assert np.array_equal(packed.numpy(), masks)
    assert np.array_equal(Masks.of(masks).sizes(), masks.sum(1))
    assert Masks.of(masks).num_repeated() == m - len({row.tobytes() for row in masks})
    assert np.array_equal(Masks.of(masks)[::-1].numpy(), masks[::-1])


@pytest.mark.parametrize(
    ("masks", "message"),
    [
        ([[0, 2]], "2 for model 0, example 1"),
        ([[0.5, 1.0]], "0.5 for model 0, example 0"),
        ([[np.nan, 1.0]], "nan for model 0"),
        ([0, 1], "row per model"),
        (np.zeros((3, 0)), "at least one example"),
        ([["a", "b"]], "dtype <U1"),
    ],
)
def test_what_is_no_mask_is_refused_with_its_place(masks, message):
    with pytest.raises(DatamodelsError, match=message):
        Masks.of(masks)


def test_bits_of_the_wrong_width_or_beyond_the_end_are_refused():
    with raises(DatamodelsError, "datamodels.packed_bits"):
        Masks(np.zeros((2, 1), np.uint8), 9)
    with raises(DatamodelsError, "datamodels.bits_beyond_last"):
        Masks(np.full((1, 1), 255, np.uint8), 3)
    with raises(DatamodelsError, "datamodels.other_examples"):
        Masks.of([[1, 0]]) + Masks.of([[1, 0, 1]])
