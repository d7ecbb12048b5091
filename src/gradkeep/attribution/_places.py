"""At which checkpoints a question is asked."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gradkeep.attribution._question import RunCheckpoint
from gradkeep.errors import AttributionError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gradkeep.store import Store


def places(
    store: Store,
    *,
    run: str | Sequence[str],
    checkpoints: str | Sequence[str] | None,
    splits: Sequence[str],
    name: str,
) -> list[RunCheckpoint]:
    """The wanted checkpoints of every run, or else all at which every split was captured."""
    runs = [run] if isinstance(run, str) else list(run)
    if not runs:
        raise AttributionError("no run was given")
    found: list[RunCheckpoint] = []
    for one in runs:
        steps = {c.name: c for c in store.checkpoints(one)}
        if checkpoints is None:
            names = _captured(store, one, splits, name)
            names.sort(key=lambda c: _order(steps[c].step if c in steps else None, c))
        else:
            names = [checkpoints] if isinstance(checkpoints, str) else list(checkpoints)
        found += [RunCheckpoint(one, c, steps[c].lr if c in steps else None) for c in names]
    if not found and checkpoints is not None:
        raise AttributionError("no checkpoint was given")
    if not found:
        keys = [k for k in store.captures() if k.run in runs and k.capture == name]
        raise AttributionError(
            f"{' and '.join(map(repr, splits))} were not captured at the same checkpoint",
            path=store.location,
            found=", ".join(f"{k.split} at {k.checkpoint}" for k in keys) or "no captures",
            fix=f"gk.capture(store, model, loader, task=task, split={splits[0]!r}), "
            f"and the same for {splits[-1]!r}",
        )
    return found


def _captured(store: Store, run: str, splits: Sequence[str], name: str) -> list[str]:
    keys = [key for key in store.captures() if (key.run, key.capture) == (run, name)]
    return list(set.intersection(*({k.checkpoint for k in keys if k.split == s} for s in splits)))


def _order(step: int | None, name: str) -> tuple[bool, int, str]:
    return step is None, step or 0, name
