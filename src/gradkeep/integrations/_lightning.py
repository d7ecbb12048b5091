"""Capture gradients during training with a Lightning Trainer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, get_args

from gradkeep._arguments import count, one_of
from gradkeep.errors import CaptureError
from gradkeep.integrations._replays import Replays, load_base_class, require_base_class

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable, Mapping

    from gradkeep.capturing._report import Captured
    from gradkeep.capturing.tasks._tasks import Task
    from gradkeep.store import Store

    Base = object
else:
    Base = load_base_class("lightning.pytorch", "Callback")

LightningMoment = Literal["epoch", "end"]


class GradkeepLightningCallback(Base):
    """Replay loaders after every epoch and capture the gradients of every sample.

    Captures are named `epoch-1`, `epoch-2`, ... and store the step and the learning rate of the last step.
    The results of the training are bitwise the same as without the callback. Cost: one forward and backward
    pass over the loaders each time.

    Args:
        store: Store to write to, or its path.
        loaders: Loaders by split; they must not shuffle.
        task: Loss and outputs of the model.
        at: Replay after each `"epoch"`, or once at the `"end"`.
        every: Replay after every n-th epoch only.
        module: Path of the submodule that computes the outputs, if it is not the LightningModule's own
            `forward`; layers are then named relative to it.
        run: Name of the run in the store.
        **options: Further arguments of `gk.capture`.

    Attributes:
        captured: Captures so far.

    Raises:
        CaptureError: If an argument is invalid.
        MissingExtraError: If lightning is not installed.
    """

    def __init__(
        self,
        store: Store | str | os.PathLike[str],
        loaders: Mapping[str, Iterable[Any]],
        *,
        task: Task,
        at: LightningMoment = "epoch",
        every: int = 1,
        module: str = "",
        run: str = "main",
        **options: Any,
    ) -> None:
        require_base_class(Base, "lightning")
        one_of("at", at, get_args(LightningMoment), error=CaptureError)
        count("every", every, error=CaptureError, least=1)
        self._replays = Replays.of(store, loaders, task, run, options)
        self._at, self._every, self._module = at, every, module
        self.captured: list[Captured] = self._replays.captured

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Raise if the store already has later captures of this run.

        Args:
            trainer: The Trainer.
            pl_module: The trained module.

        Raises:
            CaptureError: If it has.
        """
        self._replays.check_no_later_captures(int(trainer.global_step))

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        """Record the learning rate, before a schedule changes it.

        Args:
            trainer: The Trainer.
            pl_module: The trained module.
            optimizer: The optimizer.
        """
        self._replays.note_learning_rate(optimizer)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Replay after an epoch.

        Args:
            trainer: The Trainer.
            pl_module: The trained module.
        """
        if self._at == "epoch" and (trainer.current_epoch + 1) % self._every == 0:
            self._capture_if_due(trainer, pl_module, trainer.current_epoch + 1)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Replay after the training.

        Args:
            trainer: The Trainer.
            pl_module: The trained module.
        """
        if self._at == "end":
            self._capture_if_due(trainer, pl_module, trainer.current_epoch)

    def _capture_if_due(self, trainer: Any, pl_module: Any, epochs: int) -> None:
        if not trainer.is_global_zero:
            return
        model = pl_module.get_submodule(self._module)
        self._replays.capture_all(model, f"epoch-{epochs}", step=int(trainer.global_step))
