"""Ground truth: models trained on subsets, and a check that scores have the same rows."""

from __future__ import annotations

import base64
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

import numpy as np
import torch
from torch.utils.data import default_collate

from gradkeep._arguments import Limits, PositiveInt, checked, one_of
from gradkeep.attribution._tuning import FALLING, HALVES, SubsetOutcomes, subset_digests
from gradkeep.capturing._batches import digests
from gradkeep.errors import EvaluationError, GradkeepError
from gradkeep.evaluate._intervals import (
    Level,
    RankCorrelations,
    digest_of,
    format_interval,
    jackknife_correlations,
)
from gradkeep.store import open as open_store

if TYPE_CHECKING:
    import os
    from collections.abc import Callable

    from gradkeep.attribution._scores import Scores
    from gradkeep.evaluate._evaluation import Evaluation
    from gradkeep.evaluate._recipe import Recipe
    from gradkeep.store import Store

    AnyArray = np.ndarray[Any, np.dtype[Any]]


_MOST_FINGERPRINTS = 150_000
"""Rows with a fingerprint of their own: at 4 bytes each, they fit into a schema of 1 MiB."""


def fingerprint_rows(data: Any) -> str | None:
    """Fingerprint every row of a dataset in order: base64 of 8 bytes per row, or 4 of more than 20,000.

    Of more than 150,000 rows, as many evenly spaced ones. A row's digest equals the `example` of `gk.capture`
    for a loader with the same tensors. None if rows cannot be read as tensors.
    """
    try:
        pair = isinstance(data, tuple | list) and len(data) == 2 and hasattr(data[0], "shape")
        count = len(data[0]) if pair else len(data)
        places = _places(count)
        if pair:
            whole = tuple(torch.as_tensor(part)[torch.from_numpy(places)] for part in data)
            row_digests = digests(whole)
        elif isinstance(data, torch.Tensor | np.ndarray):
            row_digests = digests(torch.as_tensor(data)[torch.from_numpy(places)])
        else:
            parts = [
                digests(default_collate([data[int(at)] for at in places[start : start + 256]]))
                for start in range(0, len(places), 256)
            ]
            row_digests = np.concatenate(parts) if parts else np.empty(0, np.uint64)
    except (TypeError, ValueError, IndexError, KeyError, RuntimeError, GradkeepError):
        return None
    return base64.b64encode(row_digests.astype(_fingerprint_type(count)).tobytes()).decode()


def check_order(fingerprints: str | None, examples: AnyArray, *, what: str) -> None:
    """Raise if a row of the capture is another one than in the recipe.

    If none of the recipe's rows is in the capture, they cannot be compared: padding and added columns change
    the digest of every row.

    Args:
        fingerprints: Result of `fingerprint_rows` for the recipe's data.
        examples: Digests `[N]` of the captured rows, zero for none.
        what: Name of the rows in the error.
    """
    places = _places(len(examples))
    captured, width = examples, _fingerprint_type(len(examples))
    if fingerprints is not None and (" " in fingerprints or len(fingerprints) == 16):
        # Written by an earlier version: hexadecimal digests of up to 512 evenly spaced rows.
        recorded = np.array([int(digest, 16) for digest in fingerprints.split()], np.uint64)
        places = _places(len(examples), 512)
    else:
        recorded = np.frombuffer(base64.b64decode(fingerprints or ""), width)
        captured = examples.astype(width)
    if len(recorded) != len(places):
        return  # no fingerprints, or another number of rows
    differs = (captured[places] != recorded) & (examples[places] != 0)
    known = np.isin(recorded, captured)
    if differs.any() and known.any():
        first = int(np.flatnonzero(differs)[0])
        elsewhere = np.flatnonzero(captured == recorded[first])
        raise EvaluationError(
            f"the {what} of the capture are not those of the recipe, in this order",
            code="evaluate.other_order",
            found=f"row {int(places[first])} of the recipe is "
            + (f"row {int(elsewhere[0])} of the capture" if len(elsewhere) else "not captured"),
            fix="Capture the rows in the order of the recipe, or train a ground truth for the "
            "captured order under another name.",
        )


