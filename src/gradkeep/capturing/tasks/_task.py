"""What is asked of a model for every sample: its loss, and if there is one, its output."""

from __future__ import annotations

import abc
import dataclasses
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from gradkeep.capturing._batches import batch_size, rows_of
from gradkeep.errors import CaptureError


@dataclass(frozen=True, slots=True, eq=False)
class Measured:
    """What one forward pass tells about B samples; `losses` and `outputs` carry their graph."""

    losses: torch.Tensor
    """`[B]`: each sample's own loss, not divided by anything"""
    outputs: torch.Tensor | None = None
    """`[B]`: one number per sample whose gradient is kept in place of the loss's"""
    slopes: torch.Tensor | None = None
    """`[B]`: d loss / d output, so that the loss's gradient is slope x the output's"""
    labels: torch.Tensor | None = None
    """`[B]` whole numbers, or float targets"""
    predictions: torch.Tensor | None = None
    """`[B]`"""
    tokens: torch.Tensor | None = None
    """`[B, T]`: the losses of single tokens, NaN where there is none"""
    logits: torch.Tensor | None = None
    """`[B, C]`: of which softmax makes the probabilities of the classes"""

    def detached(self) -> Measured:
        """The same without graphs."""
        parts: dict[str, Any] = {p.name: getattr(self, p.name) for p in dataclasses.fields(self)}
        kept: dict[str, Any] = {name: v if v is None else v.detach() for name, v in parts.items()}
        return Measured(**kept)


class Task(abc.ABC):
    """What to measure; subclass it and give `losses(model, batch) -> [B]`.

    The losses must be one value per sample, not a mean: a mean would scale every gradient by
    1 / B. Override `measure` to give more in the same forward pass.

    >>> class SquaredError(Task):
    ...     def losses(self, model, batch):
    ...         x, y = batch
    ...         return (model(x).squeeze(1) - y).square()
    >>> SquaredError().measure(nn.Linear(2, 1), (torch.ones(3, 2), torch.ones(3))).losses.shape
    torch.Size([3])
    """

    packed: ClassVar[bool] = False
    """Whether a row of several documents, as padding-free collators make it, is one sample."""

    @abc.abstractmethod
    def losses(self, model: nn.Module, batch: Any) -> torch.Tensor:
        """The loss `[B]` of each sample."""

    def outputs(self, model: nn.Module, batch: Any) -> torch.Tensor | None:
        """One number `[B]` per sample to explain in place of the loss; none by default."""
        return None

    def measure(self, model: nn.Module, batch: Any) -> Measured:
        """All of it in one forward pass; by default only the losses."""
        return Measured(self.losses(model, batch))

    def measure_losses(self, model: nn.Module, batch: Any) -> Measured:
        """What a capture of losses keeps: by default all that `measure` gives."""
        return self.measure(model, batch)

    def describe(self) -> str:
        """The task and its settings, kept with what was captured and compared on resuming."""
        name = f"{type(self).__module__}.{type(self).__qualname__}"
        name = f"gradkeep.{type(self).__name__}" if name.startswith("gradkeep.") else name
        settings = ""
        if dataclasses.is_dataclass(self):
            told = [(p, getattr(self, p.name)) for p in dataclasses.fields(self)]
            # What a later version added is told only where it is used: a store that was begun
            # before can be gone on with.
            told = [(p, v) for p, v in told if not (p.metadata.get("later") and v == p.default)]
            settings = ", ".join(f"{p.name}={v!r}" for p, v in told)
        return f"{name}({settings})"

    def trained_as(self) -> str:
        """The description of the task that training rows are captured with; a query may ask for less."""
        return self.describe()


def losses_alone(task: Task, model: nn.Module, batch: Any) -> Measured:
    """What a task measures, without a graph; with one for tasks that differentiate by themselves."""
    try:
        with torch.no_grad():
            return task.measure_losses(model, batch)
    except RuntimeError as error:
        if "does not require grad" not in str(error):
            raise
    with torch.enable_grad():
        return task.measure_losses(model, batch).detached()


