"""Ranks, which correlations of ranks are made of."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    AnyArray = np.ndarray[Any, np.dtype[Any]]


def ranks(values: AnyArray) -> AnyArray:
    """Ranks along the first axis, equal values sharing the mean of theirs, `[m, t]`."""
    order = np.argsort(values, axis=0, kind="stable")
    out = np.empty(values.shape)
    for column in range(values.shape[1]):
        ordered = values[order[:, column], column]
        first = np.concatenate([[True], ordered[1:] != ordered[:-1]])
        starts = np.flatnonzero(first)
        ends = np.concatenate([starts[1:], [len(ordered)]])
        out[order[:, column], column] = ((starts + ends - 1) / 2)[np.cumsum(first) - 1]
    return out


def column_correlations(one: AnyArray, other: AnyArray) -> AnyArray:
    """Spearman's correlation of each column of two tables `[m, t]` -> `[t]`; NaN where one is constant."""
    left, right = (values - values.mean(0) for values in (ranks(one), ranks(other)))
    size = np.sqrt((left * left).sum(0) * (right * right).sum(0))
    out = np.full_like(size, np.nan)
    return np.asarray(np.divide((left * right).sum(0), size, out=out, where=size > 0))


def rank_correlation(one: AnyArray, other: AnyArray) -> float:
    """Spearman's correlation of two lists of numbers `[m]`; 0 where one of them is constant.

    >>> rank_correlation(np.array([1.0, 2.0, 9.0]), np.array([2.0, 4.0, 5.0]))
    1.0
    """
    left, right = (ranks(values.reshape(-1, 1))[:, 0] for values in (one, other))
    left, right = left - left.mean(), right - right.mean()
    size = float(np.sqrt((left * left).sum() * (right * right).sum()))
    return float((left * right).sum()) / size if size else 0.0
