"""Choose an option by the outcomes of models that were trained on subsets."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

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
"""Fingerprint of outputs that are smaller for better answers, such as losses."""
HALVES = "halves"
"""Fingerprint of subset models that are a ground truth: every second subset is for reporting."""
_RETRAINED = ".removals."
"""Part of the names of models that were trained without chosen rows, which are not random subsets."""


@dataclass(frozen=True, slots=True, eq=False)
class SubsetOutcomes:
    """Models trained on subsets: their training rows and their outputs on the queries."""

    name: str
    masks: AnyArray
    """`[m, N]` bool"""
    outputs: AnyArray
    """`[m, Q]`, larger for better answers"""


def subset_digests(masks: AnyArray) -> tuple[str, ...]:
    """Compute a short digest of each subset `[m, N]`, to detect shared subsets."""
    packed = np.packbits(np.asarray(masks).astype(bool), axis=1)
    return tuple(xxhash.xxh3_64_hexdigest(row.tobytes()) for row in packed)


def choose_option(
    method: Method,
    question: AttributionQuestion,
    options: Any,
    compute: Callable[[Any], Scores],
    subsets: Any,
) -> Scores:
    """Return the scores of the candidate that predicts the outcomes of subsets best.

    For each query the outputs of the subset models are rank-correlated with the sums of the scores of their
    training rows; the candidate with the largest mean over queries wins. One number is chosen by m outcomes
    per query, so overfitting is negligible.
    """
    assert method.tuned is not None
    outcomes = subset_outcomes(question, subsets)
    best: tuple[float, float, Scores] | None = None
    for value in method.candidates:
        scores = compute(dataclasses.replace(options, **{method.tuned: value}))
        fit = abs(agreement(scores.values, outcomes))
        if best is None or fit > best[0]:
            best = fit, value, scores
    assert best is not None
    fit, value, scores = best
    why = (
        f"{method.tuned} {value:g} of {', '.join(f'{v:g}' for v in method.candidates)}, by the "
        f"outcomes of {len(outcomes.masks)} models of {outcomes.name} (rank correlation {fit:.3f})"
    )
    return dataclasses.replace(scores, chosen=why, chosen_on=subset_digests(outcomes.masks))


def agreement(scores: AnyArray, outcomes: SubsetOutcomes) -> float:
    """Return the mean over queries of the rank correlation of predicted and true outcomes."""
    predicted = outcomes.masks.astype(np.float32) @ np.asarray(scores).T
    return float(np.nan_to_num(column_correlations(predicted, outcomes.outputs)).mean())


def subset_outcomes(question: AttributionQuestion, subsets: Any) -> SubsetOutcomes:
    """Return the outcomes `[m, Q]` of subset models: a set in the store, or (masks, outputs).

    Of a ground truth only the half for choosing is used.
    """
    at = question.at()[0]
    rows, num_queries = len(at.train_block), len(at.query_block)
    subsets = getattr(subsets, "choosing", subsets)
    if isinstance(subsets, SubsetOutcomes):
        name, masks, outputs = subsets.name, subsets.masks, subsets.outputs
    elif subsets is not None and not isinstance(subsets, str):
        masks, outputs = (np.asarray(part) for part in subsets)
        name = "the passed subsets"
    else:
        name, masks, outputs = _from_store(question, subsets, rows, num_queries)
    if masks.shape != (len(masks), rows) or outputs.shape != (len(masks), num_queries):
        raise AttributionError(
            "the subsets have other rows or queries",
            code="attribute.wrong_subsets",
            found=f"masks {list(masks.shape)}, outputs {list(outputs.shape)}",
            expected=f"[m, {rows}] and [m, {num_queries}], in the order of the captures",
        )
    if len(masks) < 10:
        raise AttributionError(
            "there are too few subset models to choose an option",
            code="attribute.few_subsets",
            found=len(masks),
            expected="at least 10",
        )
    return SubsetOutcomes(
        name, masks.astype(bool), outputs[:, question.positions].astype(np.float64)
    )


def _subset_models(store: Store) -> list[str]:
    """List the row sets that can hold models of random subsets, ground truths first."""
    random = [name for name in store.row_sets() if _RETRAINED not in name]
    return sorted(random, key=lambda name: not store.rows(name).schema.fingerprints.get(HALVES))


def _from_store(
    question: AttributionQuestion, set_name: str | None, rows: int, num_queries: int
) -> tuple[str, AnyArray, AnyArray]:
    store = question.store
    for name in _subset_models(store) if set_name is None else [set_name]:
        if name not in store.row_sets():
            raise AttributionError(
                f"there are no subset models {name!r}",
                code="attribute.unknown_subsets",
                found=", ".join(store.row_sets()) or "none",
            )
        models = store.rows(name)
        by_name = {array.name: array for array in models.schema.arrays}
        fitting = [
            array.name
            for array in by_name.values()
            if array.shape == (num_queries,) and array.dtype.startswith("float")
        ]
        if MASKS in by_name and by_name[MASKS].shape == (rows,) and len(fitting) == 1:
            fingerprints = models.schema.fingerprints
            done = models.done()
            subset = done // int(fingerprints.get("repeats") or 1)
            if fingerprints.get(HALVES):
                done, subset = done[subset % 2 == 0], subset[subset % 2 == 0]
            read = models.read(done, [MASKS, fitting[0]])
            _, first, which = np.unique(subset, return_index=True, return_inverse=True)
            # One outcome for each subset: the mean over its models.
            outputs = np.zeros((len(first), num_queries))
            np.add.at(outputs, which, np.asarray(read[fitting[0]], np.float64))
            outputs /= np.bincount(which)[:, None]
            return (
                name,
                np.asarray(read[MASKS])[first],
                -outputs if fingerprints.get(FALLING) else outputs,
            )
    raise AttributionError(
        "the store holds no subset models of these rows and queries to choose an option",
        code="attribute.no_subsets",
        path=store.location,
        fix="Train some with gk.datamodels.Study(store, ...), pass subsets=(masks, outputs), or pass "
        "a number instead of 'auto'.",
    )
