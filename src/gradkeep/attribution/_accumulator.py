"""Accumulate the scores of several checkpoints, in memory or on disk."""

from __future__ import annotations

import math
import tempfile
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from gradkeep._budgets import parse_bytes

if TYPE_CHECKING:
    from gradkeep.attribution._question import OverCheckpoints

    Floats = np.ndarray[Any, np.dtype[np.float32]]


class ScoreAccumulator:
    """Sum of the scores `[Q, N]` of C checkpoints, and their agreement.

    For every query the scores of each checkpoint are centered and scaled to length one, z_c; their mean
    correlation is r = (|sum z_c|^2 - C) / (C (C - 1)), and the expected correlation of their mean with the
    mean of C others is C r / (1 + (C - 1) r), the confidence.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        *,
        checkpoints: int,
        over: OverCheckpoints,
        memory_budget: float | str | None,
    ) -> None:
        limit = IN_MEMORY if memory_budget is None else parse_bytes(memory_budget) // 2
        several = checkpoints > 1
        self.values = zeros_on_disk_or_in_memory(shape, limit=limit // 2 if several else limit)
        self.checkpoints, self.weight = checkpoints, 1 / checkpoints if over == "mean" else 1.0
        self._unit_sums = (
            zeros_on_disk_or_in_memory(shape[-2:], limit=limit // 2) if several else None
        )

    def add(self, start: int, scores: torch.Tensor) -> None:
        """Add a checkpoint's scores `[..., b, N]` of the queries from `start` on."""
        rows = slice(start, start + scores.shape[-2])
        self.values[..., rows, :] += self.weight * scores.detach().cpu().float().numpy()
        if self._unit_sums is None:
            return
        whole = scores.sum(0) if scores.dim() == 3 else scores
        centered = whole.detach().cpu().double()
        centered = centered - centered.mean(1, keepdim=True)
        length = centered.norm(dim=1, keepdim=True)
        scaled = torch.where(length > 0, centered / length, torch.zeros_like(centered))
        self._unit_sums[rows] += scaled.float().numpy()

    def confidence(self) -> Floats | None:
        """Return the expected agreement `[Q]` with the scores of as many other checkpoints."""
        if self._unit_sums is None:
            return None
        count = self.checkpoints
        confidence = np.empty(len(self._unit_sums), np.float32)
        for row, summed in enumerate(self._unit_sums):
            length = float(np.square(summed, dtype=np.float64).sum())
            r = (length - count) / (count * (count - 1))
            confidence[row] = count * r / (1 + (count - 1) * r) if r > 0 else 0.0
        return confidence


IN_MEMORY = 4 << 30
"""Default limit in bytes of scores in memory; larger ones are written to disk."""


def zeros_on_disk_or_in_memory(shape: tuple[int, ...], *, limit: int = IN_MEMORY) -> Floats:
    """Allocate zeros in memory if they take at most `limit` bytes, else on disk.

    >>> zeros_on_disk_or_in_memory((2, 3)).shape, type(zeros_on_disk_or_in_memory((2, 3), limit=1)).__name__
    ((2, 3), 'memmap')
    """
    size = math.prod(shape) * 4
    if size <= limit:
        return np.zeros(shape, np.float32)
    # The file has no name: it is deleted with the last array that maps it.
    with tempfile.TemporaryFile(prefix="gradkeep-scores-") as file:
        file.truncate(size)
        return np.memmap(file, np.float32, "r+", shape=shape)
