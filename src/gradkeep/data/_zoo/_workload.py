"""A model with its inputs: one training step that can be run again and again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch


@dataclass(frozen=True, slots=True, eq=False)
class Workload:
    """One step of training: forward, loss, backward; the optimizer is left to the caller."""

    name: str
    model: torch.nn.Module
    loss: Callable[[], torch.Tensor]
    """The forward pass on the generated inputs."""
    sizes: dict[str, int | float]
    """What it was built with, the batch size included."""

    @property
    def parameters(self) -> int:
        """How many numbers are trained."""
        return sum(parameter.numel() for parameter in self.model.parameters())

    def step(self) -> torch.Tensor:
        """Forward, loss, backward into fresh gradients; returns the loss."""
        for parameter in self.model.parameters():
            parameter.grad = None
        loss = self.loss()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()
