"""A recipe: all that it takes to train models anew on some of the rows, and to ask them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from gradkeep import _arguments
from gradkeep._arguments import check_fields
from gradkeep.attribution._tuning import FALLING, HALVES
from gradkeep.datamodels import Output, Study, Training, losses, margins
from gradkeep.errors import EvaluationError, GradkeepError
from gradkeep.evaluate._truth import sample_rows
from gradkeep.store import open as open_store

if TYPE_CHECKING:
    import os
    from collections.abc import Callable

    from gradkeep.store import Store

    AnyArray = np.ndarray[Any, np.dtype[Any]]

RETRAINING = "retraining"


@dataclass(frozen=True, slots=True, eq=False)
class Recipe:
    """How models are trained here: on which rows, in which way, and what they are asked.

    `train` and `queries` are datasets, or inputs `[N, ...]` and labels `[N]`, in the order in which
    they were captured. `training(subset, seed)` returns a trained model; a
    `gk.datamodels.Training` can be trained many at a time. The output is the margin of each
    query unless another is given; one that falls where a query is answered better, such as a loss,
    is `falling`.

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
    """Where a command finds it again: `module:name` or `file.py:name`."""

    def __post_init__(self) -> None:
        check_fields(self, EvaluationError)
        _arguments.function("training", self.training, error=EvaluationError)

    @property
    def num_rows(self) -> int:
        """How many training rows there are."""
        pair = _pair(self.train)
        return len(self.train if pair is None else pair[1])

    @property
    def num_queries(self) -> int:
        """How many numbers are kept of a trained model, one for each query."""
        return int(np.prod(self.asked().shape))

    def asked(self) -> Output:
        """What is kept of a trained model."""
        return margins(self.queries) if self.output is None else self.output

    def is_falling(self) -> bool:
        """Whether a smaller output is a better answer."""
        if self.falling is not None:
            return self.falling
        known = None if self.output is None else self.output.of_logits
        return known is not None and known is losses(self.queries).of_logits

    def labels(self) -> AnyArray | None:
        """The labels `[N]` of the training rows, where they can be had at once."""
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
        """The models of a ground truth, begun or opened: subset i is seen by models i x seeds and on."""
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
        """A study of the store for its `retrain` alone: trainings on chosen rows, not on random ones."""
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
            made = self.training.begin(0)
            facts["parameters"] = sum(one.numel() for one in made.parameters())
        if self.source is not None:
            facts["recipe"] = self.source
        return Study(
            store,
            self.train,
            self.training,
            num_models=num_models,
            outputs=self.asked(),
            name=name,
            facts=facts,
            **options,
        )

    def _row_fingerprints(self, store: Store, name: str) -> dict[str, str]:
        """Fingerprints of rows and queries; none for a study that was begun without them."""
        if name in store.row_sets() and "rows" not in store.rows(name).schema.fingerprints:
            return {}
        found = {"rows": sample_rows(self.train), "asked": sample_rows(self.queries)}
        return {part: text for part, text in found.items() if text is not None}


def labels_digest(labels: Any) -> str:
    """What tells the labels of one data set from those of another, whatever integers they are."""
    array = np.asarray(labels)
    if array.dtype.kind in "bui":
        array = array.astype(np.int64)
    return xxhash.xxh3_64_hexdigest(np.ascontiguousarray(array).tobytes())


def _pair(data: Any) -> tuple[Any, Any] | None:
    """Inputs and labels of a pair or of a dataset that gives them whole."""
    if isinstance(data, tuple | list) and len(data) == 2 and hasattr(data[1], "__len__"):
        return data[0], data[1]
    try:
        whole = data[:]
    except (TypeError, ValueError, IndexError, KeyError, AttributeError, GradkeepError):
        return None
    is_pair = isinstance(whole, tuple | list) and len(whole) == 2 and hasattr(whole[1], "__len__")
    return (whole[0], whole[1]) if is_pair else None
