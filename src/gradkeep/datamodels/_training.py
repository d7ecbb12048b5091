"""A training that is described rather than written, so that many can be done at once."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from gradkeep.datamodels._outputs import tensors
from gradkeep.errors import StudyError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    import torch

TOLERANCE = 1e-3
"""Logits of models trained together and alone differ by less, relative to the largest one."""


@dataclass(frozen=True, slots=True, eq=False)
class Training:
    """Mini-batch training of a classifier: `model()` makes a new one, the rest is as it says.

    Called with a subset and a seed it trains one model. A study trains many of them stacked, where
    that is faster: same batches, same beginnings, logits equal within `TOLERANCE`. The optimizer
    must treat every weight by itself (SGD, Adam, AdamW and most others do).
    """

    model: Callable[[], torch.nn.Module]
    epochs: int = 10
    batch_size: int = 64
    lr: float = 0.1
    optimizer: str = "SGD"
    """A class of `torch.optim`."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """More for the optimizer, such as momentum or weight decay."""

    def __post_init__(self) -> None:
        for name in ("epochs", "batch_size"):
            if type(getattr(self, name)) is not int or getattr(self, name) < 1:
                raise StudyError(
                    f"{name} is wrong", found=repr(getattr(self, name)), expected="1 or more"
                )

    def __call__(self, subset: Any, seed: int) -> torch.nn.Module:
        """Train one model on the examples of `subset`."""
        inputs, labels = tensors(subset)
        return self.train_one(inputs, labels, seed)

    def train_one(self, inputs: torch.Tensor, labels: torch.Tensor, seed: int) -> torch.nn.Module:
        """One model, on inputs `[N, ...]` and labels `[N]`."""
        import torch

        model = self.begin(seed)
        model.train()
        optimizer = self.make_optimizer(list(model.parameters()))
        with seeded(seed + 1):
            for places in self.batches(len(labels), seed):
                optimizer.zero_grad(set_to_none=True)
                logits = model(inputs[places])
                loss = torch.nn.functional.cross_entropy(logits, labels[places])
                torch.autograd.backward(loss)
                optimizer.step()
        return model

    def begin(self, seed: int) -> torch.nn.Module:
        """The untrained model that a seed stands for."""
        with seeded(seed):
            return self.model()

    def make_optimizer(self, parameters: list[torch.Tensor]) -> torch.optim.Optimizer:
        """The optimizer of these parameters, of one model or of many stacked."""
        import torch

        kind = getattr(torch.optim, self.optimizer, None)
        if kind is None:
            raise StudyError("torch.optim has no such optimizer", found=self.optimizer)
        made: torch.optim.Optimizer = kind(parameters, lr=self.lr, **self.options)
        return made

    def batches(self, count: int, seed: int) -> Iterator[torch.Tensor]:
        """The places `[B]` of every batch of every epoch; an epoch's last batch may be smaller."""
        import torch

        generator = torch.Generator().manual_seed(seed)
        for _ in range(self.epochs):
            yield from torch.split(torch.randperm(count, generator=generator), self.batch_size)

    def describe(self) -> str:
        """What a store remembers of it, to notice a change."""
        options = ", ".join(f"{name}={self.options[name]!r}" for name in sorted(self.options))
        name = getattr(self.model, "__qualname__", type(self.model).__qualname__)
        return (
            f"{name}, {self.epochs} epochs, batches of {self.batch_size}, "
            f"{self.optimizer}(lr={self.lr!r}{', ' if options else ''}{options})"
        )


class seeded:
    """Torch's random numbers follow from a seed inside, and go on as before after it."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def __enter__(self) -> None:
        import torch

        self._before = torch.random.get_rng_state()
        torch.manual_seed(self._seed)

    def __exit__(self, *_: object) -> None:
        import torch

        torch.random.set_rng_state(self._before)
