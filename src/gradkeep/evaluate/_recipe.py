"""Recipe: how models are trained on some of the rows, and their outputs on the queries."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from gradkeep._arguments import check_fields
from gradkeep.attribution._tuning import FALLING, HALVES
from gradkeep.datamodels import Output, Study, Training, losses, margins
from gradkeep.errors import EvaluationError, GradkeepError
from gradkeep.evaluate._truth import captured_examples, check_order, fingerprint_rows
from gradkeep.store import open as open_store

if TYPE_CHECKING:
    import os
    from collections.abc import Callable

    from gradkeep.attribution._scores import Scores
    from gradkeep.store import Store

    AnyArray = np.ndarray[Any, np.dtype[Any]]

RETRAINING = "retraining"


@dataclass(frozen=True, slots=True, eq=False)
class Recipe:
    """How models are trained: on which rows, by which function, and with which outputs.

    Args:
        train: Dataset, or (inputs `[N, ...]`, labels `[N]`), in the order of the capture.
        queries: Dataset, or (inputs, labels), in the order of the capture.
        training: Function of (subset, seed) that returns a trained model; a `gk.datamodels.Training` can train
            many models at a time.
        output: Output of a model for each query; by default the margin, or the loss of floating-point targets.
        falling: True if a smaller output is a better answer, as for a loss; detected by default.
        source: Where a command can import the recipe: `module:name` or `file.py:name`.

    Raises:
        EvaluationError: A field has a wrong type.

    Example:
        >>> import torch
        >>> x, y = torch.eye(6), torch.arange(6) % 2
        >>> training = Training(lambda: torch.nn.Linear(6, 2), epochs=2, batch_size=3)
        >>> Recipe((x, y), (x[:2], y[:2]), training).num_rows
        6
    """

    train: Any
    queries: Any
    training: Callable[[Any, int], Any]
    output: Output | None = None
    falling: bool | None = None
    source: str | None = None

    def __post_init__(self) -> None:
        check_fields(self, EvaluationError)

    @property
    def num_rows(self) -> int:
        """Number of training rows."""
        pair = _pair(self.train)
        return len(self.train if pair is None else pair[1])

    @property
    def num_queries(self) -> int:
        """Number of outputs of a model, one for each query."""
        return int(np.prod(self.query_output().shape))

    def check_captured(self, scores: Scores) -> None:
        """Raise unless the captured training rows and queries are those of the recipe, in its order.

        Args:
            scores: Scores of the captures.

        Raises:
            EvaluationError: A row differs.
        """
        sides = (
            (self.train, scores.train, scores.train_ids, "training rows"),
            (self.queries, scores.queries, scores.query_ids, "queries"),
        )
        for data, split, ids, what in sides:
            examples = captured_examples(scores, split, ids)
            if examples is None:
                continue
            pair = _pair(data)
            count = len(data if pair is None else pair[1])
            if len(ids) < count and len(ids) and ids.min() >= 0 and ids.max() < count:
                by_place = np.zeros(count, np.uint64)
                by_place[ids] = examples
                examples = by_place
            check_order(fingerprint_rows(data), examples, what=what)

    def query_output(self) -> Output:
        """Return the output of a model for each query."""
        if self.output is not None:
            return self.output
        return losses(self.queries) if self._is_regression() else margins(self.queries)

    def is_falling(self) -> bool:
        """Return True if a smaller output is a better answer."""
        if self.falling is not None:
            return self.falling
        if self.output is None:
            return self._is_regression()
        known = self.output.of_logits
        return known is not None and known is losses(self.queries).of_logits

    def _is_regression(self) -> bool:
        """Return True if the queries have floating-point targets."""
        pair = _pair(self.queries)
        if pair is None:
            return False
        targets = np.asarray(pair[1])
        return targets.ndim == 1 and targets.dtype.kind == "f"

    def labels(self) -> AnyArray | None:
        """Return the labels `[N]` of the training rows, or None if the dataset has no array of them."""
        pair = _pair(self.train)
        return None if pair is None else np.asarray(pair[1])

    def study(
        self,
        store: Store | str | os.PathLike[str],
        *,
        name: str,
        subsets: int,
        seeds: int,
        alpha: float = 0.5,
        seed: int = 0,
        stacked: bool | None = None,
        keep_models: bool | Callable[[], Any] = False,
    ) -> Study:
        """Create or open the study of a ground truth: models i x seeds and following see subset i.

        Args:
            store: The store, or its path.
            name: Name of the study.
            subsets: Number of subsets.
            seeds: Models per subset.
            alpha: Share of the rows in a subset.
            seed: Seed of the subsets.
            stacked: Train many models at a time; automatic by default.
            keep_models: Save the trained models.

        Returns:
            The study.
        """
        return self._study(
            store,
            name,
            subsets * seeds,
            {HALVES: True},
            alpha=alpha,
            seed=seed,
            repeats=seeds,
            stacked=stacked,
            keep_models=keep_models,
        )

    def retraining(self, store: Store, name: str = RETRAINING) -> Study:
        """Open a study for `retrain`: trainings on chosen rows instead of random ones.

        Args:
            store: The store.
            name: Name of the study.

        Returns:
            The study.
        """
        return self._study(store, name, 1, {}, begin=False)

    def _study(
        self,
        store: Store | str | os.PathLike[str],
        name: str,
        num_models: int,
        facts: dict[str, str | int | float | bool],
        **options: Any,
    ) -> Study:
        facts = {**facts, FALLING: self.is_falling()}
        labels = self.labels()
        if labels is not None:
            facts["labels"] = labels_digest(labels)
        facts |= self._row_fingerprints(open_store(store), name)
        if isinstance(self.training, Training):
            model = self.training.begin(0)
            facts["parameters"] = sum(parameter.numel() for parameter in model.parameters())
        if self.source is not None:
            facts["recipe"] = self.source
        return Study(
            store,
            self.train,
            self.training,
            num_models=num_models,
            outputs=self.query_output(),
            name=name,
            facts=facts,
            **options,
        )

    def _row_fingerprints(self, store: Store, name: str) -> dict[str, str]:
        """Return fingerprints of rows and queries; none for a study that was created without them."""
        if name in store.row_sets():
            recorded = store.rows(name).schema.fingerprints
            if " " in str(recorded.get("rows", " ")):  # none, or those of an earlier version
                return {part: str(recorded[part]) for part in ("rows", "asked") if part in recorded}
        fingerprints = {
            "rows": fingerprint_rows(self.train),
            "asked": fingerprint_rows(self.queries),
        }
        return {part: text for part, text in fingerprints.items() if text is not None}


def labels_digest(labels: Any) -> str:
    """Return a digest of labels that does not depend on their integer type."""
    array = np.asarray(labels)
    if array.dtype.kind in "bui":
        array = array.astype(np.int64)
    return xxhash.xxh3_64_hexdigest(np.ascontiguousarray(array).tobytes())


def _pair(data: Any) -> tuple[Any, Any] | None:
    """Return inputs and labels of a pair, or of a dataset that returns them as a whole."""
    if isinstance(data, tuple | list) and len(data) == 2 and hasattr(data[1], "__len__"):
        return data[0], data[1]
    try:
        whole = data[:]
    except (TypeError, ValueError, IndexError, KeyError, AttributeError, GradkeepError):
        return None
    is_pair = isinstance(whole, tuple | list) and len(whole) == 2 and hasattr(whole[1], "__len__")
    return (whole[0], whole[1]) if is_pair else None
