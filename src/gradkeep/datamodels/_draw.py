"""Random subsets of the training set that anybody can draw again from two numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from gradkeep.errors import StudyError

if TYPE_CHECKING:
    from collections.abc import Sequence

Subsets = Literal["fixed", "independent"]
"""`fixed`: every subset has the same size; `independent`: every example with the same chance."""

_MASK, _TRAINING = 0, 1


def draw_masks(
    seed: int,
    indices: Sequence[int],
    *,
    num_examples: int,
    alpha: float = 0.5,
    subsets: Subsets = "fixed",
) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """The masks `[K, num_examples]` of these models: each follows from (seed, index) alone.

    >>> draw_masks(0, [5], num_examples=8).astype(int).tolist()
    [[0, 0, 1, 1, 0, 0, 1, 1]]
    """
    check_alpha(alpha, num_examples=num_examples)
    masks = np.zeros((len(indices), num_examples), np.bool_)
    for mask, index in zip(masks, indices, strict=True):
        # The raw stream of a bit generator is the one thing numpy promises never to change.
        keys = _bits(seed, index, _MASK).random_raw(num_examples)
        if subsets == "fixed":
            mask[np.argsort(keys, kind="stable")[: subset_size(alpha, num_examples)]] = True
        else:
            mask[:] = keys < np.uint64(min(round(alpha * 2**64), 2**64 - 1))
    return masks


def training_seed(seed: int, index: int) -> int:
    """The seed for whatever else is random in a model's training, below 2**31."""
    return int(_bits(seed, index, _TRAINING).random_raw()) >> 33


def subset_size(alpha: float, num_examples: int) -> int:
    """How many examples a subset of fixed size has."""
    return max(1, round(alpha * num_examples))


def check_alpha(alpha: float, *, num_examples: int) -> None:
    """Refuse a share that leaves nothing to learn from, or nothing out."""
    if not 0 < alpha < 1:
        raise StudyError(
            "alpha is the share of examples in a subset", found=alpha, expected="0 < alpha < 1"
        )
    if num_examples < 2:
        raise StudyError("subsets need examples to choose from", found=f"{num_examples} examples")


def _bits(seed: int, index: int, purpose: int) -> np.random.Philox:
    if seed < 0 or index < 0:
        raise StudyError("seeds and indices are at least 0", found=f"seed {seed}, index {index}")
    return np.random.Philox(np.random.SeedSequence([seed, index, purpose]))
