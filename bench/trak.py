"""TRAK with the released package and with our front end: speed, projection error and LDS.

`./x bench trak`: one thread, CPU time, all in one run. The same script runs twice, only the import
differs: load a checkpoint, featurize 1,297 digits, finalize, score 500, with the same model and
k = 2048. Then the error of projected inner products, against a dense Rademacher matrix; then the
linear datamodeling score of both, with the default and with the best ridge of each.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import logging
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench import _lds_truth
from gradkeep.compat import trak as ours
from gradkeep.curvature._project import project_dense, project_parameters
from gradkeep.curvature._sketches import Projection

K = 2048
BATCH = 100
CHECKPOINTS = 3
SUBSETS, SEEDS = 100, 3
SPEED, ERROR = 50.0, 1.1
NOISE = 0.005
"""Approximate difference of the score between two random projections."""
RIDGES = (0.3, 1.0, 3.0, 10.0)
"""Ridges to select from, by the same truth that they are evaluated on."""


def import_released() -> Any:
    """Import the released package: installed, or fetched without dependencies into a separate
    folder."""
    if importlib.util.find_spec("trak") is None:
        folder = Path(tempfile.gettempdir()) / "gradkeep-bench-traker-0.3.2"
        if not (folder / "trak").exists():
            command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
            packages = ["--target", str(folder), "traker==0.3.2", "tqdm"]
            subprocess.run([*command, *packages], check=True)
        sys.path.append(str(folder))
    return importlib.import_module("trak")


def run_pipeline(
    package: Any, setting: _lds_truth.Setting, states: list[dict[str, torch.Tensor]], folder: str
) -> Any:
    """Run the script of a user with either package."""
    net = setting.make()
    traker = package.TRAKer(
        model=net,
        task="image_classification",
        train_set_size=len(setting.train[1]),
        save_dir=folder,
        device="cpu",
        proj_dim=K,
        use_half_precision=False,
        logging_level=logging.ERROR,
    )
    for number, state in enumerate(states):
        traker.load_checkpoint(state, model_id=number)
        for x, y in batches(setting.train):
            traker.featurize((x, y), num_samples=len(y))
    traker.finalize_features()
    for number, state in enumerate(states):
        traker.start_scoring_checkpoint("test", state, number, num_targets=len(setting.test[1]))
        for x, y in batches(setting.test):
            traker.score((x, y), num_samples=len(y))
    traker.finalize_scores("test")
    return traker


def batches(data: tuple[torch.Tensor, torch.Tensor], size: int = BATCH) -> Any:
    return zip(data[0].split(size), data[1].split(size), strict=True)


def time_call(function: Callable[..., Any], *arguments: Any) -> tuple[float, Any]:
    began = time.process_time()
    result = function(*arguments)
    return time.process_time() - began, result


def score_with_ridge(traker: Any, relative: float) -> np.ndarray:
    """Return scores `[m, n]` with another ridge from stored features: the released formulas in
    float64."""
    saver = traker.saver
    total, weights = 0.0, 0.0
    for number in range(CHECKPOINTS):
        saver.load_current_store(number)
        x = np.array(saver.current_store["grads"], np.float64)
        weights = weights + np.array(saver.current_store["out_to_loss"], np.float64)
        saver.load_current_store(number, "test", saver.experiments["test"]["num_targets"])
        g = np.array(saver.current_store["test_grads"], np.float64)
        gram = x.T @ x
        gram += relative * np.trace(gram) / K * np.eye(K)
        inverse = np.linalg.inv(gram)
        total = total + x @ (inverse / np.abs(inverse).mean()) @ g.T
    return (total * weights).T


def measure_errors(
    setting: _lds_truth.Setting, state: dict[str, torch.Tensor], draws: int = 5
) -> list[float]:
    """Return root mean squares of (estimate - true) / (|x| |y|) over pairs: ours, and
    Rademacher's."""
    net = setting.make()
    net.load_state_dict(state)
    task = ours.modelout_functions.ImageClassificationModelOutput()
    computer = ours.traker.FunctionalGradientComputer(net, task, 0, torch.float32, "cpu")
    grads = computer.compute_per_sample_grad([part[:150] for part in setting.train])
    flat = torch.cat([grad.flatten(1) for grad in grads.values()], 1)
    truth = flat.double() @ flat.double().T
    lengths = truth.diagonal().sqrt()
    scale = lengths[:, None] * lengths
    upper = torch.triu(torch.ones_like(truth), 1).bool()

    def off(low: torch.Tensor) -> float:
        wrong = (low.double() @ low.double().T - truth) / scale
        return float(wrong[upper].square().mean())

    sketch = [off(project_parameters(grads, Projection("auto", K, seed))) for seed in range(draws)]
    dense = [off(project_dense(flat, Projection("rademacher", K, seed))) for seed in range(draws)]
    return [float(np.sqrt(np.mean(part))) for part in (sketch, dense)]


