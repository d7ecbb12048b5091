"""Trainings inside a byte budget, one after the other: what one was planned, the next one uses."""

from __future__ import annotations

import contextlib
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from gradkeep.errors import RematError

if TYPE_CHECKING:
    from collections.abc import Iterator


class Budgeted:
    """A budget for all trainings of this process.

    Every model is new to it, so that each training begins with recorded steps; but the plans of
    models of the same kind are the same, and are searched for only once.
    """

    def __init__(self, budget: float | str) -> None:
        self.budget = budget
        self._plans: str | None = None

    @contextlib.contextmanager
    def training(self) -> Iterator[None]:
        """Train inside the budget."""
        from gradkeep.remat import memory_budget

        budget = memory_budget(self.budget)
        with tempfile.TemporaryDirectory(prefix="gradkeep-plans-") as folder:
            plans = Path(folder) / "plans.json"
            if self._plans is not None:
                plans.write_text(self._plans)
                budget.load(plans)
            with budget:
                yield
            # Without enough steps there is no plan, and nothing to pass on.
            with contextlib.suppress(RematError):
                budget.save(plans)
                self._plans = plans.read_text()
