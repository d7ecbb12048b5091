"""Ground truth: models trained on subsets, and whether scores are of the same rows."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch.utils.data import default_collate

from gradkeep import _arguments
from gradkeep._arguments import checked
from gradkeep._ranks import column_correlations
from gradkeep.attribution._tuning import FALLING, HALVES, SubsetOutcomes, subset_digests
from gradkeep.capturing._batches import digests
from gradkeep.errors import EvaluationError, GradkeepError
from gradkeep.evaluate._evaluation import digest_of
from gradkeep.store import open as open_store

if TYPE_CHECKING:
    import os
    from collections.abc import Callable

    from gradkeep.attribution._scores import Scores
    from gradkeep.evaluate._evaluation import Evaluation
    from gradkeep.evaluate._recipe import Recipe
    from gradkeep.store import Store

    AnyArray = np.ndarray[Any, np.dtype[Any]]


_AT_ONCE = 256


def sample_rows(data: Any) -> str | None:
    """Fingerprint evenly spaced rows of a data set: hexadecimal digests in order.

    A row's digest is the one that `gk.capture` keeps as `example`, for a loader that delivers the
    same tensors. None if rows cannot be read as tensors.
    """
    try:
        pair = isinstance(data, tuple | list) and len(data) == 2 and hasattr(data[0], "shape")
        count = len(data[0]) if pair else len(data)
        places = _places(count)
        if pair:
            whole = tuple(torch.as_tensor(part)[torch.from_numpy(places)] for part in data)
            found = digests(whole)
        elif isinstance(data, torch.Tensor | np.ndarray):
            found = digests(torch.as_tensor(data)[torch.from_numpy(places)])
        else:
            parts = [
                digests(default_collate([data[int(at)] for at in places[start : start + _AT_ONCE]]))
                for start in range(0, len(places), _AT_ONCE)
            ]
            found = np.concatenate(parts) if parts else np.empty(0, np.uint64)
    except (TypeError, ValueError, IndexError, KeyError, RuntimeError, GradkeepError):
        return None
    return " ".join(f"{int(digest):016x}" for digest in found)


def check_order(sampled: str | None, examples: AnyArray, *, what: str) -> None:
    """Raise if a sampled row is in the capture at another place than in the recipe.

    Rows that the capture does not hold at all are no evidence: padding and added columns change a
    row's digest. A row that is there, but elsewhere, is.

    Args:
        sampled: What `sample_rows` gave for the recipe's data.
        examples: Digests `[N]` of the captured rows at their places, zero where there is none.
        what: Name of the rows in the error.
    """
    wanted = np.array([int(digest, 16) for digest in (sampled or "").split()], np.uint64)
    places = _places(len(examples))
    if len(wanted) != len(places):
        return  # nothing was sampled, or of another number of rows
    captured = examples[places]
    moved = (captured != wanted) & (captured != 0) & np.isin(wanted, examples)
    if moved.any():
        row = int(places[moved][0])
        raise EvaluationError(
            f"the {what} were captured in another order than the ground truth has them",
            found=f"row {row} of the ground truth is at place "
            f"{int(np.flatnonzero(examples == wanted[moved][0])[0])} of the capture",
            fix="capture the rows in the order of the recipe, or train a ground truth for the "
            "captured order under another name",
        )


def captured_examples(scores: Scores, split: str, ids: AnyArray) -> AnyArray | None:
    """Digests of rows of a split, from a capture that the scores were computed from."""
    if scores.store is None:
        return None
    for key in scores.store.captures():
        if key.split == split and key.folder in scores.captures:
            block = scores.store.read(key)
            if "example" not in block.names or not np.isin(ids, block.ids).all():
                return None
            found: AnyArray = block.column("example")[block.positions(ids)]
            return found
    return None


def _places(count: int) -> AnyArray:
    # Rows whose fingerprints are kept, evenly spaced: 8 kB of text, and a shuffle moves most of
    # them.
    return np.unique(np.linspace(0, max(0, count - 1), min(count, 512)).astype(np.int64))


TruthPart = Literal["reporting", "choosing", "all"]
_MASKS = "masks"
_LEAST = 5
"""Fewer subsets than this have no interval."""


@dataclass(frozen=True, slots=True)
class MoreModels:
    """What it would take to halve an interval."""

    subsets: int | None
    """As many more; None if other queries are what the interval comes from."""
    models: int | None
    seconds: float | None
    """Of training, where the time of a model is known."""

    def __str__(self) -> str:
        if self.subsets is None:
            return "no number of models halves this interval: it comes from the choice of queries"
        cost = "" if self.seconds is None else f", about {self.seconds:.0f} s of training"
        return f"{self.models} models more ({self.subsets} subsets) would halve the interval{cost}"


@dataclass(frozen=True, slots=True, eq=False)
class GroundTruth:
    """Subsets and what models trained on them said, divided into a half to choose by and one to report.

    Every second subset, from the first, is for choosing: a damping, layers, epochs, a hybrid. The
    others are what figures are reported on. Scores that were chosen by a subset are not judged by it.
    """

    name: str
    masks: AnyArray
    """`[m, N]` bool"""
    outputs: AnyArray
    """`[m, seeds, T]`; larger where a query is answered better"""
    training: str = ""
    """How the models were trained."""
    labels: str | None = None
    """The digest of the training labels."""
    rows: str | None = field(default=None, repr=False)
    """Fingerprints of evenly spaced training rows, in order."""
    asked: str | None = field(default=None, repr=False)
    """Fingerprints of evenly spaced queries, in order."""
    parameters: int | None = None
    """How many the model has."""
    recipe: str | None = None
    """Where its recipe is found."""
    seconds: float | None = None
    """Of one training, where it was seen."""

    def __post_init__(self) -> None:
        masks, outputs = np.asarray(self.masks), np.asarray(self.outputs)
        if masks.ndim != 2 or outputs.ndim != 3 or len(masks) != len(outputs):
            raise EvaluationError(
                "a ground truth is subsets and outputs of the models trained on them",
                found=f"masks {list(masks.shape)}, outputs {list(outputs.shape)}",
                expected="[m, N] and [m, seeds, T]",
            )
        if not np.isfinite(outputs).all():
            raise EvaluationError("some of the outputs of subset models are not numbers")
        object.__setattr__(self, "masks", masks.astype(bool))
        object.__setattr__(self, "outputs", outputs.astype(np.float64))

    @property
    def num_rows(self) -> int:
        """How many training rows the subsets are of."""
        return int(self.masks.shape[1])

    @property
    def num_queries(self) -> int:
        """How many queries the models were asked."""
        return int(self.outputs.shape[2])

    @property
    def seeds(self) -> int:
        """How many models saw each subset."""
        return int(self.outputs.shape[1])

    @property
    def choosing(self) -> SubsetOutcomes:
        """The half that anything may be chosen by; `gk.attribute(..., subsets=truth)` takes it."""
        return self.part("choosing")

    @property
    def reporting(self) -> SubsetOutcomes:
        """The half that figures are reported on."""
        return self.part("reporting")

    def part(self, part: TruthPart) -> SubsetOutcomes:
        """One of the halves, or all; outputs `[m, T]` are means over seeds."""
        rows = self._rows(part)
        name = self.name if part == "all" else f"{self.name}, {part} half"
        return SubsetOutcomes(name, self.masks[rows], self.outputs[rows].mean(axis=1))

    def ceiling(
        self, part: TruthPart = "reporting", queries: AnyArray | None = None
    ) -> float | None:
        """What a perfect prediction of the subsets' effect would score, by how seeds agree.

        The seeds are halved in many ways; r, the mean rank correlation of two halves, is stepped up
        to all seeds (Spearman-Brown), and its root is the ceiling. None with one seed.
        """
        outputs = self.outputs[self._rows(part)]
        return ceiling_of(outputs if queries is None else outputs[:, :, queries])

    def to_halve(self, found: Evaluation) -> MoreModels:
        """How many more models would halve the interval of an evaluation, and what they cost.

        The variance is that of subsets, which falls with their number, and that of queries, which
        does not.
        """
        if found.spread_by_subsets is None or found.spread_by_queries is None:
            raise EvaluationError("this evaluation does not depend on subsets", found=found.metric)
        subsets, queries = found.spread_by_subsets**2, found.spread_by_queries**2
        left = (subsets + queries) / 4 - queries
        if left <= 0:
            return MoreModels(None, None, None)
        # The reporting half grows with every second subset.
        more = 2 * math.ceil(found.sizes.subsets * (subsets / left - 1))
        models = more * self.seeds
        return MoreModels(more, models, None if self.seconds is None else models * self.seconds)

    def digest(self, part: TruthPart, queries: AnyArray) -> str:
        """What tells this truth, at some queries, from others."""
        rows = self._rows(part)
        return digest_of(self.masks[rows], self.outputs[rows][:, :, queries])

    def refuse_chosen(self, chosen_on: tuple[str, ...], part: TruthPart) -> None:
        """Raise if scores were chosen by subsets of this part."""
        shared = set(chosen_on) & set(subset_digests(self.masks[self._rows(part)]))
        if shared:
            raise EvaluationError(
                "these scores were chosen by the outcomes they would be judged by",
                found=f"{len(shared)} of the subsets of {self.part(part).name}",
                fix="choose by truth.choosing (subsets=truth) and judge by the reporting half",
            )

    def _rows(self, part: TruthPart) -> AnyArray:
        every = np.arange(len(self.masks))
        if part == "all":
            return every
        if part not in ("choosing", "reporting"):
            raise EvaluationError(f"no part {part!r}", expected="'reporting', 'choosing' or 'all'")
        rows = every[0 if part == "choosing" else 1 :: 2]
        if len(rows) < _LEAST:
            raise EvaluationError(
                "too few subsets for an interval",
                found=f"{len(rows)} in the {part} half of {self.name}",
                expected=f"{_LEAST} or more",
                fix="gk.evaluate.ground_truth(..., subsets=...) with more adds to those that are done",
            )
        return rows


@checked(EvaluationError)
def ground_truth(
    store: Store | str | os.PathLike[str],
    recipe: Recipe,
    *,
    subsets: int = 100,
    seeds: int = 2,
    alpha: float = 0.5,
    name: str = "truth",
    seed: int = 0,
    stacked: bool | None = None,
    keep_models: bool | Callable[[], Any] = False,
    **options: Any,
) -> GroundTruth:
    """Train `seeds` models on each of so many random shares `alpha` of the rows, and keep what they say.

    The models are a `gk.datamodels.Study` of that name in the store: interrupted, it resumes; more
    subsets are added to those that are there; `damping="auto"`, datamodels, hybrids and evaluations
    all read it. `options` are those of `gk.farm.run`: `workers`, `engine` (Ray, SLURM), `progress`.
    Cost: subsets x seeds trainings, many at a time where a `Training` can be stacked.

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
    _arguments.count("subsets", subsets, error=EvaluationError, least=2 * _LEAST)
    _arguments.count("seeds", seeds, error=EvaluationError, least=1)
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
            "some of the subset models could not be trained",
            path=study.rows.path,
            found="; ".join([str(outcome.progress), *why]),
            fix="mend the training and call again: what is done stays",
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
    """The ground truth of that name in a store, or the only one; any study can serve as one.

    Subsets of which not all seeds are done are left out.
    """
    opened = open_store(store, create=False)
    names = opened.row_sets()
    if name is None:
        marked = [one for one in names if opened.rows(one).schema.fingerprints.get(HALVES)]
        whole = [one for one in marked if ".removals." not in one]
        if len(whole) != 1:
            raise EvaluationError(
                "which ground truth?" if whole else "the store holds no ground truth",
                path=opened.location,
                found=", ".join(whole) or ", ".join(names) or "no subset models",
                fix="name it" if whole else "gk.evaluate.ground_truth(store, recipe) trains one",
            )
        name = whole[0]
    if name not in names:
        raise EvaluationError(
            f"no ground truth {name!r}", path=opened.location, found=", ".join(names) or "none"
        )
    rows = opened.rows(name)
    told = rows.schema.fingerprints
    fitting = [
        array.name
        for array in rows.schema.arrays
        if array.kind == "data" and array.dtype.startswith("float") and len(array.shape) == 1
        if array.name != "weights" and output in (None, array.name)
    ]
    if _MASKS not in [array.name for array in rows.schema.arrays] or len(fitting) != 1:
        raise EvaluationError(
            f"{name!r} is no ground truth: it needs masks and one output per query",
            path=rows.path,
            found=", ".join(array.name for array in rows.schema.arrays),
            fix="name one with output=" if len(fitting) > 1 else "",
        )
    seeds = int(told.get("repeats") or 1)
    done = rows.done()
    subset = done // seeds
    whole_subsets = (
        np.flatnonzero(np.bincount(subset) == seeds) if len(done) else np.empty(0, np.int64)
    )
    models = (whole_subsets[:, None] * seeds + np.arange(seeds)).ravel()
    if not len(models):
        raise EvaluationError(
            f"no subset of {name!r} is done", path=rows.path, fix="run the study to its end"
        )
    masks = np.asarray(rows.read(models[::seeds], [_MASKS])[_MASKS])
    outputs = np.asarray(rows.read(models, [fitting[0]])[fitting[0]], np.float64)
    sign = -1.0 if told.get(FALLING) else 1.0
    parameters = told.get("parameters")
    return GroundTruth(
        name,
        masks,
        sign * outputs.reshape(len(whole_subsets), seeds, -1),
        training=str(told.get("training", "")),
        labels=None if told.get("labels") is None else str(told["labels"]),
        rows=None if told.get("rows") is None else str(told["rows"]),
        asked=None if told.get("asked") is None else str(told["asked"]),
        parameters=None if parameters is None else int(parameters),
        recipe=None if told.get("recipe") is None else str(told["recipe"]),
        seconds=seconds,
    )


def ceiling_of(outputs: AnyArray) -> float | None:
    """The root of how far the mean over seeds of outputs `[m, seeds, T]` would agree with another's."""
    seeds = outputs.shape[1]
    half = seeds // 2
    if half == 0 or len(outputs) < 3:
        return None
    rng, found = np.random.default_rng(0), []
    # Ways to halve the seeds that the ceiling is averaged over.
    for _ in range(20 if seeds > 2 else 1):
        order = rng.permutation(seeds)
        one, other = (outputs[:, order[at : at + half]].mean(axis=1) for at in (0, half))
        each = column_correlations(one, other)
        found.append(each[np.isfinite(each)].mean() if np.isfinite(each).any() else 0.0)
    r = float(np.mean(found))
    if not math.isfinite(r) or r <= 0:
        return 0.0
    one_seed = r / (half - (half - 1) * r)
    return math.sqrt(seeds * one_seed / (1 + (seeds - 1) * one_seed))
