"""Tasks: the loss of every sample and, optionally, its output."""

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
    """Results of one forward pass over B samples; `losses` and `outputs` carry their graph.

    Attributes:
        losses: `[B]`: each sample's own loss, not divided by anything.
        outputs: `[B]`: one number per sample whose gradient is stored in place of the loss's.
        slopes: `[B]`: d loss / d output, so that the loss's gradient is slope x the output's.
        labels: `[B]` whole numbers, or float targets.
        predictions: `[B]` predicted classes or values.
        tokens: `[B, T]`: losses of single tokens, NaN where there is none.
        logits: `[B, C]`: their softmax is the probabilities of the classes.
    """

    losses: torch.Tensor
    outputs: torch.Tensor | None = None
    slopes: torch.Tensor | None = None
    labels: torch.Tensor | None = None
    predictions: torch.Tensor | None = None
    tokens: torch.Tensor | None = None
    logits: torch.Tensor | None = None

    def detached(self) -> Measured:
        """Return the same without graphs."""
        parts: dict[str, Any] = {p.name: getattr(self, p.name) for p in dataclasses.fields(self)}
        detached: dict[str, Any] = {
            name: v if v is None else v.detach() for name, v in parts.items()
        }
        return Measured(**detached)


class Task(abc.ABC):
    """Defines what is measured of every sample; subclass it and implement `losses(model, batch) -> [B]`.

    Losses must be one value per sample, not a mean: a mean would scale every gradient by 1 / B. Override `measure`
    to return more from the same forward pass.

    Example:
        >>> class SquaredError(Task):
        ...     def losses(self, model, batch):
        ...         x, y = batch
        ...         return (model(x).squeeze(1) - y).square()
        >>> SquaredError().measure(nn.Linear(2, 1), (torch.ones(3, 2), torch.ones(3))).losses.shape
        torch.Size([3])
    """

    packed: ClassVar[bool] = False
    """True if a row of several documents, as padding-free collators build it, is one sample."""
    stored_name: ClassVar[str | None] = None
    """Name of a built-in task in stores, if it differs from the name of the class."""

    @abc.abstractmethod
    def losses(self, model: nn.Module, batch: Any) -> torch.Tensor:
        """Return the loss `[B]` of each sample.

        Args:
            model: Model to run.
            batch: Batch of the loader, on the model's device.
        """

    def outputs(self, model: nn.Module, batch: Any) -> torch.Tensor | None:
        """Return one number `[B]` per sample to explain in place of the loss; None by default.

        Args:
            model: Model to run.
            batch: Batch of the loader, on the model's device.
        """
        return None

    def measure(self, model: nn.Module, batch: Any) -> Measured:
        """Return everything that is measured, in one forward pass; by default only the losses.

        Args:
            model: Model to run.
            batch: Batch of the loader, on the model's device.
        """
        return Measured(self.losses(model, batch))

    def measure_losses(self, model: nn.Module, batch: Any) -> Measured:
        """Return what a capture of losses stores; by default the result of `measure`.

        Args:
            model: Model to run.
            batch: Batch of the loader, on the model's device.
        """
        return self.measure(model, batch)

    def describe(self) -> str:
        """Return the task and its settings, which are stored and compared on resuming."""
        name = f"{type(self).__module__}.{type(self).__qualname__}"
        if name.startswith("gradkeep."):
            name = f"gradkeep.{type(self).stored_name or type(self).__name__}"
        settings = ""
        if dataclasses.is_dataclass(self):
            fields = [(p, getattr(self, p.name)) for p in dataclasses.fields(self)]
            # Fields of later versions appear only if they are used, so that older stores can be
            # resumed.
            fields = [(p, v) for p, v in fields if not (p.metadata.get("later") and v == p.default)]
            settings = ", ".join(f"{p.name}={v!r}" for p, v in fields)
        return f"{name}({settings})"

    def trained_as(self) -> str:
        """Return the description of the task that training rows are captured with; queries may use another."""
        return self.describe()


def measure_losses(task: Task, model: nn.Module, batch: Any) -> Measured:
    """Measure without a graph; with one for tasks that differentiate internally."""
    try:
        with torch.no_grad():
            return task.measure_losses(model, batch)
    except RuntimeError as error:
        if "does not require grad" not in str(error):
            raise
    with torch.enable_grad():
        return task.measure_losses(model, batch).detached()