def captured_examples(scores: Scores, split: str, ids: AnyArray) -> AnyArray | None:
    """Return digests of rows of a split, from a capture that the scores were computed from."""
    if scores.store is None:
        return None
    for key in scores.store.captures():
        if key.split == split and key.folder in scores.captures:
            block = scores.store.read(key)
            if "example" not in block.names or not np.isin(ids, block.ids).all():
                return None
            examples: AnyArray = block.column("example")[block.positions(ids)]
            return examples
    return None


def _places(count: int, most: int = _MOST_FINGERPRINTS) -> AnyArray:
    return np.unique(np.linspace(0, max(0, count - 1), min(count, most)).astype(np.int64))


def _fingerprint_type(count: int) -> Any:
    return np.dtype("<u8" if count <= 20_000 else "<u4")


TruthPart = Literal["reporting", "choosing", "all"]
_MASKS = "masks"
_LEAST = 5
"""Fewest subsets for an interval."""


@dataclass(frozen=True, slots=True)
class MoreModels:
    """Number of models that would halve an interval.

    Attributes:
        subsets: Additional subsets; None if the interval is due to the queries.
        models: Additional models.
        seconds: Training time, if known.
    """

    subsets: int | None
    models: int | None
    seconds: float | None

    def __str__(self) -> str:
        if self.subsets is None:
            return "no number of models halves this interval: it comes from the choice of queries"
        cost = "" if self.seconds is None else f", about {self.seconds:.0f} s of training"
        return f"{self.models} models more ({self.subsets} subsets) would halve the interval{cost}"


@dataclass(frozen=True, slots=True)
class Ceiling:
    """Expected value of a perfect prediction, estimated from the agreement of seeds.

    Attributes:
        value: The ceiling.
        interval: Its interval.
    """

    value: float
    interval: tuple[float, float] | None

    def __str__(self) -> str:
        return f"{self.value:.3f} {format_interval(self.interval)}"


