"""Comparison of methods against retraining, and mixtures of them."""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from gradkeep import _arguments
from gradkeep._arguments import checked
from gradkeep.attribution._attribute import attribute
from gradkeep.attribution._registry import methods as all_methods
from gradkeep.attribution._scores import Scores
from gradkeep.attribution._tuning import subset_digests
from gradkeep.datamodels import fit
from gradkeep.errors import EvaluationError, GradkeepError
from gradkeep.evaluate._evaluation import Difference, Evaluation, compare
from gradkeep.evaluate._lds import fitting_queries, lds
from gradkeep.evaluate._truth import GroundTruth, load_truth
from gradkeep.store import CaptureKey
from gradkeep.store import open as open_store

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Mapping, Sequence

    from gradkeep.store import Store


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


_NEEDS_A_MODEL = ("influence", "arnoldi")
"""By default these solve with the curvature of a model at hand; from a store, with the Fisher matrix."""
_BASELINES = ("random", "label-match", "similarity", "knn-shapley", "loss")
_HYBRID = "hybrid"


@dataclass(frozen=True, slots=True, eq=False)
class JudgedMethod:
    """What a method came to, and its price; or why it could not be asked."""

    name: str
    evaluation: Evaluation | None
    cpu_seconds: float
    """Of asking, the captures being there."""
    bytes_per_row: float | None
    """What is kept of a training row at all checkpoints asked, for methods that read gradients."""
    refused: str | None = None
    scores: Scores | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Judgement:
    """Methods by their LDS, the best first, and how far the best is above each."""

    truth: GroundTruth
    methods: tuple[JudgedMethod, ...]
    refused: tuple[JudgedMethod, ...]

    @property
    def best(self) -> JudgedMethod:
        """The method with the largest score."""
        return self.methods[0]

    def against_best(self, name: str) -> Difference:
        """The best method against one of the others, resample by resample."""
        (other,) = [one for one in self.methods if one.name == name]
        assert self.best.evaluation is not None
        assert other.evaluation is not None
        return compare(self.best.evaluation, other.evaluation)

    def __str__(self) -> str:
        ceiling = self.truth.ceiling()
        half = self.truth.reporting
        head = f"LDS on {half.name}: {len(half.masks)} subsets x {self.truth.seeds} seeds"
        lines = [head + ("" if ceiling is None else f", ceiling {ceiling:.3f}")]
        lines.append(
            f"{'method':28}{'LDS':>24}{'of ceiling':>12}{'CPU s':>9}{'bytes/row':>12}"
            "   best is ahead by"
        )
        for one in self.methods:
            found = one.evaluation
            assert found is not None
            low, high = found.interval
            share = "-" if found.share is None else f"{found.share:.0%}"
            size = "-" if one.bytes_per_row is None else f"{one.bytes_per_row:.0f}"
            told = f"{found.value:.3f} [{low:.3f}, {high:.3f}]"
            line = f"{one.name:28}{told:>24}{share:>12}{one.cpu_seconds:>9.2f}{size:>12}"
            if one is not self.best:
                apart = self.against_best(one.name)
                line += (
                    f"   {apart.value:+.3f} [{apart.interval[0]:+.3f}, {apart.interval[1]:+.3f}]"
                )
            lines.append(line)
        lines += [f"{one.name:28} not asked: {one.refused}" for one in self.refused]
        return "\n".join(lines)


