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