@dataclass(frozen=True, slots=True, eq=False)
class GroundTruth:
    """Subsets and the outputs of models trained on them, divided into a choosing and a reporting half.

    Every second subset, from the first, is for choosing: a damping, layers, epochs, a hybrid. Values are
    reported on the others. Scores that were tuned on a subset are not evaluated on it.

    Attributes:
        name: Name of the study.
        masks: Rows of each subset `[m, N]` bool.
        outputs: Outputs `[m, seeds, T]`, larger for better answers.
        training: Description of the training.
        labels: Digest of the training labels.
        rows: Fingerprints of the training rows.
        query_rows: Fingerprints of the queries.
        parameters: Number of parameters of the model.
        recipe: Where the recipe can be imported.
        seconds: Time of one training, if measured.
    """

    name: str
    masks: AnyArray
    outputs: AnyArray
    training: str = ""
    labels: str | None = None
    rows: str | None = field(default=None, repr=False)
    query_rows: str | None = field(default=None, repr=False)
    parameters: int | None = None
    recipe: str | None = None
    seconds: float | None = None
    _ceilings: dict[Any, Ceiling | None] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        masks, outputs = np.asarray(self.masks), np.asarray(self.outputs)
        if masks.ndim != 2 or outputs.ndim != 3 or len(masks) != len(outputs):
            raise EvaluationError(
                "masks and outputs do not match",
                code="evaluate.wrong_truth",
                found=f"masks {list(masks.shape)}, outputs {list(outputs.shape)}",
                expected="[m, N] and [m, seeds, T]",
            )
        if not np.isfinite(outputs).all():
            raise EvaluationError(
                "some outputs of subset models are not finite", code="evaluate.not_finite"
            )
        object.__setattr__(self, "masks", masks.astype(bool))
        object.__setattr__(self, "outputs", outputs.astype(np.float64))

    @property
    def num_rows(self) -> int:
        """Number of training rows."""
        return int(self.masks.shape[1])

    @property
    def num_queries(self) -> int:
        """Number of queries."""
        return int(self.outputs.shape[2])

    @property
    def seeds(self) -> int:
        """Number of models per subset."""
        return int(self.outputs.shape[1])

    @property
    def choosing(self) -> SubsetOutcomes:
        """Half for choosing options; `gk.attribute(..., subsets=truth)` uses it."""
        return self.part("choosing")

    @property
    def reporting(self) -> SubsetOutcomes:
        """Half for reporting values."""
        return self.part("reporting")

    def part(self, part: TruthPart) -> SubsetOutcomes:
        """Return one of the halves, or all; outputs `[m, T]` are means over seeds."""
        rows = self._rows(part)
        name = self.name if part == "all" else f"{self.name}, {part} half"
        return SubsetOutcomes(name, self.masks[rows], self.outputs[rows].mean(axis=1))

    def ceiling(
        self, part: TruthPart = "reporting", queries: AnyArray | None = None
    ) -> float | None:
        """Estimate the LDS of a perfect prediction, from the agreement of seeds.

        The seeds are halved in many ways; r, the mean rank correlation of two halves, is extrapolated to all seeds
        (Spearman-Brown), and its root is the ceiling. None with one seed.
        """
        estimate = self.estimate_ceiling(part, queries)
        return None if estimate is None else estimate.value

    def estimate_ceiling(
        self,
        part: TruthPart = "reporting",
        queries: AnyArray | None = None,
        *,
        level: Level = 0.95,
    ) -> Ceiling | None:
        """Return the ceiling with its interval; None with one seed."""
        key = (part, None if queries is None else queries.tobytes(), level)
        if key not in self._ceilings:
            outputs = self.outputs[self._rows(part)]
            chosen = outputs if queries is None else outputs[:, :, queries]
            self._ceilings[key] = ceiling_of(chosen, level)
        return self._ceilings[key]

    def to_halve(self, evaluation: Evaluation) -> MoreModels:
        """Estimate how many more models would halve the interval of an evaluation, and their cost.

        The variance between subsets falls with their number, the variance between queries does not.
        """
        if evaluation.spread_by_subsets is None or evaluation.spread_by_queries is None:
            raise EvaluationError(
                "the evaluation does not depend on subsets",
                code="evaluate.no_subsets",
                found=evaluation.metric,
            )
        subsets, queries = evaluation.spread_by_subsets**2, evaluation.spread_by_queries**2
        target = (subsets + queries) / 4 - queries
        if target <= 0:
            return MoreModels(None, None, None)
        # The reporting half grows with every second subset.
        more = 2 * math.ceil(evaluation.sizes.subsets * (subsets / target - 1))
        models = more * self.seeds
        return MoreModels(more, models, None if self.seconds is None else models * self.seconds)

    def digest(self, part: TruthPart, queries: AnyArray) -> str:
        """Return a digest of this truth for some queries."""
        rows = self._rows(part)
        return digest_of(self.masks[rows], self.outputs[rows][:, :, queries])

    def require_not_tuned(self, chosen_on: tuple[str, ...], part: TruthPart) -> None:
        """Raise if scores were tuned on subsets of this part."""
        shared = set(chosen_on) & set(subset_digests(self.masks[self._rows(part)]))
        if shared:
            raise EvaluationError(
                "the scores were tuned on the subsets of the evaluation",
                code="evaluate.tuned_on_truth",
                found=f"{len(shared)} of the subsets of {self.part(part).name}",
                fix="Tune with truth.choosing (subsets=truth) and evaluate on the reporting half.",
            )

    def _rows(self, part: TruthPart) -> AnyArray:
        every = np.arange(len(self.masks))
        if part == "all":
            return every
        one_of(
            "part", part, get_args(TruthPart), error=EvaluationError, code="evaluate.unknown_part"
        )
        rows = every[0 if part == "choosing" else 1 :: 2]
        if len(rows) < _LEAST:
            raise EvaluationError(
                "there are too few subsets for an interval",
                code="evaluate.few_subsets",
                found=f"{len(rows)} in the {part} half of {self.name}",
                expected=f"at least {_LEAST}",
                fix="Add subsets with gk.evaluate.ground_truth(..., subsets=...).",
            )
        return rows


