"""A small GPT: each position sees itself and what came before, and scores what comes next."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from gradkeep.data._models._attention import SelfAttention, check_length, start_small


class _Attention(SelfAttention):
    def __init__(self, dim: int, heads: int, dropout: float) -> None:
        super().__init__(dim, heads, dropout)
        self.out = nn.Linear(dim, dim)

    def forward(self, x: torch.Tensor, hidden: torch.Tensor | None = None) -> torch.Tensor:
        made: torch.Tensor = self.out(super().forward(x, hidden))
        return made


class _Feed(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.fc = nn.Linear(dim, 4 * dim)
        self.out = nn.Linear(4 * dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.out(functional.gelu(self.fc(x)))
        return made


class _Block(nn.Module):
    def __init__(self, dim: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(dim)
        self.attn = _Attention(dim, heads, dropout)
        self.ln_2 = nn.LayerNorm(dim)
        self.mlp = _Feed(dim)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        x = x + self.dropout(self.attn(self.ln_1(x), hidden))
        made: torch.Tensor = x + self.dropout(self.mlp(self.ln_2(x)))
        return made


class GPT(nn.Module):
    """`wte`, `wpe`, blocks `h.0.attn.query` and the like, `ln_f`, `lm_head`.

    If `tied`, the head is the embedding of words: one parameter with two uses.
    """

    def __init__(
        self,
        *,
        vocabulary: int = 65,
        length: int = 64,
        dim: int = 64,
        heads: int = 4,
        layers: int = 2,
        dropout: float = 0.0,
        tied: bool = True,
    ) -> None:
        super().__init__()
        self.wte = nn.Embedding(vocabulary, dim)
        self.wpe = nn.Embedding(length, dim)
        self.h = nn.ModuleList(_Block(dim, heads, dropout) for _ in range(layers))
        self.ln_f = nn.LayerNorm(dim)
        self.lm_head = nn.Linear(dim, vocabulary, bias=False)
        self.apply(start_small)
        if tied:
            self.lm_head.weight = self.wte.weight

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Logits `[N, T, vocabulary]` of ids `[N, T]`."""
        length = input_ids.shape[1]
        check_length(length, self.wpe.num_embeddings)
        places = torch.arange(length, device=input_ids.device)
        hidden = places[None, :] > places[:, None]
        x = self.wte(input_ids) + self.wpe(places)
        for block in self.h:
            x = block(x, hidden)
        logits: torch.Tensor = self.lm_head(self.ln_f(x))
        return logits
