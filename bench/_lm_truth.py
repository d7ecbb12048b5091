"""Fine-tuned language models, retrained on halves of their data: the ground truth for `bench lm`.

`build_gpt()`: a GPT of 2 layers x 128 with 512 byte pairs (learned here from both texts), pretrained
on tiny Shakespeare and fine-tuned on the beginnings of 500 news; the queries are the continuations
of 30 of these news. `build_stories()`: the pretrained Llama stories260K with its own tokenizer,
fine-tuned on 300 windows of tiny Shakespeare; the queries are the windows that follow 30 of them.
`build_large_gpt()`: a GPT of 6 layers x 384, 27 times as large as the first, with fewer and shorter
news and fewer halves. The outcome of a model is the summed loss of each query.
`python -m bench._lm_truth [gpt|stories|large]` trains everything that is not cached yet (under
GRADKEEP_CACHE; one half at a time, so it can be interrupted) and prints the LDS of dot products and
EK-FAC.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import re
import struct
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

import gradkeep as gk
from gradkeep.data import GPT

DATA = Path(
    os.environ.get("GRADKEEP_DATA", Path(__file__).resolve().parents[2] / "shared" / "data")
)
CACHE = Path(os.environ.get("GRADKEEP_CACHE", Path.home() / ".cache" / "gradkeep" / "bench"))


@dataclass(frozen=True, eq=False)
class Setting:
    """Tokens, a pretrained model and the fine-tuning recipe."""

    name: str
    start: Callable[[], nn.Module]
    """Builds the pretrained model."""
    train: torch.Tensor
    """`[N, T]`"""
    queries: torch.Tensor
    """`[Q, T]`"""
    continued_rows: np.ndarray
    """`[Q]`: the training row that each query continues"""
    weight_decay: float
    epochs: int
    subsets: int
    batch_size: int
    """Large, because with small batches two seeds differ more than two subsets."""
    lr: float = 1e-3
    seeds: int = 2
    attention: tuple[str, ...] = ("*.attn.*",)
    """Patterns of the attention layers."""
    norms: str = "LayerNorm"

    @cached_property
    def digest(self) -> str:
        """Digest of everything that the truth depends on, except the training code."""
        numbers = (self.weight_decay, self.epochs, self.subsets, self.lr, self.batch_size)
        digest = hashlib.sha256(repr((self.name, *numbers, self.seeds)).encode())
        for tokens in (self.train, self.queries):
            digest.update(np.ascontiguousarray(tokens.numpy()).tobytes())
        return digest.hexdigest()[:16]


@dataclass(frozen=True, eq=False)
class Truth:
    """Losses of models trained on halves, and the weights of the run on all rows."""

    setting: Setting
    masks: np.ndarray
    """`[M, N]`, bool"""
    losses: np.ndarray
    """`[M, S, Q]`: summed loss of each query, by subset and seed"""
    states: dict[int, dict[str, torch.Tensor]]
    """Weights of the run on all rows after each epoch, from 1; 0 is the pretrained model."""

    @property
    def selection_subsets(self) -> np.ndarray:
        """Subsets that a recipe may be selected on."""
        return np.arange(len(self.masks) // 2)

    @property
    def reporting_subsets(self) -> np.ndarray:
        """Subsets that the selected recipe is measured on."""
        return np.arange(len(self.masks) // 2, len(self.masks))

    @property
    def agreement(self) -> float:
        """Mean over queries of the rank correlation between two seeds."""
        one, two = self.losses[:, 0], self.losses[:, 1]
        return float(
            _spearman(_compare_pairs(one), _compare_pairs(two), np.ones((len(one), 1))).mean()
        )

    @property
    def ceiling(self) -> float:
        """Score of a perfect prediction of the mean over infinitely many seeds."""
        seeds, one = self.losses.shape[1], self.agreement
        return float(np.sqrt(seeds * one / (1 + (seeds - 1) * one)))

    def model(self, epoch: int) -> nn.Module:
        """Return the model after that epoch of the run on all rows, in eval mode."""
        model = self.setting.start()
        model.load_state_dict(self.states[epoch])
        return model.eval()


@dataclass(frozen=True)
class Lds:
    """A linear datamodeling score with its 95 % interval over queries and subsets."""

    mean: float
    low: float
    high: float
    draws: np.ndarray
    """`[B]`: the same resamples for all scores of a truth, so that two can be subtracted"""

    def __str__(self) -> str:
        return f"{self.mean:.3f} [{self.low:.3f}, {self.high:.3f}]"

    def minus(self, other: Lds) -> Lds:
        """Return the paired difference to another score on the same subsets, with its interval."""
        draws = self.draws - other.draws
        low, high = np.quantile(draws, (0.025, 0.975))
        return Lds(self.mean - other.mean, float(low), float(high), draws)


def compute_lds(
    scores: np.ndarray, truth: Truth, subsets: np.ndarray | None = None, *, resamples: int = 500
) -> Lds:
    """Return the LDS of scores `[Q, N]`, positive if a row helps, on all or selected subsets."""
    chosen = np.arange(len(truth.masks)) if subsets is None else np.asarray(subsets)
    predicted = truth.masks[chosen].astype(np.float64) @ np.asarray(scores, np.float64).T
    outcomes = -truth.losses[chosen].mean(1)
    below = _compare_pairs(predicted), _compare_pairs(outcomes)
    count, queries = outcomes.shape
    rng = np.random.default_rng(0)
    each = _spearman(*below, np.ones((count, 1)))
    weights = rng.multinomial(count, np.full(count, 1 / count), size=resamples).T
    shares = rng.multinomial(queries, np.full(queries, 1 / queries), size=resamples) / queries
    draws = (_spearman(*below, weights.astype(np.float64)) * shares.T).sum(0)
    low, high = np.quantile(draws, (0.025, 0.975))
    return Lds(float(each.mean()), float(low), float(high), draws)


def build_gpt() -> Setting:
    """Build a GPT with 512 byte pairs, from tiny Shakespeare to 500 news (T=48)."""
    start, pairs = _pretrained_gpt(dim=128, heads=4, layers=2)
    train, queries, continued_rows = _split_news(pairs, count=500, queries=30, length=48, seed=2611)
    return Setting(
        "GPT 2x128, news",
        start,
        train,
        queries,
        continued_rows,
        weight_decay=0.01,
        epochs=6,
        subsets=32,
        batch_size=50,
    )


def build_large_gpt() -> Setting:
    """Build a GPT of 10.9 million parameters, from half of tiny Shakespeare to 240 news (T=40)."""
    start, pairs = _pretrained_gpt(dim=384, heads=6, layers=6, signs=500_000, epochs=1, lr=5e-4)
    train, queries, continued_rows = _split_news(pairs, count=240, queries=30, length=40, seed=2615)
    return Setting(
        "GPT 6x384, news",
        start,
        train,
        queries,
        continued_rows,
        weight_decay=0.01,
        epochs=4,
        subsets=16,
        batch_size=24,
        lr=5e-4,
    )


def _pretrained_gpt(
    *,
    dim: int,
    heads: int,
    layers: int,
    signs: int | None = None,
    epochs: int = 2,
    lr: float = 1e-3,
) -> tuple[Callable[[], nn.Module], BytePairs]:
    """Return a function that builds the pretrained model, and its tokenizer."""
    vocabulary, text = 512, _shakespeare()
    pairs = BytePairs.learn([text[:300_000], *_news()[:2000]], vocabulary)

    def start() -> nn.Module:
        torch.manual_seed(5)
        model = GPT(vocabulary=vocabulary, length=64, dim=dim, heads=heads, layers=layers)
        model.load_state_dict(_load_pretrained(model, pairs, text[:signs], epochs=epochs, lr=lr))
        return model

    return start, pairs


def _split_news(
    pairs: BytePairs, *, count: int, queries: int, length: int, seed: int
) -> tuple[torch.Tensor, torch.Tensor, np.ndarray]:
    """Return the beginnings of some news, the continuations of some of them, and their rows."""
    news = _news()
    rng = np.random.default_rng(seed)
    order = rng.permutation(len(news))
    encoded = (pairs.encode(news[at])[: 2 * length] for at in order)
    long = (tokens for tokens in encoded if len(tokens) == 2 * length)
    rows = torch.tensor(list(itertools.islice(long, count)))
    continued_rows = np.sort(rng.permutation(count)[:queries])
    return rows[:, :length].clone(), rows[continued_rows, length:].clone(), continued_rows


def build_stories() -> Setting:
    """Build the Llama stories260K, from stories to 300 windows of tiny Shakespeare (T=96)."""
    length, count = 96, 300
    tokens = torch.tensor(StoryTokens.read().encode(_shakespeare()[:600_000]))
    windows = tokens[: len(tokens) // (2 * length) * 2 * length].view(-1, 2 * length)
    rng = np.random.default_rng(2612)
    rows = windows[np.sort(rng.permutation(len(windows))[:count])]
    continued_rows = np.sort(rng.permutation(count)[:30])
    return Setting(
        "stories260K, Shakespeare",
        Llama.read,
        rows[:, :length].clone(),
        rows[continued_rows, length:].clone(),
        continued_rows,
        weight_decay=0.0,
        epochs=5,
        subsets=24,
        batch_size=30,
        attention=("*.q", "*.k", "*.v", "*.out"),
        norms="RMSNorm",
    )


SETTINGS: dict[str, Callable[[], Setting]] = {
    "gpt": build_gpt,
    "stories": build_stories,
    "large": build_large_gpt,
}


def compute_truth(setting: Setting) -> Truth:
    """Train the models, or read them from the cache."""
    path = CACHE / f"lm-truth-{setting.digest}.npz"
    if not path.exists():
        _write(path, _train_halves(setting))
    with np.load(path) as archive:
        states: dict[int, dict[str, torch.Tensor]] = {}
        for name in archive.files:
            if name.startswith("state/"):
                _, epoch, part = name.split("/")
                states.setdefault(int(epoch), {})[part] = torch.from_numpy(archive[name])
        return Truth(setting, archive["masks"], archive["losses"], states)


def compute_losses(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """Return the summed loss `[B]` of each row of tokens `[B, T]`."""
    logits = model(tokens)[:, :-1]
    return F.cross_entropy(logits.transpose(1, 2), tokens[:, 1:], reduction="none").sum(1)


def fine_tune(
    setting: Setting, rows: np.ndarray, seed: int, after: Callable[[int, nn.Module], None]
) -> nn.Module:
    """Train the pretrained model on some rows; `after` is called at the end of each epoch."""
    model = setting.start().train()
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=setting.lr, weight_decay=setting.weight_decay, fused=True
    )
    rng = np.random.default_rng(seed)
    for epoch in range(1, setting.epochs + 1):
        for places in torch.from_numpy(rng.permutation(rows)).split(setting.batch_size):
            optimizer.zero_grad()
            compute_losses(model, setting.train[places]).mean().backward()
            optimizer.step()
        after(epoch, model)
    return model.eval()


def _train_halves(setting: Setting) -> dict[str, np.ndarray]:
    count = len(setting.train)
    rng = np.random.default_rng(2613)
    halves = np.stack([rng.permutation(count)[: count // 2] for _ in range(setting.subsets)])
    masks = np.zeros((setting.subsets, count), bool)
    np.put_along_axis(masks, halves, True, 1)
    whole = CACHE / f"lm-truth-{setting.digest}-whole.npz"
    if not whole.exists():
        _write(whole, _train_full_run(setting))
    outcomes = np.zeros((setting.subsets, setting.seeds, len(setting.queries)))
    began = time.monotonic()
    for number, half in enumerate(halves):
        path = CACHE / f"lm-truth-{setting.digest}-half-{number}.npz"
        if not path.exists():
            _write(path, {"losses": _train_on_half(setting, half, 10_000 + number * setting.seeds)})
        with np.load(path) as archive:
            outcomes[number] = archive["losses"]
        took = time.monotonic() - began
        print(f"\r  {number + 1} of {setting.subsets} halves, {took:.0f} s", end="", flush=True)
    print()
    with np.load(whole) as archive:
        return {**archive, "masks": masks, "losses": outcomes}


def _train_full_run(setting: Setting) -> dict[str, np.ndarray]:
    """Return the weights of the run on all rows after each epoch."""
    arrays: dict[str, np.ndarray] = {}

    def keep(epoch: int, model: nn.Module) -> None:
        for name, value in model.state_dict().items():
            arrays[f"state/{epoch}/{name}"] = value.clone().numpy()

    keep(0, setting.start())
    fine_tune(setting, np.arange(len(setting.train)), 2614, keep)
    return arrays


def _train_on_half(setting: Setting, half: np.ndarray, seed: int) -> np.ndarray:
    """Return losses `[S, Q]` of models trained on that half with consecutive seeds."""
    outcomes = np.zeros((setting.seeds, len(setting.queries)))
    for at in range(setting.seeds):
        model = fine_tune(setting, half, seed + at, lambda epoch, model: None)
        with torch.no_grad():
            outcomes[at] = compute_losses(model, setting.queries).numpy()
    return outcomes


def _load_pretrained(
    model: nn.Module, pairs: BytePairs, text: str, *, epochs: int, lr: float
) -> dict[str, torch.Tensor]:
    """Pretrain by next-token prediction on the text, or read the weights from the cache."""
    length, batch = 48, 32
    recipe = repr((pairs.merges, len(text), length, batch, epochs, lr, str(model))).encode()
    path = CACHE / f"lm-pretrained-{hashlib.sha256(recipe).hexdigest()[:16]}.npz"
    if not path.exists():
        tokens = torch.tensor(pairs.encode(text))
        rows = tokens[: len(tokens) // length * length].view(-1, length)
        optimizer = torch.optim.AdamW(model.parameters(), lr=lr, fused=True)
        for epoch in range(epochs):
            order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(epoch))
            for places in order.split(batch):
                optimizer.zero_grad()
                compute_losses(model, rows[places]).mean().backward()
                optimizer.step()
        _write(path, {name: value.numpy() for name, value in model.state_dict().items()})
    with np.load(path) as archive:
        return {name: torch.from_numpy(archive[name]) for name in archive.files}


def _write(path: Path, arrays: dict[str, np.ndarray]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{os.getpid()}")
    with partial.open("wb") as file:
        np.savez(file, **arrays)
    partial.replace(path)


def _shakespeare() -> str:
    return (DATA / "tinyshakespeare" / "input.txt").read_text(encoding="utf-8")


def _news() -> list[str]:
    lines = (DATA / "agnews" / "alps_dev.tsv").read_text(encoding="utf-8").split("\n")
    return list(dict.fromkeys(line.rpartition("\t")[0] for line in lines if line.strip()))


_PIECE = re.compile(r"\s?\w+|\s?[^\w\s]+|\s+")


@dataclass(frozen=True)
class BytePairs:
    """A byte-pair tokenizer that merges inside words."""

    merges: tuple[tuple[int, int], ...]

    @classmethod
    def learn(cls, texts: Sequence[str], size: int) -> BytePairs:
        counts = Counter(piece for text in texts for piece in _PIECE.findall(text))
        words = [(list(piece.encode()), count) for piece, count in counts.most_common(3000)]
        merges: list[tuple[int, int]] = []
        while 256 + len(merges) < size:
            pairs: Counter[tuple[int, int]] = Counter()
            for word, count in words:
                for pair in itertools.pairwise(word):
                    pairs[pair] += count
            best = max(pairs, key=lambda pair: (pairs[pair], pair))
            words = [(_merge_pair(word, best, 256 + len(merges)), count) for word, count in words]
            merges.append(best)
        return cls(tuple(merges))

    def encode(self, text: str) -> list[int]:
        return [token for piece in _PIECE.findall(text) for token in self._piece(piece)]

    def _piece(self, piece: str) -> list[int]:
        known = self._known
        if piece not in known:
            word = list(piece.encode())
            for number, pair in enumerate(self.merges):
                word = _merge_pair(word, pair, 256 + number)
            known[piece] = word
        return known[piece]

    @cached_property
    def _known(self) -> dict[str, list[int]]:
        return {}


def _merge_pair(word: list[int], pair: tuple[int, int], into: int) -> list[int]:
    if pair[0] not in word:
        return word
    merged: list[int] = []
    for token in word:
        if merged and (merged[-1], token) == pair:
            merged[-1] = into
        else:
            merged.append(token)
    return merged


@dataclass(frozen=True)
class StoryTokens:
    """The tokenizer of stories260K: in each word the pair with the best score is merged first."""

    scores: dict[bytes, float]
    numbers: dict[bytes, int]

    @classmethod
    def read(cls) -> StoryTokens:
        content = (DATA / "stories260k" / "tok512.bin").read_bytes()
        at, scores, numbers = 4, {}, {}
        while at < len(content):
            score, size = struct.unpack_from("<fi", content, at)
            token = content[at + 8 : at + 8 + size]
            scores[token], numbers[token] = score, len(numbers)
            at += 8 + size
        return cls(scores, numbers)

    def encode(self, text: str) -> list[int]:
        known: dict[str, list[int]] = {}
        tokens = []
        for piece in re.findall(r" ?[^ \n]+|\n| ", " " + text):
            if piece not in known:
                known[piece] = self._piece(piece)
            tokens += known[piece]
        return tokens

    def _piece(self, piece: str) -> list[int]:
        parts = [sign.encode() for sign in piece]
        while True:
            joined = [a + b for a, b in itertools.pairwise(parts)]
            best = max(
                range(len(joined)),
                key=lambda at: self.scores.get(joined[at], -np.inf),
                default=None,
            )
            if best is None or joined[best] not in self.scores:
                break
            parts[best : best + 2] = [joined[best]]
        # Characters that are not tokens are encoded as bytes, which follow three special tokens.
        return [
            number
            for part in parts
            for number in (
                [self.numbers[part]] if part in self.numbers else [byte + 3 for byte in part]
            )
        ]


class Llama(nn.Module):
    """Grouped queries, rotary positions, gated feed-forward layers, a tied head."""

    def __init__(
        self, dim: int, inner: int, layers: int, heads: int, shared: int, vocabulary: int
    ) -> None:
        super().__init__()
        self.tok = nn.Embedding(vocabulary, dim)
        self.layers = nn.ModuleList(LlamaLayer(dim, inner, heads, shared) for _ in range(layers))
        self.norm = nn.RMSNorm(dim, eps=1e-5)
        self.head = nn.Linear(dim, vocabulary, bias=False)
        self.head.weight = self.tok.weight
        self.pairs = dim // heads // 2

    @classmethod
    def read(cls) -> Llama:
        """Read the pretrained weights."""
        content = (DATA / "stories260k" / "stories260K.bin").read_bytes()
        dim, inner, layers, heads, shared, vocabulary, _ = struct.unpack_from("<7i", content)
        numbers = torch.from_numpy(np.frombuffer(content, np.float32, offset=28).copy())
        model = cls(dim, inner, layers, heads, shared, vocabulary)
        blocks = list(model.layers)
        names = ("norm_1", "q", "k", "v", "out", "norm_2", "gate", "down", "up")
        inside = [getattr(block, name) for name in names for block in blocks]
        at = 0
        with torch.no_grad():
            for module in (model.tok, *inside, model.norm):
                size = module.weight.numel()
                module.weight.copy_(numbers[at : at + size].view_as(module.weight))
                at += size
        return model

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Return logits `[N, T, vocabulary]` of ids `[N, T]`."""
        speeds = 10_000.0 ** (-torch.arange(self.pairs) / self.pairs)
        angles = torch.arange(input_ids.shape[1])[:, None] * speeds
        x = self.tok(input_ids)
        for layer in self.layers:
            x = layer(x, angles.cos(), angles.sin())
        return self.head(self.norm(x))


