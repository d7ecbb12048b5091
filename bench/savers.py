"""Compare savers: the released package, its saver in our TRAKer, a user's own, and ours.

`./x bench savers`: the same script for each, with the same projection: load two checkpoints, featurize
600 digits in batches, finalize, score 50. First the rankings of training rows are compared. Then each
is killed at 20 random times (SIGKILL) and restarted: every acknowledged row must still be there, and
the scores must equal those of an uninterrupted run. One process at a time, forked from this one.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import random
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.stats import spearmanr
from torch import nn

from bench import trak as trak_bench
from gradkeep.compat import trak as ours
from gradkeep.data import load_digits

ROWS, TARGETS, BATCH, K = 600, 50, 20, 128
KILLS = 20
RANKS = 0.9999
RIDGE = 0.1


class Gaussian:
    """A projector that both packages can use: one matrix per model id."""

    def __init__(self, size: int) -> None:
        self.grad_dim, self.proj_dim, self.seed, self.proj_type = size, K, 0, "gaussian"

    def project(self, grads: Any, model_id: int) -> torch.Tensor:
        flat = torch.cat([part.flatten(1) for part in grads.values()], 1)
        generator = torch.Generator().manual_seed(model_id)
        return flat @ torch.randn(self.grad_dim, K, generator=generator)

    def free_memory(self) -> None:
        pass


@dataclass(frozen=True)
class Contender:
    """A package, and the saver to use with it."""

    name: str
    package: Any
    saver: Any
    lossless: bool = True
    """True if it must lose nothing; False for savers that write documents in place, like
    traker's."""


@dataclass(frozen=True)
class Digits:
    """Data and the weights of two models."""

    train: tuple[torch.Tensor, torch.Tensor]
    test: tuple[torch.Tensor, torch.Tensor]
    states: tuple[dict[str, torch.Tensor], ...]


def build_network() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 24), nn.ReLU(), nn.Linear(24, 10))


def prepare_digits() -> Digits:
    digits = load_digits()
    x, y = torch.from_numpy(digits.train_images), torch.from_numpy(digits.train_labels)
    states = []
    for seed in range(2):
        torch.manual_seed(seed)
        model = build_network()
        optimizer = torch.optim.Adam(model.parameters(), 0.01)
        for _ in range(60):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[:ROWS]), y[:ROWS]).backward()
            optimizer.step()
        states.append({name: value.clone() for name, value in model.state_dict().items()})
    return Digits((x[:ROWS], y[:ROWS]), (x[-TARGETS:], y[-TARGETS:]), tuple(states))


def build_traker(one: Contender, folder: Path) -> Any:
    model = build_network()
    size = sum(parameter.numel() for parameter in model.parameters())
    return one.package.TRAKer(
        model=model,
        task="image_classification",
        train_set_size=ROWS,
        save_dir=folder,
        device="cpu",
        projector=Gaussian(size),
        proj_dim=K,
        saver=one.saver,
        use_half_precision=False,
        lambda_reg=RIDGE,
        logging_level=logging.CRITICAL,
    )


def run_pipeline(
    one: Contender, digits: Digits, folder: Path, on_batch: Callable[[], None] = lambda: None
) -> np.ndarray:
    """Run the whole script; `on_batch` is called after each batch of training rows."""
    t = build_traker(one, folder)
    for number, state in enumerate(digits.states):
        t.load_checkpoint(state, model_id=number)
        for x, y in trak_bench.batches(digits.train, BATCH):
            t.featurize((x, y), num_samples=len(y))
            on_batch()
    t.finalize_features()
    for number, state in enumerate(digits.states):
        t.start_scoring_checkpoint("test", state, number, num_targets=TARGETS)
        for x, y in trak_bench.batches(digits.test, BATCH):
            t.score((x, y), num_samples=len(y))
    return np.array(t.finalize_scores("test"))