def compare(
    theirs: Any, setting: _lds_truth.Setting, states: list[dict[str, torch.Tensor]], root: str
) -> Any:
    """Run both pipelines in turn; return the ratio of their CPU times and both trakers."""
    size = sum(value.numel() for value in states[0].values())
    run_pipeline(ours, setting, states[:1], tempfile.mkdtemp(dir=root))  # a warm-up
    quick, mine = min(
        (
            time_call(run_pipeline, ours, setting, states, tempfile.mkdtemp(dir=root))
            for _ in range(3)
        ),
        key=lambda result: result[0],
    )
    slow, peer = time_call(run_pipeline, theirs, setting, states, tempfile.mkdtemp(dir=root))
    count = len(states)
    print(
        f"  {size:>9,} parameters, {count} checkpoint{'s' if count > 1 else ' '}: "
        f"{quick:.2f} CPU s, traker {slow:.1f}: {slow / quick:.0f}x less"
    )
    return slow / quick, mine, peer


def states_of(trained: _lds_truth.Trained, epoch: int) -> list[dict[str, torch.Tensor]]:
    stacked = trained.states[epoch]
    count = len(next(iter(stacked.values())))
    return [{name: value[i] for name, value in stacked.items()} for i in range(count)]


def main() -> int:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as root:
        return measure(root)


def measure(root: str) -> int:
    try:
        theirs = import_released()
    except (ImportError, subprocess.CalledProcessError) as error:
        print(f"the released package cannot be had: {error}")
        return 1
    small = dataclasses.replace(_lds_truth.build_digits_mlp(), batch_size=32, lr=0.05)
    large = dataclasses.replace(small, make=_lds_truth.mlp(64, 256, 256))
    states = states_of(
        _lds_truth.train_full_runs(small, CHECKPOINTS, keep=(small.epochs,)), small.epochs
    )
    rows = f"{len(small.train[1])} digits to train, {len(small.test[1])} to score"
    print(f"whole pipeline, k = {K}, {rows} (bar {SPEED:.0f} at 85,002 parameters):")
    _, mine, peer = compare(theirs, small, states, root)
    wide = states_of(_lds_truth.train_full_runs(large, 1, keep=(large.epochs,)), large.epochs)
    speed, _, _ = compare(theirs, large, wide, root)

    sketch, dense = measure_errors(small, states[0])
    print(
        f"error of inner products: {sketch:.4f}, dense Rademacher {dense:.4f} (1 / sqrt(k) = "
        f"{K**-0.5:.4f}): {sketch / dense:.2f}x (bar {ERROR})"
    )

    truth = _lds_truth.compute_truth(small, subsets=SUBSETS, seeds=SEEDS)
    print(
        f"LDS on {SUBSETS} halves x {SEEDS} seeds, {CHECKPOINTS} checkpoints (ceiling "
        f"{truth.ceiling:.2f}); ridges times the mean diagonal:"
    )
    print(f"  {'ridge':<16}{'ours':>8}{'':16}{'traker':>8}")
    own, low, high = _lds_truth.compute_lds(np.asarray(mine.scores).T, truth)
    plain = _lds_truth.compute_lds(np.asarray(peer.scores).T, truth)[0]
    print(f"  {'default':<16}{own:>8.3f} [{low:.3f}, {high:.3f}]{plain:>8.3f}")
    scores = []
    for ridge in RIDGES:
        both = [
            _lds_truth.compute_lds(score_with_ridge(traker, ridge), truth)[0]
            for traker in (mine, peer)
        ]
        print(f"  {ridge:<16g}{both[0]:>8.3f}{'':16}{both[1]:>8.3f}")
        scores.append(both)
    best = np.max(scores, 0)
    print(f"  best ridge of each: {best[0] - best[1]:+.3f} (bar 0, a draw of projections {NOISE})")
    return int(speed < SPEED or sketch > ERROR * dense or best[0] < best[1] - NOISE)


if __name__ == "__main__":
    sys.exit(main())