class LlamaLayer(nn.Module):
    def __init__(self, dim: int, inner: int, heads: int, shared: int) -> None:
        super().__init__()
        self.heads, self.shared = heads, shared
        width = dim // heads
        self.norm_1, self.norm_2 = nn.RMSNorm(dim, eps=1e-5), nn.RMSNorm(dim, eps=1e-5)
        self.q = nn.Linear(dim, dim, bias=False)
        self.k = nn.Linear(dim, shared * width, bias=False)
        self.v = nn.Linear(dim, shared * width, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)
        self.gate = nn.Linear(dim, inner, bias=False)
        self.up = nn.Linear(dim, inner, bias=False)
        self.down = nn.Linear(inner, dim, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        normed = self.norm_1(x)
        query = _rotate(self.q(normed).unflatten(-1, (self.heads, -1)), cos, sin)
        key = _rotate(self.k(normed).unflatten(-1, (self.shared, -1)), cos, sin)
        value = self.v(normed).unflatten(-1, (self.shared, -1))
        key, value = (part.repeat_interleave(self.heads // self.shared, 2) for part in (key, value))
        seen = F.scaled_dot_product_attention(
            query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), is_causal=True
        )
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        normed = self.norm_2(x)
        return x + self.down(F.silu(self.gate(normed)) * self.up(normed))


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate neighboring pairs of `[N, T, heads, width]` by the angles of their positions."""
    first, second = x.unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.stack((first * cos - second * sin, first * sin + second * cos), -1).flatten(-2)


def _compare_pairs(values: np.ndarray) -> np.ndarray:
    """Return `[Q, M, M]`: 1 if value j of `[M, Q]` is below value i, 0.5 if they are equal,
    else 0."""
    columns = values.T
    less = columns[:, None, :] < columns[:, :, None]
    return less + 0.5 * (columns[:, None, :] == columns[:, :, None])


def _spearman(one: np.ndarray, two: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Return rank correlations `[Q, B]`, with row i counted `weights[i, b]` times."""
    total = weights.sum(0)
    first, second = one @ weights, two @ weights
    first = first - (first * weights).sum(1, keepdims=True) / total
    second = second - (second * weights).sum(1, keepdims=True) / total
    both = (first * second * weights).sum(1)
    sizes = (first**2 * weights).sum(1) * (second**2 * weights).sum(1)
    return both / np.sqrt(np.maximum(sizes, 1e-300))


def compute_exact_scores(truth: Truth, epoch: int, **options: object) -> np.ndarray:
    """Return scores `[Q, N]` of `gk.attribute` on an exact capture of that epoch."""
    setting = truth.setting
    with tempfile.TemporaryDirectory(prefix="gradkeep-lm-") as place:
        store = gk.open(place, durability="process")
        for split, tokens in (("train", setting.train), ("test", setting.queries)):
            gk.capture(
                store,
                truth.model(epoch),
                list(tokens.split(25)),
                task=gk.LanguageModeling(),
                checkpoints=f"epoch-{epoch}",
                split=split,
                progress=False,
            )
        return gk.attribute(store, queries="test", train="train", **options).values


def main(names: Sequence[str]) -> None:
    for name in names or SETTINGS:
        setting = SETTINGS[name]()
        result = compute_truth(setting)
        rows, length = setting.train.shape
        model = result.model(setting.epochs)
        with torch.no_grad():
            losses_by_epoch = [
                f"{float(compute_losses(result.model(epoch), setting.queries).mean()) / (length - 1):.3f}"
                for epoch in range(setting.epochs + 1)
            ]
        print(f"{setting.name}: {rows} rows of {length}, {len(setting.queries)} queries,")
        print(f"  {sum(weight.numel() for weight in model.parameters()):,} parameters;")
        print(f"  loss of queries per token by epoch of the full run: {', '.join(losses_by_epoch)}")
        print(f"  seeds agree {result.agreement:.3f}, ceiling {result.ceiling:.3f}")
        for epoch in (2, setting.epochs):
            for method, options in (("dot", {}), ("ekfac", {"damping": 0.1})):
                began = time.process_time()
                scores = compute_exact_scores(result, epoch, method=method, **options)
                took = time.process_time() - began
                halves = ", ".join(
                    f"{half} {compute_lds(scores, result, subsets)}"
                    for half, subsets in (
                        ("all", None),
                        ("choose", result.selection_subsets),
                        ("report", result.reporting_subsets),
                    )
                )
                print(f"  {method}, epoch {epoch}: {halves} ({took:.0f} CPU s)", flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", gk.CaptureWarning)
    main(sys.argv[1:])
