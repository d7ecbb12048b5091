"""Rows as the page shows them: what was kept of each, and what it looks like."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from gradkeep._preview import row_from_texts

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gradkeep._preview import ShownRow
    from gradkeep.web._served import RowTable, ServedStore

    AnyArray = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True, slots=True)
class RowView:
    """A row: its id, what was kept of it, what it looks like."""

    id: int
    label: int | float | None = None
    label_name: str | None = None
    predicted: int | float | None = None
    predicted_name: str | None = None
    loss: float | None = None
    probability: float | None = None
    """What the model gave to the label."""
    shown: ShownRow | None = None
    known: bool = True
    """False: the capture has no such row."""


def row_views(served: ServedStore, table: RowTable, ids: Sequence[int]) -> list[RowView]:
    """Rows by their ids; one that the capture does not have is shown as unknown."""
    wanted = np.asarray(ids, np.int64)
    at = table.positions(wanted)
    split = table.key.split
    preview = served.preview(split)
    kept = _kept_texts(table, wanted[at >= 0])
    found = []
    for row, place in zip(wanted.tolist(), at.tolist(), strict=True):
        shown = None if preview is None else preview.show(row)
        if place < 0:
            found.append(RowView(row, shown=shown, known=False))
            continue
        facts: dict[str, Any] = {
            name: table.columns[name][place].item()
            for name in ("label", "predicted", "loss")
            if name in table.columns
        }
        if table.probability is not None:
            facts["probability"] = float(table.probability[place])
        if preview is not None:
            for name in ("label", "predicted"):
                facts[f"{name}_name"] = preview.name_of(facts.get(name))
        if shown is None or shown.empty:
            shown = row_from_texts(kept.get(row, {}))
        found.append(RowView(row, shown=shown, **facts))
    return found


def _kept_texts(table: RowTable, ids: AnyArray) -> dict[int, dict[str, str]]:
    """The texts that were captured with some rows."""
    if not table.texts or not len(ids):
        return {}
    batch = table.block.read(ids, list(table.texts))
    told = {name: batch[name].texts() for name in table.texts}
    return {
        row: {name: told[name][place] for name in table.texts}
        for place, row in enumerate(ids.tolist())
    }
