"""The scores of experiments: .npy files, whose digests are in the store."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

import gradkeep.store as gs
from gradkeep.compat.trak._assigned_rows import AssignedRows
from gradkeep.compat.trak._kept_rows import file_digest, mapped_file, replaced_file
from gradkeep.errors import AttributionError, Damaged

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


class ScoreFiles:
    """Finalized scores `[n, m]`, and over them what a script assigned before it saves them."""

    def __init__(self, store: gs.Store, folder: Path, *, count: int) -> None:
        self._store, self._folder, self._count = store, folder, count
        self._assigned: dict[str, AssignedRows] = {}

    def path(self, exp_name: str) -> Path:
        """Where the scores of an experiment are."""
        return self._folder / f"{exp_name}.mmap"

    def finalized(self, exp_name: str) -> int:
        """How often scores of an experiment were committed."""
        return len(self._store.rows(f"trak.exp.{exp_name}").done())

    def assigned(self, exp_name: str, targets: int) -> AssignedRows:
        """What was assigned to rows of scores and not yet committed."""
        if exp_name not in self._assigned:
            name = f"trak.assigned.scores.{exp_name}"
            found = AssignedRows(self._store, name, count=self._count, dim=targets)
            found.look(self._store.row_sets())
            self._assigned[exp_name] = found
        return self._assigned[exp_name]

    def commit(self, exp_name: str, targets: int, made: Callable[[Any], None]) -> None:
        """Replace the scores with what `made` writes into zeros `[n, m]`."""
        path = self.path(exp_name)
        with replaced_file(path, (self._count, targets)) as values:
            made(values)
        rows = self._store.rows(f"trak.exp.{exp_name}")
        number = len(rows.done())
        if number >= rows.num_rows:
            rows.grow(2 * rows.num_rows)
        rows.put(number, {"digest": _digest(path).astype(np.int64)}, differing="keep")

    def commit_assigned(self, exp_name: str, targets: int) -> None:
        """Make what was assigned the scores; every row must have all of its numbers by now."""
        assigned = self.assigned(exp_name, targets)
        below = self.read(exp_name) if self.finalized(exp_name) else None
        rows = np.flatnonzero(assigned.there)
        values = assigned.read(rows).numpy()
        lacking = set() if below is not None else set(range(self._count)) - set(rows.tolist())
        lacking |= set(rows[~np.isfinite(values).all(1)].tolist())
        if lacking:
            some = ", ".join(map(str, sorted(lacking)[:5])) + (" ..." if len(lacking) > 5 else "")
            raise AttributionError(
                f"the scores of {exp_name!r} lack {len(lacking)} rows, or have values there that "
                "are not numbers",
                found=f"rows {some}",
                fix=f"assign current_store['{exp_name}_scores'][rows], then save them",
            )

        def made(out: Any) -> None:
            if below is not None:
                out[:] = below
            out[rows] = values

        self.commit(exp_name, targets, made)
        assigned.clear()

    def read(self, exp_name: str) -> Any:
        """Finalized scores `[n, m]`, once their bytes are seen to be those that were written."""
        path = self.path(exp_name)
        rows = self._store.rows(f"trak.exp.{exp_name}")
        known = rows.read(rows.done())["digest"] if path.exists() else []
        digest = _digest(path) if len(known) else 0
        if not any(np.array_equal(one, digest) for one in known):
            raise Damaged(
                "these scores are not finalized, or not as they were written",
                path=path,
                fix=f"finalize_scores({exp_name!r}) makes them again",
            )
        return mapped_file(path)


def score_schema(num_targets: int) -> gs.Schema:
    """What an experiment is begun with."""
    digest = gs.Array("digest", "int64", (16,), kind="data")
    return gs.Schema((digest,), rows_per_segment=1, fingerprints={"num_targets": str(num_targets)})


def _digest(path: Path) -> Any:
    return np.frombuffer(bytes.fromhex(file_digest(path)), np.uint8)
