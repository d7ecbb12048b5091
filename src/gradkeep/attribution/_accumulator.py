"""Adding up the scores of several checkpoints, in memory or on disk."""

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
    """Scores `[Q, N]` of C checkpoints, added up as they come, and how far those agree.

    For every query the scores of each checkpoint are centred and scaled to length one, z_c; their
    mean correlation is r = (|sum z_c|^2 - C) / (C (C - 1)), and what their mean would correlate
    with the mean of C others is C r / (1 + (C - 1) r), its confidence.
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
        self._agreeing = (
            zeros_on_disk_or_in_memory(shape[-2:], limit=limit // 2) if several else None
        )

    def add(self, start: int, scores: torch.Tensor) -> None:
        """Add a checkpoint's scores `[..., b, N]` of the queries from `start` on."""
        rows = slice(start, start + scores.shape[-2])
        self.values[..., rows, :] += self.weight * scores.detach().cpu().float().numpy()
        if self._agreeing is None:
            return
        whole = scores.sum(0) if scores.dim() == 3 else scores
        centred = whole.detach().cpu().double()
        centred = centred - centred.mean(1, keepdim=True)
        length = centred.norm(dim=1, keepdim=True)
        scaled = torch.where(length > 0, centred / length, torch.zeros_like(centred))
        self._agreeing[rows] += scaled.float().numpy()

    def confidence(self) -> Floats | None:
        """How much each query's scores `[Q]` would agree with those of as many other checkpoints."""
        if self._agreeing is None:
            return None
        count = self.checkpoints
        found = np.empty(len(self._agreeing), np.float32)
        for row, summed in enumerate(self._agreeing):
            length = float(np.square(summed, dtype=np.float64).sum())
            r = (length - count) / (count * (count - 1))
            found[row] = count * r / (1 + (count - 1) * r) if r > 0 else 0.0
        return found


IN_MEMORY = 4 << 30
"""Bytes of scores that are held in memory unless a budget says otherwise."""


def zeros_on_disk_or_in_memory(shape: tuple[int, ...], *, limit: int = IN_MEMORY) -> Floats:
    """Zeros in memory if they take no more than `limit` bytes, else on disk.

    >>> zeros_on_disk_or_in_memory((2, 3)).shape, type(zeros_on_disk_or_in_memory((2, 3), limit=1)).__name__
    ((2, 3), 'memmap')
    """
    size = math.prod(shape) * 4
    if size <= limit:
        return np.zeros(shape, np.float32)
    # The file has no name: it is gone with the last array that maps it.
    with tempfile.TemporaryFile(prefix="gradkeep-scores-") as file:
        file.truncate(size)
        return np.memmap(file, np.float32, "r+", shape=shape)
