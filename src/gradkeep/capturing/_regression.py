"""Regression: half the squared error, with the prediction as the output."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gradkeep.capturing._classification import LABELS
from gradkeep.capturing._task import Measured, Task, call, logits_of, split_labels
from gradkeep.errors import CaptureError

if TYPE_CHECKING:
    import torch
    from torch import nn


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
