"""Capture gradients during training with the Trainer of Hugging Face transformers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, get_args

from gradkeep._arguments import one_of
from gradkeep.errors import CaptureError
from gradkeep.integrations._replays import Replays, load_base_class, require_base_class

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable, Mapping

    from torch import nn

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
