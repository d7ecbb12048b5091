"""Capture gradients during training with the Trainer of Hugging Face transformers.

`GradkeepTrainerCallback` replays loaders, `GradkeepTrainerRecorder` records the training steps themselves.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch

from gradkeep._arguments import one_of, text
from gradkeep.capturing._recording import recording
from gradkeep.errors import CaptureError
from gradkeep.integrations._replays import (
    Replays,
    check_options,
    load_base_class,
    require_base_class,
)

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable, Mapping

    from torch import nn

    from gradkeep.capturing._recording import GradientRecording
    from gradkeep.capturing._report import Captured
    from gradkeep.capturing.tasks._tasks import Task
    from gradkeep.store import Store

    Base = object
else:
    Base = load_base_class("transformers", "TrainerCallback")

TrainerMoment = Literal["save", "epoch", "end"]


class GradkeepTrainerCallback(Base):
    """Replay loaders whenever the Trainer saves and capture the gradients of every sample.

    Captures are named like the Trainer's folders, `checkpoint-500`, and store the step and the learning rate
    of the last step. The results of the training are bitwise the same as without the callback. Cost: one
    forward and backward pass over the loaders each time.

    Args:
        store: Store to write to, or its path.
        loaders: Loaders by split; they must not shuffle.
        task: Loss and outputs of the model.
        at: Replay after each `"save"`, after each `"epoch"`, or once at the `"end"`.
        run: Name of the run in the store.
        **options: Further arguments of `gk.capture`, such as `layers` and `encoding`.

    Attributes:
        captured: Captures so far.

    Raises:
        CaptureError: If an argument is invalid.
        MissingExtraError: If transformers is not installed.
    """

    def __init__(
        self,
        store: Store | str | os.PathLike[str],
        loaders: Mapping[str, Iterable[Any]],
        *,
        task: Task,
        at: TrainerMoment = "save",
        run: str = "main",
        **options: Any,
    ) -> None:
        require_base_class(Base, "transformers")
        one_of("at", at, get_args(TrainerMoment), error=CaptureError)
        self._replays = Replays.of(store, loaders, task, run, options)
        self._at = at
        self.captured: list[Captured] = self._replays.captured

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Raise if the Trainer never saves, or the store already has later captures of this run.

        Args:
            args: Training arguments.
            state: State of the Trainer.
            control: Control flags of the Trainer.
            **kwargs: Further objects passed by the Trainer.

        Raises:
            CaptureError: In both cases.
        """
        if self._at == "save" and str(getattr(args.save_strategy, "value", "")) == "no":
            raise CaptureError(
                "the Trainer never saves, so nothing would be captured",
                code="capture.trainer_never_saves",
                fix="Pass at='epoch' or at='end' to the callback, or another save_strategy.",
            )
        self._replays.check_no_later_captures(int(state.global_step))

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Record the learning rate, before a schedule changes it.

        Args:
            args: Training arguments.
            state: State of the Trainer.
            control: Control flags of the Trainer.
            **kwargs: Further objects passed by the Trainer, among them the optimizer.
        """
        self._replays.note_learning_rate(kwargs["optimizer"])

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Replay after the Trainer has written its checkpoint.

        Args:
            args: Training arguments.
            state: State of the Trainer.
            control: Control flags of the Trainer.
            **kwargs: Further objects passed by the Trainer, among them the model.
        """
        self._capture_if_due("save", state, kwargs["model"])

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Replay after an epoch.

        Args:
            args: Training arguments.
            state: State of the Trainer.
            control: Control flags of the Trainer.
            **kwargs: Further objects passed by the Trainer, among them the model.
        """
        self._capture_if_due("epoch", state, kwargs["model"])

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Replay after the training.

        Args:
            args: Training arguments.
            state: State of the Trainer.
            control: Control flags of the Trainer.
            **kwargs: Further objects passed by the Trainer, among them the model.
        """
        self._capture_if_due("end", state, kwargs["model"])

    def _capture_if_due(self, moment: TrainerMoment, state: Any, model: nn.Module) -> None:
        if moment != self._at or not state.is_world_process_zero:
            return
        step = int(state.global_step)
        self._replays.capture_all(model, f"checkpoint-{step}", step=step)


