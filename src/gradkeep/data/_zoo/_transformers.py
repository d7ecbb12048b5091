"""Transformers: encoder with decoder, and an encoder as a model of words."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import nn

from gradkeep.data._zoo._recurrent import next_word
from gradkeep.errors import RematError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


class _Words(nn.Module):
    """Embedding with positions, an encoder that sees only earlier words, a score for each word."""

    def __init__(self, encoder: nn.TransformerEncoder, tokens: int, dim: int, length: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(tokens, dim)
        self.encoder = encoder
        self.scores = nn.Linear(dim, tokens)
        self.register_buffer("positions", _waves(length, dim))
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(length))

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.embedding(words) * math.sqrt(self.embedding.embedding_dim)
        made: torch.Tensor = self.scores(self.encoder(x + self.positions, self.mask))
        return made


def build(
    name: str, sizes: Mapping[str, int | float]
) -> tuple[nn.Module, Callable[[], torch.Tensor]]:
    """`transformer` maps one random sequence to another, `transformer_encoder` models words."""
    batch, length, dim, heads, layers, hidden = (
        int(sizes[key]) for key in ("batch_size", "length", "dim", "heads", "layers", "hidden")
    )
    if dim % heads:
        raise RematError(
            f"dim of {name} is no multiple of heads", found=f"dim={dim}, heads={heads}"
        )
    dropout = float(sizes["dropout"])
    if name == "transformer":
        decoder = int(sizes["decoder_layers"])
        model = nn.Transformer(dim, heads, layers, decoder, hidden, dropout, batch_first=True)
        source = torch.randn(batch, length, dim)
        target = torch.randn(batch, int(sizes["target_length"]), dim)
        return model, lambda: (model(source, target) - target).square().mean()
    layer = nn.TransformerEncoderLayer(dim, heads, hidden, dropout)
    encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
    words = _Words(encoder, int(sizes["tokens"]), dim, length)
    return words, next_word(words, length, batch, int(sizes["tokens"]))


def _waves(length: int, dim: int) -> torch.Tensor:
    """Sines and cosines of slower and slower frequency, `[length, 1, dim]`."""
    rates = torch.exp(torch.arange(0, dim, 2) * (-math.log(10000.0) / dim))
    angles = torch.arange(length).unsqueeze(1) * rates
    both = torch.stack([angles.sin(), angles.cos()], 2).view(length, -1)
    return both[:, :dim].unsqueeze(1).contiguous()
