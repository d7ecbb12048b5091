"""How many rare words two texts share: what gradients of language models are to be set beside."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from gradkeep import _arguments
from gradkeep._arguments import checked
from gradkeep._surroundings import install_hint
from gradkeep.attribution._scores import Scores
from gradkeep.errors import AttributionError, MissingExtraError

Texts = Sequence[str] | Sequence[Sequence[int]]
"""Texts, or the ids of their tokens."""


@checked(AttributionError)
def text_similarity(
    queries: Texts,
    train: Texts,
    *,
    words: int = 2,
    how: Literal["tfidf", "bm25"] = "tfidf",
    query_ids: Any = None,
    train_ids: Any = None,
) -> Scores:
    """How many rare words texts share, by runs of up to `words` words or tokens: scores without a model.

    `tfidf`: cosines of TF-IDF vectors; `bm25`: Okapi BM25, as search engines rank.

    On applied questions this often does as well as gradients: show it beside them, or mix it in with
    `gk.combine`. Ids default to places. Cost: one pass over the texts and a sparse product.

    >>> found = text_similarity(["the cat sat"], ["a dog ran", "the cat ran"])
    >>> found.top(1, query=0).ids.tolist()
    [1]
    """
    _arguments.count("words", words, error=AttributionError, least=1, most=8)
    sides = [_split(name, texts) for name, texts in (("queries", queries), ("train", train))]
    if not any(sides[1]):
        raise AttributionError("the training texts hold no words", found=len(train))
    asked, known = ([_runs(row, words) for row in side] for side in sides)
    values = _cosines(asked, known) if how == "tfidf" else _okapi(asked, known)
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
        method="text-similarity" if how == "tfidf" else "bm25",
        scale=f"{'cosine of TF-IDF vectors' if how == 'tfidf' else 'BM25'} of runs of up to {words} words",
    )


def _cosines(asked: list[list[str]], known: list[list[str]]) -> Any:
    try:
        from sklearn.feature_extraction.text import TfidfVectorizer
    except ImportError as error:
        raise MissingExtraError(
            "similarity of texts needs scikit-learn", fix=install_hint("demo")
        ) from error
    counter = TfidfVectorizer(analyzer=lambda row: row, sublinear_tf=True)
    rows = counter.fit_transform(known)
    return (counter.transform(asked) @ rows.T).toarray().astype(np.float32)


def _okapi(asked: list[list[str]], known: list[list[str]]) -> Any:
    try:
        import bm25s
    except ImportError as error:
        raise MissingExtraError("BM25 needs bm25s", fix=install_hint("text")) from error
    index = bm25s.BM25()
    index.index(known, show_progress=False)
    vocabulary = {word for row in known for word in row}
    out = np.zeros((len(asked), len(known)), np.float32)
    for row, words in enumerate(asked):
        shared = [word for word in words if word in vocabulary]
        if shared:
            out[row] = index.get_scores(shared)
    return out


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
