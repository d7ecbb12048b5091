"""Fingerprints of a recipe's rows, which tell whether a capture holds them in the same order."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import default_collate

from gradkeep.capturing._batches import digests
from gradkeep.errors import EvaluationError, GradkeepError

if TYPE_CHECKING:
    from gradkeep.attribution._scores import Scores

    AnyArray = np.ndarray[Any, np.dtype[Any]]

_SAMPLED = 512
"""Rows whose fingerprints are kept, evenly spaced: 8 kB of text, and a shuffle moves most of them."""
_AT_ONCE = 256


def sample_rows(data: Any) -> str | None:
    """Fingerprint evenly spaced rows of a data set: hexadecimal digests in order.

    A row's digest is the one that `gk.capture` keeps as `example`, for a loader that delivers the
    same tensors. None if rows cannot be read as tensors.
    """
    try:
        pair = isinstance(data, tuple | list) and len(data) == 2 and hasattr(data[0], "shape")
        count = len(data[0]) if pair else len(data)
        places = _places(count)
        if pair:
            whole = tuple(torch.as_tensor(part)[torch.from_numpy(places)] for part in data)
            found = digests(whole)
        elif isinstance(data, torch.Tensor | np.ndarray):
            found = digests(torch.as_tensor(data)[torch.from_numpy(places)])
        else:
            parts = [
                digests(default_collate([data[int(at)] for at in places[start : start + _AT_ONCE]]))
                for start in range(0, len(places), _AT_ONCE)
            ]
            found = np.concatenate(parts) if parts else np.empty(0, np.uint64)
    except (TypeError, ValueError, IndexError, KeyError, RuntimeError, GradkeepError):
        return None
    return " ".join(f"{int(digest):016x}" for digest in found)


def check_order(sampled: str | None, examples: AnyArray, *, what: str) -> None:
    """Raise if a sampled row is in the capture at another place than in the recipe.

    Rows that the capture does not hold at all are no evidence: padding and added columns change a
    row's digest. A row that is there, but elsewhere, is.

    Args:
        sampled: What `sample_rows` gave for the recipe's data.
        examples: Digests `[N]` of the captured rows at their places, zero where there is none.
        what: Name of the rows in the error.
    """
    wanted = np.array([int(digest, 16) for digest in (sampled or "").split()], np.uint64)
    places = _places(len(examples))
    if len(wanted) != len(places):
        return  # nothing was sampled, or of another number of rows
    captured = examples[places]
    moved = (captured != wanted) & (captured != 0) & np.isin(wanted, examples)
    if moved.any():
        row = int(places[moved][0])
        raise EvaluationError(
            f"the {what} were captured in another order than the ground truth has them",
            found=f"row {row} of the ground truth is at place "
            f"{int(np.flatnonzero(examples == wanted[moved][0])[0])} of the capture",
            expected="the same rows in the same order",
            fix="capture the rows in the order of the recipe, or train a ground truth for the "
            "captured order under another name",
        )


def captured_examples(scores: Scores, split: str, ids: AnyArray) -> AnyArray | None:
    """Digests of rows of a split, from a capture that the scores were computed from."""
    if scores.store is None:
        return None
    for key in scores.store.captures():
        if key.split == split and key.folder in scores.captures:
            block = scores.store.read(key)
            if "example" not in block.names or not np.isin(ids, block.ids).all():
                return None
            found: AnyArray = block.column("example")[block.positions(ids)]
            return found
    return None


def _places(count: int) -> AnyArray:
    return np.unique(np.linspace(0, max(0, count - 1), min(count, _SAMPLED)).astype(np.int64))
