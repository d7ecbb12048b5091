"""A child-sum Tree-LSTM over generated trees."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


@dataclass(frozen=True, slots=True, eq=False)
class _Tree:
    value: torch.Tensor
    children: tuple[_Tree, ...]


class _ChildSum(nn.Module):
    """Joins the states of any number of children; each child has a forget gate of its own."""

    def __init__(self, inputs: int, memory: int) -> None:
        super().__init__()
        self.memory = memory
        self.gates_input = nn.Linear(inputs, 3 * memory)
        self.gates_state = nn.Linear(memory, 3 * memory, bias=False)
        self.forget_input = nn.Linear(inputs, memory)
        self.forget_state = nn.Linear(memory, memory, bias=False)

    def forward(self, tree: _Tree) -> torch.Tensor:
        return self._states(tree)[0]

    def _states(self, tree: _Tree) -> tuple[torch.Tensor, torch.Tensor]:
        gates = self.gates_input(tree.value)
        kept = tree.value.new_zeros(len(tree.value), self.memory)
        if tree.children:
            below = [self._states(child) for child in tree.children]
            gates = gates + self.gates_state(torch.stack([state for state, _ in below]).sum(0))
            forget = self.forget_input(tree.value)
            for state, memory in below:
                kept = kept + (forget + self.forget_state(state)).sigmoid() * memory
        entering, showing, content = gates.chunk(3, 1)
        kept = kept + entering.sigmoid() * content.tanh()
        return showing.sigmoid() * kept.tanh(), kept


def build(
    name: str, sizes: Mapping[str, int | float]
) -> tuple[nn.Module, Callable[[], torch.Tensor]]:
    """A tree of `depth` levels; `irregular` trees have any number of children up to `children`."""
    model = _ChildSum(int(sizes["in_dim"]), int(sizes["mem_dim"]))
    # Drawn by torch, so that the shape follows the same seed as the values.
    shapes = random.Random(int(torch.randint(2**31, ()).item()))
    tree = _grown(sizes, int(sizes["depth"]), shapes)
    return model, lambda: model(tree).square().mean()


def _grown(sizes: Mapping[str, int | float], depth: int, shapes: random.Random) -> _Tree:
    most = int(sizes["children"])
    count = shapes.randint(1, most) if sizes["irregular"] else most
    children = (_grown(sizes, depth - 1, shapes) for _ in range(count if depth > 1 else 0))
    value = torch.randn(int(sizes["batch_size"]), int(sizes["in_dim"]))
    return _Tree(value, tuple(children))