def call(model: nn.Module, inputs: Any) -> Any:
    """Call the model with the inputs of a batch: `model(x)`, `model(*xs)` or `model(**xs)`."""
    try:
        return _called(model, inputs)
    except IndexError as error:
        row = _row_beyond_tables(model, inputs)
        where = "" if row is None else f", in row {row}"
        raise CaptureError(
            f"an index of the batch is beyond the model's tables{where}",
            code="capture.index_out_of_table",
            found=str(error)[:200],
            fix="Use the tokenizer of the model, and truncate as in training.",
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
            f"the model does not take the entries of the batch: {', '.join(map(str, inputs))}",
            code="capture.model_arguments",
            expected=f"{type(model).__name__}{inspect.signature(model.forward)}",
            fix="Rename entries in the collate function, use columns=, or subclass gk.Task.",
        )
    if isinstance(inputs, tuple | list):
        return model(*inputs)
    return model(inputs)


def _takes(model: nn.Module, inputs: Mapping[Any, Any]) -> bool:
    """Return True if the model's forward has arguments of these names."""
    try:
        inspect.signature(model.forward).bind(**inputs)
    except TypeError:
        return False
    except ValueError:
        return True  # compiled code has no signature
    return True


def holds_numbers(tensor: torch.Tensor) -> bool:
    """Return True if the tensor has values: plans use meta and fake tensors."""
    return not tensor.is_meta and not hasattr(tensor, "fake_mode")


def find_logits(answer: Any) -> torch.Tensor:
    """Return the logits of a model's output: a tensor, `.logits`, `["logits"]`, or the first of a tuple."""
    logits = getattr(answer, "logits", answer)
    if isinstance(answer, Mapping) and "logits" in answer:
        logits = answer["logits"]
    elif logits is answer and isinstance(answer, tuple | list) and answer:
        logits = answer[0]
    if not isinstance(logits, torch.Tensor):
        raise CaptureError(
            f"the model's output holds no logits: {type(answer).__name__}",
            code="capture.no_logits",
            fix="Subclass gk.Task and implement losses(model, batch) -> [B].",
        )
    return logits


def split_labels(batch: Any, names: tuple[str, ...]) -> tuple[Any, torch.Tensor]:
    """Split a batch into (inputs, labels): the last of a tuple, or the first of `names` in a dict."""
    if isinstance(batch, Mapping):
        for name in names:
            if name in batch:
                rest = {key: value for key, value in batch.items() if key != name}
                return rest, torch.as_tensor(batch[name])
    elif isinstance(batch, tuple | list) and len(batch) >= 2:
        inputs = batch[0] if len(batch) == 2 else tuple(batch[:-1])
        return inputs, torch.as_tensor(batch[-1])
    raise CaptureError(
        f"the batch has no labels: {describe_batch(batch)}",
        code="capture.no_labels",
        expected=f"(inputs, labels), or a dict with one of {', '.join(names)}",
        fix="Use such batches, or subclass gk.Task.",
    )


def describe_batch(batch: Any) -> str:
    if isinstance(batch, Mapping):
        return f"a dict with {', '.join(map(str, batch))}"
    if isinstance(batch, torch.Tensor):
        return f"{batch.dtype} {tuple(batch.shape)}"
    return type(batch).__name__


LABELS = ("labels", "label", "targets", "target", "y")


