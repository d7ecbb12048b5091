"""Recurrent networks: a cell written out and unrolled, and torch's own as models of words."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn import functional

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


class _Unrolled(nn.Module):
    """An LSTM of which every operator of every step is its own."""

    def __init__(self, inputs: int, memory: int) -> None:
        super().__init__()
        self.memory = memory
        self.from_input = nn.Linear(inputs, 4 * memory)
        self.from_state = nn.Linear(memory, 4 * memory, bias=False)

    def forward(self, steps: list[torch.Tensor]) -> torch.Tensor:
        state = kept = steps[0].new_zeros(len(steps[0]), self.memory)
        for x in steps:
            gates = self.from_input(x) + self.from_state(state)
            entering, leaving, showing, content = gates.chunk(4, 1)
            kept = leaving.sigmoid() * kept + entering.sigmoid() * content.tanh()
            state = showing.sigmoid() * kept.tanh()
        return state


class _Words(nn.Module):
    """Embedding, recurrent layers, and a score for every word that may come next."""

    def __init__(self, core: nn.LSTM | nn.GRU, tokens: int, dim: int, dropout: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(tokens, dim)
        self.dropout = nn.Dropout(dropout)
        self.core = core
        self.scores = nn.Linear(core.hidden_size, tokens)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        states, _ = self.core(self.dropout(self.embedding(words)))
        made: torch.Tensor = self.scores(self.dropout(states))
        return made


def build(
    name: str, sizes: Mapping[str, int | float]
) -> tuple[nn.Module, Callable[[], torch.Tensor]]:
    """`lstm` is the unrolled cell, `lstm_encoder` and `gru_encoder` are torch's layers."""
    batch, length = int(sizes["batch_size"]), int(sizes["length"])
    if name == "lstm":
        model = _Unrolled(int(sizes["in_dim"]), int(sizes["mem_dim"]))
        steps = [torch.randn(batch, int(sizes["in_dim"])) for _ in range(length)]
        return model, lambda: model(steps).square().mean()
    kind = nn.LSTM if name == "lstm_encoder" else nn.GRU
    dim, dropout = int(sizes["dim"]), float(sizes["dropout"])
    layers = int(sizes["layers"])
    # Between layers only: torch warns of dropout with a single one.
    core = kind(dim, int(sizes["hidden"]), layers, dropout=dropout if layers > 1 else 0.0)
    words = _Words(core, int(sizes["tokens"]), dim, dropout)
    return words, next_word(words, length, batch, int(sizes["tokens"]))


def next_word(model: nn.Module, length: int, batch: int, tokens: int) -> Callable[[], torch.Tensor]:
    """The loss of a model of words on random text."""
    text = torch.randint(tokens, (length + 1, batch))
    given, following = text[:-1], text[1:].reshape(-1)
    return lambda: functional.cross_entropy(model(given).view(-1, tokens), following)
