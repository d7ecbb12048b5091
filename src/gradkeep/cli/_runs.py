"""Which runs a question is about, when the command line does not say."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gradkeep.errors import AttributionError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gradkeep.store import Store

_USUAL = "main"


def chosen_runs(
    store: Store, given: Sequence[str] | None, *, splits: Sequence[str], capture: str
) -> list[str]:
    """The runs that were named; else `main`, or the only run that has captures of these splits."""
    if given:
        return list(given)
    kept: dict[str, set[str]] = {}
    for key in store.captures():
        if key.capture == capture:
            kept.setdefault(key.run, set()).add(key.split)
    fitting = sorted(run for run, found in kept.items() if found >= set(splits))
    if _USUAL in kept or not kept:
        return [_USUAL]
    if len(fitting) == 1:
        return fitting
    raise AttributionError(
        "which run?" if fitting else f"no run has captures of {' and '.join(sorted({*splits}))}",
        path=store.location,
        found="; ".join(f"{run}: {', '.join(sorted(found))}" for run, found in kept.items()),
        fix=f"--run {fitting[0]}, for example" if fitting else "name splits that there are",
    )
