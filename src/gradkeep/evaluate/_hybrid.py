"""Scores and the outcomes of subset models, made into one."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np

from gradkeep._annotations import checked
from gradkeep.attribution._scores import Scores
from gradkeep.attribution._tuning import subset_digests
from gradkeep.datamodels import fit
from gradkeep.errors import EvaluationError
from gradkeep.evaluate._lds import fitting_queries

if TYPE_CHECKING:
    from gradkeep.evaluate._truth import GroundTruth

_FOLDS, _LEAST_IN_A_FOLD = 5, 3
"""Those of `gk.datamodels.fit` around a prior."""


@checked(EvaluationError)
def hybrid(scores: Scores, truth: GroundTruth, *, variances: Any = None, **options: Any) -> Scores:
    """Datamodels of the choosing half with the scores as their prior: mostly above either parent.

    Weights shrink towards the scaled scores, as far as `variances [N]` allow each row to differ (the
    mean 1 - p of a row is a good measure); the folds of `gk.datamodels.fit` choose how far, with the
    scores alone among the choices; with few subsets they can choose wrongly. `options` are those of `fit`.
    """
    places = fitting_queries(scores, truth)
    truth.refuse_chosen(scores.chosen_on, "reporting")
    half = truth.choosing
    prior = np.asarray(scores.values)
    few = len(half.masks) < _FOLDS * _LEAST_IN_A_FOLD
    if few and not {"folds", "lam", "held_out"} & set(options):
        options["folds"] = _fewer_folds(len(half.masks))
    found = fit(half.masks, half.outputs[:, places], prior=prior, variances=variances, **options)
    alone = bool(np.isinf(found.lam).all())
    return dataclasses.replace(
        scores,
        values=np.ascontiguousarray(found.weights.T, np.float32),
        method=f"hybrid of {scores.method}",
        scale="weights of a datamodel with these scores as prior",
        exact=False,
        approximate=scores.approximate,
        chosen=f"{'the prior alone' if alone else 'a datamodel'}, by {len(half.masks)} subsets of "
        f"{half.name}",
        chosen_on=tuple(dict.fromkeys((*scores.chosen_on, *subset_digests(half.masks)))),
        confidence=None,
        per_layer=None,
        plan=None,
    )


def _fewer_folds(models: int) -> int:
    """As many as hold three models each."""
    if models < 2 * _LEAST_IN_A_FOLD:
        raise EvaluationError(
            "too few subsets to choose how far a hybrid follows its scores",
            found=f"{models} in the choosing half",
            expected=f"{2 * _LEAST_IN_A_FOLD} or more",
            fix="gk.evaluate.ground_truth(..., subsets=...) with more adds to those that are done",
        )
    return models // _LEAST_IN_A_FOLD


@checked(EvaluationError)
def datamodel_scores(truth: GroundTruth, **options: Any) -> Scores:
    """The weights of datamodels of the choosing half as scores `[T, N]`; `options` are those of `fit`."""
    half = truth.choosing
    found = fit(half.masks, half.outputs, **options)
    return Scores(
        np.ascontiguousarray(found.weights.T, np.float32),
        np.arange(truth.num_queries),
        np.arange(truth.num_rows),
        method="datamodel",
        scale="change of the output with the row",
        exact=False,
        chosen=f"fitted to {len(half.masks)} subsets of {half.name}",
        chosen_on=subset_digests(half.masks),
    )
