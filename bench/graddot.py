"""Exact products of all gradients: the cost of capture and query together, and of the query alone.

`./x bench graddot [WORD ...]`: one thread, CPU time, alternating in one run. Words select models by
name. Ours captures to disk and queries from there. "whole price" is both captures and the first query
after them; "question" is a query on existing captures with their rows in the page cache; "cold" is
the same with the files dropped from the cache and the store reopened; "once" is
`gk.attribute_once`, which stores nothing, like the peers. Calibration, a one-time cost of the first
query on a machine, is not included.

Peers hold everything in memory: twenty lines of hooks and matrix products written for these layers,
torch.func with one product per parameter in batches of its best size, and captum's TracInCP. A ratio
is a peer's time over ours, with a bar for each.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import gradkeep as gk
from bench._passes import build_cnn, cpu_seconds
from gradkeep.data import GPT, load_digits, model
from gradkeep.query._products import Products

if TYPE_CHECKING:
    from collections.abc import Callable

ROUNDS = 2
BATCHES = (64, 256)
"""Batch sizes tried for torch.func; the faster one counts."""


@dataclass(frozen=True)
class Case:
    """A model, its rows, and the bars: ratios of a peer's time to our whole price, query and
    single run."""

    name: str
    net: nn.Module
    task: gk.Task
    train: TensorDataset
    test: TensorDataset
    batch: int
    bars: dict[str, tuple[float, float, float]] = field(default_factory=dict)

    def layers(self) -> list[str]:
        """Return the linear layers and convolutions, which all peers support."""
        kinds = (nn.Linear, nn.Conv2d)
        return [name for name, layer in self.net.named_modules() if isinstance(layer, kinds)]

    def losses(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        if logits.dim() == 3:  # labels are given for every token
            return F.cross_entropy(logits.transpose(1, 2), labels, reduction="none").sum(1)
        return F.cross_entropy(logits, labels, reduction="none")


def multiply_with_hooks(case: Case) -> torch.Tensor:
    """Multiply with hand-written hooks: factors of linear layers with one position, else
    gradients."""
    net, modules = case.net, [case.net.get_submodule(name) for name in case.layers()]

    def collected(data: TensorDataset) -> list[tuple[torch.Tensor, ...]]:
        inputs: list[list[Any]] = [[] for _ in modules]
        suffixes: list[list[Any]] = [[] for _ in modules]

        def hook(at: int) -> Any:
            def keep(_: Any, args: Any, output: torch.Tensor) -> None:
                inputs[at].append(args[0].detach())
                output.register_hook(lambda gradient: suffixes[at].append(gradient))

            return keep

        handles = [layer.register_forward_hook(hook(at)) for at, layer in enumerate(modules)]
        for x, y in DataLoader(data, batch_size=case.batch):
            case.losses(net(x), y).sum().backward()
        for handle in handles:
            handle.remove()
        net.zero_grad()
        return [join_factors(*one) for one in zip(modules, inputs, suffixes, strict=True)]

    def join_factors(layer: Any, xs: list[Any], gs: list[Any]) -> tuple[torch.Tensor, ...]:
        if isinstance(layer, nn.Linear) and xs[0].dim() == 2:
            return torch.cat(xs), torch.cat(gs)
        parts = []
        for x, g in zip(xs, gs, strict=True):
            if isinstance(layer, nn.Conv2d):
                x = F.unfold(x, layer.kernel_size, padding=layer.padding, stride=layer.stride)
                x, g = x.transpose(1, 2), g.flatten(2).transpose(1, 2)
            weight = torch.bmm(g.transpose(1, 2), x).flatten(1)
            parts.append(torch.cat([weight, g.sum(1)], 1) if layer.bias is not None else weight)
        return (torch.cat(parts),)

    total: torch.Tensor | None = None
    for one, other in zip(collected(case.test), collected(case.train), strict=True):
        products = one[0] @ other[0].T
        if len(one) == 2:
            products = (products + 1) * (one[1] @ other[1].T)
        total = products if total is None else total + products
    assert total is not None
    return total


def multiply_with_torch_func(case: Case, batch: int) -> torch.Tensor:
    everything = {name: value.detach() for name, value in case.net.named_parameters()}
    layers = tuple(case.layers())
    weights = {n: v for n, v in everything.items() if n.rpartition(".")[0] in layers}

    def loss(weights: dict[str, torch.Tensor], x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        answer = torch.func.functional_call(case.net, everything | weights, (x.unsqueeze(0),))
        return case.losses(answer, y.unsqueeze(0))[0]

    each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))

    def dense(data: TensorDataset) -> dict[str, torch.Tensor]:
        parts = [each(weights, x, y) for x, y in DataLoader(data, batch_size=batch)]
        return {name: torch.cat([part[name].flatten(1) for part in parts]) for name in weights}

    queries, train = dense(case.test), dense(case.train)
    return sum(queries[name] @ train[name].T for name in weights)  # type: ignore[return-value]


def multiply_with_captum(case: Case) -> torch.Tensor:
    from captum.influence import TracInCP

    influence = TracInCP(
        case.net,
        case.train,
        ["now"],
        checkpoints_load_func=lambda network, path: 1.0,
        layers=case.layers(),
        loss_fn=nn.CrossEntropyLoss(reduction="sum"),
        batch_size=case.batch,
        sample_wise_grads_per_batch=True,
    )
    return influence.influence(tuple(case.test.tensors))


def capture_splits(case: Case, folder: str) -> int:
    store, stored_bytes = gk.open(folder), 0
    for split, data in (("train", case.train), ("test", case.test)):
        loader = DataLoader(data, batch_size=case.batch)
        stored_bytes += gk.capture(
            store,
            case.net,
            loader,
            task=case.task,
            split=split,
            layers=case.layers(),
            progress=False,
        ).bytes
    return stored_bytes


def query_products(folder: str, compute: str | None = None) -> Products:
    store = gk.open(folder)
    queries, train = gk.gradients(store, split="test"), gk.gradients(store, split="train")
    return gk.query.dot(queries, train, compute=compute)


def attribute_once(case: Case) -> torch.Tensor:
    train, test = (DataLoader(data, batch_size=case.batch) for data in (case.train, case.test))
    options = {"task": case.task, "layers": case.layers(), "method": "dot"}
    return torch.from_numpy(gk.attribute_once(case.net, train, test, **options).numpy())


def drop_from_page_cache(folder: str) -> None:
    for path in Path(folder).rglob("*"):
        if path.is_file():
            handle = os.open(path, os.O_RDONLY)
            os.fsync(handle)
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(handle)


@dataclass
class OwnTimes:
    """CPU seconds of gradkeep in each round."""

    whole: list[float] = field(default_factory=list)
    question: list[float] = field(default_factory=list)
    cold: list[float] = field(default_factory=list)
    once: list[float] = field(default_factory=list)


def measure_rounds(
    case: Case,
) -> tuple[OwnTimes, dict[str, list[float]], dict[str, torch.Tensor], int]:
    """Time everything in alternating rounds; return times, answers and stored bytes."""
    peers: dict[str, Callable[[], torch.Tensor]] = {"hooks": lambda: multiply_with_hooks(case)}
    multiply_with_torch_func(case, BATCHES[0])  # a warm-up for all peers
    best = min(BATCHES, key=lambda size: cpu_seconds(lambda: multiply_with_torch_func(case, size)))
    peers[f"torch.func, batch {best}"] = lambda: multiply_with_torch_func(case, best)
    if case.net(case.test.tensors[0][:1]).dim() == 2:  # captum supports one label per sample
        peers["captum"] = lambda: multiply_with_captum(case)
    answers: dict[str, torch.Tensor] = {}
    ours, theirs, stored_bytes = OwnTimes(), {name: [] for name in peers}, 0
    for _ in range(ROUNDS):
        for name, peer in peers.items():
            theirs[name].append(cpu_seconds(partial(store_answer, answers, name, peer)))
        with tempfile.TemporaryDirectory() as folder:

            def everything() -> None:
                nonlocal stored_bytes
                stored_bytes = capture_splits(case, folder)
                answers["ours"] = query_products(folder).values

            ours.whole.append(cpu_seconds(everything))
            ours.question.append(min(cpu_seconds(lambda: query_products(folder)) for _ in range(3)))
            drop_from_page_cache(folder)
            ours.cold.append(cpu_seconds(lambda: query_products(folder)))
        ours.once.append(
            cpu_seconds(partial(store_answer, answers, "once", lambda: attribute_once(case)))
        )
    return ours, theirs, answers, stored_bytes


def store_answer(
    answers: dict[str, torch.Tensor], name: str, peer: Callable[[], torch.Tensor]
) -> None:
    answers[name] = peer()


def compare(case: Case) -> bool:
    size = sum(p.numel() for n in case.layers() for p in case.net.get_submodule(n).parameters())
    shape = f"{len(case.train)} x {len(case.test)}"
    print(f"{case.name}: {size:,} parameters, {shape}, linear and convolutional layers with biases")
    with tempfile.TemporaryDirectory() as folder:  # a warm-up for imports and calibration
        capture_splits(case, folder)
        query_products(folder)
        attribute_once(case)
    ours, theirs, answers, stored_bytes = measure_rounds(case)
    truth = next(answers[name] for name in theirs if name.startswith("torch.func"))
    dense = (len(case.train) + len(case.test)) * size * 4
    print(
        f"  stored in {stored_bytes / 1e6:.1f} MB, dense is {dense / 1e6:.0f} MB ({dense / stored_bytes:.0f}x)"
    )
    print(
        f"  {'':<24}{'CPU s':>8}{'/ whole':>9}{'bar':>6}{'/ query':>12}{'bar':>6}"
        f"{'/ once':>8}{'bar':>6}{'error':>9}"
    )
    whole, question, cold, once = (
        statistics.median(one) for one in (ours.whole, ours.question, ours.cold, ours.once)
    )
    print(
        f"  {'ours, whole price':<24}{whole:>8.3f}{'':>47}{relative_error(answers['ours'], truth):>9.1e}"
    )
    print(f"  {'ours, query':<24}{question:>8.3f}")
    print(f"  {'ours, query, cold':<24}{cold:>8.3f}")
    print(
        f"  {'ours, attribute_once':<24}{once:>8.3f}{'':>47}{relative_error(answers['once'], truth):>9.1e}"
    )
    missed = False
    for name, seconds in theirs.items():
        price = statistics.median(seconds)
        least = case.bars.get(name.partition(",")[0], (0.0, 0.0, 0.0))
        ratios = (price / whole, price / question, price / once)
        short = any(value < bar for value, bar in zip(ratios, least, strict=True))
        missed |= short
        print(
            f"  {name:<24}{price:>8.3f}{ratios[0]:>9.2f}{least[0]:>6.2f}{ratios[1]:>12.1f}"
            f"{least[1]:>6.1f}{ratios[2]:>8.2f}{least[2]:>6.2f}{relative_error(answers[name], truth):>9.1e}{'  MISSED' if short else ''}",
            flush=True,
        )
    return missed


def relative_error(products: torch.Tensor, truth: torch.Tensor) -> float:
    return float((products.double() - truth.double()).norm() / truth.double().norm())


def build_cases() -> list[Case]:
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    source = load_digits()
    images = torch.cat(
        [torch.from_numpy(source.train_images), torch.from_numpy(source.test_images)]
    )
    labels = torch.cat(
        [torch.from_numpy(source.train_labels), torch.from_numpy(source.test_labels)]
    )
    pixels = torch.randn(1400, 3, 32, 32, generator=generator)
    kinds = torch.randint(0, 10, (1400,), generator=generator)
    tokens = torch.randint(0, 256, (288, 64), generator=generator)

    def two(x: torch.Tensor, y: torch.Tensor, train: int) -> tuple[TensorDataset, TensorDataset]:
        return TensorDataset(x[:train], y[:train]), TensorDataset(x[train:], y[train:])

    classes = gk.Classification()
    digits = two(images[:1797], labels[:1797], 1500)
    cnn = two(pixels, kinds, 1200)
    gpt = GPT(vocabulary=256, length=64, dim=64, heads=4, layers=2, tied=False)
    texts = two(tokens, tokens, 256)
    return [
        Case(
            *("MLP 64-256-256-10, digits", model("mlp").eval(), classes, *digits, 64),
            {"hooks": (1 / 3, 0, 1 / 2), "torch.func": (3, 30, 10), "captum": (3, 15, 10)},
        ),
        Case(
            *("CNN 3x32x32", build_cnn(), classes, *cnn, 64),
            {"torch.func": (1, 2, 1), "captum": (1, 2, 1)},
        ),
        Case(
            *("transformer 2x64, T=64", gpt.eval(), gk.LanguageModeling(), *texts, 32),
            {"torch.func": (0, 2, 0)},
        ),
    ]


def main() -> int:
    torch.set_num_threads(1)
    words = sys.argv[1:]
    chosen = [one for one in build_cases() if not words or any(word in one.name for word in words)]
    missed = [compare(case) for case in chosen]
    return int(any(missed))


if __name__ == "__main__":
    sys.exit(main())
