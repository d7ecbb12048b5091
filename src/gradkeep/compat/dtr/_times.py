"""Where the time went, in nanoseconds as the prototype told it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gradkeep.compat.dtr._state import STATE

if TYPE_CHECKING:
    from gradkeep.remat._online import Online


def base_compute_time() -> int:
    """Running every operator once."""
    return STATE.base + (STATE.online.live.base_compute if STATE.online else 0)


def remat_compute_time() -> int:
    """Running operators again."""
    return STATE.remat + (STATE.online.live.remat_compute if STATE.online else 0)


def search_time() -> int:
    """Choosing what to evict."""
    return STATE.search + (STATE.online.live.search_time if STATE.online else 0)


def cost_time() -> int:
    """Putting values back where they belong; the prototype counted its cost model here."""
    return STATE.copy + (STATE.online.live.copy_time if STATE.online else 0)


def reset_profile() -> None:
    """Count from zero."""
    STATE.base = STATE.remat = STATE.search = STATE.copy = 0
    if STATE.online is not None:
        live = STATE.online.live
        live.base_compute = live.remat_compute = live.search_time = live.copy_time = 0


def toggle_profile(*, on: bool) -> None:
    """Whether budgets that end add to the times."""
    STATE.profiling = on


def remember(online: Online) -> None:
    """Add the times of a runtime that has ended."""
    if STATE.profiling:
        live = online.live
        STATE.base += live.base_compute
        STATE.remat += live.remat_compute
        STATE.search += live.search_time
        STATE.copy += live.copy_time
