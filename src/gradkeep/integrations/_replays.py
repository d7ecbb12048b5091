"""Replaying loaders at the moments that a trainer tells of."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

import gradkeep.store as gs
from gradkeep._surroundings import install_hint
from gradkeep.capturing._capture import capture
from gradkeep.errors import CaptureError, MissingExtra

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable, Mapping

    from torch import nn

    from gradkeep.capturing._report import Captured
    from gradkeep.capturing.tasks._task import Task
    from gradkeep.store import Store

_OWN = ("checkpoint", "ids", "lr", "model", "progress", "resume", "split", "step")
"""Arguments of `gk.capture` that follow from the training."""


@dataclass(frozen=True, slots=True, eq=False)
class Replays:
    """What to replay at every checkpoint, and how to keep it."""

    store: Store
    loaders: Mapping[str, Iterable[Any]]
    task: Task
    run: str
    options: Mapping[str, Any]
    """Further arguments of `gk.capture`."""

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

    def keep(
        self, model: nn.Module, checkpoint: str, *, step: int, lr: float | None
    ) -> list[Captured]:
        """Capture every loader at the weights that the model has now.

        The training goes on as if nothing had happened: loaders draw a seed from torch's random
        state, which is put back, as are the model's mode and gradients.
        """
        kept: list[Captured] = []
        with torch.random.fork_rng(), torch.enable_grad():
            for split, loader in self.loaders.items():
                found = capture(
                    self.store,
                    model,
                    loader,
                    task=self.task,
                    split=split,
                    checkpoints=checkpoint,
                    run=self.run,
                    step=step,
                    lr=lr,
                    progress=False,
                    **self.options,
                )
                kept += found if isinstance(found, list) else [found]
        return kept


def replays(
    store: Store | str | os.PathLike[str],
    loaders: Mapping[str, Iterable[Any]],
    *,
    task: Task,
    run: str,
    options: Mapping[str, Any],
) -> Replays:
    """The replays of a callback, once its arguments are seen to make sense."""
    if not loaders:
        raise CaptureError(
            "no loaders to replay", fix='pass {"train": train_loader, "test": test_loader}'
        )
    wrong = sorted(set(options) & set(_OWN))
    if wrong:
        raise CaptureError(
            "the training decides about these arguments",
            found=", ".join(wrong),
            fix="leave them out",
        )
    opened = store if isinstance(store, gs.Store) else gs.open(store)
    return Replays(opened, dict(loaders), task, run, {"mode": "eval", **options})


def learning_rate(optimizer: Any) -> float | None:
    """The optimizer's step size, if all its parameters have the same."""
    rates = {float(group["lr"]) for group in optimizer.param_groups}
    return rates.pop() if len(rates) == 1 else None


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
        raise MissingExtra(
            f"this callback is for {extra}, which is not installed",
            fix=install_hint(extra),
        )
