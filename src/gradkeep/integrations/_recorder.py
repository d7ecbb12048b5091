"""Keeping the gradients of the training steps themselves, while transformers' Trainer runs."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch

from gradkeep._arguments import text
from gradkeep.capturing._recording import recording
from gradkeep.errors import CaptureError
from gradkeep.integrations._replays import base, check_options, need

if TYPE_CHECKING:
    import os

    from torch import nn

    from gradkeep.capturing._recording import GradientRecording
    from gradkeep.store import Store

    Base = object
else:
    Base = base("transformers", "TrainerCallback")


class GradkeepTrainerRecorder(Base):
    """Keeps every sample's gradient as the Trainer computes it, at the weights of that step.

    The data set has a column of whole numbers, by default `id`, that names its rows; it needs
    `remove_unused_columns=False`, and the model does not see it. Captures are named `epoch-1`,
    `epoch-2`, ... and sealed when an epoch ends. What is kept is the gradient of a row's own summed
    loss: the Trainer's division by tokens, rows and accumulated steps is undone. Other arguments go to
    `gk.recording`: `layers=`, `encoding=`, `uncovered=`. Cost: keeping references during the step, then
    writing; no second pass.
    """

    def __init__(
        self,
        store: Store | str | os.PathLike[str],
        *,
        ids: str = "id",
        run: str = "main",
        split: str = "train",
        **options: Any,
    ) -> None:
        need(Base, "transformers")
        check_options(options, ("checkpoints", "reduction"))
        self._ids = text("ids", ids, error=CaptureError)
        self._store, self._options = store, {"run": run, "split": split, **options}
        self._hook: Any = None
        self._epoch = contextlib.ExitStack()
        self._batch = contextlib.ExitStack()
        self._recording: GradientRecording | None = None
        self.rows = 0
        """Rows that were kept so far."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Refuse what cannot be recorded, before the first step."""
        if args.remove_unused_columns:
            raise CaptureError(
                f"the Trainer drops the column {self._ids!r}, which the model does not know",
                fix="TrainingArguments(remove_unused_columns=False), and leave in the data set what the "
                "collate function and the model take",
            )
        self._steps = int(args.gradient_accumulation_steps)
        model: nn.Module = given["model"]
        self._hook = model.register_forward_pre_hook(self._begin, with_kwargs=True)

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Begin the capture of an epoch."""
        name = f"epoch-{int(state.epoch or 0) + 1}"
        self._recording = self._epoch.enter_context(
            recording(self._store, given["model"], checkpoints=name, **self._options)
        )

    def on_substep_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Take the gradients of a batch."""
        self._batch.close()

    on_pre_optimizer_step = on_substep_end

    def on_epoch_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Seal the capture of an epoch."""
        self._recording = None
        self._epoch.close()

    def on_train_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Leave the model as it was."""
        if self._hook is not None:
            self._hook.remove()
        self._hook = None

    def _begin(self, model: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        """Watch a batch of the training; the model is not given its ids."""
        ids = kwargs.get(self._ids)
        rest = {name: value for name, value in kwargs.items() if name != self._ids}
        if self._recording is None or not model.training or not torch.is_grad_enabled():
            return args, rest
        if ids is None:
            raise CaptureError(
                f"no {self._ids!r} in the batch: it is not known which rows these are",
                found=", ".join(kwargs),
                fix="let the collate function pass the column on",
            )
        # What the Trainer divides the sum of a batch's losses by.
        divisor: Any
        labels: Any
        divisor, labels = rest.get("num_items_in_batch"), rest.get("labels")
        if divisor is None and (self._steps > 1 or not isinstance(labels, torch.Tensor)):
            raise CaptureError(
                "this model's loss is divided by accumulated steps, of which the last may be fewer"
                if self._steps > 1
                else "no labels in the batch: it is not known what the loss is divided by",
                found=f"gradient_accumulation_steps={self._steps}, {', '.join(rest)}",
                fix="accumulate no steps, or replay the data with GradkeepTrainerCallback",
            )
        if divisor is None:
            valid = labels[:, 1:] if labels.dim() == 2 else labels
            divisor = (valid != -100).sum()
        self._batch.close()
        self._batch.enter_context(self._recording.batch(ids, divisor=float(divisor)))
        self.rows += len(ids)
        return args, rest
