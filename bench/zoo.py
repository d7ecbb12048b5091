"""Captures and recordings of a zoo of models in unusual batches, row by row against autograd in float64.

`./x bench zoo [WORD ...] [--capture] [--recording] [--own]`: every model of `bench/_zoo_models.py` with
each of its batch patterns. A row is exact if its gradient agrees with autograd's of that row alone to
1e-5 of its length; refused is a `GradkeepError`; anything else is wrong or a bare error, and the exit
code is 1. Words select items by name. Takes about 10 minutes on one core.
"""

from __future__ import annotations

import argparse
import collections
import logging
import sys
import tempfile
import traceback
import warnings
from dataclasses import dataclass
from typing import Any

import torch

import gradkeep as gk
from bench._zoo_models import Batch, ZooItem, has_transformers, iter_zoo
from gradkeep.errors import GradkeepError

BOUND = 1e-5
KINDS = ("exact", "refused", "wrong", "bare error")
Gradients = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Verdict:
    """Result of an item with one method of storing gradients."""

    kind: str
    detail: str = ""


def to_double(batch: Batch) -> Batch:
    return {
        name: value.double() if value.is_floating_point() else value
        for name, value in batch.items()
    }


def count_rows(batch: Batch) -> int:
    return len(next(iter(batch.values())))


def compute_true_gradients(item: ZooItem, batches: list[Batch]) -> Gradients:
    """Return autograd's gradients of every row, run alone."""
    model = item.make().double()
    weights = {name: p for name, p in model.named_parameters() if p.requires_grad}
    gradients_by_name: dict[str, list[torch.Tensor]] = {name: [] for name in weights}
    for batch in batches:
        for row in range(count_rows(batch)):
            one = {name: value[row : row + 1] for name, value in batch.items()}
            loss = item.task.losses(model, one).sum()
            gradients = torch.autograd.grad(loss, list(weights.values()), allow_unused=True)
            for (name, weight), gradient in zip(weights.items(), gradients, strict=True):
                dense = torch.zeros_like(weight) if gradient is None else gradient
                gradients_by_name[name].append(dense.to_dense() if dense.is_sparse else dense)
    return {name: torch.stack(rows) for name, rows in gradients_by_name.items()}


def capture_item(item: ZooItem, batches: list[Batch], folder: str) -> None:
    model = item.make().double()
    gk.capture(folder, model, batches, task=item.task, split="train", of="loss", progress=False)


def record_item(item: ZooItem, batches: list[Batch], folder: str) -> None:
    model = item.make().double()
    at = 0
    with gk.recording(
        folder, model, checkpoints="final", reduction="sum", uncovered="skip"
    ) as recording:
        for batch in batches:
            ids = range(at, at + count_rows(batch))
            at = ids.stop
            model.zero_grad()
            with recording.batch(ids):
                item.task.losses(model, batch).sum().backward()


METHODS: dict[str, Any] = {"capture": capture_item, "recording": record_item}


def judge_item(item: ZooItem, method: str, batches: list[Batch], truth: Gradients) -> Verdict:
    """Store the gradients of an item, read them back and compare."""
    try:
        with tempfile.TemporaryDirectory() as folder:
            METHODS[method](item, batches, folder)
            gradients = gk.gradients(folder, split="train")
            restored = gradients.restore(gradients.ids)
    except GradkeepError as error:
        return Verdict("refused", f"{type(error).__name__}: {error.message}")
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{where.filename.rsplit('/', 1)[-1]}:{where.lineno}"
        return Verdict("bare error", f"{type(error).__name__}: {str(error)[:120]} at {place}")
    lengths = torch.stack([t.flatten(1).square().sum(1) for t in truth.values()]).sum(0).sqrt()
    for name, value in truth.items():
        if name not in restored:
            if method == "capture" and bool(value.any()):
                return Verdict("wrong", f"{name} is missing")
            continue
        errors = (restored[name].double() - value).flatten(1).norm(dim=1)
        wrong = ~(errors <= BOUND * lengths.clamp(min=1e-12))
        if bool(wrong.any()):
            share = float((errors / lengths.clamp(min=1e-12)).max())
            return Verdict("wrong", f"{name}: {int(wrong.sum())} rows, off by {share:.1%}")
    return Verdict("exact")


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="./x bench zoo")
    parser.add_argument("words", nargs="*", help="only items whose name contains one of these")
    parser.add_argument("--capture", action="store_true", help="only gk.capture")
    parser.add_argument("--recording", action="store_true", help="only gk.recording")
    parser.add_argument("--own", action="store_true", help="no stock models")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    if not options.own and not has_transformers():
        print("transformers is not installed: only our own models are tested")
    methods = [method for method in METHODS if getattr(options, method)] or list(METHODS)
    counts = {method: collections.Counter[str]() for method in methods}
    models = set()
    for item in iter_zoo(stock=not options.own):
        if options.words and not any(word in item.name for word in options.words):
            continue
        models.add(item.model)
        batches = [to_double(batch) for batch in item.batches()]
        truth = compute_true_gradients(item, batches)
        for method in methods:
            verdict = judge_item(item, method, batches, truth)
            counts[method][verdict.kind] += 1
            if verdict.kind != "exact":
                print(f"  {verdict.kind}: {method} of {item.name}: {verdict.detail}", flush=True)
    print(f"{len(models)} models")
    for method, count in counts.items():
        print(f"  {method:<10}" + "".join(f"{count[kind]:>8} {kind}" for kind in KINDS))
    return int(any(count["wrong"] + count["bare error"] for count in counts.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
