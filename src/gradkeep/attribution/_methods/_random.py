"""`random`: what every method must beat."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from gradkeep.attribution._method import Method, Scorer
from gradkeep.attribution._projections import _random

if TYPE_CHECKING:
    from torch import Tensor

    from gradkeep.attribution._question import CheckpointView


@dataclass(frozen=True, slots=True)
class Options:
    """What `random` can be told."""

    seed: int = 0


def _prepare(at: CheckpointView, options: Options) -> Scorer:
    question = at.question
    queries, train = at.query_block.ids[question.positions], at.train_block.ids.astype(np.uint64)

    def score(start: int, stop: int) -> Tensor:
        rows = [_numbers(train, options.seed, int(query)) for query in queries[start:stop]]
        return torch.from_numpy(np.stack(rows))

    return Scorer(score)


def _numbers(
    ids: np.ndarray[tuple[int], np.dtype[np.uint64]], seed: int, query: int
) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    """Between -1 and 1, by the ids alone: other rows, orders or tiles change nothing."""
    key = _random.raw(2, "random scores", seed, query)
    with np.errstate(over="ignore"):  # the finaliser of splitmix64, modulo 2^64
        mixed = (ids + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15) + key[0]
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27)) ^ key[1]) * np.uint64(0x94D049BB133111EB)
        mixed = mixed ^ (mixed >> np.uint64(31))
    return np.asarray(mixed.astype(np.float64) / 2.0**63 - 1, np.float32)


METHOD = Method(
    "random",
    "a random number between -1 and 1 for every pair of ids",
    "nothing but the ids of both splits",
    "Q x N random numbers",
    exact=True,
    reference="the baseline that says what chance looks like",
    prepare=_prepare,
    options=Options,
)
