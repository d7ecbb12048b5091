"""A projection that is not a number never leaves as one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gradkeep.errors import AttributionError

if TYPE_CHECKING:
    from torch import Tensor


def require_finite(values: Tensor, ids: Any = None) -> Tensor:
    """The values `[B, k]`, if all are finite; else an error that names the first rows."""
    # What is not finite leaves no sum finite: one pass, and a closer look only if it must be.
    if bool(values.sum().isfinite()):
        return values
    good = values.isfinite().all(1)
    if bool(good.all()):
        return values
    bad = (~good).nonzero()[:, 0].tolist()
    named = bad if ids is None else [int(ids[row]) for row in bad]
    raise AttributionError(
        f"{len(bad)} gradients are infinite or not a number",
        found=f"{'rows' if ids is None else 'ids'} {', '.join(map(str, named[:5]))}"
        + (" ..." if len(bad) > 5 else ""),
        fix="look at the inputs and losses of these rows, or leave them out",
    )
