"""Transformers with query, key and value as separate layers: BERT and GPT."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional

from gradkeep.errors import DataError


class SelfAttention(nn.Module):
    """Multi-head attention without the output layer, `[N, T, D]` to `[N, T, D]`."""

    def __init__(self, dim: int, heads: int, dropout: float) -> None:
        super().__init__()
        if dim % heads:
            raise DataError(
                "dim must be a multiple of heads",
                code="data.heads",
                found=f"dim={dim}, heads={heads}",
                expected=f"dim={dim // heads * heads or heads}",
            )
        self.heads, self.dropout = heads, dropout
        self.query = nn.Linear(dim, dim)
        self.key = nn.Linear(dim, dim)
        self.value = nn.Linear(dim, dim)

    def forward(self, x: torch.Tensor, hidden: torch.Tensor | None = None) -> torch.Tensor:
        """Attend to all positions except where `hidden`, which broadcasts to `[N, 1, T, T]`, is True."""
        query, key, value = (
            layer(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        scores = query @ key.transpose(-2, -1) / math.sqrt(query.shape[-1])
        if hidden is not None:
            # Not minus infinity: a fully masked row must not become NaN.
            scores = scores.masked_fill(hidden, torch.finfo(scores.dtype).min)
        weights = functional.dropout(scores.softmax(-1), self.dropout, self.training)
        mixed: torch.Tensor = weights @ value
        return mixed.transpose(1, 2).flatten(2)


def start_small(layer: nn.Module) -> None:
    """Initialize weights with standard deviation 0.02 and zero biases, as BERT and GPT-2."""
    if isinstance(layer, nn.Linear | nn.Embedding):
        nn.init.normal_(layer.weight, std=0.02)
    if isinstance(layer, nn.Linear) and layer.bias is not None:
        nn.init.zeros_(layer.bias)


def check_length(length: int, longest: int) -> None:
    """Raise for sequences longer than the model's positions."""
    if length > longest:
        raise DataError(
            "the sequence is longer than the model's positions",
            code="data.sequence_length",
            found=length,
            expected=f"at most {longest}",
            fix=f"Build the model with length={length}, or cut the sequence.",
        )


_EPSILON = 1e-12


class _BertEmbeddings(nn.Module):
    def __init__(
        self, vocabulary: int, length: int, segments: int, dim: int, dropout: float
    ) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(vocabulary, dim)
        self.position_embeddings = nn.Embedding(length, dim)
        self.token_type_embeddings = nn.Embedding(segments, dim) if segments else None
        self.LayerNorm = nn.LayerNorm(dim, eps=_EPSILON)
        self.dropout = nn.Dropout(dropout)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        check_length(ids.shape[1], self.position_embeddings.num_embeddings)
        places = torch.arange(ids.shape[1], device=ids.device)
        x = self.word_embeddings(ids) + self.position_embeddings(places)
        if self.token_type_embeddings is not None:
            x = x + self.token_type_embeddings(torch.zeros_like(ids))
        output: torch.Tensor = self.dropout(self.LayerNorm(x))
        return output


class _BertOutput(nn.Module):
    """A linear layer, added to the earlier input and normalized."""

    def __init__(self, inputs: int, dim: int, dropout: float) -> None:
        super().__init__()
        self.dense = nn.Linear(inputs, dim)
        self.LayerNorm = nn.LayerNorm(dim, eps=_EPSILON)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.LayerNorm(self.dropout(self.dense(x)) + before)
        return output


