"""Keeping gradients while a Lightning Trainer runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, get_args

from gradkeep._arguments import count, one_of
from gradkeep.errors import CaptureError
from gradkeep.integrations._replays import Replays, base, need

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable, Mapping

    from gradkeep.capturing._report import Captured
    from gradkeep.capturing.tasks._tasks import Task
    from gradkeep.store import Store

    Base = object
else:
    Base = base("lightning.pytorch", "Callback")

LightningMoment = Literal["epoch", "end"]


class GradkeepLightningCallback(Base):
    """Replays loaders after every epoch of training, and keeps every sample's gradients.

    `loaders` name the splits; they must not shuffle. Captures are named `epoch-1`, `epoch-2`, ...
    with the step and the learning rate of the last step. `module` is the path of the part that
    makes the outputs, where that is not the LightningModule's own `forward`; layers are then named
    from there. `every=5` leaves epochs out, `at="end"` replays once. Other arguments go to
    `gk.capture`. The training itself comes out bit by bit as without it. Cost: one forward and
    backward pass over the loaders each time.
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
        need(Base, "lightning")
        one_of("at", at, get_args(LightningMoment), error=CaptureError)
        count("every", every, error=CaptureError, least=1)
        self._replays = Replays.of(store, loaders, task, run, options)
        self._at, self._every, self._module = at, every, module
        self.captured: list[Captured] = self._replays.captured
        """Captures so far."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Refuse to meet what is there before hours have passed."""
        self._replays.check_new(int(trainer.global_step))

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        """Note the learning rate: a schedule moves it on before the epoch ends."""
        self._replays.note_rate(optimizer)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Replay after an epoch."""
        if self._at == "epoch" and (trainer.current_epoch + 1) % self._every == 0:
            self._keep(trainer, pl_module, trainer.current_epoch + 1)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Replay after the training."""
        if self._at == "end":
            self._keep(trainer, pl_module, trainer.current_epoch)

    def _keep(self, trainer: Any, pl_module: Any, epochs: int) -> None:
        if not trainer.is_global_zero:
            return
        model = pl_module.get_submodule(self._module)
        self._replays.keep(model, f"epoch-{epochs}", step=int(trainer.global_step))
