"""What looks wrong in gradients as they pass: not a number, zero, about to vanish."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from gradkeep.errors import CaptureError

if TYPE_CHECKING:
    import numpy as np

    from gradkeep.capturing._prepare import Prepared


class Alarms:
    """Counts what looks wrong in the gradients that pass."""

    def __init__(self) -> None:
        self.rows = self.zero = self.tiny = 0
        self.example: int | None = None

    def look(self, ids: np.ndarray[Any, Any], values: dict[str, Any], prepared: Prepared) -> None:
        """Stop at NaN and infinity, which would spoil every answer; count vanished gradients."""
        lengths = torch.from_numpy(values["norms"])
        finite = lengths.isfinite()
        if not finite.all():
            row, layer = (~finite).nonzero()[0].tolist()
            raise CaptureError(
                f"the gradient of sample {ids[row]} is not a number in layer "
                f"{prepared.kept[layer].unit.name}; nothing of this batch was kept",
                found=f"loss {values['loss'][row]}",
                fix="look at that sample, or capture an earlier checkpoint: training diverged",
            )
        total = values["norm"]
        self.rows += len(total)
        zero = total == 0
        self.zero += int(zero.sum())
        self.tiny += int(((total > 0) & (total < 1e-30)).sum())
        if self.example is None and zero.any():
            self.example = int(ids[zero.argmax()])

    def check_all_zero(self) -> None:
        """Raise before anything is sealed if there was not a single gradient."""
        if self.rows and self.zero == self.rows:
            raise CaptureError(
                "all gradients are zero: there is nothing to answer questions with",
                found=f"{self.rows} samples",
                expected="a loss that depends on the chosen layers",
                fix="check the task and the labels; dead units or a detached loss do this",
            )

    def notes(self) -> list[str]:
        """What a user should know."""
        found = []
        if self.zero:
            found.append(
                f"{self.zero} of {self.rows} samples have a gradient of exactly zero, the first "
                f"is {self.example}: no method can say anything about them"
            )
        if self.tiny:
            found.append(f"{self.tiny} samples have gradients below 1e-30: they may underflow")
        return found
