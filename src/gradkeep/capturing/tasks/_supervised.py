"""Classification and regression: one label, or one target, for every sample."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
import xxhash
from torch import nn
from torch.nn import functional as F

from gradkeep.capturing._batches import digests
from gradkeep.capturing.tasks._task import (
    Measured,
    Task,
    call,
    holds_numbers,
    logits_of,
    split_labels,
)
from gradkeep.errors import CaptureError

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
        if self.labels not in ("given", "sampled"):
            raise CaptureError(
                "labels are given or drawn from the model",
                found=repr(self.labels),
                expected="'given' or 'sampled'",
            )

    def losses(self, model: nn.Module, batch: Any) -> torch.Tensor:
        """-log p `[B]`"""
        return self.measure(model, batch).losses

    def outputs(self, model: nn.Module, batch: Any) -> torch.Tensor | None:
        """The margins `[B]`"""
        return self.measure(model, batch).outputs

    def measure_losses(self, model: nn.Module, batch: Any) -> Measured:
        """Losses, labels, predictions and logits, in fewer steps than `measure` takes."""
        own = type(self).measure is Classification.measure and self.labels == "given"
        if not own:  # a subclass measures something else
            return self.measure(model, batch)
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
            expected="logits [B, C], labels [B]",
            fix="use gk.LanguageModelling for sequences, or subclass gk.Task",
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
