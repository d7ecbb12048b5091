"""What workers do for a study: train models on subsets, for itself or without some examples."""

from __future__ import annotations

import contextlib
import random
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from gradkeep.datamodels.fitting._masks import Masks, Subsets, draw_masks, training_seed
from gradkeep.datamodels.study._outputs import tensors
from gradkeep.datamodels.study._training import Training, train_many
from gradkeep.errors import DatamodelsError, RematError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from gradkeep.datamodels.fitting._masks import AnyArray
    from gradkeep.datamodels.study._outputs import Output

MASKS, WEIGHTS = "masks", "weights"


@dataclass(slots=True, eq=False)
class StudyJob:
    """Trains the models of some rows; each follows from the study's seed and its index alone."""

    dataset: Any
    train_fn: Callable[[Any, int], Any]
    outputs: Mapping[str, Output]
    num_examples: int
    alpha: float
    subsets: Subsets
    seed: int
    keep_models: bool
    stacked: bool
    repeats: int = 1
    """How many models see each subset, one after the other."""
    memory_budget: float | str | None = None
    """Live bytes of a training step, or a fraction of what it takes; the models are the same."""
    _loaded: Any = field(default=None, repr=False)
    _budget: TrainingBudget | None = field(default=None, repr=False)

    def __call__(self, numbers: Sequence[int]) -> list[dict[str, Any]]:
        """The masks, outputs and, if wanted, weights of these models."""
        masks = draw_masks(
            self.seed,
            [number // self.repeats for number in numbers],
            num_examples=self.num_examples,
            alpha=self.alpha,
            subsets=self.subsets,
        )
        return self.train_all(masks, [training_seed(self.seed, number) for number in numbers])

    def train_all(self, masks: AnyArray, seeds: Sequence[int]) -> list[dict[str, Any]]:
        """The rows of models trained on masks `[K, n]`; those of equal size together, if they may be."""
        if not self.stacked:
            return [self.train_on(mask, seed) for mask, seed in zip(masks, seeds, strict=True)]
        sizes, rows = masks.sum(1), [dict[str, Any]() for _ in seeds]
        for size in np.unique(sizes):
            places = np.flatnonzero(sizes == size).tolist()
            found = self._together(masks[places], [seeds[place] for place in places])
            for place, row in zip(places, found, strict=True):
                rows[place] = row
        return rows

    def __getstate__(self) -> dict[str, Any]:
        names = [name for name in self.__dataclass_fields__ if not name.startswith("_")]
        return {name: getattr(self, name) for name in names}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        for name, value in state.items():
            setattr(self, name, value)
        self._loaded = self._budget = None

    def data(self) -> Any:
        """The dataset, made once per process if it was given as a function."""
        if self._loaded is None:
            self._loaded = load_dataset(self.dataset)
        return self._loaded

    def train_on(self, mask: AnyArray, seed: int) -> dict[str, Any]:
        """The row of one model, trained on a mask `[n]`."""
        import torch

        places = np.flatnonzero(mask)
        # Also whatever the training draws from by itself: the order of rows must not matter.
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)
        with self._within():
            if isinstance(self.train_fn, Training):
                inputs, labels = tensors(self.data())
                model: Any = self.train_fn.train_one(inputs[places], labels[places], seed)
            else:
                model = self.train_fn(torch.utils.data.Subset(self.data(), places.tolist()), seed)
        row: dict[str, Any] = {MASKS: mask}
        row.update({name: output(model) for name, output in self.outputs.items()})
        if self.keep_models:
            row[WEIGHTS] = flat_weights(model.state_dict())
        return row

    def _within(self) -> contextlib.AbstractContextManager[None]:
        if self.memory_budget is None:
            return contextlib.nullcontext()
        if self._budget is None:
            self._budget = TrainingBudget(self.memory_budget)
        return self._budget.training()

    def _together(self, masks: AnyArray, seeds: Sequence[int]) -> list[dict[str, Any]]:
        import torch

        assert isinstance(self.train_fn, Training)
        inputs, labels = tensors(self.data())
        subsets = torch.from_numpy(np.stack([np.flatnonzero(mask) for mask in masks]))
        weights, ask = train_many(self.train_fn, inputs, labels, subsets, seeds)
        found = {}
        for name, output in self.outputs.items():
            assert output.of_logits is not None
            asked, right = tensors(output.examples)
            found[name] = output.of_logits(ask(asked), right).numpy().astype(output.dtype)
        rows: list[dict[str, Any]] = []
        for place, mask in enumerate(masks):
            row: dict[str, Any] = {MASKS: mask}
            row.update({name: values[place] for name, values in found.items()})
            if self.keep_models:
                row[WEIGHTS] = flat_weights({n: value[place] for n, value in weights.items()})
            rows.append(row)
        return rows


def load_dataset(dataset: Any) -> Any:
    """A dataset, or what the function that was given in its place returns."""
    return dataset() if callable(dataset) and not hasattr(dataset, "__len__") else dataset


def flat_weights(state: Mapping[str, Any]) -> AnyArray:
    """All float tensors of a state, one after the other, float32 `[P]`."""
    parts = [value.detach().cpu().float().reshape(-1).numpy() for value in floats(state).values()]
    return np.concatenate([np.empty(0, np.float32), *parts])


def floats(state: Mapping[str, Any]) -> dict[str, Any]:
    """The tensors of a state that hold weights; counters are left as they begin."""
    return {name: value for name, value in state.items() if value.is_floating_point()}


def restore_weights(model: Any, flat: AnyArray) -> Any:
    """Put weights `[P]` back into a model of the same kind."""
    import torch

    state = dict(model.state_dict())
    at = 0
    for name, value in floats(state).items():
        part = flat[at : at + value.numel()]
        at += value.numel()
        if len(part) == value.numel():
            state[name] = torch.from_numpy(part.copy()).reshape(value.shape).to(value.dtype)
    if at != len(flat):
        raise DatamodelsError(
            "this model has another number of weights than those that were kept",
            found=at,
            expected=len(flat),
        )
    model.load_state_dict(state)
    return model


@dataclass(frozen=True, slots=True, eq=False)
class RetrainJob:
    """Trains on given masks, all of them once, then all of them again with another seed."""

    job: StudyJob
    masks: Masks

    def __call__(self, numbers: Sequence[int]) -> list[dict[str, Any]]:
        """The masks and outputs of these trainings."""
        many = len(self.masks)
        masks = self.masks[[number % many for number in numbers]].numpy()
        seeds = [training_seed(self.job.seed, number // many) for number in numbers]
        return self.job.train_all(masks, seeds)


class TrainingBudget:
    """A budget for all trainings of this process.

    Every model is new to it, so that each training begins with recorded steps; but the plans of
    models of the same kind are the same, and are searched for only once.
    """

    def __init__(self, budget: float | str) -> None:
        self.budget = budget
        self._plans: str | None = None

    @contextlib.contextmanager
    def training(self) -> Iterator[None]:
        """Train inside the budget."""
        from gradkeep.remat import memory_budget

        budget = memory_budget(self.budget)
        with tempfile.TemporaryDirectory(prefix="gradkeep-plans-") as folder:
            plans = Path(folder) / "plans.json"
            if self._plans is not None:
                plans.write_text(self._plans)
                budget.load(plans)
            with budget:
                yield
            # Without enough steps there is no plan, and nothing to pass on.
            with contextlib.suppress(RematError):
                budget.save(plans)
                self._plans = plans.read_text()
