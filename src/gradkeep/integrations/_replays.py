"""Replay loaders at given points of a training."""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

import gradkeep.store as gs
from gradkeep._environment import install_hint
from gradkeep.capturing._capture import capture
from gradkeep.errors import CaptureError, MissingExtraError

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable, Mapping

    from torch import nn

    from gradkeep.capturing._report import Captured
    from gradkeep.capturing.tasks._tasks import Task
    from gradkeep.store import Store

_RESERVED_OPTIONS = ("checkpoints", "ids", "lr", "model", "progress", "resume", "split", "step")
"""Arguments of `gk.capture` that the callback sets."""


@dataclass(slots=True, eq=False)
class Replays:
    """Loaders to replay during a training, and how to capture their rows."""

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
                "there are no loaders to replay",
                code="capture.no_loaders",
                fix='Pass loaders={"train": train_loader, "test": test_loader}.',
            )
        check_options(options, _RESERVED_OPTIONS)
        return cls(gs.open(store), dict(loaders), task, run, {"mode": "eval", **options})

    def check_no_later_captures(self, step: int) -> None:
        """Raise if the run already has captures of steps after this one."""
        steps = {known.name: known.step or 0 for known in self.store.checkpoints(self.run)}
        held = [key for key in self.store.captures() if key.run == self.run]
        taken = [key for key in held if key.split in self.loaders]
        later = [key for key in taken if step == 0 or steps.get(key.checkpoint, 0) > step]
        if later:
            raise CaptureError(
                f"run {self.run!r} has captures of an earlier training",
                code="capture.run_exists",
                path=self.store.location,
                found=", ".join(f"{key.split} at {key.checkpoint}" for key in later[:4]),
                expected=f"none after step {step}, where this training starts",
                fix="Pass another run= to the callback, or delete these captures.",
            )

    def note_learning_rate(self, optimizer: Any) -> None:
        """Record the learning rate if all parameters share one."""
        rates = {float(group["lr"]) for group in optimizer.param_groups}
        self.lr = rates.pop() if len(rates) == 1 else None

    def capture_all(self, model: nn.Module, checkpoint: str, *, step: int) -> None:
        """Capture every loader at the model's current weights.

        The training is not affected: torch's random state, from which loaders draw a seed, is restored, as are
        the model's mode and gradients.
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
    """Raise if options contain reserved arguments."""
    wrong = ", ".join(sorted(set(options) & set(own)))
    if wrong:
        raise CaptureError(
            "the callback sets these arguments",
            code="capture.reserved_options",
            found=wrong,
            fix="Remove them.",
        )


def load_base_class(module: str, name: str) -> type:
    """Import the base class, or return `object` if its library is missing."""
    try:
        class_: type = getattr(importlib.import_module(module), name)
    except ImportError:
        return object
    return class_


def require_base_class(base_class: type, extra: str) -> None:
    """Raise if the base class is missing."""
    if base_class is object:
        raise MissingExtraError(
            f"the callback needs {extra}",
            fix=install_hint(extra),
        )
