"""Datamodels against other L1 solvers and a plain matrix product, in one run, CPU time.

`./x bench lasso` measures everything; `--quick` smaller sizes without bars; `--memory` only the fit of
20,000 examples under 4 GiB. celer is compared if it can be imported, or if CELER_PYTHON is the Python
of another environment that can import it.

Every solver follows the same 20 penalties from lam_max to lam_max / 100, to a duality gap of at most
1e-4 of half the target's variance. Ours solves all targets together and its time is divided by their
number; against solvers that start from the masks it includes the packing, counts and matrix.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from sklearn.linear_model import lasso_path

from gradkeep.datamodels import Masks, fit, planted
from gradkeep.datamodels._counts import Counts, add_pairs, pair_dtype, standardize
from gradkeep.datamodels._path import PathSolver, follow_path

GAP = 1e-4
FRACTIONS = tuple(np.geomspace(1, 1e-2, 20))


@dataclass(frozen=True)
class Line:
    what: str
    ratio: float
    bar: float | None
    note: str = ""

    def show(self) -> str:
        bar = "" if self.bar is None else f">= {self.bar:g}x"
        return f"{self.what:<62}{self.ratio:>8.1f}x  {bar:<9}{self.note}"


def cpu_seconds(work: Callable[[], object], rounds: int = 1) -> float:
    spent = []
    for _ in range(rounds):
        start = time.process_time()
        work()
        spent.append(time.process_time() - start)
    return min(spent)


def measure_gram(models: int, examples: int, bar: float | None) -> Line:
    dense = np.random.default_rng(0).random((models, examples)) < 0.5
    x = torch.from_numpy(dense).float()
    masks = Masks.of(dense)
    out = np.zeros((examples, examples), pair_dtype(models))
    product = cpu_seconds(lambda: x.T @ x, 2)

    def ours() -> None:
        out[:] = 0
        add_pairs(masks, out)

    spent = cpu_seconds(ours, 3)
    assert np.array_equal(out, (x.T @ x).numpy()), "the counts are not exact"
    name = f"Gram of {models} x {examples} masks, exact / fp32 GEMM"
    return Line(name, product / spent, bar, f"({spent:.2f} s against {product:.2f} s)")


def standardize_columns(masks: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    x = masks.astype(np.float64)
    z = np.asfortranarray((x - x.mean(0)) / x.std(0))
    centred = y - y.mean(0)
    return z, centred / centred.std(0)


def bounds(z: np.ndarray, y: np.ndarray, w: np.ndarray, lam: float) -> tuple[float, float]:
    """Return the objective at w and a lower bound from its dual, both relative to half the
    variance."""
    m = len(y)
    r = y - z @ w
    slope = np.abs(z.T @ r / m).max()
    primal = r @ r / (2 * m) + lam * np.abs(w).sum()
    scale = min(lam / slope, (r @ y) / (r @ r))
    dual = scale * (r @ y) / m - scale**2 * (r @ r) / (2 * m)
    return primal / (y @ y / (2 * m)), dual / (y @ y / (2 * m))


def follow_penalties(
    masks: np.ndarray, outputs: np.ndarray
) -> tuple[float, float, list[np.ndarray]]:
    """Return CPU seconds for counts and matrix, for the path, and the weights `[t, n]` along it."""
    weights: list[np.ndarray] = []

    def visit(index: int, ids: object, lam: object, w: torch.Tensor, gap: object) -> None:
        weights.append(w.numpy().copy())

    start = time.process_time()
    counts = Counts.of(Masks.of(masks), outputs)
    standard = standardize(counts, dtype=torch.float32, device="cpu", dense=True)
    middle = time.process_time()
    with torch.inference_mode():
        solver = PathSolver("l1", 1.0, 0.9 * GAP, 5000, masks.shape[1])
        follow_path(solver, standard, FRACTIONS, 1.0, visit)
    return middle - start, time.process_time() - middle, weights


def measure_paths(sizes: tuple[int, int, int], peers: int, bars: dict[str, float]) -> list[Line]:
    m, n, t = sizes
    data = planted(m, n, t, large=30, tail=0.01, explained=0.6)
    prepared, followed, weights = follow_penalties(data.masks, data.outputs)
    z, y = standardize_columns(data.masks, data.outputs)
    matrix = np.asfortranarray(z.T @ z)
    lines: list[Line] = []
    ours, theirs = 0.0, 0.0
    on_x, on_gram = [], []
    # sklearn's tolerance is relative to y'y / m, twice the reference of our gap.
    on_masks = {"precompute": False, "tol": GAP / 2}
    on_pairs = {"precompute": matrix, "tol": GAP / 2}
    for target in range(peers):
        one = np.ascontiguousarray(y[:, target])
        largest = np.abs(z.T @ one / m).max()
        lams = largest * np.array(FRACTIONS)
        coefs: list[np.ndarray] = []
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            on_x.append(
                cpu_seconds(lambda: coefs.append(lasso_path(z, one, alphas=lams, **on_masks)[1]))  # noqa: B023
            )
            product = z.T @ one
            on_gram.append(
                cpu_seconds(lambda: lasso_path(z, one, alphas=lams, Xy=product, **on_pairs))  # noqa: B023
            )
            best = lasso_path(z, one, alphas=lams, Xy=product, **{**on_pairs, "tol": 1e-7})[1]
        for index, lam in enumerate(lams):
            _, least = bounds(z, one, best[:, index], lam)
            value, _ = bounds(z, one, weights[index][target].astype(np.float64), lam)
            ours = max(ours, value - least)
            theirs = max(theirs, bounds(z, one, coefs[0][:, index], lam)[0] - least)
    name = f"({m}, {n}, {t})"
    each, whole = followed / t, (prepared + followed) / t
    gaps = f"proven {ours:.0e} from the minimum, sklearn {theirs:.0e}"
    assert ours <= GAP, gaps
    lines.append(
        Line(
            f"{name} sklearn lasso_path on X / ours from masks",
            float(np.mean(on_x)) / whole,
            bars.get("x"),
            f"({1e3 * whole:.1f} ms against {1e3 * np.mean(on_x):.0f} per target; {gaps})",
        )
    )
    lines.append(
        Line(
            f"{name} sklearn lasso_path on a Gram / ours on counts",
            float(np.mean(on_gram)) / each,
            bars.get("gram"),
            f"({1e3 * each:.1f} ms against {1e3 * np.mean(on_gram):.0f} per target)",
        )
    )
    if "celer" in bars:
        celer = measure_celer(z, y[:, 0])
        if isinstance(celer, str):
            print(f"celer skipped: {celer}")
        else:
            note = f"({1e3 * whole:.1f} ms against {1e3 * celer:.0f} per target)"
            lines.append(
                Line(
                    f"{name} celer_path on X / ours from masks", celer / whole, bars["celer"], note
                )
            )
    return lines


CELER = """
import json, sys, time, warnings
import numpy as np
from celer import celer_path
warnings.simplefilter("ignore")
z, y = np.asfortranarray(np.load(sys.argv[1])), np.load(sys.argv[2])
lams = np.abs(z.T @ y / len(y)).max() * np.geomspace(1, 1e-2, 20)
# celer's tolerance is relative to y'y / m, twice the reference of our gap.
run = lambda count: celer_path(z[:, :count], y, "lasso", alphas=lams, tol=5e-5)
run(50)  # a warm-up for imports and compilation
start = time.process_time()
run(z.shape[1])
print(json.dumps(time.process_time() - start))
"""


def measure_celer(z: np.ndarray, y: np.ndarray) -> float | str:
    """Return the CPU seconds of celer for one target, or the reason why it failed."""
    python = os.environ.get("CELER_PYTHON", sys.executable)
    with tempfile.TemporaryDirectory() as folder:
        np.save(f"{folder}/z.npy", z)
        np.save(f"{folder}/y.npy", y)
        run = subprocess.run(
            [python, "-c", CELER, f"{folder}/z.npy", f"{folder}/y.npy"],
            capture_output=True,
            text=True,
            check=False,
        )
    if run.returncode:
        reason = (run.stderr.strip().splitlines() or ["unknown error"])[-1]
        return f"{reason} (pip install celer elsewhere and set CELER_PYTHON)"
    return float(json.loads(run.stdout))


def measure_memory(budget: int = 4 << 30) -> Line:
    """Fit 20,000 examples in a separate process and compare its peak with the budget."""
    run = subprocess.run(
        [sys.executable, "-m", "bench.lasso", "--memory"],
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        check=True,
    )
    peak, spent = json.loads(run.stdout)
    note = f"(peak {peak / 2**30:.2f} GiB with libraries and data, {spent:.0f} s CPU)"
    return Line("4 GiB / memory taken by a fit of 20,000 examples", budget / peak, 1.0, note)


def fit_large() -> None:
    rng = np.random.default_rng(0)
    bits = rng.integers(0, 256, (2000, 2500), np.uint8)
    masks = Masks(bits, 20_000)
    weights = np.zeros((20_000, 4), np.float32)
    for target in range(4):
        weights[rng.choice(20_000, 30, replace=False), target] = rng.laplace(0, 1, 30)
    signal = np.concatenate([rows.astype(np.float32) @ weights for _, rows in masks.blocks(500)])
    outputs = signal + signal.std(0) * rng.standard_normal(signal.shape)
    start = time.process_time()
    fitted = fit(masks, outputs, memory_budget="4GiB", lambdas=np.geomspace(1, 0.1, 6))
    assert not fitted.unfinished
    peak = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(json.dumps([peak, time.process_time() - start]))


def fit_with_sklearn(masks: np.ndarray, y: np.ndarray, *, gram: bool) -> np.ndarray:
    """Fit one target like `fit`, with sklearn in float32.

    Holds out a tenth of the models, selects the penalty that predicts them best, then fits all
    models.
    """
    out = np.random.default_rng(0).permutation(len(y))[: len(y) // 10]
    rest = np.setdiff1d(np.arange(len(y)), out)

    def standard(rows: np.ndarray) -> tuple[np.ndarray, ...]:
        x, one = masks[rows].astype(np.float32), y[rows].astype(np.float32)
        mean, scale = x.mean(0), x.std(0)
        z = np.asfortranarray((x - mean) / scale)
        return z, (one - one.mean()) / one.std(), mean, scale, one.mean(), one.std()

    z, one, mean, scale, centre, spread = standard(rest)
    lams = np.abs(z.T @ one / len(one)).max() * np.array(FRACTIONS)
    options = {"precompute": gram, "tol": GAP / 2}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        coefs = lasso_path(z, one, alphas=lams, **options)[1]
        weights = coefs / scale[:, None] * spread
        predicted = masks[out].astype(np.float32) @ weights + centre - mean @ weights
        best = int(((predicted - y[out, None]) ** 2).mean(0).argmin())
        z, one, *_ = standard(np.arange(len(y)))
        first = np.ascontiguousarray(coefs[:, best])
        return lasso_path(z, one, alphas=lams[best : best + 1], coef_init=first, **options)[1]


def measure_one_target(models: int, examples: int, bar: float | None) -> Line:
    """Compare the public `fit` of one target, with penalty selection, to the same by sklearn."""
    data = planted(models, examples, 1, large=30, tail=0.01, explained=0.6)
    y, rounds = data.outputs[:, 0], 5 if models < 5000 else 2
    fit(data.masks[:100, :20], y[:100])
    ours = cpu_seconds(lambda: fit(data.masks, y, lambdas=FRACTIONS), rounds)
    peers = [
        cpu_seconds(partial(fit_with_sklearn, data.masks, y, gram=gram), rounds)
        for gram in (False, True)
    ]
    note = (
        f"({1e3 * ours:.0f} ms against {1e3 * peers[0]:.0f} on X, {1e3 * peers[1]:.0f} on a Gram)"
    )
    name = f"({models}, {examples}, 1) sklearn float32, best / public fit"
    return Line(name, min(peers) / ours, bar, note)


def main(arguments: list[str]) -> int:
    torch.set_num_threads(1)
    if "--memory" in arguments:
        fit_large()
        return 0
    if "--quick" in arguments:
        lines = [measure_one_target(2000, 1000, None), measure_gram(4000, 1000, None)]
        lines += measure_paths((400, 200, 20), 2, {})
    else:
        lines = [measure_one_target(2000, 1000, 1.0), measure_one_target(5000, 2000, 1.0)]
        lines += [measure_one_target(10000, 5000, 1.0), measure_gram(16384, 4000, 5.0)]
        lines += measure_paths((2000, 1000, 50), 5, {"x": 10.0, "gram": 3.0, "celer": 10.0})
        lines += measure_paths((10000, 5000, 20), 2, {"x": 15.0})
        lines.append(measure_memory())
    for line in lines:
        print(line.show())
    return int(any(line.bar is not None and line.ratio < line.bar for line in lines))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
