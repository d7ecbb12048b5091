"""Subsets and outputs whose true weights are known: to try a method before trusting it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from gradkeep import _arguments
from gradkeep._annotations import checked
from gradkeep.errors import DatamodelsError

if TYPE_CHECKING:
    from gradkeep.datamodels.fitting._masks import AnyArray


@dataclass(frozen=True, slots=True, eq=False)
class PlantedData:
    """`masks [m, n]`, `outputs [m, t]`, and the `weights [n, t]` and `bias [t]` they came from."""

    masks: AnyArray
    outputs: AnyArray
    weights: AnyArray
    bias: AnyArray


@checked(DatamodelsError)
def planted(
    models: int,
    examples: int,
    targets: int,
    *,
    alpha: float = 0.5,
    large: int = 5,
    tail: float = 0.02,
    explained: float = 0.8,
    seed: int = 0,
) -> PlantedData:
    """Outputs = masks . weights + bias + noise, with `large` weights per target over a dense tail.

    Every example is in a subset with probability `alpha`; `explained` is the part of an output's
    variance that is no noise.

    >>> data = planted(100, 20, 3)
    >>> data.masks.shape, data.outputs.shape, data.weights.shape
    ((100, 20), (100, 3), (20, 3))
    """
    for name, value in (("models", models), ("examples", examples), ("targets", targets)):
        _arguments.count(name, value, error=DatamodelsError, least=1)
    for name, value in (("large", large), ("seed", seed)):
        _arguments.count(name, value, error=DatamodelsError)
    _arguments.fraction("alpha", alpha, error=DatamodelsError)
    _arguments.number("tail", tail, error=DatamodelsError, least=0)
    _arguments.number("explained", explained, error=DatamodelsError, above=0, most=1)
    rng = np.random.default_rng(seed)
    masks = rng.random((models, examples)) < alpha
    weights = rng.normal(0, tail, (examples, targets))
    for target in range(targets):
        chosen = rng.choice(examples, min(large, examples), replace=False)
        weights[chosen, target] += rng.laplace(0, 0.5, len(chosen))
    signal = masks.astype(np.float64) @ weights
    noise = rng.standard_normal(signal.shape) * signal.std(axis=0) * np.sqrt(1 / explained - 1)
    bias = rng.normal(0, 3, targets)
    return PlantedData(masks, signal + noise + bias, weights, bias)
