"""Captures of many models of one setting, and entries with the scores and cost of each method."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch.func import functional_call

import gradkeep as gk
from bench import _lds_truth
from bench._quality_board import Entry
from gradkeep.attribution._scores import Scores
from gradkeep.evaluate._truth import GroundTruth
from gradkeep.store import CaptureKey

BASELINES = ("random", "label-match", "similarity", "loss")
"""Methods that do not read gradients."""


@dataclass(frozen=True, eq=False)
class CapturedModels:
    """A store with captures of many models, and the CPU seconds of each."""

    setting: _lds_truth.Setting
    store: gk.Store
    seconds: dict[str, float] = field(default_factory=dict)
    """CPU seconds of capturing both splits, by run and checkpoint."""

    def capture(
        self,
        prefix: str,
        states: dict[int, dict[str, torch.Tensor]],
        models: Sequence[int],
        embedded: Sequence[int] = (),
    ) -> list[str]:
        """Capture models with stacked weights at all saved epochs; return the names of the runs."""
        setting, net = self.setting, self.setting.make()
        last = [name for name, part in net.named_modules() if isinstance(part, torch.nn.Linear)][-1]
        runs = []
        for number in models:
            runs.append(f"{prefix}-{number}")
            for epoch, state in states.items():
                weights = {name: values[number] for name, values in state.items()}
                source = gk.Weights(weights, step=epoch, lr=1.0)
                began = time.process_time()
                for split, batch in (("train", setting.train), ("test", setting.test)):
                    gk.capture(
                        self.store,
                        net,
                        [batch],
                        task=gk.Classification(),
                        checkpoints={epoch_name(epoch): source},
                        embeddings=[last] if epoch in embedded else [],
                        split=split,
                        run=runs[-1],
                        progress=False,
                    )
                took = time.process_time() - began
                self.seconds[f"{runs[-1]}/{epoch_name(epoch)}"] = took
        return runs

    def evaluate(
        self,
        name: str,
        method: str,
        runs: Sequence[str],
        epochs: Sequence[int],
        *,
        peer: bool = False,
        **options: object,
    ) -> Entry:
        """Return mean scores of a method over runs, with the cost of its captures and of
        scoring."""
        checkpoints = [epoch_name(epoch) for epoch in epochs]
        over = {one.name: one.over for one in gk.methods()}[method]
        began = time.process_time()
        if over == "one":
            parts = [
                gk.attribute(
                    self.store, method=method, run=run, checkpoints=checkpoints[-1], **options
                )
                for run in runs
            ]
            values = np.mean([part.values for part in parts], 0)
            places = tuple(f"{run}/{checkpoints[-1]}" for run in runs)
            scores = dataclasses.replace(parts[0], values=values, checkpoints=places)
        else:
            scores = gk.attribute(
                self.store, method=method, run=list(runs), checkpoints=checkpoints, **options
            )
            places = tuple(f"{run}/{one}" for run in runs for one in checkpoints)
        took = time.process_time() - began
        if method in BASELINES:
            return Entry(name, scores, took, None, peer)
        read = sum(self.seconds[place] for place in places)
        return Entry(name, scores, took + read, sum(map(self._bytes, places)), peer)

    def _bytes(self, place: str) -> float:
        """Return the bytes per training row at one checkpoint."""
        run, _, checkpoint = place.rpartition("/")
        block = self.store.read(CaptureKey(checkpoint, "train", run))
        return block.manifest.bytes / len(block)


def epoch_name(epoch: int) -> str:
    return f"epoch-{epoch:02d}"


def build_ground_truth(name: str, truth: _lds_truth.Truth, seconds: float) -> GroundTruth:
    """Build the ground truth of `gradkeep.evaluate`; `seconds` is the cost of one training."""
    return GroundTruth(name, truth.masks, truth.by_seed, seconds=seconds)


def compute_uncertainty(setting: _lds_truth.Setting, state: dict[str, torch.Tensor]) -> np.ndarray:
    """Return the mean of 1 - p over models with stacked weights, for every training row `[N]`."""
    x, y = setting.train
    net = setting.make().to("meta")
    total = torch.zeros(len(y), dtype=torch.float64)
    count = len(next(iter(state.values())))
    with torch.no_grad():
        for number in range(count):
            weights = {name: values[number] for name, values in state.items()}
            right = functional_call(net, weights, (x,)).softmax(1).gather(1, y[:, None])
            total += 1 - right[:, 0].double()
    # Never 0, because it is used as a variance.
    return np.clip((total / count).numpy(), 1e-6, 1)


def combine_entries(name: str, parts: Sequence[Entry]) -> Entry:
    """Average standardized scores; the cost is the sum of all costs."""
    scores = gk.combine([part.scores for part in parts])
    row_bytes = sum(part.bytes_per_row or 0 for part in parts)
    return Entry(name, scores, sum(part.seconds for part in parts), row_bytes)


def derive_entry(
    name: str, parents: Sequence[Entry], make: Callable[[], Scores], *, peer: bool = False
) -> Entry:
    """Compute scores from other entries; the cost includes that of the other entries."""
    began = time.process_time()
    scores = make()
    took = time.process_time() - began + sum(one.seconds for one in parents)
    row_bytes = sum(one.bytes_per_row or 0 for one in parents)
    return Entry(name, scores, took, row_bytes or None, peer)
