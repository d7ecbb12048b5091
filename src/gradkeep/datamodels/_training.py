"""Training of one model or of many at a time, and the job that does it."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import random
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np

from gradkeep import _arguments
from gradkeep._arguments import Limits, PositiveInt, check_fields, checked
from gradkeep.datamodels._masks import Masks, Subsets, draw_masks, training_seed
from gradkeep.datamodels._spec import is_regression, losses_of, tensors
from gradkeep.errors import DatamodelsError, RematError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    import torch

    from gradkeep.datamodels._masks import AnyArray
    from gradkeep.datamodels._spec import Output


TOLERANCE = 1e-3
"""Logits of models trained together and alone differ by less, relative to the largest one."""
MANY = 64
"""How many models are trained together: more gain little, and leave the cache."""


@dataclass(frozen=True, slots=True, eq=False)
class Training:
    """Mini-batch training of a classifier with cross entropy, or of a regression with squared errors.

    Floating-point labels `[N]` are targets of a regression; the model returns `[B, 1]`.

    A study trains many of them stacked if that is faster: same batches, same initialization, logits equal within `TOLERANCE`. The optimizer must
    treat every weight separately, as SGD, Adam and AdamW do.

    Attributes:
        model: Function that builds a new model.
        epochs: Number of epochs.
        batch_size: Rows per batch.
        lr: Learning rate.
        optimizer: Name of a class of `torch.optim` in any case (`"sgd"`, `"AdamW"`), or the class.
        options: Further options of the optimizer, such as momentum or weight decay.
    """

    model: Callable[[], torch.nn.Module]
    epochs: PositiveInt = 10
    batch_size: PositiveInt = 64
    lr: Annotated[float, Limits(0)] = 0.1
    optimizer: str | type[torch.optim.Optimizer] = "SGD"
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_fields(self, DatamodelsError)
        self._optimizer()

    def __call__(self, subset: Any, seed: int) -> torch.nn.Module:
        """Train one model on the examples of `subset`."""
        inputs, labels = tensors(subset)
        return self.train_one(inputs, labels, seed)

    @checked(DatamodelsError)
    def train_one(self, inputs: torch.Tensor, labels: torch.Tensor, seed: int) -> torch.nn.Module:
        """Train one model.

        Args:
            inputs: Inputs `[N, ...]`.
            labels: Labels `[N]`.
            seed: Seed of initialization and batch order.

        Returns:
            The trained model.
        """
        import torch

        model = self.begin(seed)
        model.train()
        optimizer = self.make_optimizer(list(model.parameters()))
        with seeded(seed + 1):
            for places in self.batches(len(labels), seed):
                optimizer.zero_grad(set_to_none=True)
                logits = model(inputs[places])
                if is_regression(labels):
                    loss = losses_of(logits, labels[places]).mean()
                else:
                    loss = torch.nn.functional.cross_entropy(logits, labels[places])
                torch.autograd.backward(loss)
                optimizer.step()
        return model

    @checked(DatamodelsError)
    def begin(self, seed: int) -> torch.nn.Module:
        """Build the untrained model of a seed.

        Args:
            seed: Seed of the initialization.

        Returns:
            The model.
        """
        with seeded(seed):
            return self.model()

    def make_optimizer(self, parameters: list[torch.Tensor]) -> torch.optim.Optimizer:
        """Build the optimizer.

        Args:
            parameters: Parameters of one model, or stacked ones of many.

        Returns:
            The optimizer.
        """
        optimizer: torch.optim.Optimizer = self._optimizer()(parameters, lr=self.lr, **self.options)
        return optimizer

    def _optimizer(self) -> Any:
        import torch

        known: dict[str, Any] = {
            name.lower(): kind
            for name, kind in vars(torch.optim).items()
            if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)
        }
        kind = (
            known.get(self.optimizer.lower()) if isinstance(self.optimizer, str) else self.optimizer
        )
        if kind is None or not issubclass(kind, torch.optim.Optimizer):
            raise DatamodelsError(
                "torch.optim has no such optimizer",
                code="datamodels.unknown_optimizer",
                found=_arguments.short_repr(self.optimizer),
                expected="a name such as 'SGD' or 'AdamW', or a subclass of torch.optim.Optimizer",
            )
        return kind

    @checked(DatamodelsError)
    def batches(self, count: int, seed: int) -> Iterator[torch.Tensor]:
        """Iterate over the batches of all epochs.

        Args:
            count: Number of rows.
            seed: Seed of the order.

        Yields:
            Row indices `[B]`; the last batch of an epoch can be smaller.
        """
        import torch

        generator = torch.Generator().manual_seed(seed)
        for _ in range(self.epochs):
            yield from torch.split(torch.randperm(count, generator=generator), self.batch_size)

    def describe(self) -> str:
        """Describe the training, to notice a change when a study is opened again."""
        options = ", ".join(f"{name}={self.options[name]!r}" for name in sorted(self.options))
        name = getattr(self.model, "__qualname__", type(self.model).__qualname__)
        return (
            f"{name}, {self.epochs} epochs, batches of {self.batch_size}, "
            f"{self._optimizer().__name__}(lr={self.lr!r}{', ' if options else ''}{options})"
        )


class seeded:
    """Context manager that seeds torch and restores its random state afterwards."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def __enter__(self) -> None:
        import torch

        self._before = torch.random.get_rng_state()
        torch.manual_seed(self._seed)

    def __exit__(self, *_: object) -> None:
        import torch

        torch.random.set_rng_state(self._before)


