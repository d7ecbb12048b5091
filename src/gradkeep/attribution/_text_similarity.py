"""`gk.text_similarity`: TF-IDF and BM25 baselines for attribution of language models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import numpy as np

from gradkeep import _arguments
from gradkeep._arguments import Limits, checked
from gradkeep._environment import import_extra
from gradkeep.attribution._scores import Scores
from gradkeep.errors import AttributionError

Texts = Sequence[str] | Sequence[Sequence[int]]
"""Texts, or the ids of their tokens."""


@checked(AttributionError)
def text_similarity(
    queries: Texts,
    train: Texts,
    *,
    words: Annotated[int, Limits(least=1, most=8)] = 2,
    how: Literal["tfidf", "bm25"] = "tfidf",
    query_ids: Any = None,
    train_ids: Any = None,
) -> Scores:
    """Score pairs of texts by shared rare words, without a model.

    Often as good as gradients on applied questions: compare with it, or combine it by `gk.combine`. Cost: one
    pass over the texts and a sparse product.

    Args:
        queries: Texts or token ids of the queries.
        train: Texts or token ids of the training rows.
        words: Largest length of n-grams of words or tokens.
        how: `tfidf`: cosines of TF-IDF vectors; `bm25`: Okapi BM25.
        query_ids: Ids of the queries; 0, 1, 2, ... by default.
        train_ids: Ids of the training rows; 0, 1, 2, ... by default.

    Returns:
        Scores `[queries, train]`.

    Raises:
        AttributionError: There are no words, or the number of ids is wrong.
        MissingExtraError: scikit-learn or bm25s is not installed.

    Example:
        >>> scores = text_similarity(["the cat sat"], ["a dog ran", "the cat ran"])
        >>> scores.top(1, query=0).ids.tolist()
        [1]
    """
    sides = [_split(name, texts) for name, texts in (("queries", queries), ("train", train))]
    if not any(sides[1]):
        raise AttributionError(
            "the training texts hold no words",
            code="attribute.no_words",
            found=f"{len(train)} texts",
        )
    query_grams, train_grams = ([_ngrams(row, words) for row in side] for side in sides)
    score = _cosines if how == "tfidf" else _okapi
    values = score(query_grams, train_grams)
    return Scores(
        values,
        _ids("query_ids", query_ids, len(queries)),
        _ids("train_ids", train_ids, len(train)),
        method="text-similarity" if how == "tfidf" else "bm25",
        scale=f"{'cosine of TF-IDF vectors' if how == 'tfidf' else 'BM25'} of runs of up to {words} words",
    )


def _ids(name: str, passed: Any, count: int) -> Any:
    if passed is None:
        return np.arange(count)
    return _arguments.whole_numbers(
        name, passed, error=AttributionError, length=count, code="attribute.wrong_ids"
    )


def _cosines(queries: list[list[str]], train: list[list[str]]) -> Any:
    text = import_extra(
        "sklearn.feature_extraction.text", extra="demo", what="the similarity of texts"
    )
    counter = text.TfidfVectorizer(analyzer=lambda row: row, sublinear_tf=True)
    rows = counter.fit_transform(train)
    return (counter.transform(queries) @ rows.T).toarray().astype(np.float32)


def _okapi(queries: list[list[str]], train: list[list[str]]) -> Any:
    bm25s = import_extra("bm25s", extra="text", what="BM25")
    index = bm25s.BM25()
    index.index(train, show_progress=False)
    vocabulary = {word for row in train for word in row}
    out = np.zeros((len(queries), len(train)), np.float32)
    for row, words in enumerate(queries):
        shared = [word for word in words if word in vocabulary]
        if shared:
            out[row] = index.get_scores(shared)
    return out


def _split(name: str, texts: Texts) -> list[list[str]]:
    if isinstance(texts, str) or not len(texts):
        raise AttributionError(
            f"{name} must be a list of texts, or of token ids",
            code="attribute.not_texts",
            found=repr(texts)[:60],
        )
    words_of_texts = []
    for text in texts:
        if isinstance(text, str):
            words_of_texts.append(text.lower().split())
        else:
            ids = _arguments.whole_numbers(name, text, error=AttributionError, least=-(2**62))
            words_of_texts.append([str(token) for token in ids.tolist()])
    return words_of_texts


def _ngrams(row: list[str], words: int) -> list[str]:
    """Return all n-grams of up to `words` words."""
    return [
        " ".join(row[at : at + length])
        for length in range(1, words + 1)
        for at in range(len(row) - length + 1)
    ]
