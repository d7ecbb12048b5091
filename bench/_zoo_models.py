"""A zoo of small models with batches of unusual shapes, for benchmarks that sweep over models.

`iter_zoo()` yields our own models, and stock Hugging Face ones if `transformers` is installed. Each item
builds a fresh model, its batches and a task with one loss per row. The first batch of a pattern differs
from the later ones: one long document first, one step first, other sizes, as many steps as rows, other
experts.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, rnn

import gradkeep as gk

WORDS, WIDTH, OUT = 23, 8, 3
SIZES = {
    "even": (4, 4, 3),
    "one row first": (1, 5, 2),
    "one row last": (5, 3, 1),
}
"""Rows of each batch."""
SHAPES = {
    "even": ((4, 6), (4, 6), (3, 6)),
    "long document first": ((1, 9), (4, 3), (3, 5)),
    "one step first": ((4, 1), (3, 5), (2, 4)),
    "sizes": ((2, 5), (6, 5), (1, 5)),
    "as many steps as rows": ((4, 6), (5, 5), (3, 4)),
}
"""Rows and steps of each batch."""
Batch = dict[str, torch.Tensor]


class RowLoss(gk.Task):
    """One loss per row for any output: a fixed function of all its values."""

    def losses(self, model: nn.Module, batch: Any) -> torch.Tensor:
        out = first_tensor(model(**batch))
        rows = len(next(iter(batch.values())))
        flat = out.reshape(rows, -1)
        places = torch.arange(flat.shape[1], dtype=flat.dtype)
        return (flat * torch.cos(places)).sum(1) + 0.5 * flat.square().mean(1)


def first_tensor(out: Any) -> torch.Tensor:
    """Return the logits, the last hidden state, or the first tensor of an output."""
    if isinstance(out, torch.Tensor):
        return out
    for name in ("logits", "last_hidden_state", "prediction_logits", "reconstruction"):
        tensor = getattr(out, name, None)
        if isinstance(tensor, torch.Tensor):
            return tensor
    values = out.values() if hasattr(out, "values") else out
    return next(value for value in values if isinstance(value, torch.Tensor))


@dataclass(frozen=True, slots=True)
class ZooItem:
    """A model with the batches of one pattern."""

    model: str
    pattern: str
    make: Callable[[], nn.Module]
    """Builds the model in eval mode, the same each time."""
    batches: Callable[[], list[Batch]]
    """Draws the batches, the same each time."""
    task: gk.Task
    stock: bool = False
    """True for models of `transformers`."""

    @property
    def name(self) -> str:
        return f"{self.model} / {self.pattern}"


def iter_zoo(*, stock: bool = True) -> Iterator[ZooItem]:
    """Iterate over all models with two patterns or more; `stock` includes those of
    `transformers`."""
    yield from own_items()
    if stock and has_transformers():
        yield from stock_items()


def has_transformers() -> bool:
    try:
        import transformers  # noqa: F401
    except ImportError:
        return False
    return True


def _seeded_model(build: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        torch.manual_seed(0)
        return build().eval()

    return make


def _seeded_batches(draw: Callable[[torch.Generator], list[Batch]]) -> Callable[[], list[Batch]]:
    return lambda: draw(torch.Generator().manual_seed(1))


# Inputs.


def vectors(sizes: tuple[int, ...], *shape: int) -> Callable[[], list[Batch]]:
    return _seeded_batches(
        lambda g: [{"x": torch.randn(rows, *shape, generator=g)} for rows in sizes]
    )


def steps(shapes: tuple[tuple[int, int], ...], width: int = WIDTH) -> Callable[[], list[Batch]]:
    return _seeded_batches(
        lambda g: [{"x": torch.randn(rows, length, width, generator=g)} for rows, length in shapes]
    )


def tokens(shapes: tuple[tuple[int, int], ...], name: str = "x") -> Callable[[], list[Batch]]:
    return _seeded_batches(
        lambda g: [{name: torch.randint(1, WORDS, shape, generator=g)} for shape in shapes]
    )


def ragged(shapes: tuple[tuple[int, int], ...]) -> Callable[[], list[Batch]]:
    """Draw sequences with lengths; those of the first batch are all equal."""

    def draw(g: torch.Generator) -> list[Batch]:
        batches = []
        for at, (rows, length) in enumerate(shapes):
            lengths = torch.full((rows,), length)
            if at:
                lengths = torch.randint(1, length + 1, (rows,), generator=g)
                lengths[0] = length
            batches.append({"x": torch.randn(rows, length, WIDTH, generator=g), "lengths": lengths})
        return batches

    return _seeded_batches(draw)


def routed(*chosen: list[int]) -> Callable[[], list[Batch]]:
    return _seeded_batches(
        lambda g: [
            {"x": torch.randn(len(some), WIDTH, generator=g), "expert": torch.tensor(some)}
            for some in chosen
        ]
    )


# Models with a custom forward.


class FunctionModule(nn.Module):
    """Modules and a function of them."""

    def __init__(self, forward: Callable[..., torch.Tensor], **modules: Any) -> None:
        super().__init__()
        self._function = forward
        for name, module in modules.items():
            setattr(self, name, module)

    def forward(self, **inputs: torch.Tensor) -> torch.Tensor:
        return self._function(self, **inputs)


class Scaled(nn.Embedding):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.embedding_dim**0.5


class Doubled(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x) + 1


class Shifted(nn.Embedding):
    """An embedding that reads rows two places further, like the positions of OPT."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x + 2)