def train_many(
    training: Training,
    inputs: torch.Tensor,
    labels: torch.Tensor,
    subsets: torch.Tensor,
    seeds: Sequence[int],
) -> tuple[dict[str, torch.Tensor], Callable[[torch.Tensor], torch.Tensor]]:
    """Train K models on rows `subsets [K, S]`, each as `Training` would train it alone.

    Returns the stacked weights, and a function from inputs `[N, ...]` to logits `[K, N, C]`.
    """
    import torch
    from torch.func import functional_call, stack_module_state

    models = [training.begin(seed) for seed in seeds]
    stacked, buffers = stack_module_state(models)
    skeleton = copy.deepcopy(models[0]).to("meta")
    skeleton.train()

    def forward(weights: dict[str, torch.Tensor], rest: dict[str, torch.Tensor], x: Any) -> Any:
        return functional_call(skeleton, (weights, rest), (x,))

    each = torch.vmap(forward, randomness="different")
    optimizer = training.make_optimizer(list(stacked.values()))
    size = subsets.shape[1]
    for places in zip(*(training.batches(size, seed) for seed in seeds), strict=True):
        rows = subsets.gather(1, torch.stack(places))
        flat = rows.flatten()
        optimizer.zero_grad(set_to_none=True)
        # Whole rows at a time, which indexing with a matrix would not do.
        batch = inputs.index_select(0, flat).reshape(*rows.shape, *inputs.shape[1:])
        logits = each(stacked, buffers, batch)
        # The sum over models of each one's mean: no model's gradient sees another's loss.
        answers, targets = logits.flatten(0, 1), labels.index_select(0, flat)
        if is_regression(labels):
            loss = losses_of(answers, targets).sum()
        else:
            loss = torch.nn.functional.cross_entropy(answers, targets, reduction="sum")
        torch.autograd.backward(loss / rows.shape[1])
        optimizer.step()
    weights = {name: value.detach() for name, value in stacked.items()}

    def ask(x: torch.Tensor) -> torch.Tensor:
        skeleton.eval()
        with torch.no_grad():
            shared = torch.vmap(forward, in_dims=(0, 0, None))
            answer: torch.Tensor = shared(weights, buffers, x)
            return answer

    return weights, ask


def stacks_well(training: Training, inputs: torch.Tensor, labels: torch.Tensor, size: int) -> bool:
    """Return True if stacked training of subsets of `size` gives the same logits and is faster.

    Tried on a few batches. Models with random layers, running statistics or shapes that cannot be stacked are trained one by one.
    """
    import torch

    model = training.begin(0)
    if next(model.buffers(), None) is not None or _is_random(model):
        return False
    brief = dataclasses.replace(training, epochs=1)
    few = min(size, 16 * training.batch_size)
    seeds = list(range(16))
    generator = torch.Generator().manual_seed(0)
    subsets = torch.stack([torch.randperm(len(labels), generator=generator)[:few] for _ in seeds])
    try:
        train_many(brief, inputs, labels, subsets[:, :1], seeds)  # what is paid once
        together, (_, ask) = _timed(lambda: train_many(brief, inputs, labels, subsets, seeds))
    except (RuntimeError, ValueError, NotImplementedError, AttributeError):
        return False
    alone, models = _timed(
        lambda: [
            brief.train_one(inputs[rows], labels[rows], seed)
            for rows, seed in zip(subsets, seeds, strict=True)
        ]
    )
    probe = inputs[:few]
    with torch.no_grad():
        separate_logits = torch.stack([model.eval()(probe) for model in models])
    stacked_logits = ask(probe)
    same = (stacked_logits - separate_logits).abs().max() <= TOLERANCE * separate_logits.abs().max()
    return bool(same) and alone > 1.2 * together