@checked(EvaluationError)
def judge_methods(
    store: Store | str | os.PathLike[str],
    truth: GroundTruth | str | None = None,
    *,
    methods: Sequence[str] | None = None,
    given: Mapping[str, Scores] | None = None,
    checkpoints: str | Sequence[str] | None = None,
    run: str | Sequence[str] = "main",
    name: str = "main",
    queries: str = "test",
    train: str = "train",
    ids: Any = None,
    level: float = 0.95,
    hybrid_of_best: bool = True,
    report: Callable[[JudgedMethod], None] | None = None,
) -> Judgement:
    """The LDS of every method that the captures of a store can be asked by, baselines among them.

    `given` are scores from elsewhere, by name (text similarity, another library). With
    `hybrid_of_best`, the method that predicts the choosing half best is also joined with the outcomes
    of that half; all figures are of the reporting half. Cost: that of asking each method, and of the fit.
    """
    if report is not None:
        _arguments.function("report", report, error=EvaluationError)
    opened = open_store(store, create=False)
    found = truth if isinstance(truth, GroundTruth) else load_truth(opened, truth)
    about_queries = [one.name for one in all_methods() if one.about_queries]
    asked = about_queries if methods is None else list(methods)
    where = {"queries": queries, "train": train, "run": run, "name": name, "ids": ids}
    judged = []
    for method in asked:
        began = time.process_time()
        try:
            scores = ask_method(opened, method, checkpoints=checkpoints, **where)
            took = time.process_time() - began
            size = _bytes_per_row(opened, scores, train, name)
            one = _judged(method, scores, found, level, took, size)
        except GradkeepError as error:
            told = str(error).splitlines()[0]
            one = JudgedMethod(method, None, time.process_time() - began, None, told)
        judged.append(one)
        if report is not None:
            report(one)
    for label, scores in (given or {}).items():
        judged.append(_judged(label, scores, found, level, 0.0, None))
        if report is not None:
            report(judged[-1])
    whole = [one for one in judged if one.evaluation is not None]
    if not whole:
        raise EvaluationError(
            "none of the methods could be asked", found=judged[0].refused if judged else "no method"
        )
    if hybrid_of_best:
        joined = _hybrid_of_best(whole, found, level)
        judged.append(joined)
        whole += [joined] if joined.evaluation is not None else []
        if report is not None:
            report(joined)
    ordered = sorted(whole, key=_value, reverse=True)
    return Judgement(found, tuple(ordered), tuple(one for one in judged if one.evaluation is None))


def ask_method(
    store: Store, method: str, *, checkpoints: str | Sequence[str] | None, **where: Any
) -> Scores:
    """The scores of a method as it is best asked of a store alone; one checkpoint where it takes one."""
    known = {one.name: one for one in all_methods()}
    options: dict[str, Any] = {"curvature": "fisher"} if method in _NEEDS_A_MODEL else {}
    single = method in known and known[method].over == "one"
    if single and checkpoints is not None and not isinstance(checkpoints, str):
        checkpoints = list(checkpoints)[-1] if len(checkpoints) else None
    return attribute(store, method=method, checkpoints=checkpoints, **where, **options)


def _judged(
    name: str, scores: Scores, truth: GroundTruth, level: float, took: float, size: float | None
) -> JudgedMethod:
    reads = None if name in _BASELINES else size
    return JudgedMethod(name, lds(scores, truth, level=level), took, reads, scores=scores)


def _hybrid_of_best(judged: list[JudgedMethod], truth: GroundTruth, level: float) -> JudgedMethod:
    """The method that is best on the choosing half, with the outcomes of that half."""

    def fits(one: JudgedMethod) -> float:
        assert one.scores is not None
        if one.scores.chosen_on:
            return -1.0  # it has seen that half
        return lds(one.scores, truth, part="choosing", resamples=100).value

    best = max(judged, key=fits)
    assert best.scores is not None
    began = time.process_time()
    try:
        made = hybrid(best.scores, truth)
    except GradkeepError as error:
        told = str(error).splitlines()[0]
        return JudgedMethod(f"{_HYBRID} of {best.name}", None, 0.0, None, told)
    took = time.process_time() - began
    found = lds(made, truth, level=level)
    return JudgedMethod(
        f"{_HYBRID} of {best.name}", found, best.cpu_seconds + took, best.bytes_per_row, scores=made
    )


def _value(one: JudgedMethod) -> float:
    assert one.evaluation is not None
    return one.evaluation.value


def _bytes_per_row(store: Store, scores: Scores, train: str, name: str) -> float | None:
    """What is kept of a training row at all checkpoints that were asked."""
    total = 0.0
    for place in scores.checkpoints:
        run, _, checkpoint = place.rpartition("/")
        key = CaptureKey(checkpoint, train, run or "main", name)
        if not store.has(key):
            return None
        block = store.read(key)
        total += block.manifest.bytes / max(1, len(block)) if len(block) else 0.0
    return total or None
