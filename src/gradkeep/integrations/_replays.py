"""Replaying loaders at the moments that a trainer tells of."""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

import gradkeep.store as gs
from gradkeep._surroundings import install_hint
from gradkeep.capturing._capture import capture
from gradkeep.errors import CaptureError, MissingExtraError

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable, Mapping

    from torch import nn

    from gradkeep.capturing._report import Captured
    from gradkeep.capturing.tasks._tasks import Task
    from gradkeep.store import Store

_OWN = ("checkpoints", "ids", "lr", "model", "progress", "resume", "split", "step")
"""Arguments of `gk.capture` that follow from the training."""


@dataclass(slots=True, eq=False)
class Replays:
    """Loaders that are replayed at moments of a training, and how their rows are kept."""

    store: Store
    loaders: Mapping[str, Iterable[Any]]
    task: Task
    run: str
    options: Mapping[str, Any]
    """Further arguments of `gk.capture`."""
    captured: list[Captured] = field(default_factory=list)
    lr: float | None = None

    @classmethod
    def of(
        cls,
        store: Store | str | os.PathLike[str],
        loaders: Mapping[str, Iterable[Any]],
        task: Task,
        run: str,
        options: Mapping[str, Any],
    ) -> Replays:
        """Validate the arguments of a callback."""
        if not loaders:
            raise CaptureError(
                "no loaders to replay", fix='pass {"train": train_loader, "test": test_loader}'
            )
        check_options(options, _OWN)
        return cls(gs.open(store), dict(loaders), task, run, {"mode": "eval", **options})

    def check_new(self, step: int) -> None:
        """Raise before training goes on from a step if captures of later ones are there already."""
        steps = {known.name: known.step or 0 for known in self.store.checkpoints(self.run)}
        held = [key for key in self.store.captures() if key.run == self.run]
        taken = [key for key in held if key.split in self.loaders]
        later = [key for key in taken if step == 0 or steps.get(key.checkpoint, 0) > step]
        if later:
            raise CaptureError(
                f"run {self.run!r} holds captures of an earlier training",
                path=self.store.location,
                found=", ".join(f"{key.split} at {key.checkpoint}" for key in later[:4]),
                expected=f"none after step {step}, where this one starts",
                fix="give the callback another run=, or delete those captures",
            )

    def note_rate(self, optimizer: Any) -> None:
        """Note the step size, if all parameters have the same: a schedule moves it on."""
        rates = {float(group["lr"]) for group in optimizer.param_groups}
        self.lr = rates.pop() if len(rates) == 1 else None

    def keep(self, model: nn.Module, checkpoint: str, *, step: int) -> None:
        """Capture every loader at the weights that the model has now.

        The training goes on as if nothing had happened: loaders draw a seed from torch's random
        state, which is put back, as are the model's mode and gradients.
        """
        fixed: dict[str, Any] = {"task": self.task, "run": self.run, "progress": False}
        with torch.random.fork_rng(), torch.enable_grad():
            for split, loader in self.loaders.items():
                captured = capture(
                    self.store,
                    model,
                    loader,
                    split=split,
                    checkpoints=checkpoint,
                    step=step,
                    lr=self.lr,
                    **fixed,
                    **self.options,
                )
                self.captured.append(captured)


def check_options(options: Mapping[str, Any], own: Iterable[str]) -> None:
    """Raise for arguments that follow from the training."""
    wrong = ", ".join(sorted(set(options) & set(own)))
    if wrong:
        raise CaptureError(
            "the training decides about these arguments", found=wrong, fix="leave them out"
        )


def base(module: str, name: str) -> type:
    """The class to derive from, or `object` where its library is missing."""
    try:
        found: type = getattr(importlib.import_module(module), name)
    except ImportError:
        return object
    return found


def need(found: type, extra: str) -> None:
    """Raise if the class to derive from is missing."""
    if found is object:
        raise MissingExtraError(
            f"this callback is for {extra}, which is not installed",
            fix=install_hint(extra),
        )
