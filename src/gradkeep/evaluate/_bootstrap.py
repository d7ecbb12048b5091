"""Resampling: what other queries, other subsets or other rows would have said."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from gradkeep import _arguments
from gradkeep._ranks import ranks
from gradkeep.errors import EvaluationError

if TYPE_CHECKING:
    AnyArray = np.ndarray[Any, np.dtype[Any]]

_AT_ONCE = 1 << 24
"""Numbers that a part of the resamples may take."""


def check_bounds(level: float, resamples: int) -> None:
    """Refuse a level or a number of resamples that no interval can be made with."""
    _arguments.number("level", level, error=EvaluationError, above=0, most=0.9999)
    _arguments.count("resamples", resamples, error=EvaluationError, least=100, most=1_000_000)


def digest_of(*parts: Any) -> str:
    """One short name for arrays and words: what tells two universes of resamples apart."""
    found = xxhash.xxh3_128()
    for part in parts:
        if isinstance(part, np.ndarray):
            found.update(f"{part.dtype.str}{part.shape}".encode())
            found.update(np.ascontiguousarray(part).data)
        else:
            found.update(repr(part).encode())
    return found.hexdigest()


def draw_weights(count: int, resamples: int, universe: str, what: str) -> AnyArray:
    """How often each of `count` things is drawn in each resample `[B, count]`, by the universe alone."""
    seed = xxhash.xxh3_64_intdigest(f"{universe}/{what}".encode())
    rng = np.random.default_rng(seed)
    return rng.multinomial(count, np.full(count, 1 / count), size=resamples).astype(np.float64)


@dataclass(frozen=True, slots=True, eq=False)
class ResampledCorrelation:
    """Correlations of ranks over subsets, one for each query, and their mean in resamples."""

    items: AnyArray
    """`[T]`; NaN where the outcome is constant"""
    value: float
    draws: AnyArray
    """`[B]`: subsets and queries drawn anew"""
    by_subsets: float
    """The standard deviation that more subsets would lessen."""
    by_queries: float
    """The standard deviation that stays with any number of subsets: queries differ."""


def rank_correlations(
    predicted: AnyArray, actual: AnyArray, *, resamples: int, universe: str
) -> ResampledCorrelation:
    """Spearman's correlation over subsets of predictions and outcomes `[m, T]`, averaged over queries.

    Ranks are made once; a resample weighs subsets and queries by how often it drew them. A constant
    prediction of an outcome that varies counts as 0. Costs resamples x m x T.
    """
    # By range: a mean of equal numbers may differ from them in the last bit.
    varies = np.ptp(actual, axis=0) > 0
    if not varies.any():
        raise EvaluationError(
            "the models say the same whatever they were trained on: there is nothing to predict",
            found=f"{len(varies)} queries with constant outputs",
        )
    says = np.ptp(predicted, axis=0) > 0
    items = np.where(varies, 0.0, np.nan)
    told = np.flatnonzero(varies & says)
    p, y = ranks(predicted[:, told]), ranks(actual[:, told])
    for values in (p, y):
        values -= values.mean(axis=0)
        values /= values.std(axis=0)
    items[told] = (p * y).mean(axis=0)
    defined = np.flatnonzero(varies)
    value = float(items[defined].mean())
    by_subset = draw_weights(len(p), resamples, universe, "subsets") / len(p)
    by_query = draw_weights(len(defined), resamples, universe, "queries") / len(defined)
    place = np.searchsorted(defined, told)
    draws = np.empty(resamples)
    step = max(1, _AT_ONCE // max(1, 8 * len(told)))
    parts = (p, y, p * y, p * p, y * y)
    for start in range(0, resamples, step):
        weights = by_subset[start : start + step]
        ep, ey, epy, epp, eyy = (weights @ part for part in parts)
        spread = np.sqrt(np.maximum(epp - ep * ep, 0) * np.maximum(eyy - ey * ey, 0))
        ratio = np.divide(epy - ep * ey, spread, out=np.zeros_like(spread), where=spread > 0)
        each = np.zeros((len(ratio), len(defined)))
        each[:, place] = np.clip(ratio, -1, 1)
        draws[start : start + step] = (each * by_query[start : start + step]).sum(axis=1)
    # A correlation of few models is too near to 0, that of a resample doubly so.
    draws += value - draws.mean()
    # Correlations of few subsets differ by chance, too: what is left of their variance is the queries'.
    noise = ((1 - items[told] ** 2) ** 2).sum() / (len(p) - 1) / len(defined)
    stays = max(0.0, float(items[defined].var()) - noise) / len(defined)
    lessens = max(0.0, float(draws.var()) - stays)
    return ResampledCorrelation(items, value, draws, math.sqrt(lessens), math.sqrt(stays))
