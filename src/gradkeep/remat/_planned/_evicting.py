"""The online runtime as a budget uses it: from when on, with how many bytes, and what it did."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gradkeep.remat._online import Online, Told
    from gradkeep.remat._planned._book import Settings


class Evicting:
    """Steps that no plan is made for."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self.chosen = settings.mode == "online"
        """Whether steps are left to the online runtime."""
        self.peak = 0
        """The most bytes that a step took without a budget, as far as it is known."""
        self.told: Told | None = None
        """What happened in the latest block."""
        self._online: Online | None = None

    def enter(self) -> Online:
        """The runtime, switched on."""
        from gradkeep.remat._online import Online

        if self._online is None:
            self._online = Online(heuristic=self._settings.heuristic)
        self._online.budget = self._bytes()
        self._online.__enter__()
        return self._online

    def step_is_over(self) -> None:
        """A fraction is of what the first step took, which ran without a budget."""
        online = self._online
        if online is None:
            return
        if self.peak == 0:
            self.peak = online.live.peak
            online.limit_to(self._bytes())
        self.told = online.told()

    def leave(self, error: BaseException | None) -> None:
        """Switch it off; everything is brought back."""
        if self._online is not None:
            kind = None if error is None else type(error)
            self._online.__exit__(kind, error, None)
            self.told = self._online.told()

    def _bytes(self) -> float:
        budget = self._settings.budget
        if isinstance(budget, float):
            return int(budget * self.peak) if self.peak else math.inf
        return budget
