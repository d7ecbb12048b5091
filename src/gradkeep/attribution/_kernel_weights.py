"""Per training row, pooled over checkpoints: the slope of its loss, and its weight in the curvature."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch

from gradkeep.attribution._row_features import column
from gradkeep.errors import AttributionError

if TYPE_CHECKING:
    from torch import Tensor

    from gradkeep.attribution._question import AttributionQuestion
    from gradkeep.query._gradients import GradientOf
    from gradkeep.store import Block

KernelWeight = Literal["q", "q(1-q)", "none"]
ScoreTarget = Literal["loss", "output"]
"""What a score is about: the query's loss (positive lowers it) or its output (positive raises it)."""
WEIGHTS: tuple[KernelWeight, ...] = ("q", "q(1-q)", "none")
LEAST = 1e-12
"""Weights are no smaller: a row that the model is sure of still has a place in the kernel."""


@dataclass(frozen=True, slots=True, eq=False)
class LossSlopes:
    """Per training row: what its loss does along its output."""

    of: GradientOf
    """Whose gradients the kernel is made of."""
    pull: Tensor
    """`[N]`: -d loss / d output, the mean over checkpoints; 1 where losses are all there is"""
    weight: Tensor
    """`[N]`: the weight of the row in the curvature"""
    query_pull: Tensor
    """`[Q]`: what turns a score of the query's output into one of its loss"""

    def about_queries(self, scores: Tensor, start: int, stop: int) -> Tensor:
        """Scores `[..., stop - start, N]` of outputs as scores of the target."""
        return scores * self.query_pull[start:stop, None]


def loss_slopes(
    question: AttributionQuestion,
    weight: KernelWeight,
    *,
    q: Any = None,
    target: ScoreTarget = "loss",
) -> LossSlopes:
    """The pulls and weights of the training rows, from what was kept of them.

    Where loss = log(1 + exp(-output)), q = 1 - p is the pull, and the weight is what was asked
    for. Of other losses of one output, such as squared errors, the weight is 1 (Gauss-Newton).
    Where only losses were kept, their gradients make the kernel, and both are 1. `q [N]` may be
    given, for example the mean over models that did not see the row.

    A score says what a row does to the query's output. Multiplied by -d loss / d output of the
    query, the mean over checkpoints, it says what the row does to the query's loss. Margins are
    left as they are: raising one always lowers its loss. `target="output"` leaves every output so.
    """
    if weight not in WEIGHTS:
        raise AttributionError(f"weight {weight!r}", expected=" or ".join(map(repr, WEIGHTS)))
    places = question.at()
    rows = len(places[0].train_block)
    as_is = torch.ones(len(question.positions))
    if not all(at.has_outputs() for at in places):
        _refuse(q)
        if target == "output":
            raise AttributionError(
                "scores of outputs need captured outputs: these captures keep losses only",
                expected="a task with one output per sample, such as gk.Classification()",
                fix="leave target out",
            )
        return LossSlopes("loss", torch.ones(rows), torch.ones(rows), as_is)
    if not all(_is_margin(at.train_block) for at in places):
        _refuse(q)
        mean = _mean([-column(at.train_block, "slope", method="kernel") for at in places])
        if target == "loss":
            pulls = [-column(at.query_block, "slope", method="kernel") for at in places]
            as_is = _mean(pulls)[torch.from_numpy(question.positions)]
        return LossSlopes("output", mean, torch.ones(rows), as_is)
    # Probabilities are averaged, not their logarithms.
    pooled = (
        _mean([-column(at.train_block, "slope", method="kernel") for at in places])
        if q is None
        else _given(q)
    )
    if pooled.shape != (rows,):
        raise AttributionError(
            "q needs one value per training row",
            found=f"shape {list(pooled.shape)}",
            expected=f"[{rows}]",
        )
    by = {"q": pooled, "q(1-q)": pooled * (1 - pooled), "none": torch.ones(rows)}[weight]
    return LossSlopes("output", pooled, by.clamp(min=LEAST), as_is)


def _is_margin(block: Block) -> bool:
    """Tell whether the loss is that of a margin: log(1 + exp(-output))."""
    if "output" not in block.names:  # imported from TRAK, which keeps only the slopes
        slopes = column(block, "slope", method="kernel")
        return bool(((slopes >= -1) & (slopes <= 0)).all())
    outputs = column(block, "output", method="kernel").double()
    expected = torch.nn.functional.softplus(-outputs)
    return torch.allclose(
        column(block, "loss", method="kernel").double(), expected, rtol=1e-3, atol=1e-5
    )


def _mean(parts: list[Tensor]) -> Tensor:
    return torch.stack(parts).double().mean(0).float()


def _given(q: Any) -> Tensor:
    found = torch.as_tensor(np.asarray(q), dtype=torch.float32)
    if not bool(((found >= 0) & (found <= 1)).all()):
        raise AttributionError("q must lie between 0 and 1: it is 1 - p")
    return found


def _refuse(q: Any) -> None:
    if q is not None:
        raise AttributionError(
            "q is about margins, which these captures do not keep",
            fix="capture with gk.Classification(), or leave q out",
        )