def _is_random(model: torch.nn.Module) -> bool:
    import torch

    return any(isinstance(part, torch.nn.modules.dropout._DropoutNd) for part in model.modules())


def _timed(function: Callable[[], Any]) -> tuple[float, Any]:
    began = time.perf_counter()
    result = function()
    return time.perf_counter() - began, result


MASKS, WEIGHTS = "masks", "weights"


@dataclass(slots=True, eq=False)
class StudyJob:
    """Job that trains the models of some rows; each depends only on the study's seed and its index."""

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
        """Return masks, outputs and, if requested, weights of these models."""
        masks = draw_masks(
            self.seed,
            [number // self.repeats for number in numbers],
            num_examples=self.num_examples,
            alpha=self.alpha,
            subsets=self.subsets,
        )
        return self.train_all(masks, [training_seed(self.seed, number) for number in numbers])

    def train_all(self, masks: AnyArray, seeds: Sequence[int]) -> list[dict[str, Any]]:
        """Train on masks `[K, n]`; masks of equal size together if stacked."""
        if not self.stacked:
            return [self.train_on(mask, seed) for mask, seed in zip(masks, seeds, strict=True)]
        sizes, rows = masks.sum(1), [dict[str, Any]() for _ in seeds]
        for size in np.unique(sizes):
            places = np.flatnonzero(sizes == size).tolist()
            trained = self._together(masks[places], [seeds[place] for place in places])
            for place, row in zip(places, trained, strict=True):
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
        """Load the data set once per process."""
        if self._loaded is None:
            self._loaded = load_dataset(self.dataset)
        return self._loaded

    def train_on(self, mask: AnyArray, seed: int) -> dict[str, Any]:
        """Train one model on a mask `[n]` and return its row."""
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
                data = self.data()
                if is_pair(data):
                    data = torch.utils.data.TensorDataset(*tensors(data))
                model = self.train_fn(torch.utils.data.Subset(data, places.tolist()), seed)
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
        outputs = {}
        for name, output in self.outputs.items():
            assert output.of_logits is not None
            queries, right = tensors(output.examples)
            outputs[name] = output.of_logits(ask(queries), right).numpy().astype(output.dtype)
        rows: list[dict[str, Any]] = []
        for place, mask in enumerate(masks):
            row: dict[str, Any] = {MASKS: mask}
            row.update({name: values[place] for name, values in outputs.items()})
            if self.keep_models:
                row[WEIGHTS] = flat_weights({n: value[place] for n, value in weights.items()})
            rows.append(row)
        return rows


def load_dataset(dataset: Any) -> Any:
    """Return the data set, calling it if it is a loading function."""
    return dataset() if callable(dataset) and not hasattr(dataset, "__len__") else dataset


def is_pair(data: Any) -> bool:
    """Return True for a pair of inputs and labels, as opposed to a data set of two examples."""
    return isinstance(data, tuple | list) and len(data) == 2 and hasattr(data[0], "shape")


def flat_weights(state: Mapping[str, Any]) -> AnyArray:
    """Concatenate all floating-point tensors of a state dict, float32 `[P]`."""
    parts = [value.detach().cpu().float().reshape(-1).numpy() for value in floats(state).values()]
    return np.concatenate([np.empty(0, np.float32), *parts])


def floats(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the floating-point tensors of a state dict."""
    return {name: value for name, value in state.items() if value.is_floating_point()}


def restore_weights(model: Any, flat: AnyArray) -> Any:
    """Load flat weights `[P]` into a model of the same architecture."""
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
            "the model has another number of weights than the saved one",
            code="datamodels.weight_count",
            found=at,
            expected=len(flat),
        )
    model.load_state_dict(state)
    return model


@dataclass(frozen=True, slots=True, eq=False)
class RetrainJob:
    """Job that trains on given masks, all of them once per seed."""

    job: StudyJob
    masks: Masks

    def __call__(self, numbers: Sequence[int]) -> list[dict[str, Any]]:
        """Return masks and outputs of these trainings."""
        many = len(self.masks)
        masks = self.masks[[number % many for number in numbers]].numpy()
        seeds = [training_seed(self.job.seed, number // many) for number in numbers]
        return self.job.train_all(masks, seeds)


class TrainingBudget:
    """Memory budget for all trainings of a process.

    Each training begins with recorded steps, but plans of models of the same architecture are searched only once.
    """

    def __init__(self, budget: float | str) -> None:
        self.budget = budget
        self._plans: str | None = None

    @contextlib.contextmanager
    def training(self) -> Iterator[None]:
        """Train within the budget."""
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