class OwnWeight(nn.Module):
    """A module that multiplies by its own weight."""

    def __init__(self, low: int, high: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(high, low) / low**0.5)
        self.gain = nn.Parameter(torch.ones(high))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight) * self.gain


class Attention(nn.Module):
    def __init__(self, width: int = WIDTH, heads: int = 2, *, causal: bool = False) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.heads, self.causal = heads, causal

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, width = x.shape
        parts = self.qkv(x).view(rows, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(*parts, is_causal=self.causal)
        return self.out(attended.transpose(1, 2).reshape(rows, length, width))


class Block(nn.Module):
    def __init__(self, inner: nn.Module, norm: nn.Module) -> None:
        super().__init__()
        self.inner, self.norm = inner, norm

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inner(self.norm(x))


def pool(x: torch.Tensor) -> torch.Tensor:
    return x.mean(1)


def head(low: int = WIDTH) -> nn.Linear:
    return nn.Linear(low, OUT)


def chain(*modules: nn.Module) -> nn.Module:
    body = nn.Sequential(*modules)
    return FunctionModule(lambda self, x: self.body(x), body=body)


def over_steps(*modules: nn.Module) -> nn.Module:
    return FunctionModule(
        lambda self, x: self.head(pool(self.body(x))), body=nn.Sequential(*modules), head=head()
    )


def time_major(*modules: nn.Module) -> nn.Module:
    return FunctionModule(
        lambda self, x: self.head(self.body(x.transpose(0, 1)).mean(0)),
        body=nn.Sequential(*modules),
        head=head(),
    )


def _flat_time_major(self: Any, x: torch.Tensor) -> torch.Tensor:
    rows, length, width = x.shape
    flat = x.transpose(0, 1).reshape(length * rows, width)
    return self.last(torch.tanh(self.inner(flat))).view(length, rows, -1).sum(0)


def _flat_batch_major(self: Any, x: torch.Tensor) -> torch.Tensor:
    rows, length, width = x.shape
    return self.last(torch.tanh(self.inner(x.reshape(rows * length, width)))).view(rows, -1)[
        :, :OUT
    ]


def recurrent(layer: nn.RNNBase) -> nn.Module:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        inputs = x if layer.batch_first else x.transpose(0, 1)
        out = self.cells(inputs)[0]
        return self.head(out.mean(1 if layer.batch_first else 0))

    wide = layer.hidden_size * (2 if layer.bidirectional else 1)
    return FunctionModule(forward, cells=layer, head=head(wide))


def packed(layer: nn.RNNBase) -> nn.Module:
    def forward(self: Any, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        inputs = rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        out, _ = rnn.pad_packed_sequence(self.cells(inputs)[0], batch_first=True)
        return self.head(out.sum(1))

    return FunctionModule(forward, cells=layer, head=head(layer.hidden_size))


def _cells(self: Any, x: torch.Tensor) -> torch.Tensor:
    state = x.new_zeros(len(x), WIDTH)
    for step in x.unbind(1):
        state = torch.tanh(self.inner(step) + self.again(state))
    return self.head(state)


def _sorted(self: Any, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    order = torch.argsort(lengths, descending=True, stable=True)
    inside = torch.arange(x.shape[1]) < lengths[order, None]
    hidden = torch.tanh(self.inner(x[order])) * inside.unsqueeze(2)
    return self.head(hidden.sum(1))[torch.argsort(order)]


def _masked(self: Any, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    inside = torch.arange(x.shape[1]) < lengths[:, None]
    return self.head((torch.tanh(self.inner(x)) * inside.unsqueeze(2)).sum(1))


def _only_real_tokens(self: Any, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    inside = torch.arange(x.shape[1]) < lengths[:, None]
    out = x.new_zeros(*x.shape[:2], OUT)
    out[inside] = self.head(torch.tanh(self.inner(x[inside])))
    return out.sum(1)


def _experts(self: Any, x: torch.Tensor, expert: torch.Tensor) -> torch.Tensor:
    out = x
    for number, one in enumerate(self.experts):
        rows = (expert == number).nonzero().flatten()[: self.capacity]
        if len(rows):
            out = out.index_copy(0, rows, torch.tanh(one(x[rows])))
    return self.head(out)


def experts(capacity: int | None = None) -> nn.Module:
    many = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
    return FunctionModule(_experts, experts=many, head=head(), capacity=capacity)


def _soft_experts(self: Any, x: torch.Tensor) -> torch.Tensor:
    shares = self.router(x).softmax(-1)
    each = torch.stack([one(x) for one in self.experts], -2)
    return self.head((each * shares.unsqueeze(-1)).sum(-2))


def _long_path(self: Any, x: torch.Tensor) -> torch.Tensor:
    short = self.short(x)
    return self.head(pool(self.long(short) if x.shape[1] > 5 else short))


def embedded(table: nn.Module, *modules: nn.Module) -> nn.Module:
    return FunctionModule(
        lambda self, x: self.head(pool(self.body(self.table(x)))),
        table=table,
        body=nn.Sequential(*modules),
        head=head(),
    )


def _positions(self: Any, x: torch.Tensor) -> torch.Tensor:
    places = torch.arange(x.shape[1])
    places = places if self.dims == 1 else places[None] if self.dims == 2 else places.expand_as(x)
    return self.head(pool(torch.tanh(self.inner(self.table(x) + self.place(places)))))


def positions(dims: int, place: nn.Module | None = None) -> nn.Module:
    return FunctionModule(
        _positions,
        table=nn.Embedding(WORDS, WIDTH),
        place=place or nn.Embedding(16, WIDTH),
        inner=nn.Linear(WIDTH, WIDTH),
        head=head(),
        dims=dims,
    )


def tied(*, by_hand: bool) -> nn.Module:
    table = nn.Embedding(WORDS, WIDTH)
    last = nn.Linear(WIDTH, WORDS, bias=False)
    last.weight = table.weight
    inner = nn.Linear(WIDTH, WIDTH)
    if by_hand:
        return FunctionModule(
            lambda self, x: F.linear(torch.tanh(self.inner(self.table(x))), self.table.weight),
            table=table,
            inner=inner,
        )
    return FunctionModule(
        lambda self, x: self.last(torch.tanh(self.inner(self.table(x)))),
        table=table,
        inner=inner,
        last=last,
    )


def images(*modules: nn.Module) -> nn.Module:
    return chain(*modules, nn.Flatten(), nn.LazyLinear(OUT))


def _initialized(build: Callable[[], nn.Module], *shape: int) -> Callable[[], nn.Module]:
    """Run a model once, so that lazy layers know their sizes."""

    def make() -> nn.Module:
        model = build()
        with torch.no_grad():
            model.eval()(x=torch.zeros(2, *shape))
        return model

    return make


ACTIVATIONS = (
    *(nn.ReLU, nn.GELU, nn.SiLU, nn.Tanh, nn.ELU, nn.Softplus, nn.Mish, nn.Hardswish),
    *(nn.PReLU, nn.LeakyReLU, nn.Sigmoid),
)


def vector_models() -> dict[str, Callable[[], nn.Module]]:
    line = lambda: nn.Linear(WIDTH, WIDTH)  # noqa: E731
    models: dict[str, Callable[[], nn.Module]] = {
        f"MLP {kind.__name__}": lambda kind=kind: chain(line(), kind(), head())
        for kind in ACTIVATIONS
    }
    shared = lambda: FunctionModule(  # noqa: E731
        lambda self, x: self.head(self.one(torch.tanh(self.one(x)))), one=line(), head=head()
    )
    return models | {
        "linear": lambda: chain(head()),
        "linear without bias": lambda: chain(nn.Linear(WIDTH, OUT, bias=False)),
        "bottleneck": lambda: chain(nn.Linear(WIDTH, 1), nn.Tanh(), nn.Linear(1, OUT)),
        "LayerNorm": lambda: chain(line(), nn.LayerNorm(WIDTH), nn.ReLU(), head()),
        "LayerNorm without bias": lambda: chain(line(), nn.LayerNorm(WIDTH, bias=False), head()),
        "RMSNorm": lambda: chain(line(), nn.RMSNorm(WIDTH), nn.ReLU(), head()),
        "BatchNorm1d": lambda: chain(line(), nn.BatchNorm1d(WIDTH), nn.ReLU(), head()),
        "GroupNorm": lambda: chain(line(), nn.GroupNorm(2, WIDTH), nn.ReLU(), head()),
        "module used twice": shared,
        "bilinear": lambda: FunctionModule(
            lambda self, x: self.head(self.both(x, x)),
            both=nn.Bilinear(WIDTH, WIDTH, 4),
            head=head(4),
        ),
        "weight norm": lambda: chain(parametrizations.weight_norm(line()), nn.Tanh(), head()),
        "orthogonal": lambda: chain(parametrizations.orthogonal(line()), nn.Tanh(), head()),
        "Linear subclass": lambda: chain(Doubled(WIDTH, WIDTH), nn.Tanh(), head()),
        "own weight": lambda: chain(OwnWeight(WIDTH, WIDTH), nn.Tanh(), head()),
        "residual": lambda: chain(
            Block(nn.Sequential(line(), nn.GELU()), nn.LayerNorm(WIDTH)), head()
        ),
        "gated": lambda: FunctionModule(
            lambda self, x: self.head(self.a(x) * torch.sigmoid(self.b(x))),
            a=line(),
            b=line(),
            head=head(),
        ),
        "soft experts": lambda: FunctionModule(
            _soft_experts,
            experts=nn.ModuleList(line() for _ in range(3)),
            router=nn.Linear(WIDTH, 3),
            head=head(),
        ),
        "parameter of the model": lambda: FunctionModule(
            lambda self, x: self.head(x * self.scale),
            scale=nn.Parameter(torch.ones(WIDTH)),
            head=head(),
        ),
        "head by hand": lambda: FunctionModule(
            lambda self, x: F.linear(torch.tanh(self.one(x)), self.one.weight), one=line()
        ),
        "frozen layer": lambda: chain(line().requires_grad_(False), nn.Tanh(), head()),
        "spare layer": lambda: FunctionModule(
            lambda self, x: self.head(x), spare=line(), head=head()
        ),
    }


def image_models() -> dict[str, Callable[[], nn.Module]]:
    conv = nn.Conv2d
    return {
        "Conv2d": lambda: images(conv(2, 4, 3), nn.ReLU()),
        "Conv2d padded": lambda: images(conv(2, 4, 3, padding=1, stride=2), nn.ReLU()),
        "Conv2d same": lambda: images(conv(2, 4, 3, padding="same"), nn.ReLU()),
        "Conv2d circular": lambda: images(
            conv(2, 4, 3, padding=1, padding_mode="circular"), nn.Tanh()
        ),
        "Conv2d dilated": lambda: images(conv(2, 4, 2, dilation=2), nn.Tanh()),
        "Conv2d groups": lambda: images(conv(2, 4, 3, groups=2), nn.ReLU()),
        "Conv2d depthwise": lambda: images(conv(2, 2, 3, groups=2, bias=False), conv(2, 4, 1)),
        "Conv2d twice": lambda: images(
            conv(2, 4, 3, padding=1), nn.ReLU(), conv(4, 4, 3), nn.ReLU()
        ),
        "ConvTranspose2d": lambda: images(nn.ConvTranspose2d(2, 3, 3, stride=2), nn.Tanh()),
        "BatchNorm2d": lambda: images(conv(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU()),
        "GroupNorm images": lambda: images(conv(2, 4, 3), nn.GroupNorm(2, 4), nn.ReLU()),
        "InstanceNorm2d": lambda: images(conv(2, 4, 3), nn.InstanceNorm2d(4, affine=True)),
        "LayerNorm images": lambda: images(conv(2, 4, 3), nn.LayerNorm((4, 4, 4)), nn.ReLU()),
        "max pooling": lambda: images(conv(2, 4, 3), nn.MaxPool2d(2), nn.ReLU()),
        "average pooling": lambda: images(conv(2, 4, 3), nn.AdaptiveAvgPool2d(1)),
        "pixel shuffle": lambda: images(conv(2, 4, 3), nn.PixelShuffle(2), nn.Tanh()),
        "upsampled": lambda: images(nn.Upsample(scale_factor=2), conv(2, 3, 3), nn.Tanh()),
        "unfold": lambda: images(nn.Unfold(3), nn.Linear(16, 4), nn.Tanh()),
        "squeeze and excite": lambda: FunctionModule(
            lambda self, x: self.head(
                (
                    self.conv(x)
                    * torch.sigmoid(self.gate(self.conv(x).mean((2, 3))))[..., None, None]
                ).mean((2, 3))
            ),
            conv=conv(2, 4, 3),
            gate=nn.Linear(4, 4),
            head=head(4),
        ),
        "patches": lambda: FunctionModule(
            lambda self, x: self.head(pool(self.body(self.cut(x).flatten(2).transpose(1, 2)))),
            cut=conv(2, WIDTH, 2, stride=2),
            body=Block(Attention(), nn.LayerNorm(WIDTH)),
            head=head(),
        ),
    }


def step_models() -> dict[str, Callable[[], nn.Module]]:
    line = lambda: nn.Linear(WIDTH, WIDTH)  # noqa: E731
    layer = lambda **options: nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.0, **options)  # noqa: E731
    models: dict[str, Callable[[], nn.Module]] = {
        "linear over steps": lambda: over_steps(line(), nn.Tanh()),
        "norm over steps": lambda: over_steps(line(), nn.LayerNorm(WIDTH), line(), nn.GELU()),
        "time-major linear": lambda: time_major(line(), nn.Tanh(), line()),
        "time-major flattened": lambda: FunctionModule(_flat_time_major, inner=line(), last=head()),
        "batch-major flattened": lambda: FunctionModule(
            _flat_batch_major, inner=line(), last=head()
        ),
        "attention": lambda: over_steps(Attention()),
        "causal attention": lambda: over_steps(Block(Attention(causal=True), nn.LayerNorm(WIDTH))),
        "MultiheadAttention": lambda: FunctionModule(
            lambda self, x: self.head(pool(self.mix(x, x, x, need_weights=False)[0])),
            mix=nn.MultiheadAttention(WIDTH, 2, batch_first=True),
            head=head(),
        ),
        "MultiheadAttention time-major": lambda: FunctionModule(
            lambda self, x: self.head(
                self.mix(*[x.transpose(0, 1)] * 3, need_weights=False)[0].mean(0)
            ),
            mix=nn.MultiheadAttention(WIDTH, 2),
            head=head(),
        ),
        "TransformerEncoderLayer": lambda: over_steps(layer(batch_first=True)),
        "TransformerEncoderLayer time-major": lambda: time_major(layer()),
        "TransformerEncoderLayer norm first": lambda: over_steps(
            layer(batch_first=True, norm_first=True)
        ),
        "TransformerDecoderLayer": lambda: FunctionModule(
            lambda self, x: self.head(pool(self.mix(x, x))),
            mix=nn.TransformerDecoderLayer(WIDTH, 2, 16, dropout=0.0, batch_first=True),
            head=head(),
        ),
        "Conv1d over steps": lambda: FunctionModule(
            lambda self, x: self.head(self.conv(x.transpose(1, 2)).mean(2)),
            conv=nn.Conv1d(WIDTH, WIDTH, 3, padding=1),
            head=head(),
        ),
        "cells": lambda: FunctionModule(_cells, inner=line(), again=line(), head=head()),
        "GRUCell": lambda: FunctionModule(
            lambda self, x: self.head(_through_cell(self.cell, x)),
            cell=nn.GRUCell(WIDTH, WIDTH),
            head=head(),
        ),
        "path by length": lambda: FunctionModule(
            _long_path, short=line(), long=line(), head=head()
        ),
        "gated over steps": lambda: FunctionModule(
            lambda self, x: self.head(pool(self.down(F.silu(self.gate(x)) * self.up(x)))),
            gate=line(),
            up=line(),
            down=line(),
            head=head(),
        ),
        "linear attention": lambda: FunctionModule(
            lambda self, x: self.head(pool(self.q(x) @ (self.k(x).mT @ self.v(x)))),
            q=line(),
            k=line(),
            v=line(),
            head=head(),
        ),
    }
    kinds = (nn.RNN, nn.GRU, nn.LSTM)
    for kind, first, both in itertools.product(kinds, (True, False), (False, True)):
        name = f"{kind.__name__}{'' if first else ' time-major'}{' both ways' if both else ''}"
        models[name] = lambda kind=kind, first=first, both=both: recurrent(
            kind(WIDTH, 5, batch_first=first, bidirectional=both)
        )
    models["LSTM of two layers"] = lambda: recurrent(nn.LSTM(WIDTH, 5, 2, batch_first=True))
    return models


def _through_cell(cell: nn.GRUCell, x: torch.Tensor) -> torch.Tensor:
    state = x.new_zeros(len(x), WIDTH)
    for step in x.unbind(1):
        state = cell(step, state)
    return state


def ragged_models() -> dict[str, Callable[[], nn.Module]]:
    line = lambda: nn.Linear(WIDTH, WIDTH)  # noqa: E731
    return {
        "sorted by length": lambda: FunctionModule(_sorted, inner=line(), head=head()),
        "masked": lambda: FunctionModule(_masked, inner=line(), head=head()),
        "only real tokens": lambda: FunctionModule(_only_real_tokens, inner=line(), head=head()),
        "packed LSTM": lambda: packed(nn.LSTM(WIDTH, 5, batch_first=True)),
        "packed GRU": lambda: packed(nn.GRU(WIDTH, 5, batch_first=True)),
    }


def token_models() -> dict[str, Callable[[], nn.Module]]:
    table = lambda: nn.Embedding(WORDS, WIDTH)  # noqa: E731
    return {
        "embedding": lambda: embedded(table()),
        "embedding with padding": lambda: embedded(nn.Embedding(WORDS, WIDTH, padding_idx=1)),
        "embedding of bounded norm": lambda: embedded(nn.Embedding(WORDS, WIDTH, max_norm=1.0)),
        "scaled embedding": lambda: embedded(Scaled(WORDS, WIDTH)),
        "sparse embedding": lambda: embedded(nn.Embedding(WORDS, WIDTH, sparse=True)),
        "EmbeddingBag": lambda: FunctionModule(
            lambda self, x: self.head(self.table(x)),
            table=nn.EmbeddingBag(WORDS, WIDTH),
            head=head(),
        ),
        "positions [T]": lambda: positions(1),
        "positions [1, T]": lambda: positions(2),
        "positions [B, T]": lambda: positions(3),
        "shifted positions": lambda: positions(3, Shifted(18, WIDTH)),
        "position parameter": lambda: FunctionModule(
            lambda self, x: self.head(pool(self.table(x) + self.place[: x.shape[1]])),
            table=table(),
            place=nn.Parameter(torch.randn(16, WIDTH)),
            head=head(),
        ),
        "tied head": lambda: tied(by_hand=False),
        "tied head by hand": lambda: tied(by_hand=True),
        "embedding used twice": lambda: FunctionModule(
            lambda self, x: self.head(pool(self.table(x) + self.table(x.flip(1)))),
            table=table(),
            head=head(),
        ),
        "decoder": lambda: embedded(
            table(), Block(Attention(causal=True), nn.LayerNorm(WIDTH)), nn.RMSNorm(WIDTH)
        ),
        "embedding time-major": lambda: FunctionModule(
            lambda self, x: self.head(torch.tanh(self.inner(self.table(x.t()))).mean(0)),
            table=table(),
            inner=nn.Linear(WIDTH, WIDTH),
            head=head(),
        ),
    }


ROUTES = {
    "all at once": ([0, 1, 2, 1], [2, 0, 1], [1, 1]),
    "others later": ([0, 0, 0], [0, 1, 0, 1], [2, 2, 1]),
}


def own_items() -> Iterator[ZooItem]:
    task = RowLoss()
    for name, build in vector_models().items():
        for pattern, sizes in SIZES.items():
            yield ZooItem(name, pattern, _seeded_model(build), vectors(sizes, WIDTH), task)
    for name, build in image_models().items():
        for pattern, sizes in SIZES.items():
            make = _seeded_model(_initialized(build, 2, 6, 6))
            yield ZooItem(name, pattern, make, vectors(sizes, 2, 6, 6), task)
    for kind, inputs in ((step_models, steps), (ragged_models, ragged), (token_models, tokens)):
        for name, build in kind().items():
            for pattern, shapes in SHAPES.items():
                yield ZooItem(name, pattern, _seeded_model(build), inputs(shapes), task)
    for name, capacity in (("experts", None), ("experts with a capacity", 1)):
        for pattern, routes in ROUTES.items():
            build = lambda capacity=capacity: experts(capacity)  # noqa: E731
            yield ZooItem(name, pattern, _seeded_model(build), routed(*routes), task)


# Stock models of `transformers`, at tiny sizes.

TINY = {
    "vocab_size": WORDS,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
"""What most configurations are called with."""
GROUPED = {"num_key_value_heads": 1}
N_STYLE = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32, "vocab_size": WORDS}
EXPERTS = {"num_local_experts": 3, "num_experts": 3, "num_experts_per_tok": 2}
CAUSAL: dict[str, dict[str, Any]] = {
    "gpt2": N_STYLE,
    "gpt_neo": TINY
    | {
        "num_layers": 2,
        "num_heads": 2,
        "attention_types": [[["global", "local"], 1]],
        "window_size": 4,
    },
    "gpt_neox": TINY,
    "gptj": N_STYLE | {"rotary_dim": 4},
    "codegen": N_STYLE | {"rotary_dim": 4, "n_head": 4},
    "gpt_bigcode": N_STYLE,
    "bloom": {"vocab_size": WORDS, "hidden_size": 16, "n_layer": 2, "n_head": 2},
    "opt": TINY | {"ffn_dim": 24, "word_embed_proj_dim": 16},
    "llama": TINY | GROUPED,
    "mistral": TINY | GROUPED,
    "mixtral": TINY | GROUPED | EXPERTS,
    "qwen2": TINY | GROUPED,
    "qwen2_moe": TINY
    | GROUPED
    | EXPERTS
    | {"moe_intermediate_size": 8, "shared_expert_intermediate_size": 8, "decoder_sparse_step": 1},
    "qwen3": TINY | GROUPED | {"head_dim": 8},
    "gemma": TINY | GROUPED | {"head_dim": 8},
    "gemma2": TINY | GROUPED | {"head_dim": 8},
    "phi": TINY,
    "phi3": TINY | GROUPED,
    "stablelm": TINY | GROUPED,
    "starcoder2": TINY | GROUPED,
    "falcon": TINY,
    "olmo": TINY | GROUPED,
    "olmo2": TINY | GROUPED,
    "cohere": TINY | GROUPED,
    "granite": TINY | GROUPED,
    "persimmon": TINY,
    "mpt": {"d_model": 16, "n_heads": 2, "n_layers": 2, "vocab_size": WORDS, "max_seq_len": 32},
    "biogpt": TINY,
    "mamba": {"vocab_size": WORDS, "hidden_size": 16, "state_size": 4, "num_hidden_layers": 2},
    "smollm3": TINY | GROUPED,
    "helium": TINY | GROUPED | {"head_dim": 8},
}
ENCODERS: dict[str, dict[str, Any]] = {
    "bert": TINY,
    "roberta": TINY | {"max_position_embeddings": 40},
    "xlm-roberta": TINY | {"max_position_embeddings": 40},
    "camembert": TINY | {"max_position_embeddings": 40},
    "electra": TINY | {"embedding_size": 16},
    "albert": TINY | {"embedding_size": 16},
    "distilbert": {
        "vocab_size": WORDS,
        "dim": 16,
        "n_layers": 2,
        "n_heads": 2,
        "hidden_dim": 24,
        "max_position_embeddings": 32,
    },
    "mpnet": TINY | {"max_position_embeddings": 40},
    "deberta-v2": TINY,
    "roformer": TINY | {"embedding_size": 16},
    "fnet": TINY,
    "nystromformer": TINY | {"num_landmarks": 4, "segment_means_seq_len": 4},
    "convbert": TINY | {"embedding_size": 16},
    "squeezebert": TINY | {"embedding_size": 16},
    "modernbert": TINY,
    "megatron-bert": TINY,
    "ernie": TINY,
}
SEQ2SEQ: dict[str, dict[str, Any]] = {
    "t5": {
        "vocab_size": WORDS,
        "d_model": 16,
        "d_ff": 24,
        "d_kv": 8,
        "num_layers": 2,
        "num_heads": 2,
    },
    "mt5": {
        "vocab_size": WORDS,
        "d_model": 16,
        "d_ff": 24,
        "d_kv": 8,
        "num_layers": 2,
        "num_heads": 2,
    },
    "bart": {
        "vocab_size": WORDS,
        "d_model": 16,
        "encoder_layers": 2,
        "decoder_layers": 2,
        "encoder_attention_heads": 2,
        "decoder_attention_heads": 2,
        "encoder_ffn_dim": 24,
        "decoder_ffn_dim": 24,
        "max_position_embeddings": 32,
    },
    "pegasus": {
        "vocab_size": WORDS,
        "d_model": 16,
        "encoder_layers": 2,
        "decoder_layers": 2,
        "encoder_attention_heads": 2,
        "decoder_attention_heads": 2,
        "encoder_ffn_dim": 24,
        "decoder_ffn_dim": 24,
        "max_position_embeddings": 32,
    },
}
VISION: dict[str, dict[str, Any]] = {
    "vit": TINY | {"image_size": 8, "patch_size": 4},
    "deit": TINY | {"image_size": 8, "patch_size": 4},
    "beit": TINY | {"image_size": 8, "patch_size": 4},
    "dinov2": TINY | {"image_size": 8, "patch_size": 4},
    "convnext": {"hidden_sizes": [8, 8, 8, 8], "depths": [1, 1, 1, 1], "patch_size": 2},
    "resnet": {
        "embedding_size": 8,
        "hidden_sizes": [8, 8],
        "depths": [1, 1],
        "layer_type": "basic",
    },
    "swin": {
        "image_size": 16,
        "patch_size": 2,
        "embed_dim": 8,
        "depths": [1, 1],
        "num_heads": [2, 2],
        "window_size": 4,
    },
    "mobilenet_v1": {"image_size": 32, "depth_multiplier": 0.25},
}
TEXT_PATTERNS = ("even", "long document first", "as many steps as rows")


def stock_items() -> Iterator[ZooItem]:
    import transformers

    groups = (
        (CAUSAL, transformers.AutoModelForCausalLM, "text"),
        (ENCODERS, transformers.AutoModel, "text"),
        (SEQ2SEQ, transformers.AutoModelForSeq2SeqLM, "pairs"),
        (VISION, transformers.AutoModel, "images"),
    )
    for known, auto, inputs in groups:
        for kind, options in known.items():
            yield from _stock_items(kind, options, auto, inputs)


def _stock_items(kind: str, options: dict[str, Any], auto: Any, inputs: str) -> Iterator[ZooItem]:
    import transformers

    def build() -> nn.Module:
        config = transformers.AutoConfig.for_model(kind, **options)
        config.use_cache = False
        config._attn_implementation = "eager"
        config._experts_implementation = "eager"
        model: nn.Module = auto.from_config(config)
        return model

    if inputs == "images":
        size = int(options.get("image_size", 32))
        for pattern, sizes in SIZES.items():
            drawn = _renamed(vectors(sizes, 3, size, size), "pixel_values")
            yield ZooItem(f"hf {kind}", pattern, _seeded_model(build), drawn, RowLoss(), stock=True)
        return
    for pattern in TEXT_PATTERNS:
        batches = tokens(SHAPES[pattern], "input_ids")
        if inputs == "pairs":
            batches = _paired(batches)
        yield ZooItem(f"hf {kind}", pattern, _seeded_model(build), batches, RowLoss(), stock=True)


def _renamed(batches: Callable[[], list[Batch]], name: str) -> Callable[[], list[Batch]]:
    return lambda: [{name: batch["x"]} for batch in batches()]


def _paired(batches: Callable[[], list[Batch]]) -> Callable[[], list[Batch]]:
    return lambda: [
        {**batch, "decoder_input_ids": batch["input_ids"].flip(1)} for batch in batches()
    ]