@dataclass(frozen=True)
class Classification(Task):
    """One class per sample, from logits `[B, C]`; batches are (inputs, labels) or dicts.

    loss = -log p, output = log(p / (1 - p)), the margin, with p the probability of the label. d loss / d output =
    -(1 - p), so both gradients come from one capture; the output's does not vanish when the model is sure. With a
    single logit `[B]` or `[B, 1]` the labels are 0 or 1.

    Attributes:
        labels: `"given"` uses the labels of the batch. `"sampled"` draws each label from the model's own
            probabilities, by the content of the sample and the seed, so it is the same in every batch: the true
            Fisher matrix consists of such gradients.
        seed: Seed of sampled labels.

    Raises:
        CaptureError: `labels` has a wrong value.

    Example:
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
        """Return -log p `[B]`.

        Args:
            model: Classifier with logits `[B, C]`.
            batch: (inputs, labels) or a dict.
        """
        return self.measure(model, batch).losses

    def outputs(self, model: nn.Module, batch: Any) -> torch.Tensor | None:
        """Return the margins `[B]`.

        Args:
            model: Classifier with logits `[B, C]`.
            batch: (inputs, labels) or a dict.
        """
        return self.measure(model, batch).outputs

    def measure_losses(self, model: nn.Module, batch: Any) -> Measured:
        """Return losses, labels, predictions and logits, in fewer operations than `measure`.

        Args:
            model: Classifier with logits `[B, C]`.
            batch: (inputs, labels) or a dict.
        """
        if type(self).measure is not Classification.measure or self.labels == "sampled":
            return self.measure(model, batch)  # a subclass measures something else
        inputs, labels = split_labels(batch, LABELS)
        logits = find_logits(call(model, inputs))
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
        """Return losses, margins, slopes, labels and predictions from one forward pass.

        Args:
            model: Classifier with logits `[B, C]`.
            batch: (inputs, labels) or a dict.
        """
        inputs, labels = split_labels(batch, LABELS)
        logits = find_logits(call(model, inputs))
        labels = labels.to(logits.device)
        if logits.dim() == 1 or logits.shape[1:] == (1,):
            logits = logits.reshape(-1)
            if self.labels == "sampled":
                labels = _sample_labels(torch.stack([-logits, logits], 1) / 2, batch, self.seed)
            margins = torch.where(labels.reshape(-1) > 0, logits, -logits)
            predictions = (logits > 0).long()
        else:
            _check(logits, labels)
            labels = labels.long()
            if self.labels == "sampled":
                labels = _sample_labels(logits, batch, self.seed)
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


def _sample_labels(logits: torch.Tensor, batch: Any, seed: int) -> torch.Tensor:
    """Draw a class `[B]` of each row by softmax, from a number that its sample determines."""
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
            code="capture.class_logits",
            found=f"logits {tuple(logits.shape)}, labels {tuple(labels.shape)}",
            fix="Use gk.LanguageModeling for sequences, or subclass gk.Task.",
        )
    if labels.dtype.is_floating_point:
        raise CaptureError(
            "labels must be whole numbers", code="capture.float_labels", fix="Use labels.long()."
        )
    if not holds_numbers(labels):
        return
    low, high = (int(end) for end in labels.aminmax()) if len(labels) else (0, 0)
    if not 0 <= low <= high < logits.shape[1]:
        raise CaptureError(
            f"labels from {low} to {high} are not classes of the model, 0 to {logits.shape[1] - 1}",
            code="capture.label_not_a_class",
        )


@dataclass(frozen=True)
class Regression(Task):
    """Float targets `[B]` or `[B, K]`: loss = 0.5 * |prediction - target|^2.

    With one target per sample the output is the prediction itself, and d loss / d output the residual. With
    several there is no such output, and the loss's gradient is stored.

    Example:
        >>> import torch
        >>> model, batch = torch.nn.Linear(4, 1), (torch.ones(2, 4), torch.zeros(2))
        >>> measured = Regression().measure(model, batch)
        >>> torch.equal(measured.slopes, measured.outputs)
        True
    """

    def losses(self, model: nn.Module, batch: Any) -> torch.Tensor:
        """Return half the squared error `[B]`.

        Args:
            model: Model with predictions `[B]` or `[B, K]`.
            batch: (inputs, targets) or a dict.
        """
        return self.measure(model, batch).losses

    def measure(self, model: nn.Module, batch: Any) -> Measured:
        """Return losses and, for single targets, predictions and residuals, from one forward pass.

        Args:
            model: Model with predictions `[B]` or `[B, K]`.
            batch: (inputs, targets) or a dict.
        """
        inputs, targets = split_labels(batch, LABELS)
        answer = find_logits(call(model, inputs))
        targets = targets.to(answer.device, answer.dtype)
        if answer.numel() != targets.numel() or len(answer) != len(targets):
            raise CaptureError(
                f"predictions {tuple(answer.shape)} do not match targets {tuple(targets.shape)}",
                code="capture.prediction_shape",
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
