"""EK-FAC influence on an MLP, CNNs and a transformer, against kronfluence; six methods from one capture.

`./x bench ekfac [mlp] [cnn] [cnn32] [gpt128] [gpt256] [together]`: one thread, CPU time, alternating
rounds in one run, medians of ratios. Both use the empirical Fisher matrix, float32, and a damping of
0.1 x the mean eigenvalue of the layer, which is the default of kronfluence. kronfluence is installed
into a separate folder, without torchvision and CUDA, which it does not need here; --without-peer
omits it.

`gpt128` and `gpt256` are transformers of 4 layers x 128 and x 256 on windows of 64 characters, with
their linear layers only, which are the ones that kronfluence supports. Most of the time is in matrix
products that both compute: two moments, two rotations of all positions, the gradient of every row,
the products of all pairs.

`cnn32` has images of 3 x 32 x 32 and two layers whose gradients take fewer bytes than their factors.
For these the capture stores the moments of the prefixes and suffixes of the first 128 rows, which
the eigenvectors are computed from; their eigenvalues are measured with all rows. With keep="factors"
the moments are those of all rows, as in kronfluence. The first convolution of `cnn` is such a layer
too.

Both are bound by the same matrix products on a convolution with many positions: moments of patches,
their rotation and the products of all pairs, of which ours computes about two thirds. On layers with
one position per row most of those products are never computed.
`together` runs several methods on one capture and compares the total with the slowest method alone.
"""

from __future__ import annotations

import copy
import importlib.util
import logging
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import gradkeep as gk
from gradkeep.data import GPT, load_digits, model

DATA = Path(os.environ.get("GRADKEEP_DATA") or Path(__file__).parents[2] / "shared" / "data")
TRAIN, TEST = 1500, 297
DAMPING = 0.1
CORRELATION = 0.99
"""Minimum mean over queries of the rank correlation with kronfluence, as captured."""
BARS = {"mlp": (10, 3), "cnn": (10, 3), "cnn32": (5, 2), "gpt128": (5, 3), "gpt256": (5, 3)}
"""Minimum ratios of kronfluence's CPU time to ours: without capture, and with capture."""
ROUNDS = 3
METHODS = ("dot", "cos", "self", "trak", "logra", "ekfac")
METHODS_BAR = 1.5
WITHOUT = "--without-peer"
PEER = (
    "kronfluence==1.0.1",
    "accelerate==1.15.0",
    "einconv==0.1.0",
    "einops==0.8.2",
    "opt_einsum==3.4.0",
    "psutil==7.2.2",
)
"""kronfluence and its imports; its declared dependencies would add torchvision and CUDA."""


def fetch_peer() -> None:
    """Make kronfluence importable: as installed, or fetched into a separate folder."""
    if importlib.util.find_spec("kronfluence") is None:
        folder = Path(tempfile.gettempdir()) / "gradkeep-bench-kronfluence-1.0.1"
        if not (folder / "kronfluence").exists():
            command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
            subprocess.run([*command, "--target", str(folder), *PEER], check=True)
        sys.path.append(str(folder))


def score_with_kronfluence(net: nn.Module, train: TensorDataset, test: TensorDataset) -> np.ndarray:
    from kronfluence.analyzer import Analyzer, prepare_model
    from kronfluence.arguments import FactorArguments, ScoreArguments
    from kronfluence.task import Task

    class Digits(Task):
        def compute_train_loss(self, batch, model, sample=False):
            return compute_loss(model, *batch, reduction="sum")

        def compute_measurement(self, batch, model):
            return self.compute_train_loss(batch, model)

    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        analyzer = Analyzer(
            "digits",
            prepare_model(copy.deepcopy(net), Digits()),
            Digits(),
            cpu=True,
            output_dir=folder,
            disable_tqdm=True,
            log_level=logging.ERROR,
        )
        analyzer.fit_all_factors(
            "factors",
            train,
            factor_args=FactorArguments(strategy="ekfac", use_empirical_fisher=True),
            per_device_batch_size=64,
        )
        analyzer.compute_pairwise_scores(
            "scores",
            "factors",
            test,
            train,
            per_device_query_batch_size=len(test),
            per_device_train_batch_size=256,
            score_args=ScoreArguments(damping_factor=None),
        )
        return analyzer.load_pairwise_scores("scores")["all_modules"].numpy()


