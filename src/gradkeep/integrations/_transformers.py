"""Keeping gradients while the Trainer of Hugging Face's transformers runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, get_args

from gradkeep._arguments import one_of
from gradkeep.errors import CaptureError
from gradkeep.integrations._replays import Replays, base, need

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable, Mapping

    from torch import nn

    from gradkeep.capturing._report import Captured
    from gradkeep.capturing.tasks._tasks import Task
    from gradkeep.store import Store

    Base = object
else:
    Base = base("transformers", "TrainerCallback")

TrainerMoment = Literal["save", "epoch", "end"]


class GradkeepTrainerCallback(Base):
    """Replays loaders whenever the Trainer saves, and keeps every sample's gradients.

    `loaders` name the splits; they must not shuffle. Captures are named like the Trainer's folders,
    `checkpoint-500`, with the step and the learning rate of the last step. `at="epoch"` or
    `"end"` replays then instead. Other arguments go to `gk.capture`: `layers=`, `encoding=`, ...
    The training itself comes out bit by bit as without it. Cost: one forward and backward pass
    over the loaders each time.
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
        need(Base, "transformers")
        one_of("at", at, get_args(TrainerMoment), error=CaptureError)
        self._replays = Replays.of(store, loaders, task, run, options)
        self._at = at
        self.captured: list[Captured] = self._replays.captured
        """Captures so far."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Refuse what would keep nothing, or meet what is there, before hours have passed."""
        if self._at == "save" and str(getattr(args.save_strategy, "value", "")) == "no":
            raise CaptureError(
                "the Trainer never saves, so that nothing would be kept",
                fix="pass at='epoch' or at='end' to the callback, or another save_strategy",
            )
        self._replays.check_new(int(state.global_step))

    def on_step_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Note the learning rate: a schedule moves it on before anything is saved."""
        self._replays.note_rate(given["optimizer"])

    def on_save(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Replay after the Trainer's own checkpoint is written."""
        self._keep("save", state, given["model"])

    def on_epoch_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Replay after an epoch."""
        self._keep("epoch", state, given["model"])

    def on_train_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Replay after the training."""
        self._keep("end", state, given["model"])

    def _keep(self, moment: TrainerMoment, state: Any, model: nn.Module) -> None:
        if moment != self._at or not state.is_world_process_zero:
            return
        step = int(state.global_step)
        self._replays.keep(model, f"checkpoint-{step}", step=step)