class _BertAttention(nn.Module):
    def __init__(self, dim: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.self = SelfAttention(dim, heads, dropout)
        self.output = _BertOutput(dim, dim, dropout)

    def forward(self, x: torch.Tensor, hidden: torch.Tensor | None) -> torch.Tensor:
        output: torch.Tensor = self.output(self.self(x, hidden), x)
        return output


class _BertDense(nn.Module):
    """One linear layer called `dense`, followed by a function."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.dense = nn.Linear(inputs, outputs)


class _BertIntermediate(_BertDense):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.gelu(self.dense(x))


class _BertPooler(_BertDense):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.dense(x[:, 0]))


class _BertLayer(nn.Module):
    def __init__(self, dim: int, heads: int, inner: int, dropout: float) -> None:
        super().__init__()
        self.attention = _BertAttention(dim, heads, dropout)
        self.intermediate = _BertIntermediate(dim, inner)
        self.output = _BertOutput(inner, dim, dropout)

    def forward(self, x: torch.Tensor, hidden: torch.Tensor | None) -> torch.Tensor:
        x = self.attention(x, hidden)
        output: torch.Tensor = self.output(self.intermediate(x), x)
        return output


class _BertEncoder(nn.Module):
    def __init__(self, layers: list[_BertLayer]) -> None:
        super().__init__()
        self.layer = nn.ModuleList(layers)

    def forward(self, x: torch.Tensor, hidden: torch.Tensor | None) -> torch.Tensor:
        for layer in self.layer:
            x = layer(x, hidden)
        return x


class _Bert(nn.Module):
    """Map ids `[N, T]` to one vector per text `[N, D]`, that of the first token, [CLS]."""

    def __init__(
        self, embeddings: _BertEmbeddings, encoder: _BertEncoder, pooler: _BertPooler | None
    ) -> None:
        super().__init__()
        self.embeddings, self.encoder, self.pooler = embeddings, encoder, pooler

    def forward(self, ids: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        hidden = None if mask is None else mask[:, None, None, :] == 0
        x: torch.Tensor = self.encoder(self.embeddings(ids), hidden)
        return x[:, 0] if self.pooler is None else self.pooler(x)


class BertClassifier(nn.Module):
    """BERT with a classifier: `bert.encoder.layer.0.attention.self.query` and the like, then `classifier`.

    The defaults are small; BERT-base is `vocabulary=30522, length=512, dim=768, heads=12, layers=12, inner=3072,
    segments=2`. Without `pooler` the classifier reads [CLS] directly.
    """

    def __init__(
        self,
        *,
        vocabulary: int = 10_000,
        length: int = 128,
        dim: int = 128,
        heads: int = 4,
        layers: int = 2,
        inner: int = 512,
        classes: int = 4,
        segments: int = 0,
        dropout: float = 0.1,
        pooler: bool = False,
    ) -> None:
        super().__init__()
        self.bert = _Bert(
            _BertEmbeddings(vocabulary, length, segments, dim, dropout),
            _BertEncoder([_BertLayer(dim, heads, inner, dropout) for _ in range(layers)]),
            _BertPooler(dim, dim) if pooler else None,
        )
        self.classifier = nn.Linear(dim, classes)
        self.apply(start_small)

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return logits `[N, classes]` of ids `[N, T]`; positions with mask `[N, T]` 0 are ignored."""
        logits: torch.Tensor = self.classifier(self.bert(input_ids, attention_mask))
        return logits


class _GptAttention(SelfAttention):
    def __init__(self, dim: int, heads: int, dropout: float) -> None:
        super().__init__(dim, heads, dropout)
        self.out = nn.Linear(dim, dim)

    def forward(self, x: torch.Tensor, hidden: torch.Tensor | None = None) -> torch.Tensor:
        output: torch.Tensor = self.out(super().forward(x, hidden))
        return output


class _GptFeedForward(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.fc = nn.Linear(dim, 4 * dim)
        self.out = nn.Linear(4 * dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.out(functional.gelu(self.fc(x)))
        return output


class _GptBlock(nn.Module):
    def __init__(self, dim: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(dim)
        self.attn = _GptAttention(dim, heads, dropout)
        self.ln_2 = nn.LayerNorm(dim)
        self.mlp = _GptFeedForward(dim)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        x = x + self.dropout(self.attn(self.ln_1(x), hidden))
        output: torch.Tensor = x + self.dropout(self.mlp(self.ln_2(x)))
        return output


class GPT(nn.Module):
    """GPT-2 style decoder: `wte`, `wpe`, blocks `h.0.attn.query` and the like, `ln_f`, `lm_head`.

    Args:
        vocabulary: Number of tokens.
        length: Largest sequence length.
        dim: Width of the model.
        heads: Attention heads per layer.
        layers: Number of blocks.
        dropout: Dropout probability.
        tied: Use the token embedding as head: one parameter with two uses.
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
        self.h = nn.ModuleList(_GptBlock(dim, heads, dropout) for _ in range(layers))
        self.ln_f = nn.LayerNorm(dim)
        self.lm_head = nn.Linear(dim, vocabulary, bias=False)
        self.apply(start_small)
        if tied:
            self.lm_head.weight = self.wte.weight

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Return logits `[N, T, vocabulary]`.

        Args:
            input_ids: Token ids `[N, T]`.
        """
        length = input_ids.shape[1]
        check_length(length, self.wpe.num_embeddings)
        places = torch.arange(length, device=input_ids.device)
        hidden = places[None, :] > places[:, None]
        x = self.wte(input_ids) + self.wpe(places)
        for block in self.h:
            x = block(x, hidden)
        logits: torch.Tensor = self.lm_head(self.ln_f(x))
        return logits
