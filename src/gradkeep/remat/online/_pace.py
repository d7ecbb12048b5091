"""Whether operators are large enough for deciding about each as it comes: told after the first few."""

from __future__ import annotations

import logging

_LOGGER = logging.getLogger("gradkeep.remat")
_FIRST = 16
"""Operators that are passed over: what they are is looked up for the first time."""
_MEASURED = 32
_TOO_SLOW = 3.0
"""Times the plain time, before anything is evicted; at .8 of the peak it is three to ten times as much."""


class Pace:
    """What the first operators take by themselves, and with all that is done around them."""

    def __init__(self) -> None:
        self._seen = 0
        self._whole: list[int] = []
        self._alone: list[int] = []

    def known(self, whole: int, alone: int) -> bool:
        """Note one operator, in nanoseconds of its thread; whether enough have been seen."""
        if alone <= 0:
            return False  # a view: nothing ran
        self._seen += 1
        if self._seen > _FIRST:
            self._whole.append(whole)
            self._alone.append(alone)
        return len(self._whole) >= _MEASURED

    def warning(self) -> str | None:
        """Say it, once and early, if a plan is what this step needs."""
        # Sums, not medians: many small operators do no harm beside a few large ones.
        whole, alone = sum(self._whole) / _MEASURED, sum(self._alone) / _MEASURED
        if whole < _TOO_SLOW * alone:
            return None
        said = (
            f"operators of this step take about {alone / 1e3:.0f} us each, and deciding about each "
            f"takes {(whole - alone) / 1e3:.0f} us more: expect {whole / alone:.0f} times the plain "
            "time while nothing is evicted, and several times that in a tight budget; mode='planned' "
            "of gradkeep.memory_budget decides once, before, and adds microseconds per saved tensor"
        )
        _LOGGER.warning(said)
        return said
