"""Ranks, and rank correlations."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    AnyArray = np.ndarray[Any, np.dtype[Any]]


def ranks(values: AnyArray) -> AnyArray:
    """Return ranks along the first axis, `[m, t]`; equal values share the mean of theirs."""
    order = np.argsort(values, axis=0, kind="stable")
    ordered = np.take_along_axis(values, order, axis=0)
    places = np.arange(len(values))[:, None]
    first = np.ones(values.shape, bool)
    first[1:] = ordered[1:] != ordered[:-1]
    last = np.ones(values.shape, bool)
    last[:-1] = first[1:]
    starts = np.maximum.accumulate(np.where(first, places, 0), axis=0)
    ends = np.minimum.accumulate(np.where(last, places, len(values))[::-1], axis=0)[::-1]
    out = np.empty(values.shape)
    np.put_along_axis(out, order, (starts + ends) / 2, axis=0)
    return out


def column_correlations(one: AnyArray, other: AnyArray) -> AnyArray:
    """Return Spearman's correlation `[t]` of columns of two tables `[m, t]`; NaN if one is constant."""
    first, second = (values - values.mean(0) for values in (ranks(one), ranks(other)))
    size = np.sqrt((first * first).sum(0) * (second * second).sum(0))
    out = np.full_like(size, np.nan)
    return np.asarray(np.divide((first * second).sum(0), size, out=out, where=size > 0))


def rank_correlation(one: AnyArray, other: AnyArray) -> float:
    """Return Spearman's correlation of two lists of numbers `[m]`; 0 if one of them is constant.

    >>> rank_correlation(np.array([1.0, 2.0, 9.0]), np.array([2.0, 4.0, 5.0]))
    1.0
    """
    first, second = (ranks(values.reshape(-1, 1))[:, 0] for values in (one, other))
    first, second = first - first.mean(), second - second.mean()
    size = float(np.sqrt((first * first).sum() * (second * second).sum()))
    return float((first * second).sum()) / size if size else 0.0
