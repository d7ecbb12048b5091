"""Similarity of texts: against cosines by hand, mixed with other scores, and bad input."""

import itertools
import math
from collections import Counter

import numpy as np
import pytest
from raises import raises

import gradkeep as gk
from gradkeep.errors import AttributionError

TRAIN = ["the cat sat on the mat", "dogs run fast", "the cat ran", "a mat on a mat"]


def runs(text):
    words = text.split()
    return [*words, *(" ".join(pair) for pair in itertools.pairwise(words))]


def by_hand(query, train):
    """Cosine of log counts times smoothed inverse frequencies, one run after the other."""
    known = {run for text in train for run in runs(text)}
    often = {run: sum(run in runs(text) for text in train) for run in known}
    weight = {run: math.log((1 + len(train)) / (1 + often[run])) + 1 for run in known}

    def vector(text):
        counts = Counter(run for run in runs(text) if run in known)
        actual = {run: (1 + math.log(count)) * weight[run] for run, count in counts.items()}
        size = math.sqrt(sum(v * v for v in actual.values())) or 1.0
        return {run: value / size for run, value in actual.items()}

    query_vector = vector(query)
    return [
        sum(value * vector(text).get(run, 0.0) for run, value in query_vector.items())
        for text in train
    ]


def test_scores_are_cosines():
    queries = ["the cat sat", "mat", "nothing known"]
    scores = gk.text_similarity(queries, TRAIN)
    expected = np.array([by_hand(query, TRAIN) for query in queries])
    np.testing.assert_allclose(scores.numpy(), expected, atol=1e-6)
    assert scores.numpy()[2].max() == 0


def test_tokens_do_as_words_do():
    book = {
        word: number for number, word in enumerate(sorted({w for t in TRAIN for w in t.split()}))
    }
    tokens = [[book[word] for word in text.split()] for text in TRAIN]
    words = gk.text_similarity(TRAIN, TRAIN).numpy()
    np.testing.assert_allclose(gk.text_similarity(tokens, tokens).numpy(), words, atol=1e-6)


def test_it_is_mixed_with_other_scores():
    texts = gk.text_similarity(["the cat"], TRAIN, train_ids=[5, 6, 7, 8], query_ids=[3])
    other = gk.text_similarity(["the cat"], TRAIN, words=1, train_ids=[5, 6, 7, 8], query_ids=[3])
    mixed = gk.combine([texts, other])
    assert mixed.train_ids.tolist() == [5, 6, 7, 8]
    assert mixed.top(1, query=3).ids.tolist() == texts.top(1, query=3).ids.tolist()


def test_bad_input_is_refused():
    for queries, train in (("one text", TRAIN), ([], TRAIN), (["a"], [""]), ([[1.5]], TRAIN)):
        with pytest.raises(AttributionError):
            gk.text_similarity(queries, train)
    with raises(AttributionError, "attribute.wrong_ids"):
        gk.text_similarity(["a"], TRAIN, train_ids=[1])
