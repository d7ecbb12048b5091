"""Scores of several methods or runs, made into one."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from gradkeep._annotations import checked
from gradkeep._ranks import ranks
from gradkeep.attribution._accumulator import zeros_on_disk_or_in_memory
from gradkeep.errors import AttributionError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gradkeep.attribution._scores import Scores

    Floats = np.ndarray[Any, np.dtype[np.float32]]


@checked(AttributionError)
def combine(scores: Sequence[Scores], *, how: Literal["mean", "borda"] = "mean") -> Scores:
    """One set of scores `[Q, N]` from several of the same queries and rows.

    `mean`: each query's scores are centred and divided by their standard deviation, so that every
    method counts the same, then averaged. `borda`: each query's rows are ranked, and their mean
    rank is scaled to run from -1 to 1. Costs C x Q x N (log N for ranks).

    >>> from gradkeep.attribution._scores import Scores
    >>> one = Scores(np.array([[1.0, 2.0, 9.0]], np.float32), np.array([0]), np.arange(3))
    >>> combine([one, one], how="borda").values.tolist()
    [[-1.0, 0.0, 1.0]]
    """
    if how not in ("mean", "borda"):
        raise AttributionError(f"no way to combine called {how!r}", expected="'mean' or 'borda'")
    if len(scores) == 0:
        raise AttributionError("no scores to combine")
    first = scores[0]
    for other in scores[1:]:
        for part in ("query_ids", "train_ids"):
            if not np.array_equal(getattr(first, part), getattr(other, part)):
                raise AttributionError(
                    f"scores of different {part.replace('_', ' ')} cannot be combined",
                    found=f"{len(getattr(first, part))} and {len(getattr(other, part))}",
                    fix="ask all methods about the same queries and training rows",
                )
    values = zeros_on_disk_or_in_memory(first.shape)
    turn = _standard if how == "mean" else _places
    for row in range(len(values)):
        values[row] = np.mean([turn(one.values[row]) for one in scores], 0)
    names = ", ".join(one.method for one in scores)
    return dataclasses.replace(
        first,
        values=values,
        method=f"{how} of {names}",
        checkpoints=tuple(dict.fromkeys(c for one in scores for c in one.checkpoints)),
        scale="mean of standardised scores" if how == "mean" else "mean rank, from -1 to 1",
        exact=all(one.exact for one in scores),
        approximate=next((one.approximate for one in scores if one.approximate), None),
        options="{}",
        chosen=None,
        chosen_on=tuple(dict.fromkeys(one for part in scores for one in part.chosen_on)),
        confidence=None,
        per_layer=None,
        captures={folder: one for part in scores for folder, one in part.captures.items()},
        plan=None,
    )


def _standard(row: Floats) -> Any:
    spread = float(row.std(dtype=np.float64))
    return (row - row.mean(dtype=np.float64)) / (spread or 1.0)


def _places(row: Floats) -> Any:
    return 2 * ranks(row[:, None])[:, 0] / max(1, len(row) - 1) - 1
