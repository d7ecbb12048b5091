"""The eight models that planned training is measured on; each a training step without its optimizer."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from gradkeep.compat.dtr.zoo import build

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True, slots=True, eq=False)
class Subject:
    """A model, its loss, and possible placements of checkpoints."""

    name: str
    model: nn.Module
    loss: Callable[[], torch.Tensor]
    placements: tuple[tuple[str, Callable[[], Callable[[], None]]], ...] = ()
    """Each places checkpoints when called, and returns a function that removes them."""


class Vgg(nn.Module):
    """Convolutions with batch normalization and in-place ReLU, then dropout before the
    classifier."""

    def __init__(self, widths: tuple[tuple[int, ...], ...], side: int) -> None:
        super().__init__()
        stages: list[nn.Module] = []
        inputs = 3
        for stage in widths:
            layers: list[nn.Module] = []
            for width in stage:
                layers += [
                    nn.Conv2d(inputs, width, 3, padding=1),
                    nn.BatchNorm2d(width),
                    nn.ReLU(inplace=True),
                ]
                inputs = width
            stages.append(nn.Sequential(*layers, nn.MaxPool2d(2)))
        self.stages = nn.ModuleList(stages)
        final_side = side // 2 ** len(widths)
        self.head = nn.Sequential(
            nn.Flatten(),
            nn.Linear(inputs * final_side * final_side, 256),
            nn.ReLU(inplace=True),
            nn.Dropout(0.5),
            nn.Linear(256, 10),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for stage in self.stages:
            x = stage(x)
        return self.head(x)


class Layer(nn.Module):
    """A transformer layer: attention and a feed-forward part, each with dropout."""

    def __init__(self, dim: int, heads: int, dropout: float, *, fused: bool) -> None:
        super().__init__()
        self.heads, self.fused, self.rate = heads, fused, dropout
        self.first, self.second = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, dim = x.shape
        qkv = self.qkv(self.first(x)).view(batch, length, 3, self.heads, dim // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        if self.fused:
            seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        else:
            weights = (query @ key.transpose(-1, -2) * (dim // self.heads) ** -0.5).softmax(-1)
            seen = self.dropout(weights) @ value
        x = x + self.dropout(self.out(seen.transpose(1, 2).reshape(batch, length, dim)))
        return x + self.dropout(self.down(functional.gelu(self.up(self.second(x)))))


class LanguageModel(nn.Module):
    """Embedding, transformer layers and logits."""

    def __init__(
        self, tokens: int, dim: int, depth: int, length: int, dropout: float, *, fused: bool
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(tokens, dim)
        self.places = nn.Parameter(torch.randn(length, dim) * 0.02)
        self.layers = nn.ModuleList(Layer(dim, 4, dropout, fused=fused) for _ in range(depth))
        self.norm = nn.LayerNorm(dim)
        self.scores = nn.Linear(dim, tokens)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        x = self.embedding(text) + self.places
        for layer in self.layers:
            x = layer(x)
        return self.scores(self.norm(x))


def _segment_placements(model: nn.Module, stages: list[nn.Module], before, after):
    """Return placements for a chain of stages: k segments, or the first stages individually."""

    def place(groups):
        def forward(x):
            x = before(x)
            for group, saved in groups:
                run = nn.Sequential(*group) if len(group) > 1 else group[0]
                x = run(x) if saved else checkpoint(run, x, use_reentrant=False)
            return after(x)

        def on():
            model.forward = forward
            return lambda: delattr(model, "forward")

        return on

    count = len(stages)
    placements = []
    for parts in sorted({2, 3, 4, 6, 8, 11, 15, count}):
        if parts <= count:
            edges = [round(part * count / parts) for part in range(parts + 1)]
            groups = [stages[a:b] for a, b in itertools.pairwise(edges)]
            placements.append((f"{parts} segments", place([(g, g is groups[-1]) for g in groups])))
    for share in (0.25, 0.5, 0.75):
        first = max(1, round(share * count))
        placements.append(
            (f"first {share:.0%}", place([([s], at >= first) for at, s in enumerate(stages)]))
        )
    return tuple(placements)


def _module_placements(parts: list[nn.Module]):
    """Return placements for modules that are not a chain: all, every other one, the first ones."""

    def place(chosen):
        def on():
            for part in chosen:
                own = type(part).forward

                def forward(*args, part=part, own=own):
                    return checkpoint(own, part, *args, use_reentrant=False)

                part.forward = forward
            return lambda: [delattr(part, "forward") for part in chosen]

        return on

    half = len(parts) // 2
    chosen = {
        "all": parts,
        "even": parts[::2],
        "odd": parts[1::2],
        "first half": parts[:half],
        "last half": parts[half:],
        "outermost": [parts[0], parts[-1]],
        "two outermost": [*parts[:2], *parts[-2:]],
    }
    return tuple((name, place(list(dict.fromkeys(some)))) for name, some in chosen.items() if some)


def _identity(x):
    return x


def _time_step_placements(model):
    """Return placements for the unrolled recurrent network: a number of time steps per segment."""

    def place(length):
        def some(state, cell, *steps):
            for x in steps:
                gates = model.from_input(x) + model.from_state(state)
                entering, leaving, showing, content = gates.chunk(4, 1)
                cell = leaving.sigmoid() * cell + entering.sigmoid() * content.tanh()
                state = showing.sigmoid() * cell.tanh()
            return state, cell

        def forward(steps):
            state = cell = steps[0].new_zeros(len(steps[0]), model.memory)
            for at in range(0, len(steps), length):
                part = steps[at : at + length]
                state, cell = checkpoint(some, state, cell, *part, use_reentrant=False)
            return state

        def on():
            model.forward = forward
            return lambda: delattr(model, "forward")

        return on

    return tuple((f"{length} steps", place(length)) for length in (1, 2, 3, 4, 6, 8, 12))


def build_zoo_subject(name: str, seed: int, **sizes: float) -> Subject:
    """Build a model of DTR's experiments."""
    work = build(name, seed=seed, **sizes)
    model = work.model
    if isinstance(model, nn.Sequential):
        placements = _segment_placements(model, list(model), _identity, _identity)
    elif name == "unet":
        placements = _module_placements([model.first, *model.down, *model.up])
    elif name == "lstm":
        placements = _time_step_placements(model)
    else:
        placements = _module_placements([model.core])
    return Subject(name, model, work.loss, placements)


