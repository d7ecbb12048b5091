"""How many rare words two texts share: what gradients of language models are to be set beside."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from gradkeep import _arguments
from gradkeep._annotations import checked
from gradkeep.attribution._scores import Scores
from gradkeep.errors import AttributionError, MissingExtra

Texts = Sequence[str] | Sequence[Sequence[int]]
"""Texts, or the ids of their tokens."""


@checked(AttributionError)
def text_similarity(
    queries: Texts,
    train: Texts,
    *,
    words: int = 2,
    query_ids: Any = None,
    train_ids: Any = None,
) -> Scores:
    """Cosines of TF-IDF vectors of runs of up to `words` words, or tokens: scores without a model.

    On applied questions this often does as well as gradients: show it beside them, or mix it in with
    `gk.combine`. Ids default to places. Cost: one pass over the texts and a sparse product.

    >>> found = text_similarity(["the cat sat"], ["a dog ran", "the cat ran"])
    >>> found.top(1, query=0).ids.tolist()
    [1]
    """
    try:
        from sklearn.feature_extraction.text import TfidfVectorizer
    except ImportError as error:
        raise MissingExtra(
            "similarity of texts needs scikit-learn", fix='pip install "gradkeep[demo]"'
        ) from error
    _arguments.count("words", words, error=AttributionError, least=1, most=8)
    sides = [_split(name, texts) for name, texts in (("queries", queries), ("train", train))]
    counter = TfidfVectorizer(analyzer=lambda row: _runs(row, words), sublinear_tf=True)
    try:
        rows = counter.fit_transform(sides[1])
    except ValueError as error:  # scikit-learn's way to say that there is not a single word
        raise AttributionError("the training texts hold no words", found=len(train)) from error
    values = (counter.transform(sides[0]) @ rows.T).toarray().astype(np.float32)
    ids = [
        np.arange(len(side))
        if given is None
        else _arguments.whole_numbers(name, given, error=AttributionError)
        for name, side, given in zip(
            ("query_ids", "train_ids"), sides, (query_ids, train_ids), strict=True
        )
    ]
    for name, side, own in zip(("query_ids", "train_ids"), sides, ids, strict=True):
        if len(own) != len(side):
            raise AttributionError(
                f"{name} must be one for each text", found=f"{len(own)} for {len(side)} texts"
            )
    return Scores(
        values,
        ids[0],
        ids[1],
        method="text-similarity",
        scale=f"cosine of TF-IDF vectors of runs of up to {words} words",
    )


def _split(name: str, texts: Texts) -> list[list[str]]:
    if isinstance(texts, str) or not len(texts):
        raise AttributionError(
            f"{name} must be a list of texts, or of token ids", found=repr(texts)[:60]
        )
    found = []
    for text in texts:
        if isinstance(text, str):
            found.append(text.lower().split())
        else:
            ids = _arguments.whole_numbers(name, text, error=AttributionError, least=-(2**62))
            found.append([str(token) for token in ids.tolist()])
    return found


def _runs(row: list[str], words: int) -> list[str]:
    """All runs of one to so many words."""
    return [
        " ".join(row[at : at + length])
        for length in range(1, words + 1)
        for at in range(len(row) - length + 1)
    ]
