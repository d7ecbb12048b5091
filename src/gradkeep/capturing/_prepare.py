"""From a model, a task and a first batch to how every layer will be captured and kept."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gradkeep.capturing import _select, _storing
from gradkeep.capturing._settle import settle
from gradkeep.capturing._soon import LATER
from gradkeep.capturing._tracer import Tracer
from gradkeep.capturing._units import units_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn

    from gradkeep.capturing._piece import Piece
    from gradkeep.capturing._select import Selection
    from gradkeep.capturing._settle import Uncovered
    from gradkeep.capturing._storing import Keeping
    from gradkeep.capturing._task import Task
    from gradkeep.capturing._tracer import Of
    from gradkeep.capturing._units import Unit
    from gradkeep.factors import Storage
    from gradkeep.store import Encoding

Plan = str | Mapping[str, str] | None
"""A way to keep all layers, or a way for each glob of layers; None: the smallest."""


@dataclass(frozen=True, slots=True)
class Wishes:
    """What a user may ask of a capture, beside the model and the data."""

    layers: Selection | Sequence[str | type] = None
    of: Of | None = None
    uncovered: Uncovered = "dense"
    encoding: Encoding = "plain"
    plan: Plan = None
    tolerance: float = 0.0


@dataclass(frozen=True, slots=True, eq=False)
class Prepared:
    """A tracer that is ready to run, and how each of its layers is kept."""

    tracer: Tracer
    kept: tuple[Keeping, ...]
    skipped: tuple[Unit, ...]
    pieces: Mapping[Unit, Piece]
    """Those of the batch that this was found out with."""

    @property
    def row_bytes(self) -> float:
        """Bytes on disk of one row's gradients."""
        return sum(keeping.row_bytes for keeping in self.kept)

    @property
    def dense(self) -> frozenset[Unit]:
        """The layers that are kept dense: their factors are not needed once that is made."""
        return frozenset(k.unit for k in self.kept if k.storage == "dense")

    @property
    def light(self) -> frozenset[nn.Module]:
        """Modules whose inputs are needed only until their dense gradients are made."""
        soon = {unit for unit in self.dense if unit.way not in LATER}
        others = [k.unit for k in self.kept if k.unit not in soon]
        needed = {module for unit in others for module in unit.modules}
        return frozenset({module for unit in soon for module in unit.modules} - needed)


def prepare(
    model: nn.Module,
    task: Task,
    batch: Any,
    wishes: Wishes,
    *,
    as_before: Mapping[str, Storage] | None = None,
) -> Prepared:
    """Find out and prove how each chosen layer is captured, and choose how it is kept.

    `as_before` gives the storage of layers that an earlier run of the same capture has chosen.
    """
    units = _select.selected(units_of(model), wishes.layers)
    tracer = Tracer(model, task, wishes.of)
    settled = settle(tracer, units, batch, uncovered=wishes.uncovered)
    tracer = dataclasses.replace(
        tracer, units=settled.units, unused=settled.unused, aside=settled.aside
    )
    wanted = _wanted(settled.units, wishes.plan, as_before or {})
    kept = _storing.choose(
        settled.pieces, encoding=wishes.encoding, wanted=wanted, tolerance=wishes.tolerance
    )
    return Prepared(tracer, tuple(kept), settled.skipped, settled.pieces)


def _wanted(
    units: Sequence[Unit], plan: Plan, as_before: Mapping[str, Storage]
) -> dict[Unit, Storage | None]:
    if plan is None:
        return {unit: as_before.get(unit.name) for unit in units}
    if isinstance(plan, str):
        return dict.fromkeys(units, _storing.storage_of(plan))
    wanted: dict[Unit, Storage | None] = dict.fromkeys(units)
    for pattern, name in plan.items():
        storage = _storing.storage_of(name)
        for unit in _select.selected(units, pattern):
            wanted[unit] = storage
    return wanted