@checked(EvaluationError)
def ground_truth(
    store: Store | str | os.PathLike[str],
    recipe: Recipe,
    *,
    subsets: Annotated[int, Limits(2 * _LEAST)] = 100,
    seeds: PositiveInt = 2,
    alpha: float = 0.5,
    name: str = "truth",
    seed: int = 0,
    stacked: bool | None = None,
    keep_models: bool | Callable[[], Any] = False,
    **options: Any,
) -> GroundTruth:
    """Train models on random subsets of the rows, and save their outputs.

    The models are a `gk.datamodels.Study` in the store: it resumes after an interruption, and more subsets can
    be added. `damping="auto"`, datamodels, hybrids and evaluations read it. Cost: subsets x seeds trainings,
    many at a time if a `Training` can be stacked.

    Args:
        store: The store, or its path.
        recipe: How models are trained.
        subsets: Number of subsets.
        seeds: Models per subset.
        alpha: Share of the rows in a subset.
        name: Name of the study.
        seed: Seed of the subsets.
        stacked: Train many models at a time; automatic by default.
        keep_models: Save the trained models.
        options: Options of `gk.farm.run`: `workers`, `engine` (Ray, SLURM), `progress`.

    Returns:
        The ground truth.

    Raises:
        EvaluationError: Some models could not be trained.

    Example:
        >>> import tempfile, torch
        >>> from gradkeep.datamodels import Training
        >>> from gradkeep.evaluate import Recipe
        >>> x, y = torch.randn(20, 4), torch.arange(20) % 2
        >>> training = Training(lambda: torch.nn.Linear(4, 2), epochs=1, batch_size=5)
        >>> recipe = Recipe((x, y), (x[:3], y[:3]), training)
        >>> truth = ground_truth(tempfile.mkdtemp(), recipe, subsets=10, stacked=False, workers=0)
        >>> truth.masks.shape, truth.outputs.shape, len(truth.reporting.masks)
        ((10, 20), (10, 2, 3), 5)
    """
    opened = open_store(store)
    study = recipe.study(
        opened,
        name=name,
        subsets=subsets,
        seeds=seeds,
        alpha=alpha,
        seed=seed,
        stacked=stacked,
        keep_models=keep_models,
    )
    before = len(study.done())
    outcome = study.run(**options)
    if not outcome.complete:
        why = [item.error.splitlines()[-1] for item in outcome.failures[:1]]
        raise EvaluationError(
            "some subset models could not be trained",
            code="evaluate.training_failed",
            path=study.rows.path,
            found="; ".join([str(outcome.progress), *why]),
            fix="Fix the training and call again: finished models are not trained again.",
        )
    trained = len(study.done()) - before
    return load_truth(opened, name, seconds=outcome.seconds / trained if trained >= seeds else None)