def _build_vgg(seed: int) -> Subject:
    model = Vgg(((32, 32), (64, 64), (128, 128)), 32)
    images, labels = torch.randn(32, 3, 32, 32), torch.randint(10, (32,))
    return Subject(
        "vgg",
        model,
        lambda: functional.cross_entropy(model(images), labels),
        _segment_placements(
            model, [layer for stage in model.stages for layer in stage], _identity, model.head
        ),
    )


def build_language_model(
    name: str,
    *,
    dropout: float,
    fused: bool,
    dim: int,
    depth: int = 4,
    length: int = 128,
    batch: int = 8,
) -> Subject:
    """Build a transformer that predicts the next token of random texts."""
    tokens = 500
    model = LanguageModel(tokens, dim, depth, length, dropout, fused=fused)
    text = torch.randint(tokens, (batch, length + 1))
    return Subject(
        name,
        model,
        lambda: functional.cross_entropy(
            model(text[:, :-1]).reshape(-1, tokens), text[:, 1:].reshape(-1)
        ),
        _segment_placements(
            model,
            list(model.layers),
            lambda text: model.embedding(text) + model.places,
            lambda x: model.scores(model.norm(x)),
        ),
    )


SUBJECTS = (*("resnet32", "vgg", "unet", "transformer", "lstm", "fused_lstm", "densenet", "gpt"),)


def build_subject(name: str, seed: int = 0) -> Subject:
    """Build a subject; the same seed gives the same model and data."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if name == "resnet32":
            return build_zoo_subject("resnet32", seed, batch_size=16)
        if name == "vgg":
            return _build_vgg(seed)
        if name == "unet":
            return build_zoo_subject("unet", seed, batch_size=8, channels=12)
        if name == "transformer":
            return build_language_model("transformer", dropout=0.1, fused=False, dim=256)
        if name == "lstm":
            return build_zoo_subject(
                "lstm", seed, batch_size=256, length=16, in_dim=128, mem_dim=256
            )
        if name == "fused_lstm":
            return build_zoo_subject(
                "lstm_encoder",
                seed,
                batch_size=32,
                length=48,
                tokens=500,
                dim=128,
                hidden=128,
                layers=3,
            )
        if name == "densenet":
            return build_zoo_subject("densenet100", seed, batch_size=4)
        if name == "gpt":
            return build_language_model("gpt", dropout=0.0, fused=True, dim=192)
    raise ValueError(name)
