"""Coverage of every interval that gradkeep.evaluate prints, in simulated experiments with known truth.

`./x bench coverage` simulates 1,000 experiments for each line, `--quick` 200. An interval at 95 % should hold
the true value in .92 to .98 of them, and exclude zero in at most 6 % of those in which the truth is zero.

Queries, seeds, subsets and random control sets are all drawn anew in each experiment. The true values follow
from the distributions: Spearman's correlation of a bivariate normal with correlation rho is 6/pi asin(rho/2).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from gradkeep.attribution._scores import Scores
from gradkeep.evaluate import compare, lds, leakage
from gradkeep.evaluate._intervals import mean_interval, rank_correlations
from gradkeep.evaluate._removal import _gain
from gradkeep.evaluate._truth import GroundTruth, ceiling_of

Interval = tuple[float, float] | None
Rng = np.random.Generator
COVERAGE, ALARMS = (0.92, 0.98), 0.06
FACTORS, CONTROLS, LEVEL = 12, 5, 0.95


@dataclass(frozen=True)
class Line:
    """One kind of interval: `draw` simulates an experiment and returns the interval."""

    what: str
    truth: float
    draw: Callable[[Rng], Interval]

    def coverage(self, trials: int, seed: int = 0) -> float:
        rng = np.random.default_rng(seed)
        intervals = [self.draw(rng) for _ in range(trials)]
        held = [one is not None and one[0] <= self.truth <= one[1] for one in intervals]
        return float(np.mean(held))


def spearman(rho: Any) -> Any:
    return 6 / np.pi * np.arcsin(rho / 2)


def draw_gain(rng: Rng, *, seeds: int, queries: int, effect: float) -> Interval:
    """`verify_rows`, `groups` and `check_removal`: rows against random sets of as many rows."""
    seed = rng.standard_normal((1, seeds, 1))  # shared by all trainings of a seed
    outputs = seed + rng.standard_normal((1 + CONTROLS, seeds, queries))
    outputs += 0.5 * rng.standard_normal((1 + CONTROLS, seeds, 1))
    outputs[0] += effect + (rng.standard_normal(queries) if queries > 1 else 0)
    outputs[1:] += 0.5 * rng.standard_normal((CONTROLS, 1, 1))
    outputs[1:] += 0.5 * rng.standard_normal((CONTROLS, 1, queries))
    return _gain(outputs, np.arange(9), np.arange(queries), "without", LEVEL).interval


def draw_line(rng: Rng, *, seeds: int, queries: int) -> Interval:
    """A point of a removal curve: a mean over queries and seeds without controls."""
    table = rng.standard_normal((queries, 1)) + 0.5 * rng.standard_normal(seeds)
    return mean_interval(table + rng.standard_normal((queries, seeds)), LEVEL)


def draw_flips(rng: Rng, *, seeds: int, queries: int, share: float) -> Interval:
    """Brittleness: a share of queries and seeds; seeds of a query mostly agree."""
    chance = rng.beta(share, 1 - share, size=(queries, 1))
    return mean_interval((rng.random((queries, seeds)) < chance) * 1.0, LEVEL, share=True)


def draw_leakage(rng: Rng, *, queries: int, share: float) -> Interval:
    """The share of queries whose copy has the largest score."""
    values = np.zeros((queries, 3), np.float32)
    values[np.arange(queries), np.where(rng.random(queries) < share, 0, 1)] = 1
    scores = Scores(values, np.arange(queries), np.arange(3))
    return leakage(scores, np.zeros(queries, int)).interval


@dataclass(frozen=True)
class Study:
    """Subsets with normal features, outputs that are linear in them, and methods that know part of it."""

    error: float
    noise: float = 0.5
    related: bool = True

    def weights(self, rng: Rng, queries: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """True weights of queries, and the scores of two equally good methods."""
        true = rng.standard_normal((queries, FACTORS)) + np.linspace(-1, 1, FACTORS)
        first, second = (
            self.related * true + self.error * rng.standard_normal(true.shape) for _ in range(2)
        )
        return true, first, second

    def lds(self) -> float:
        true, scores, _ = self.weights(np.random.default_rng(9), 200_000)
        size = np.linalg.norm(scores, axis=1) * np.sqrt((true**2).sum(1) + self.noise**2)
        return float(spearman((true * scores).sum(1) / size).mean())

    def ceiling(self, seeds: int) -> float:
        signal = (self.weights(np.random.default_rng(9), 200_000)[0] ** 2).sum(1)
        return float(spearman(np.sqrt(signal / (signal + self.noise**2 / seeds))).mean())

    def draw(self, rng: Rng, subsets: int, queries: int, seeds: int = 1) -> tuple[Any, ...]:
        """Predictions of both methods `[m, T]` and outputs `[m, seeds, T]`."""
        true, *methods = self.weights(rng, queries)
        features = rng.standard_normal((subsets, FACTORS))
        noise = self.noise * rng.standard_normal((subsets, seeds, queries))
        return (*(features @ one.T for one in methods), (features @ true.T)[:, None] + noise)


def draw_lds(rng: Rng, *, study: Study, subsets: int, queries: int) -> Interval:
    predicted, _, outputs = study.draw(rng, subsets, queries)
    return rank_correlations(predicted, outputs[:, 0]).interval(LEVEL)


def draw_difference(rng: Rng, *, study: Study, subsets: int, queries: int) -> Interval:
    first, second, outputs = study.draw(rng, subsets, queries)
    # Scores whose sums over masks are these predictions: each subset has one row of its own.
    truth = GroundTruth("simulated", np.eye(subsets, dtype=bool), outputs)
    ids = np.arange(queries), np.arange(subsets)
    one, other = (lds(Scores(x.T.astype("f4"), *ids), truth, part="all") for x in (first, second))
    return compare(one, other).interval


def draw_ceiling(rng: Rng, *, study: Study, subsets: int, queries: int, seeds: int) -> Interval:
    ceiling = ceiling_of(study.draw(rng, subsets, queries, seeds)[2], LEVEL)
    return None if ceiling is None else ceiling.interval


def draw_agreement(rng: Rng, *, rho: float, queries: int) -> Interval:
    """`check_removal`: one correlation over queries."""
    predicted = rng.standard_normal((queries, 1))
    change = rho * predicted + np.sqrt(1 - rho**2) * rng.standard_normal((queries, 1))
    return rank_correlations(predicted, change).interval(LEVEL)


STUDIES = {"high": Study(0.2), "middle": Study(1.0, noise=2.0), "null": Study(1.0, related=False)}


def lines() -> Iterator[Line]:
    for seeds in (3, 5, 10):
        at = f"{seeds} seeds"
        for queries in (1, 10, 50):
            for effect, kind in ((1.0, "effect"), (0.0, "null")):
                draw = partial(draw_gain, seeds=seeds, queries=queries, effect=effect)
                yield Line(f"gain over random rows, {kind}, {at}, {queries} queries", effect, draw)
        yield Line(
            f"removal curve, {at}, 10 queries", 0.0, partial(draw_line, seeds=seeds, queries=10)
        )
        for share in (0.1, 0.5):
            draw = partial(draw_flips, seeds=seeds, queries=20, share=share)
            yield Line(f"brittleness {share}, {at}, 20 queries", share, draw)
        draw = partial(draw_ceiling, study=STUDIES["middle"], subsets=50, queries=20, seeds=seeds)
        yield Line(f"ceiling, {at}, 50 subsets", STUDIES["middle"].ceiling(seeds), draw)
    for share in (0.1, 0.5):
        draw = partial(draw_leakage, queries=20, share=share)
        yield Line(f"leakage {share}, 20 queries", share, draw)
    for subsets in (20, 50, 100):
        for name, study in STUDIES.items():
            truth = study.lds() if study.related else 0.0
            at = {"study": study, "subsets": subsets, "queries": 20}
            yield Line(
                f"LDS, {name} ({truth:.2f}), {subsets} subsets", truth, partial(draw_lds, **at)
            )
            draw = partial(draw_difference, **at)
            yield Line(f"LDS difference, null, {name}, {subsets} subsets", 0.0, draw)
        for rho, kind in ((0.9, "high"), (0.5, "middle"), (0.0, "null")):
            draw = partial(draw_agreement, rho=rho, queries=subsets)
            yield Line(f"agreement, {kind}, {subsets} queries", float(spearman(rho)), draw)


def main() -> int:
    trials = 200 if "--quick" in sys.argv else 1000
    missed = 0
    print(f"{'interval at 95 %':52}{'coverage':>10}{'null alarms':>13}   ({trials} experiments)")
    for line in lines():
        coverage = line.coverage(trials)
        null = line.truth == 0 and "null" in line.what
        inside = COVERAGE[0] <= coverage <= COVERAGE[1] and not (null and 1 - coverage > ALARMS)
        missed += not inside
        alarms = f"{1 - coverage:.1%}" if null else "-"
        print(
            f"{line.what:52}{coverage:>10.3f}{alarms:>13}{'' if inside else '   MISSED'}",
            flush=True,
        )
    print(
        f"bars: coverage {COVERAGE[0]} to {COVERAGE[1]}, null alarms at most {ALARMS:.0%}: {missed} missed"
    )
    return 1 if missed and "--quick" not in sys.argv else 0


if __name__ == "__main__":
    sys.exit(main())