@checked(EvaluationError)
def load_truth(
    store: Store | str | os.PathLike[str],
    name: str | None = None,
    *,
    output: str | None = None,
    seconds: float | None = None,
) -> GroundTruth:
    """Load a ground truth; any study can serve as one.

    Subsets with unfinished seeds are left out.

    Args:
        store: The store, or its path.
        name: Name of the study; the only ground truth by default.
        output: Name of the output, if the study has several.
        seconds: Time of one training, if known.

    Returns:
        The ground truth.

    Raises:
        EvaluationError: There is no such ground truth, or none of its subsets is finished.
    """
    opened = open_store(store, create=False)
    names = opened.row_sets()
    if name is None:
        marked = [one for one in names if opened.rows(one).schema.fingerprints.get(HALVES)]
        whole = [one for one in marked if ".removals." not in one]
        if len(whole) != 1:
            raise EvaluationError(
                f"the store holds {'several ground truths' if whole else 'no ground truth'}",
                code="evaluate.several_truths" if whole else "evaluate.no_truth",
                path=opened.location,
                found=", ".join(whole) or ", ".join(names) or "no subset models",
                fix="Pass its name."
                if whole
                else "Train one with gk.evaluate.ground_truth(store, recipe).",
            )
        name = whole[0]
    if name not in names:
        raise EvaluationError(
            f"there is no ground truth {name!r}",
            code="evaluate.unknown_truth",
            path=opened.location,
            found=", ".join(names) or "none",
        )
    rows = opened.rows(name)
    fingerprints = rows.schema.fingerprints
    fitting = [
        array.name
        for array in rows.schema.arrays
        if array.kind == "data" and array.dtype.startswith("float") and len(array.shape) == 1
        if array.name != "weights" and output in (None, array.name)
    ]
    if _MASKS not in [array.name for array in rows.schema.arrays] or len(fitting) != 1:
        raise EvaluationError(
            f"{name!r} is not a ground truth, which has masks and one output per query",
            code="evaluate.not_a_truth",
            path=rows.path,
            found=", ".join(array.name for array in rows.schema.arrays),
            fix="Select one with output=." if len(fitting) > 1 else "",
        )
    seeds = int(fingerprints.get("repeats") or 1)
    done = rows.done()
    subset = done // seeds
    whole_subsets = (
        np.flatnonzero(np.bincount(subset) == seeds) if len(done) else np.empty(0, np.int64)
    )
    models = (whole_subsets[:, None] * seeds + np.arange(seeds)).ravel()
    if not len(models):
        raise EvaluationError(
            f"no subset of {name!r} is finished",
            code="evaluate.unfinished_truth",
            path=rows.path,
            fix="Run the study to its end.",
        )
    masks = np.asarray(rows.read(models[::seeds], [_MASKS])[_MASKS])
    outputs = np.asarray(rows.read(models, [fitting[0]])[fitting[0]], np.float64)
    sign = -1.0 if fingerprints.get(FALLING) else 1.0
    parameters = fingerprints.get("parameters")
    keys = {"labels": "labels", "rows": "rows", "query_rows": "asked", "recipe": "recipe"}
    texts: Any = {
        field: str(fingerprints[key])
        for field, key in keys.items()
        if fingerprints.get(key) is not None
    }
    return GroundTruth(
        name,
        masks,
        sign * outputs.reshape(len(whole_subsets), seeds, -1),
        training=str(fingerprints.get("training", "")),
        parameters=None if parameters is None else int(parameters),
        seconds=seconds,
        **texts,
    )


def ceiling_of(outputs: AnyArray, level: float) -> Ceiling | None:
    """Return the root of the expected agreement of the mean over seeds of outputs `[m, seeds, T]` with another."""
    seeds = outputs.shape[1]
    half = seeds // 2
    outputs = outputs[:, :, np.ptp(outputs.mean(axis=1), axis=0) > 0]
    if half == 0 or len(outputs) < 3 or not outputs.shape[2]:
        return None
    rng = np.random.default_rng(0)
    halvings = []
    # More random halvings of the seeds change the ceiling by less than its interval.
    for _ in range(5 if seeds > 2 else 1):
        order = rng.permutation(seeds)
        one, other = (outputs[:, order[at : at + half]].mean(axis=1) for at in (0, half))
        halvings.append(jackknife_correlations(one, other))
    items = np.mean([whole for whole, _ in halvings], axis=0)
    table = np.mean([values for _, values in halvings], axis=0)
    agreement = RankCorrelations(items, float(items.mean()), table)

    def extrapolated(r: float) -> float:
        if r <= 0:
            return 0.0
        one_seed = r / (half - (half - 1) * r)
        return math.sqrt(seeds * one_seed / (1 + (seeds - 1) * one_seed))

    interval = agreement.interval(level)
    ends = None if interval is None else (extrapolated(interval[0]), extrapolated(interval[1]))
    return Ceiling(extrapolated(agreement.value), ends)