def load_digit_rows(name: str) -> tuple[TensorDataset, TensorDataset]:
    source = load_digits()
    images = torch.cat(
        [torch.from_numpy(source.train_images), torch.from_numpy(source.test_images)]
    )
    labels = torch.cat(
        [torch.from_numpy(source.train_labels), torch.from_numpy(source.test_labels)]
    )
    if name == "cnn":
        images = images.reshape(-1, 1, 8, 8)
    train = TensorDataset(images[:TRAIN], labels[:TRAIN])
    return train, TensorDataset(images[TRAIN : TRAIN + TEST], labels[TRAIN : TRAIN + TEST])


def compute_loss(
    net: nn.Module, x: torch.Tensor, y: torch.Tensor, reduction: str = "mean"
) -> torch.Tensor:
    """Return the loss of classes, or of the next token at all positions."""
    logits = net(x)
    logits = logits.transpose(1, 2) if logits.dim() == 3 else logits
    return F.cross_entropy(logits, y, reduction=reduction)


def fit_model(net: nn.Module, train: TensorDataset, epochs: int) -> nn.Module:
    """Train the model with Adam for some epochs and return it in eval mode."""
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    order = torch.Generator().manual_seed(0)
    for _ in range(epochs):
        for x, y in DataLoader(train, batch_size=64, shuffle=True, generator=order):
            optimizer.zero_grad()
            compute_loss(net, x, y).backward()
            optimizer.step()
    return net.eval()


def load_cifar() -> tuple[TensorDataset, TensorDataset]:
    """Return 600 and 60 images of 3 x 32 x 32: CIFAR-10 if available, else random ones."""
    path = DATA / "cifar10" / "cifar10_10k_2k.npz"
    rng, parts = np.random.default_rng(0), []
    if path.exists():
        archive = np.load(path)
        for split, count in (("train", 600), ("test", 60)):
            chosen = rng.permutation(len(archive[f"y_{split}"]))[:count]
            images = torch.from_numpy(archive[f"x_{split}"][chosen]).permute(0, 3, 1, 2) / 255 - 0.5
            parts.append((images, torch.from_numpy(archive[f"y_{split}"][chosen]).long()))
    else:
        for count in (600, 60):
            images = torch.from_numpy(rng.standard_normal((count, 3, 32, 32), np.float32))
            parts.append((images, torch.from_numpy(rng.integers(0, 10, count))))
    return TensorDataset(*parts[0]), TensorDataset(*parts[1])