def call(model: nn.Module, inputs: Any) -> Any:
    """The model's answer to the inputs of a batch: `model(x)`, `model(*xs)` or `model(**xs)`."""
    try:
        return _called(model, inputs)
    except IndexError as error:
        raise _beyond_tables(model, inputs, error) from error


def _beyond_tables(model: nn.Module, inputs: Any, error: IndexError) -> CaptureError:
    """The error for what a model has no entry for: which row of the batch it is."""
    row = None
    with torch.no_grad():
        for at in range(batch_size(inputs)):
            try:
                _called(model, rows_of(inputs, at, at + 1))
            except IndexError:
                row = at
                break
    return CaptureError(
        "the model has no entry for what it is to look up"
        + ("" if row is None else f" in row {row} of this batch"),
        found=str(error).splitlines()[0][:200] if str(error) else "IndexError",
        expected="tokens of the model's vocabulary, and no more of them than it has positions",
        fix="use the tokenizer that belongs to the model, and truncate as in training",
    )


def _called(model: nn.Module, inputs: Any) -> Any:
    if isinstance(inputs, Mapping):
        if _takes(model, inputs):
            return model(**inputs)
        if len(inputs) == 1:
            return model(*inputs.values())
        raise CaptureError(
            "the model does not take what the batch holds",
            found=f"{', '.join(map(str, inputs))} for {type(model).__name__}"
            f"{inspect.signature(model.forward)}",
            expected="the names of its arguments, or a single input",
            fix="rename or remove entries in the collate function, keep them aside with columns=, or "
            "subclass gk.Task",
        )
    if isinstance(inputs, tuple | list):
        return model(*inputs)
    return model(inputs)


def _takes(model: nn.Module, inputs: Mapping[Any, Any]) -> bool:
    """Whether the model's forward has arguments of these names."""
    try:
        inspect.signature(model.forward).bind(**inputs)
    except TypeError:
        return False
    except ValueError:
        return True  # compiled code does not tell
    return True


def holds_numbers(tensor: torch.Tensor) -> bool:
    """Whether there is something to check: a plan is made from tensors that have only a shape."""
    return not tensor.is_meta and not hasattr(tensor, "fake_mode")


def logits_of(answer: Any) -> torch.Tensor:
    """The logits in a model's answer: a tensor, `.logits`, `["logits"]`, or the first of a tuple."""
    found = answer
    if not isinstance(found, torch.Tensor):
        if hasattr(answer, "logits"):
            found = answer.logits
        elif isinstance(answer, Mapping) and "logits" in answer:
            found = answer["logits"]
        elif isinstance(answer, tuple | list) and answer:
            found = answer[0]
    if not isinstance(found, torch.Tensor):
        raise CaptureError(
            "the model's answer holds no logits",
            found=type(answer).__name__,
            expected="a tensor, or something with .logits",
            fix="subclass gk.Task and give losses(model, batch) -> [B]",
        )
    return found


def split_labels(batch: Any, names: tuple[str, ...]) -> tuple[Any, torch.Tensor]:
    """A batch as (inputs, labels): the last of a tuple, or the first of `names` in a dict."""
    if isinstance(batch, Mapping):
        for name in names:
            if name in batch:
                rest = {key: value for key, value in batch.items() if key != name}
                return rest, torch.as_tensor(batch[name])
        raise CaptureError(
            "no labels in the batch",
            found=f"a dict with {', '.join(map(str, batch))}",
            expected=f"one of {', '.join(names)}",
            fix="name the labels so, or subclass gk.Task",
        )
    if isinstance(batch, tuple | list) and len(batch) >= 2:
        inputs = batch[0] if len(batch) == 2 else tuple(batch[:-1])
        return inputs, torch.as_tensor(batch[-1])
    raise CaptureError(
        "no labels in the batch",
        found=type(batch).__name__,
        expected="(inputs, labels), or a dict with labels",
        fix="give such batches, or subclass gk.Task",
    )