class GradkeepTrainerRecorder(Base):
    """Capture every sample's gradient as the Trainer computes it, at the weights of that step.

    The data set needs an integer column that identifies its rows, and `remove_unused_columns=False`; the
    model does not receive the column. Captures are named `epoch-1`, `epoch-2`, ... and sealed at the end of
    the epoch. Stored is the gradient of a row's own summed loss: the Trainer's division by tokens, rows and
    accumulated steps is undone. Cost: references during the step, then writing; no second pass.

    Args:
        store: Store to write to, or its path.
        ids: Name of the column with the row ids.
        run: Name of the run in the store.
        split: Name of the split in the store.
        **options: Further arguments of `gk.recording`, such as `layers`, `encoding` and `uncovered`.

    Attributes:
        rows: Number of rows captured so far.

    Raises:
        CaptureError: If an argument is invalid.
        MissingExtraError: If transformers is not installed.
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
        require_base_class(Base, "transformers")
        check_options(options, ("checkpoints", "reduction"))
        self._ids = text("ids", ids, error=CaptureError)
        self._store, self._options = store, {"run": run, "split": split, **options}
        self._hook: Any = None
        self._epoch = contextlib.ExitStack()
        self._batch = contextlib.ExitStack()
        self._recording: GradientRecording | None = None
        self.rows = 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Install the hook; raise if the Trainer removes the column of row ids.

        Args:
            args: Training arguments.
            state: State of the Trainer.
            control: Control flags of the Trainer.
            **kwargs: Further objects passed by the Trainer, among them the model.

        Raises:
            CaptureError: If it does.
        """
        if args.remove_unused_columns:
            raise CaptureError(
                f"the Trainer removes the column {self._ids!r}, because the model does not use it",
                code="capture.ids_removed",
                fix="Pass remove_unused_columns=False to TrainingArguments, and keep only columns that "
                "the collate function and the model accept.",
            )
        self._steps = int(args.gradient_accumulation_steps)
        model: nn.Module = kwargs["model"]
        self._hook = model.register_forward_pre_hook(self._begin, with_kwargs=True)

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begin the capture of an epoch.

        Args:
            args: Training arguments.
            state: State of the Trainer.
            control: Control flags of the Trainer.
            **kwargs: Further objects passed by the Trainer, among them the model.
        """
        name = f"epoch-{int(state.epoch or 0) + 1}"
        self._recording = self._epoch.enter_context(
            recording(self._store, kwargs["model"], checkpoints=name, **self._options)
        )

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Store the gradients of a batch.

        Args:
            args: Training arguments.
            state: State of the Trainer.
            control: Control flags of the Trainer.
            **kwargs: Further objects passed by the Trainer.
        """
        self._batch.close()

    on_pre_optimizer_step = on_substep_end

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Seal the capture of an epoch.

        Args:
            args: Training arguments.
            state: State of the Trainer.
            control: Control flags of the Trainer.
            **kwargs: Further objects passed by the Trainer.
        """
        self._recording = None
        self._epoch.close()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Remove the hook from the model.

        Args:
            args: Training arguments.
            state: State of the Trainer.
            control: Control flags of the Trainer.
            **kwargs: Further objects passed by the Trainer.
        """
        if self._hook is not None:
            self._hook.remove()
        self._hook = None

    def _begin(self, model: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        """Record a training batch; remove the ids from the model's arguments."""
        ids = kwargs.get(self._ids)
        rest = {name: value for name, value in kwargs.items() if name != self._ids}
        if self._recording is None or not model.training or not torch.is_grad_enabled():
            return args, rest
        if ids is None:
            raise CaptureError(
                f"the batch has no row ids {self._ids!r}",
                code="capture.ids_missing",
                found=", ".join(kwargs),
                fix="Make the collate function pass the column on.",
            )
        # The Trainer divides the sum of a batch's losses by this.
        divisor: Any
        labels: Any
        divisor, labels = rest.get("num_items_in_batch"), rest.get("labels")
        if divisor is None and (self._steps > 1 or not isinstance(labels, torch.Tensor)):
            raise CaptureError(
                "the loss is divided by a number of accumulated steps that may vary"
                if self._steps > 1
                else "the batch has no labels, so the divisor of the loss is unknown",
                code="capture.unknown_divisor",
                found=f"gradient_accumulation_steps={self._steps}, {', '.join(rest)}",
                fix="Do not accumulate steps, or replay the data with GradkeepTrainerCallback.",
            )
        if divisor is None:
            valid = labels[:, 1:] if labels.dim() == 2 else labels
            divisor = (valid != -100).sum()
        self._batch.close()
        self._batch.enter_context(self._recording.batch(ids, divisor=float(divisor)))
        self.rows += len(ids)
        return args, rest
