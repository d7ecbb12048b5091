"""Workloads of sequences and trees: LSTM, GRU, Transformer, Tree-LSTM."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn import functional

from gradkeep.errors import RematError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


class _UnrolledLstm(nn.Module):
    """An LSTM with separate operators for every step."""

    def __init__(self, inputs: int, memory: int) -> None:
        super().__init__()
        self.memory = memory
        self.from_input = nn.Linear(inputs, 4 * memory)
        self.from_state = nn.Linear(memory, 4 * memory, bias=False)

    def forward(self, steps: list[torch.Tensor]) -> torch.Tensor:
        state = cell = steps[0].new_zeros(len(steps[0]), self.memory)
        for x in steps:
            gates = self.from_input(x) + self.from_state(state)
            entering, leaving, showing, content = gates.chunk(4, 1)
            cell = leaving.sigmoid() * cell + entering.sigmoid() * content.tanh()
            state = showing.sigmoid() * cell.tanh()
        return state


class _UnrolledGru(nn.Module):
    """A GRU with separate operators for every step."""

    def __init__(self, inputs: int, memory: int) -> None:
        super().__init__()
        self.memory = memory
        self.from_input = nn.Linear(inputs, 3 * memory)
        self.from_state = nn.Linear(memory, 3 * memory)

    def forward(self, steps: list[torch.Tensor]) -> torch.Tensor:
        state = steps[0].new_zeros(len(steps[0]), self.memory)
        for x in steps:
            reset, update, new = self.from_input(x).chunk(3, 1)
            old_reset, old_update, old = self.from_state(state).chunk(3, 1)
            update_gate = (update + old_update).sigmoid()
            content = (new + (reset + old_reset).sigmoid() * old).tanh()
            state = content + update_gate * (state - content)
        return state


class _RecurrentWords(nn.Module):
    """Embedding, recurrent layers, and a score for every word that may come next."""

    def __init__(self, core: nn.LSTM | nn.GRU, tokens: int, dim: int, dropout: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(tokens, dim)
        self.dropout = nn.Dropout(dropout)
        self.core = core
        self.scores = nn.Linear(core.hidden_size, tokens)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        states, _ = self.core(self.dropout(self.embedding(words)))
        outputs: torch.Tensor = self.scores(self.dropout(states))
        return outputs


def recurrent_workload(
    name: str, sizes: Mapping[str, int | float]
) -> tuple[nn.Module, Callable[[], torch.Tensor]]:
    """Build an RNN; `lstm` and `gru` are unrolled cells, `lstm_encoder` and `gru_encoder` torch's layers."""
    batch, length = int(sizes["batch_size"]), int(sizes["length"])
    if name in ("lstm", "gru"):
        cell = _UnrolledLstm if name == "lstm" else _UnrolledGru
        model = cell(int(sizes["in_dim"]), int(sizes["mem_dim"]))
        steps = [torch.randn(batch, int(sizes["in_dim"])) for _ in range(length)]
        return model, lambda: model(steps).square().mean()
    kind = nn.LSTM if name == "lstm_encoder" else nn.GRU
    dim, dropout = int(sizes["dim"]), float(sizes["dropout"])
    layers = int(sizes["layers"])
    # Between layers only: torch warns of dropout with a single one.
    core = kind(dim, int(sizes["hidden"]), layers, dropout=dropout if layers > 1 else 0.0)
    words = _RecurrentWords(core, int(sizes["tokens"]), dim, dropout)
    return words, next_word(words, length, batch, int(sizes["tokens"]))


def next_word(model: nn.Module, length: int, batch: int, tokens: int) -> Callable[[], torch.Tensor]:
    """Return the loss of a language model on random text."""
    text = torch.randint(tokens, (length + 1, batch))
    words, following = text[:-1], text[1:].reshape(-1)
    return lambda: functional.cross_entropy(model(words).view(-1, tokens), following)


class _EncoderWords(nn.Module):
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
        outputs: torch.Tensor = self.scores(self.encoder(x + self.positions, self.mask))
        return outputs


