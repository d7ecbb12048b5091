"""Choosing a damping by what models that were trained on subsets really did."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from gradkeep import _arguments
from gradkeep._ranks import column_correlations
from gradkeep.errors import AttributionError

if TYPE_CHECKING:
    from collections.abc import Callable

    from gradkeep.attribution._question import AttributionQuestion, Method
    from gradkeep.attribution._scores import Scores
    from gradkeep.store import Store

    AnyArray = np.ndarray[Any, np.dtype[Any]]

AUTO = "auto"
MASKS = "masks"
FALLING = "falling"
"""The fingerprint of outputs that are smaller where a query is answered better, such as losses."""
HALVES = "halves"
"""The fingerprint of subset models that are a ground truth: every second subset is for reporting."""
_RETRAINED = ".removals."
"""In the names of models that were trained without chosen rows: what they say is no random outcome."""
LEAST = 10
"""Fewer subset models than this choose nothing."""


@dataclass(frozen=True, slots=True, eq=False)
class SubsetOutcomes:
    """Models trained on subsets: which rows each saw, and what it said of the queries."""

    name: str
    masks: AnyArray
    """`[m, N]` bool"""
    outputs: AnyArray
    """`[m, Q]`, larger where the query is answered better"""


def subset_digests(masks: AnyArray) -> tuple[str, ...]:
    """A short name for each subset `[m, N]`: what tells whether two sets of models share some."""
    given = _arguments.array("masks", masks, error=AttributionError)
    if given.ndim != 2:
        raise AttributionError("subsets are [m, N]", found=f"shape {list(given.shape)}")
    packed = np.packbits(given.astype(bool), axis=1)
    return tuple(xxhash.xxh3_64_hexdigest(row.tobytes()) for row in packed)


def wants_choice(method: Method, told: Any) -> bool:
    """Whether an option of the method was left to be chosen."""
    value = None if method.tuned is None else getattr(told, method.tuned)
    return isinstance(value, str) and value == AUTO


def choose_option(
    method: Method,
    question: AttributionQuestion,
    told: Any,
    compute: Callable[[Any], Scores],
    subsets: Any,
) -> Scores:
    """The scores of the candidate that predicts the outcomes of subsets best, and why.

    For each query the outputs of the subset models are correlated, by ranks, with the sums of the
    scores of the rows that they saw; the mean over queries decides. One number is chosen by m
    outcomes per query, so that it is hardly fitted to them.
    """
    assert method.tuned is not None
    found = subset_outcomes(question, subsets)
    best: tuple[float, float, Scores] | None = None
    for value in method.candidates:
        scores = compute(dataclasses.replace(told, **{method.tuned: value}))
        fit = abs(agreement(scores.values, found))
        if best is None or fit > best[0]:
            best = fit, value, scores
    assert best is not None
    fit, value, scores = best
    why = (
        f"{method.tuned} {value:g} of {', '.join(f'{v:g}' for v in method.candidates)}, by the "
        f"outcomes of {len(found.masks)} models of {found.name} (rank correlation {fit:.3f})"
    )
    return dataclasses.replace(scores, chosen=why, chosen_on=subset_digests(found.masks))


def agreement(scores: AnyArray, found: SubsetOutcomes) -> float:
    """The mean over queries of the rank correlation of predicted and true outcomes."""
    predicted = found.masks.astype(np.float32) @ np.asarray(scores).T
    return float(np.nan_to_num(column_correlations(predicted, found.outputs)).mean())


def subset_outcomes(question: AttributionQuestion, wanted: Any) -> SubsetOutcomes:
    """The outcomes `[m, Q]` of subset models: a set in the store, or given as (masks, outputs).

    Of a ground truth, in the store or given, only the half that is for choosing is looked at.
    """
    at = question.at()[0]
    rows, asked = len(at.train_block), len(at.query_block)
    wanted = getattr(wanted, "choosing", wanted)
    if isinstance(wanted, SubsetOutcomes):
        name, masks, outputs = wanted.name, wanted.masks, wanted.outputs
    elif wanted is not None and not isinstance(wanted, str):
        masks, outputs = (np.asarray(part) for part in wanted)
        name = "the given subsets"
    else:
        name, masks, outputs = _from_store(question, wanted, rows, asked)
    if masks.shape != (len(masks), rows) or outputs.shape != (len(masks), asked):
        raise AttributionError(
            "the subsets are of other rows or queries",
            found=f"masks {list(masks.shape)}, outputs {list(outputs.shape)}",
            expected=f"[m, {rows}] and [m, {asked}], in the order of the captures",
        )
    if len(masks) < LEAST:
        raise AttributionError(
            "too few subset models to choose by", found=len(masks), expected=f"{LEAST} or more"
        )
    return SubsetOutcomes(
        name, masks.astype(bool), outputs[:, question.positions].astype(np.float64)
    )


def _subset_models(store: Store) -> list[str]:
    """The sets of rows that can be of random subsets, ground truths first."""
    random = [name for name in store.row_sets() if _RETRAINED not in name]
    return sorted(random, key=lambda name: not store.rows(name).schema.fingerprints.get(HALVES))


def _from_store(
    question: AttributionQuestion, wanted: str | None, rows: int, asked: int
) -> tuple[str, AnyArray, AnyArray]:
    store = question.store
    for name in _subset_models(store) if wanted is None else [wanted]:
        if name not in store.row_sets():
            raise AttributionError(
                f"no subset models {name!r}", found=", ".join(store.row_sets()) or "none"
            )
        found = store.rows(name)
        by_name = {array.name: array for array in found.schema.arrays}
        fitting = [
            array.name
            for array in by_name.values()
            if array.shape == (asked,) and array.dtype.startswith("float")
        ]
        if MASKS in by_name and by_name[MASKS].shape == (rows,) and len(fitting) == 1:
            told = found.schema.fingerprints
            done = found.done()
            subset = done // int(told.get("repeats") or 1)
            if told.get(HALVES):
                done, subset = done[subset % 2 == 0], subset[subset % 2 == 0]
            read = found.read(done, [MASKS, fitting[0]])
            _, first, which = np.unique(subset, return_index=True, return_inverse=True)
            # One outcome for each subset: the mean over the models that saw it.
            outputs = np.zeros((len(first), asked))
            np.add.at(outputs, which, np.asarray(read[fitting[0]], np.float64))
            outputs /= np.bincount(which)[:, None]
            return name, np.asarray(read[MASKS])[first], -outputs if told.get(FALLING) else outputs
    raise AttributionError(
        "nothing to choose by: the store holds no subset models of these rows and queries",
        path=store.location,
        fix="train some with gk.datamodels.Study(store, ...), pass subsets=(masks, outputs), or a "
        "number in place of 'auto'",
    )