def run_and_kill(one: Contender, digits: Digits, folder: Path, after: float) -> int:
    """Run in a child process that is killed after that many seconds; return acknowledged rows."""
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read_end)
        silence = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silence, 1)
        os.dup2(silence, 2)
        try:
            run_pipeline(one, digits, folder, lambda: os.write(write_end, b"."))
        finally:
            os._exit(0)
    os.close(write_end)
    time.sleep(after)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    with os.fdopen(read_end, "rb") as pipe:
        return BATCH * len(pipe.read())


def count_rows(one: Contender, folder: Path) -> int:
    """Return the number of rows marked as featurized, read like a new process would."""
    if not folder.exists():
        return 0
    saver = build_traker(one, folder).saver
    count = 0
    for number in list(saver.model_ids):
        saver.load_current_store(number)
        count += int(np.asarray(saver.current_store["is_featurized"]).sum())
    return count


def resume(one: Contender, digits: Digits, folder: Path, acknowledged: int) -> tuple[int, Any]:
    """Return the number of lost or unreadable acknowledged rows, and the scores of the next run."""
    try:
        lost = max(0, acknowledged - count_rows(one, folder))
        return lost, run_pipeline(one, digits, folder)
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        return acknowledged, f"{type(error).__name__} in {Path(frame.filename).name}: {error}"


def build_contenders() -> list[Contender]:
    theirs = trak_bench.import_released()
    path = Path(__file__).resolve().parents[1] / "examples" / "trak" / "own_saver.py"
    spec = importlib.util.spec_from_file_location("own_saver", path)
    assert spec is not None
    assert spec.loader is not None
    own = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(own)
    return [
        Contender("traker, its own saver", theirs, None, lossless=False),
        Contender(
            "ours, traker's saver",
            ours,
            importlib.import_module("trak.savers").MmapSaver,
            lossless=False,
        ),
        Contender("ours, a user's saver", ours, own.FolderSaver),
        Contender("ours, our saver", ours, None),
    ]


def main() -> int:
    torch.set_num_threads(1)
    digits, moments, failed = prepare_digits(), random.Random(0), False
    truth: Any = None
    print(f"{ROWS} digits, {TARGETS} targets, 2 checkpoints, k = {K}; {KILLS} kills each")
    head = ("", "seconds", "least rank correlation", "top 10 alike", "rows lost", "scores differ")
    print("  {:<24}{:>9}{:>24}{:>14}{:>11}{:>15}".format(*head))
    with tempfile.TemporaryDirectory() as root:
        for one in build_contenders():
            began = time.perf_counter()
            scores = run_pipeline(one, digits, Path(root) / f"{one.name} whole")
            seconds = time.perf_counter() - began
            truth = scores if truth is None else truth
            ranks = min(spearmanr(scores[:, i], truth[:, i])[0] for i in range(TARGETS))
            tops = [np.argsort(-values, 0)[:10] for values in (scores, truth)]
            alike = float((np.sort(tops[0], 0) == np.sort(tops[1], 0)).mean())
            lost = differ = 0
            for number in range(KILLS):
                folder = Path(root) / f"{one.name} {number}"
                acknowledged = run_and_kill(one, digits, folder, moments.uniform(0, seconds))
                gone, resumed_scores = resume(one, digits, folder, acknowledged)
                lost += gone
                same = not isinstance(resumed_scores, str) and np.allclose(
                    resumed_scores, scores, rtol=0, atol=1e-5 * np.abs(scores).max()
                )
                differ += not same
                if isinstance(resumed_scores, str):
                    print(f"    {resumed_scores[:100]}")
            print(
                f"  {one.name:<24}{seconds:>9.2f}{ranks:>24.6f}{alike:>14.1%}{lost:>11}{differ:>15}"
            )
            failed |= ranks < RANKS or (one.lossless and lost + differ > 0)
    print(f"bars: rank correlation {RANKS}; of the last two, nothing lost and the same scores")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
