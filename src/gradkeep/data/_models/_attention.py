"""Self-attention from ordinary operators: query, key and value are layers that can be hooked."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional

from gradkeep.errors import DataError


class SelfAttention(nn.Module):
    """Attention of several heads without the output layer, `[N, T, D]` to `[N, T, D]`."""

    def __init__(self, dim: int, heads: int, dropout: float) -> None:
        super().__init__()
        if dim % heads:
            raise DataError(
                "dim is no multiple of heads",
                found=f"dim={dim}, heads={heads}",
                expected=f"dim={dim // heads * heads or heads}",
            )
        self.heads, self.dropout = heads, dropout
        self.query = nn.Linear(dim, dim)
        self.key = nn.Linear(dim, dim)
        self.value = nn.Linear(dim, dim)

    def forward(self, x: torch.Tensor, hidden: torch.Tensor | None = None) -> torch.Tensor:
        """Attend everywhere but where `hidden`, a mask that broadcasts to `[N, 1, T, T]`, is true."""
        query, key, value = (
            layer(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        scores = query @ key.transpose(-2, -1) / math.sqrt(query.shape[-1])
        if hidden is not None:
            # Not minus infinity: a row that hides everything must not become not-a-number.
            scores = scores.masked_fill(hidden, torch.finfo(scores.dtype).min)
        weights = functional.dropout(scores.softmax(-1), self.dropout, self.training)
        mixed: torch.Tensor = weights @ value
        return mixed.transpose(1, 2).flatten(2)


def start_small(layer: nn.Module) -> None:
    """Weights of deviation 0.02 and no bias, as BERT and GPT-2 begin."""
    if isinstance(layer, nn.Linear | nn.Embedding):
        nn.init.normal_(layer.weight, std=0.02)
    if isinstance(layer, nn.Linear) and layer.bias is not None:
        nn.init.zeros_(layer.bias)


def check_length(found: int, longest: int) -> None:
    """Refuse sequences for which there are no positions."""
    if found > longest:
        raise DataError(
            "the sequence is longer than the model's positions",
            found=found,
            expected=f"at most {longest}",
            fix=f"build the model with length={found}, or cut the sequence",
        )