def transformer_workload(
    name: str, sizes: Mapping[str, int | float]
) -> tuple[nn.Module, Callable[[], torch.Tensor]]:
    """Build a Transformer; `transformer` maps one sequence to another, `transformer_encoder` models words."""
    batch, length, dim, heads, layers, hidden = (
        int(sizes[key]) for key in ("batch_size", "length", "dim", "heads", "layers", "hidden")
    )
    if dim % heads:
        raise RematError(
            f"dim of {name} is not a multiple of heads",
            code="compat.dim_and_heads",
            found=f"dim={dim}, heads={heads}",
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
    words = _EncoderWords(encoder, int(sizes["tokens"]), dim, length)
    return words, next_word(words, length, batch, int(sizes["tokens"]))


def _waves(length: int, dim: int) -> torch.Tensor:
    """Sines and cosines of slower and slower frequency, `[length, 1, dim]`."""
    rates = torch.exp(torch.arange(0, dim, 2) * (-math.log(10000.0) / dim))
    angles = torch.arange(length).unsqueeze(1) * rates
    both = torch.stack([angles.sin(), angles.cos()], 2).view(length, -1)
    return both[:, :dim].unsqueeze(1).contiguous()


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
        cell = tree.value.new_zeros(len(tree.value), self.memory)
        if tree.children:
            below = [self._states(child) for child in tree.children]
            gates = gates + self.gates_state(torch.stack([state for state, _ in below]).sum(0))
            forget = self.forget_input(tree.value)
            for state, memory in below:
                cell = cell + (forget + self.forget_state(state)).sigmoid() * memory
        entering, showing, content = gates.chunk(3, 1)
        cell = cell + entering.sigmoid() * content.tanh()
        return showing.sigmoid() * cell.tanh(), cell


def tree_workload(
    name: str, sizes: Mapping[str, int | float]
) -> tuple[nn.Module, Callable[[], torch.Tensor]]:
    """Build a Tree-LSTM on a tree of `depth` levels with `children`, or up to `children` if `irregular`."""
    model = _ChildSum(int(sizes["in_dim"]), int(sizes["mem_dim"]))
    # Drawn by torch, so that the shape follows the same seed as the values.
    shapes = random.Random(int(torch.randint(2**31, ()).item()))
    tree = _grown(sizes, int(sizes["depth"]), shapes)
    return model, lambda: model(tree).square().mean()


class _Similarity(nn.Module):
    """Similarity of two sentences: a tree of words each, and scores from product and difference."""

    def __init__(self, sizes: Mapping[str, int | float]) -> None:
        super().__init__()
        memory, hidden = int(sizes["mem_dim"]), int(sizes["hidden"])
        self.embedding = nn.Embedding(int(sizes["tokens"]), int(sizes["in_dim"]))
        self.tree = _ChildSum(int(sizes["in_dim"]), memory)
        self.product, self.difference = nn.Linear(memory, hidden), nn.Linear(memory, hidden)
        self.scores = nn.Linear(hidden, int(sizes["classes"]))

    def forward(self, first: _Tree, second: _Tree) -> torch.Tensor:
        one, two = self.tree(self._embedded(first)), self.tree(self._embedded(second))
        both = self.product(one * two) + self.difference((one - two).abs())
        return functional.log_softmax(self.scores(both.sigmoid()), 1)

    def _embedded(self, tree: _Tree) -> _Tree:
        return _Tree(self.embedding(tree.value), tuple(map(self._embedded, tree.children)))


def similarity_workload(
    name: str, sizes: Mapping[str, int | float]
) -> tuple[nn.Module, Callable[[], torch.Tensor]]:
    """Build a sentence-similarity model on pairs of random trees of `words` words."""
    model = _Similarity(sizes)
    batch = int(sizes["batch_size"])
    shapes = random.Random(int(torch.randint(2**31, ()).item()))
    first, second = (_sentence(sizes, shapes) for _ in range(2))
    targets = torch.rand(batch, int(sizes["classes"])).softmax(1)
    return model, lambda: functional.kl_div(model(first, second), targets, reduction="batchmean")


def _sentence(sizes: Mapping[str, int | float], shapes: random.Random) -> _Tree:
    count = int(sizes["words"])
    heads = [shapes.randrange(word) for word in range(1, count)]
    words = torch.randint(int(sizes["tokens"]), (count, int(sizes["batch_size"])))
    nodes: dict[int, _Tree] = {}
    for word in reversed(range(count)):
        below = tuple(nodes[one] for one in range(word + 1, count) if heads[one - 1] == word)
        nodes[word] = _Tree(words[word], below)
    return nodes[0]


def _grown(sizes: Mapping[str, int | float], depth: int, shapes: random.Random) -> _Tree:
    most = int(sizes["children"])
    count = shapes.randint(1, most) if sizes["irregular"] else most
    children = (_grown(sizes, depth - 1, shapes) for _ in range(count if depth > 1 else 0))
    value = torch.randn(int(sizes["batch_size"]), int(sizes["in_dim"]))
    return _Tree(value, tuple(children))
