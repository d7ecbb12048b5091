"""Tasks: the loss of every sample, and if there is one, its output."""

from __future__ import annotations

import abc
import dataclasses
import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import numpy as np
import torch
import xxhash
from torch import nn
from torch.nn import functional as F

from gradkeep._arguments import one_of
from gradkeep.capturing._batches import batch_size, digests, rows_of
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
    stored_name: ClassVar[str | None] = None
    """Name of a built-in task in stores, where it differs from the name of the class."""

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
        if name.startswith("gradkeep."):
            name = f"gradkeep.{type(self).stored_name or type(self).__name__}"
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
        row = _row_beyond_tables(model, inputs)
        raise CaptureError(
            "the model has no entry for what it is to look up"
            + ("" if row is None else f" in row {row} of this batch"),
            found=str(error).splitlines()[0][:200] if str(error) else "IndexError",
            fix="use the tokenizer that belongs to the model, and truncate as in training",
        ) from error


@torch.no_grad()
def _row_beyond_tables(model: nn.Module, inputs: Any) -> int | None:
    for row in range(batch_size(inputs)):
        try:
            _called(model, rows_of(inputs, row, row + 1))
        except IndexError:
            return row
    return None


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
    found = getattr(answer, "logits", answer)
    if isinstance(answer, Mapping) and "logits" in answer:
        found = answer["logits"]
    elif found is answer and isinstance(answer, tuple | list) and answer:
        found = answer[0]
    if not isinstance(found, torch.Tensor):
        raise CaptureError(
            "the model's answer holds no logits",
            found=type(answer).__name__,
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
    elif isinstance(batch, tuple | list) and len(batch) >= 2:
        inputs = batch[0] if len(batch) == 2 else tuple(batch[:-1])
        return inputs, torch.as_tensor(batch[-1])
    raise CaptureError(
        "no labels in the batch",
        found=described_batch(batch),
        expected=f"(inputs, labels), or a dict with one of {', '.join(names)}",
        fix="give such batches, or subclass gk.Task",
    )


def described_batch(batch: Any) -> str:
    if isinstance(batch, Mapping):
        return f"a dict with {', '.join(map(str, batch))}"
    if isinstance(batch, torch.Tensor):
        return f"{batch.dtype} {tuple(batch.shape)}"
    return type(batch).__name__


LABELS = ("labels", "label", "targets", "target", "y")


@dataclass(frozen=True)
class Classification(Task):
    """One class per sample, from logits `[B, C]`; batches are (inputs, labels) or dicts.

    loss = -log p, output = log(p / (1 - p)), the margin, with p the probability of the label.
    d loss / d output = -(1 - p), so both gradients come from one capture; the output's does not
    vanish when the model is sure. With a single logit `[B]` or `[B, 1]` the labels are 0 or 1.

    `labels="sampled"` draws each label from the model's own probabilities, by the content of the
    sample and the seed, so the same in every batch: gradients of which the true Fisher matrix is
    made.

    >>> model = nn.Linear(4, 3)
    >>> measured = Classification().measure(model, (torch.ones(2, 4), torch.tensor([0, 2])))
    >>> torch.allclose(measured.losses, F.softplus(-measured.outputs))
    True
    """

    labels: Literal["given", "sampled"] = field(
        default="given", kw_only=True, metadata={"later": True}
    )
    seed: int = field(default=0, kw_only=True, metadata={"later": True})

    def __post_init__(self) -> None:
        one_of("labels", self.labels, words=("given", "sampled"), error=CaptureError)

    def losses(self, model: nn.Module, batch: Any) -> torch.Tensor:
        """-log p `[B]`"""
        return self.measure(model, batch).losses

    def outputs(self, model: nn.Module, batch: Any) -> torch.Tensor | None:
        """The margins `[B]`"""
        return self.measure(model, batch).outputs

    def measure_losses(self, model: nn.Module, batch: Any) -> Measured:
        """Losses, labels, predictions and logits, in fewer steps than `measure` takes."""
        if type(self).measure is not Classification.measure or self.labels == "sampled":
            return self.measure(model, batch)  # a subclass measures something else
        inputs, labels = split_labels(batch, LABELS)
        logits = logits_of(call(model, inputs))
        if logits.dim() == 1 or logits.shape[1:] == (1,):
            single = logits.reshape(-1)
            logits = torch.stack([-single, single], 1) / 2
            labels = (labels.reshape(-1) > 0).long()
        labels = labels.to(logits.device)
        _check(logits, labels)
        labels = labels.long()
        losses = F.cross_entropy(logits, labels, reduction="none")
        return Measured(losses, labels=labels, predictions=logits.argmax(1), logits=logits)

    def measure(self, model: nn.Module, batch: Any) -> Measured:
        """Losses, margins, slopes, labels and predictions from one forward pass."""
        inputs, labels = split_labels(batch, LABELS)
        logits = logits_of(call(model, inputs))
        labels = labels.to(logits.device)
        if logits.dim() == 1 or logits.shape[1:] == (1,):
            logits = logits.reshape(-1)
            if self.labels == "sampled":
                labels = _drawn(torch.stack([-logits, logits], 1) / 2, batch, self.seed)
            margins = torch.where(labels.reshape(-1) > 0, logits, -logits)
            predictions = (logits > 0).long()
        else:
            _check(logits, labels)
            labels = labels.long()
            if self.labels == "sampled":
                labels = _drawn(logits, batch, self.seed)
            right = logits.gather(1, labels.unsqueeze(1)).squeeze(1)
            own = torch.zeros_like(logits, dtype=torch.bool).scatter_(1, labels.unsqueeze(1), True)
            margins = right - logits.masked_fill(own, -torch.inf).logsumexp(1)
            predictions = logits.argmax(1)
        return Measured(
            losses=F.softplus(-margins),
            outputs=margins,
            slopes=-torch.sigmoid(-margins.detach()),
            labels=labels.reshape(-1).long(),
            predictions=predictions,
            logits=torch.stack([-logits, logits], 1) / 2 if logits.dim() == 1 else logits,
        )


def _drawn(logits: torch.Tensor, batch: Any, seed: int) -> torch.Tensor:
    """A class `[B]` of each row, drawn by softmax from a number that its sample gives."""
    words = digests(batch)
    numbers = [xxhash.xxh3_64_intdigest(f"{seed} {word}".encode()) for word in words.tolist()]
    points = torch.from_numpy(np.array(numbers, np.uint64) / 2.0**64)
    shares = logits.detach().double().softmax(1).cumsum(1).cpu()
    classes = (shares < points[:, None]).sum(1).clamp(max=logits.shape[1] - 1)
    return classes.to(logits.device)


def _check(logits: torch.Tensor, labels: torch.Tensor) -> None:
    if logits.dim() != 2 or labels.dim() != 1 or len(labels) != len(logits):
        raise CaptureError(
            "classification needs one row of logits and one label per sample",
            found=f"logits {tuple(logits.shape)}, labels {tuple(labels.shape)}",
            fix="use gk.LanguageModeling for sequences, or subclass gk.Task",
        )
    if labels.dtype.is_floating_point:
        raise CaptureError(
            "labels must be whole numbers",
            found=str(labels.dtype),
            fix="pass labels.long(), or use gk.Regression",
        )
    if not holds_numbers(labels):
        return
    low, high = (int(end) for end in labels.aminmax()) if len(labels) else (0, 0)
    if not 0 <= low <= high < logits.shape[1]:
        raise CaptureError(
            "a label that is no class of the model",
            found=f"labels from {low} to {high}",
            expected=f"0 to {logits.shape[1] - 1}",
        )


@dataclass(frozen=True)
class Regression(Task):
    """Float targets `[B]` or `[B, K]`: loss = 0.5 * |prediction - target|^2.

    With one target per sample the output is the prediction itself, and d loss / d output the
    residual. With several there is no such output, and the loss's gradient is kept.

    >>> import torch
    >>> model, batch = torch.nn.Linear(4, 1), (torch.ones(2, 4), torch.zeros(2))
    >>> measured = Regression().measure(model, batch)
    >>> torch.equal(measured.slopes, measured.outputs)
    True
    """

    def losses(self, model: nn.Module, batch: Any) -> torch.Tensor:
        """Half the squared error `[B]`"""
        return self.measure(model, batch).losses

    def measure(self, model: nn.Module, batch: Any) -> Measured:
        """Losses, and for single targets predictions and residuals, from one forward pass."""
        inputs, targets = split_labels(batch, LABELS)
        answer = logits_of(call(model, inputs))
        targets = targets.to(answer.device, answer.dtype)
        if answer.numel() != targets.numel() or len(answer) != len(targets):
            raise CaptureError(
                "predictions and targets differ in shape",
                found=f"predictions {tuple(answer.shape)}, targets {tuple(targets.shape)}",
                expected="one prediction per target",
            )
        residuals = answer.reshape(len(answer), -1) - targets.reshape(len(targets), -1)
        losses = 0.5 * residuals.square().sum(1)
        if residuals.shape[1] != 1:
            return Measured(losses)
        predictions = answer.reshape(-1)
        return Measured(
            losses=losses,
            outputs=predictions,
            slopes=residuals.detach().reshape(-1),
            labels=targets.reshape(-1),
            predictions=predictions.detach(),
        )
