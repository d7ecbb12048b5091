"""The training of the demo."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional as F

if TYPE_CHECKING:
    from collections.abc import Mapping

    from gradkeep.data import Digits

    States = Mapping[str, dict[str, torch.Tensor]]

EPOCHS = 30
KEPT = (2, 4, 7, 10, 15, 30)
"""The epochs whose weights are kept, more of them early: late ones have learnt all by heart."""


@dataclass(frozen=True, slots=True, eq=False)
class Trained:
    """What a training ends with."""

    accuracy: float
    """On the test digits."""
    states: States = field(default_factory=dict)
    """The weights by the name of their checkpoint."""


def network(seed: int) -> nn.Sequential:
    """The 64-64-10 network that a seed stands for."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def train(digits: Digits, rows: Any, *, seed: int, keep: bool = False) -> Trained:
    """Train on some rows of the training digits."""
    model = network(seed)
    chosen = torch.as_tensor(rows)
    images = torch.from_numpy(digits.train_images)[chosen]
    labels = torch.from_numpy(digits.train_labels)[chosen]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    states = {}
    for epoch in range(1, EPOCHS + 1):
        for batch in torch.split(torch.randperm(len(labels)), 64):
            optimizer.zero_grad()
            torch.autograd.backward(F.cross_entropy(model(images[batch]), labels[batch]))
            optimizer.step()
        if keep and epoch in KEPT:
            states[f"epoch-{epoch:02d}"] = {
                name: value.clone() for name, value in model.state_dict().items()
            }
    with torch.no_grad():
        said = model(torch.from_numpy(digits.test_images)).argmax(1)
    accuracy = float((said == torch.from_numpy(digits.test_labels)).float().mean())
    return Trained(accuracy, states)