def train_cifar_cnn(train: TensorDataset) -> nn.Module:
    """Train a CNN whose first layers are smaller as gradients than as factors."""
    torch.manual_seed(0)
    net = nn.Sequential(
        *(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(32, 32, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(2)),
        *(nn.Flatten(), nn.Linear(128, 10)),
    )
    return fit_model(net, train, 8)


def load_texts(
    train: int = 512, test: int = 64, length: int = 64
) -> tuple[TensorDataset, TensorDataset]:
    """Return windows of tiny Shakespeare with their next characters; random ones if it is
    missing."""
    files = sorted((DATA / "tinyshakespeare").glob("*.txt"))
    rng = np.random.default_rng(0)
    if files:
        codes = np.unique(np.frombuffer(files[0].read_bytes(), np.uint8), return_inverse=True)[1]
    else:
        codes = rng.integers(0, 65, 1 << 18)
    count = train + test
    starts = rng.choice(len(codes) // (length + 1), count, replace=False) * (length + 1)
    windows = torch.from_numpy(codes[starts[:, None] + np.arange(length + 1)]).long()
    x, y = windows[:, :-1].contiguous(), windows[:, 1:].contiguous()
    return TensorDataset(x[:train], y[:train]), TensorDataset(x[train:], y[train:])


def build_subject(name: str) -> tuple[nn.Module, TensorDataset, TensorDataset]:
    """Return a trained model, its training rows and its queries."""
    torch.manual_seed(0)
    if name.startswith("gpt"):
        train, test = load_texts(*((512, 64) if name == "gpt128" else (192, 32)))
        net = GPT(dim=int(name.removeprefix("gpt")), layers=4, tied=False)
        return fit_model(net, train, 4), train, test
    if name == "cnn32":
        train, test = load_cifar()
        return train_cifar_cnn(train), train, test
    train, test = load_digit_rows(name)
    return fit_model(model(name), train, 5), train, test


def capture(net: nn.Module, train: TensorDataset, test: TensorDataset, **options) -> gk.Store:
    store = gk.open(tempfile.mkdtemp())
    task = gk.LanguageModeling() if isinstance(net, GPT) else gk.Classification()
    if isinstance(net, GPT):  # the layers that kronfluence supports
        linear = [name for name, part in net.named_modules() if isinstance(part, nn.Linear)]
        options = {"layers": linear, **options}
    for split, data in (("train", train), ("test", test)):
        loader = DataLoader(data, batch_size=64)
        gk.capture(store, net, loader, task=task, split=split, progress=False, **options)
    return store


def time_call(function, *arguments, **options):
    """Return the CPU time of a call, and its result."""
    started = time.process_time()
    result = function(*arguments, **options)
    return time.process_time() - started, result


def attribute(store: gk.Store, method: str = "ekfac", **options) -> np.ndarray:
    return gk.attribute(store, method=method, **options).numpy()


def correlation(one: np.ndarray, other: np.ndarray) -> tuple[float, float]:
    """Return the mean and the least Spearman correlation over queries."""
    ranks = [x.argsort(1).argsort(1).astype(np.float64) for x in (one, other)]
    ranks = [(x - x.mean(1, keepdims=True)) / x.std(1, keepdims=True) for x in ranks]
    correlations = (ranks[0] * ranks[1]).mean(1)
    return float(correlations.mean()), float(correlations.min())


def compare(name: str) -> bool:
    net, train, test = build_subject(name)
    size = sum(p.numel() for p in net.parameters())
    print(
        f"{name}: {size:,} parameters, {len(train)} x {len(test)}, damping {DAMPING} x mean eigenvalue"
    )
    peered = WITHOUT not in sys.argv
    if peered:
        fetch_peer()
    rounds = []
    for _ in range(ROUNDS):  # alternating, so that other load affects all alike
        capture_seconds, store = time_call(capture, net, train, test)
        query_seconds, ours = time_call(attribute, store, damping=DAMPING)
        peer, theirs = (
            time_call(score_with_kronfluence, net, train, test) if peered else (0.0, ours)
        )
        rounds.append((capture_seconds, query_seconds, peer))
    for what, seconds in zip(
        ("capture", "ours, from disk", "kronfluence"), zip(*rounds, strict=True), strict=True
    ):
        print(f"  {what:<24}{statistics.median(seconds):>8.2f} s")
    if not peered:
        return False
    ratios = (
        statistics.median(peer / query_seconds for _, query_seconds, peer in rounds),
        statistics.median(
            peer / (capture_seconds + query_seconds)
            for capture_seconds, query_seconds, peer in rounds
        ),
    )
    for what, ratio, bar in zip(
        ("without capture", "with capture"), ratios, BARS[name], strict=True
    ):
        print(f"  {what:<24}{ratio:>8.1f} x less CPU time (bar {bar})")
    alike = attribute(capture(net, train, test, keep="factors"), damping=DAMPING)
    for what, scores in (("as captured", ours), ('keep="factors"', alike)):
        mean, least = correlation(scores, theirs)
        print(f"  rank correlation, {what:<14}: mean {mean:.4f}, least {least:.4f}")
    missed = correlation(ours, theirs)[0] < CORRELATION
    return missed or any(r < bar for r, bar in zip(ratios, BARS[name], strict=True))


def compare_methods() -> bool:
    """Compare one capture and several methods with one capture and the slowest method alone."""
    train, test = load_digit_rows("mlp")
    net = fit_model(model("mlp"), train, 5)
    store = capture(net, train, test)
    capture_seconds = min(time_call(capture, net, train, test)[0] for _ in range(ROUNDS))
    known = {method.name for method in gk.methods()}
    each = {
        method: min(time_call(attribute, store, method)[0] for _ in range(ROUNDS))
        for method in METHODS
        if method in known
    }
    slowest = max(each, key=each.__getitem__)
    ratio = (capture_seconds + sum(each.values())) / (capture_seconds + each[slowest])
    print(f"capture {capture_seconds:.2f} s, " + ", ".join(f"{m} {s:.2f}" for m, s in each.items()))
    print(f"  all / the slowest ({slowest}) with capture: {ratio:.2f} (bar {METHODS_BAR})")
    return ratio > METHODS_BAR or len(each) < len(METHODS)


def main() -> int:
    torch.set_num_threads(1)
    names = [word for word in sys.argv[1:] if word != WITHOUT] or [*BARS, "together"]
    missed = [compare_methods() if name == "together" else compare(name) for name in names]
    return int(any(missed))


if __name__ == "__main__":
    sys.exit(main())
