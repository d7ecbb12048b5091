"""A generator trained against a discriminator that looks several of its own steps ahead."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_RATE = 0.1


class _UnrolledGan(nn.Module):
    """The generator's loss after the discriminator's next steps, which stay in the graph."""

    def __init__(self, noise: int, generator: int, discriminator: int, steps: int) -> None:
        super().__init__()
        self.generator = _three_layers(noise, generator, 2)
        self.discriminator = _three_layers(2, discriminator, 1)
        self.steps = steps

    def forward(self, real: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        fake = self.generator(noise)
        weights: dict[str, torch.Tensor] = dict(self.discriminator.named_parameters())
        for _ in range(self.steps):
            loss = self._judged(weights, real, 1.0) + self._judged(weights, fake, 0.0)
            slopes = torch.autograd.grad(loss, list(weights.values()), create_graph=True)
            weights = {
                name: value - _RATE * slope
                for (name, value), slope in zip(weights.items(), slopes, strict=True)
            }
        return self._judged(weights, fake, 1.0)

    def _judged(
        self, weights: dict[str, torch.Tensor], points: torch.Tensor, truth: float
    ) -> torch.Tensor:
        scores = functional_call(self.discriminator, weights, (points,))
        return functional.binary_cross_entropy_with_logits(scores, torch.full_like(scores, truth))


def gan_workload(
    name: str, sizes: Mapping[str, int | float]
) -> tuple[nn.Module, Callable[[], torch.Tensor]]:
    """Learns points that lie in eight heaps on a circle."""
    batch, noise_dim, generator, discriminator, steps = (
        int(sizes[key])
        for key in ("batch_size", "noise_dim", "g_hidden", "d_hidden", "unrolled_steps")
    )
    model = _UnrolledGan(noise_dim, generator, discriminator, steps)
    angles = torch.randint(8, (batch,)) * (math.pi / 4)
    real = 2 * torch.stack([angles.cos(), angles.sin()], 1) + 0.02 * torch.randn(batch, 2)
    noise = torch.randn(batch, noise_dim)
    return model, lambda: model(real, noise)


def _three_layers(inputs: int, hidden: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(inputs, hidden),
        nn.Tanh(),
        nn.Linear(hidden, hidden),
        nn.Tanh(),
        nn.Linear(hidden, outputs),
    )
