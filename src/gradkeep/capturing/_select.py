"""Choosing layers by name, glob or type."""

from __future__ import annotations

import difflib
import fnmatch
from typing import TYPE_CHECKING

from gradkeep.errors import CaptureError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gradkeep.capturing._units import Unit

Selection = str | type | None


def selected(units: Sequence[Unit], choice: Selection | Sequence[str | type]) -> list[Unit]:
    """The units that a choice names: `"fc*"`, `nn.Linear`, `"Linear"`, several of them, None for all.

    A leading `!` leaves out: `["*", "!*.bias"]`. A choice that matches nothing is an error that
    offers the nearest names.
    """
    if choice is None:
        return list(units)
    wanted: list[str | type] = [choice] if isinstance(choice, str | type) else list(choice)
    keep = [False] * len(units)
    if wanted and all(isinstance(item, str) and item.startswith("!") for item in wanted):
        keep = [True] * len(units)
    for item in wanted:
        leave_out = isinstance(item, str) and item.startswith("!")
        pattern = item[1:] if isinstance(item, str) and leave_out else item
        found = [index for index, unit in enumerate(units) if _matches(unit, pattern)]
        if not found:
            raise _nothing(units, pattern)
        for index in found:
            keep[index] = not leave_out
    chosen = [unit for unit, kept in zip(units, keep, strict=True) if kept]
    if not chosen:
        raise CaptureError(
            "no layer is left", found=f"layers={choice!r}", fix="choose at least one layer"
        )
    return chosen


def _matches(unit: Unit, pattern: str | type) -> bool:
    if isinstance(pattern, type):
        return any(isinstance(module, pattern) for module in unit.modules)
    names = (unit.name, *unit.also)
    if unit.type == pattern or pattern in names:
        return True
    return any(
        fnmatch.fnmatchcase(name, pattern) or name.startswith(f"{pattern}.") for name in names
    )


def _nothing(units: Sequence[Unit], pattern: str | type) -> CaptureError:
    names = [unit.name for unit in units]
    types = sorted({unit.type for unit in units})
    shown = pattern if isinstance(pattern, str) else pattern.__name__
    near = difflib.get_close_matches(shown, [*names, *types], n=3, cutoff=0.4)
    return CaptureError(
        f"no layer matches {shown!r}",
        found=f"{len(names)} layers: {', '.join(names[:8])}{' ...' if len(names) > 8 else ''}",
        expected=f"a name, a glob such as 'layer4.*', or a type of {', '.join(types)}",
        fix=f"did you mean {' or '.join(near)}? gk.layers(model) lists them"
        if near
        else "gk.layers(model) lists them",
    )
