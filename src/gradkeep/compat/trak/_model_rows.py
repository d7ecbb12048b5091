"""All that is kept of the training rows of one model id."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from gradkeep.compat.trak._assigned_rows import AssignedRows, OverlaidRows
from gradkeep.errors import AttributionError

if TYPE_CHECKING:
    from collections.abc import Collection

    from torch import Tensor

    from gradkeep.compat.trak._kept_rows import KeptGradients
    from gradkeep.store import Store

    Mask = np.ndarray[Any, np.dtype[np.bool_]]
    Ids = np.ndarray[Any, np.dtype[np.int64]]


class ModelRows:
    """Gradients, weights and which of them are done; what a script assigned goes before."""

    def __init__(self, store: Store, prefix: str, kept: KeptGradients) -> None:
        def assigned(name: str, dim: int) -> AssignedRows:
            return AssignedRows(store, f"{prefix}.assigned.{name}", count=kept.count, dim=dim)

        self.kept = kept
        self.grads = OverlaidRows(kept, assigned("grads", kept.dim), weights=False)
        self.weights = OverlaidRows(kept, assigned("weights", 1), weights=True)
        self.flags = assigned("flags", 1)
        self.features = assigned("features", kept.dim)
        self.look(store.row_sets())

    @property
    def done(self) -> Mask:
        """Which rows are done `[n]`, as far as was seen."""
        found = self.kept.done
        told = np.flatnonzero(self.flags.there)
        if len(told):
            found[told] = self.flags.read(told)[:, 0].numpy() == 1
        return found

    @property
    def version(self) -> tuple[int, int]:
        """What changes when a row is done, or is no longer."""
        return self.kept.version, self.flags.version

    @property
    def plain(self) -> bool:
        """Whether nothing was assigned, so that the kept gradients are all there is."""
        over = (self.grads.assigned, self.weights.assigned, self.flags)
        return not any(one.version for one in over)

    def look(self, names: Collection[str]) -> None:
        """See what other processes have put or assigned; `names` are the store's sets of rows."""
        self.kept.refresh()
        for one in (self.grads.assigned, self.weights.assigned, self.flags, self.features):
            one.look(names)

    def refresh(self) -> None:
        """See what was put, and what was assigned since anything was."""
        self.kept.refresh()
        for one in (self.grads.assigned, self.weights.assigned, self.flags, self.features):
            one.refresh()

    def put(self, ids: Ids, grads: Tensor, weights: Tensor) -> None:
        """Keep rows; returns when they are durable."""
        if self.plain:
            self.kept.put(ids, grads, weights)
            return
        # What is assigned goes before what is put: rows that come later must be assigned too.
        self.grads.assigned.assign(ids, grads.detach().cpu().numpy())
        self.weights.assigned.assign(ids, weights.detach().cpu().numpy())
        self.flags.assign(ids, np.ones(len(ids)))

    def flag(self, ids: Ids, values: Any) -> None:
        """Say that rows are done (1), or are not (0); those without gradients cannot be."""
        wanted = np.asarray(values).reshape(-1)
        if not np.isin(wanted, (0, 1)).all():
            raise AttributionError("is_featurized takes 0 and 1", found=wanted[:5].tolist())
        done = ids[wanted == 1]
        for name, rows in (("grads", self.grads), ("out_to_loss", self.weights)):
            lacking = rows.missing(done)
            if len(lacking):
                some = ", ".join(map(str, lacking[:5])) + (" ..." if len(lacking) > 5 else "")
                raise AttributionError(
                    f"{len(lacking)} rows cannot be flagged as featurized: their {name!r} were "
                    "not written, or are not all numbers",
                    found=f"rows {some}",
                    fix=f"assign current_store[{name!r}][rows] first",
                )
        self.flags.assign(ids, wanted)

    def drop(self) -> None:
        """Delete gradients and weights."""
        self.flags.clear()  # first: a flag without its row would be a lie
        self.kept.drop()
        self.grads.assigned.clear()
        self.weights.assigned.clear()
