"""The functions of the DTR prototype: budget, times and logs of this thread."""

from __future__ import annotations

import atexit
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gradkeep._budgets import parse_bytes
from gradkeep.errors import BudgetError, RematError
from gradkeep.remat import heuristic
from gradkeep.remat.simulator import SampledHeuristic

if TYPE_CHECKING:
    import os

    from torch import Tensor

    from gradkeep.remat import Recorder
    from gradkeep.remat.online import OnlineRuntime


@dataclass(slots=True, eq=False)
class PrototypeState:
    """The runtime in force, and how it is to choose."""

    online: OnlineRuntime | None = None
    recorder: Recorder | None = None
    sampling: bool = False
    ignore_small: bool = False
    profiling: bool = True
    base: int = 0
    """Nanoseconds of runtimes that have ended; the others likewise."""
    remat: int = 0
    search: int = 0
    copy: int = 0


STATE = PrototypeState()


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


def remember(online: OnlineRuntime) -> None:
    """Add the times of a runtime that has ended."""
    if STATE.profiling:
        live = online.live
        STATE.base += live.base_compute
        STATE.remat += live.remat_compute
        STATE.search += live.search_time
        STATE.copy += live.copy_time


def set_memory_budget(budget: int | str | None) -> None:
    """Keep the live bytes of this thread's tensors within a budget from now on; None ends it."""
    clear_checkpointpool()
    if budget is None:
        return
    from gradkeep.remat.online import OnlineRuntime  # loads torch

    size = parse_bytes(budget)
    if size <= 0:
        raise BudgetError("a budget must be positive", found=size, fix="None ends a budget")
    chooser = heuristic("dtr-eq")
    if STATE.sampling or STATE.ignore_small:
        chooser = SampledHeuristic(chooser, sample=STATE.sampling, skip_small=STATE.ignore_small)
    STATE.online = OnlineRuntime(size, heuristic=chooser)
    STATE.online.__enter__()


def clear_checkpointpool() -> None:
    """Bring everything back and end the budget."""
    online, STATE.online = STATE.online, None
    if online is not None:
        online.__exit__(None, None, None)
        remember(online)


def checkpoint(tensor: Tensor) -> Tensor:
    """The tensor itself: all are managed."""
    return tensor


def decheckpoint(tensor: Tensor) -> Tensor:
    """The tensor, with its bytes in memory and there to stay."""
    if STATE.online is not None:
        STATE.online.pin(tensor)
    return tensor


def is_checkpoint(tensor: Tensor) -> bool:
    """Whether the tensor may be evicted: while a budget is in force, as long as it is not pinned."""
    if STATE.online is None:
        return False
    node = STATE.online.live.latest.get(id(tensor.untyped_storage()))
    return node is not None and not node.storage.pinned


def pin(tensor: Tensor) -> Tensor:
    """Never evict a tensor."""
    return decheckpoint(tensor)


def toggle_sampling(*, on: bool) -> None:
    """Choose among about 2 sqrt(n) storages in place of all; counts for budgets set after it."""
    STATE.sampling = on


def toggle_ignore_small_tensors(*, on: bool) -> None:
    """Never evict storages below 1 % of the mean size; counts for budgets set after it."""
    STATE.ignore_small = on


# A tensor that outlives the interpreter's last lines must not be left empty.
atexit.register(clear_checkpointpool)


def toggle_log(*, on: bool, path: str | os.PathLike[str] = "default.log") -> None:
    """Begin or end a log of what runs, which `gradkeep remat simulate` reads."""
    if on and STATE.online is not None:
        raise RematError(
            "a log is of a step without a budget", fix="set_memory_budget(None) before it"
        )
    if STATE.recorder is not None:
        STATE.recorder.__exit__(None, None, None)
        STATE.recorder = None
    if on:
        from gradkeep.remat import record  # loads torch

        STATE.recorder = record(path)
        STATE.recorder.__enter__()


def annotate_log(annotation: str) -> None:
    """`START` drops what was logged before it; other annotations are for people, and left out."""
    if STATE.recorder is not None and annotation == "START":
        path = STATE.recorder.path
        toggle_log(on=False)
        toggle_log(on=True, path=path)
