"""Language modelling: the sum of the losses of a sequence's tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch.nn import functional as F

from gradkeep.capturing.tasks._task import Measured, Task, call, holds_numbers, logits_of
from gradkeep.errors import CaptureError


@dataclass(frozen=True)
class LanguageModelling(Task):
    """One sequence per sample, from logits `[B, T, V]`; padded places count for nothing.

    Batches are dicts with `input_ids` and optionally `attention_mask` and `labels` (as in Hugging
    Face models: -100 is ignored, and labels are shifted here), or (tokens, targets) where targets
    are the next tokens already. loss = sum over its valid tokens of -log p, or their mean with
    `reduction="mean"`, which divides by that sequence's own number of tokens.

    `shift=False` predicts the token at the same place (masked language models).
    """

    ignore_index: int = -100
    reduction: Literal["sum", "mean"] = "sum"
    shift: bool = True

    def losses(self, model: nn.Module, batch: Any) -> torch.Tensor:
        """The loss `[B]` of each sequence"""
        return self.measure(model, batch).losses

    def measure(self, model: nn.Module, batch: Any) -> Measured:
        """Losses of sequences and of their tokens from one forward pass."""
        inputs, targets, shift = self._split(batch)
        logits = logits_of(call(model, inputs))
        if logits.dim() != 3 or targets.shape != logits.shape[:2]:
            raise CaptureError(
                "language modelling needs logits for every token",
                found=f"logits {tuple(logits.shape)}, targets {tuple(targets.shape)}",
                expected="logits [B, T, V], targets [B, T]",
            )
        targets = targets.to(logits.device, torch.int64)
        if shift:
            # The last token predicts nothing. Logits are not cut: a cut would be copied twice.
            targets = F.pad(targets[:, 1:], (0, 1), value=self.ignore_index)
        self._check_targets(targets, logits.shape[-1])
        flat = F.cross_entropy(
            logits.flatten(0, 1),
            targets.flatten(),
            reduction="none",
            ignore_index=self.ignore_index,
        ).view_as(targets)
        valid = targets != self.ignore_index
        losses = flat.sum(1)
        if self.reduction == "mean":
            losses = losses / valid.sum(1).clamp(min=1)
        return Measured(losses, tokens=flat.detach().masked_fill(~valid, torch.nan))

    def _check_targets(self, targets: torch.Tensor, tokens: int) -> None:
        if not holds_numbers(targets):
            return
        wrong = (targets != self.ignore_index) & ((targets < 0) | (targets >= tokens))
        if bool(wrong.any()):
            row, place = wrong.nonzero()[0].tolist()
            raise CaptureError(
                f"row {row} of this batch has a label that is no token of the model",
                found=f"label {int(targets[row, place])}",
                expected=f"0 to {tokens - 1}, or {self.ignore_index} for what is ignored",
                fix="use the tokenizer that belongs to the model",
            )

    def targets(self, batch: Any) -> torch.Tensor:
        """The tokens `[B, T]` that are predicted, `ignore_index` where none is."""
        _, targets, shift = self._split(batch)
        return targets[:, 1:] if shift and targets.dim() == 2 else targets

    def _split(self, batch: Any) -> tuple[Any, torch.Tensor, bool]:
        if isinstance(batch, Mapping):
            inputs = {name: value for name, value in batch.items() if name != "labels"}
            targets = batch.get("labels", batch.get("input_ids"))
            if targets is None:
                raise CaptureError(
                    "no tokens in the batch",
                    found=f"a dict with {', '.join(map(str, batch))}",
                    expected="input_ids, and optionally attention_mask and labels",
                )
            mask = batch.get("attention_mask")
            if "labels" not in batch and mask is not None:
                targets = targets.masked_fill(mask == 0, self.ignore_index)
            return inputs, targets, self.shift
        if isinstance(batch, tuple | list) and len(batch) == 2:
            return batch[0], batch[1], False
        if isinstance(batch, torch.Tensor):
            return batch, batch, self.shift
        raise CaptureError(
            "a batch that is no sequence",
            found=type(batch).__name__,
            expected="a dict with input_ids, (tokens, next tokens), or tokens [B, T]",
        )
