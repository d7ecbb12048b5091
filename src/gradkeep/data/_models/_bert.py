"""A classifier like BERT; every layer has the path that Hugging Face gives it."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from gradkeep.data._models._attention import SelfAttention, check_length, start_small

_EPSILON = 1e-12


class _Embeddings(nn.Module):
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
        made: torch.Tensor = self.dropout(self.LayerNorm(x))
        return made


class _Output(nn.Module):
    """A linear layer, added to what went in before, normalised."""

    def __init__(self, inputs: int, dim: int, dropout: float) -> None:
        super().__init__()
        self.dense = nn.Linear(inputs, dim)
        self.LayerNorm = nn.LayerNorm(dim, eps=_EPSILON)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.LayerNorm(self.dropout(self.dense(x)) + before)
        return made


class _Attention(nn.Module):
    def __init__(self, dim: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.self = SelfAttention(dim, heads, dropout)
        self.output = _Output(dim, dim, dropout)

    def forward(self, x: torch.Tensor, hidden: torch.Tensor | None) -> torch.Tensor:
        made: torch.Tensor = self.output(self.self(x, hidden), x)
        return made


class _Dense(nn.Module):
    """One linear layer with a function behind it, under the name `dense`."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.dense = nn.Linear(inputs, outputs)


class _Intermediate(_Dense):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.gelu(self.dense(x))


class _Pooler(_Dense):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.dense(x[:, 0]))


class _Layer(nn.Module):
    def __init__(self, dim: int, heads: int, inner: int, dropout: float) -> None:
        super().__init__()
        self.attention = _Attention(dim, heads, dropout)
        self.intermediate = _Intermediate(dim, inner)
        self.output = _Output(inner, dim, dropout)

    def forward(self, x: torch.Tensor, hidden: torch.Tensor | None) -> torch.Tensor:
        x = self.attention(x, hidden)
        made: torch.Tensor = self.output(self.intermediate(x), x)
        return made


class _Encoder(nn.Module):
    def __init__(self, layers: list[_Layer]) -> None:
        super().__init__()
        self.layer = nn.ModuleList(layers)

    def forward(self, x: torch.Tensor, hidden: torch.Tensor | None) -> torch.Tensor:
        for layer in self.layer:
            x = layer(x, hidden)
        return x


class _Bert(nn.Module):
    """From ids `[N, T]` to one vector per text `[N, D]`, that of the first word, [CLS]."""

    def __init__(self, embeddings: _Embeddings, encoder: _Encoder, pooler: _Pooler | None) -> None:
        super().__init__()
        self.embeddings, self.encoder, self.pooler = embeddings, encoder, pooler

    def forward(self, ids: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        hidden = None if mask is None else mask[:, None, None, :] == 0
        x: torch.Tensor = self.encoder(self.embeddings(ids), hidden)
        return x[:, 0] if self.pooler is None else self.pooler(x)


class BertClassifier(nn.Module):
    """`bert.encoder.layer.0.attention.self.query` and the like, then `classifier`.

    The defaults are small; BERT-base is `vocabulary=30522, length=512, dim=768, heads=12,
    layers=12, inner=3072, segments=2`. Without `pooler` the classifier reads [CLS] itself.
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
            _Embeddings(vocabulary, length, segments, dim, dropout),
            _Encoder([_Layer(dim, heads, inner, dropout) for _ in range(layers)]),
            _Pooler(dim, dim) if pooler else None,
        )
        self.classifier = nn.Linear(dim, classes)
        self.apply(start_small)

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Logits `[N, classes]` of ids `[N, T]`; where the mask `[N, T]` is 0 nothing is read."""
        logits: torch.Tensor = self.classifier(self.bert(input_ids, attention_mask))
        return logits
