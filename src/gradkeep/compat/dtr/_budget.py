"""The budget, and tensors that need no conversion any more."""

from __future__ import annotations

import atexit
from typing import TYPE_CHECKING

from gradkeep._budgets import parse_bytes
from gradkeep.compat.dtr._state import STATE
from gradkeep.compat.dtr._times import remember
from gradkeep.errors import BudgetError
from gradkeep.remat import heuristic
from gradkeep.remat._candidates import Candidates
from gradkeep.remat._online import Online

if TYPE_CHECKING:
    from torch import Tensor


def set_memory_budget(budget: int | str | None) -> None:
    """Keep the live bytes of this thread's tensors within a budget from now on; None ends it."""
    clear_checkpointpool()
    if budget is None:
        return
    size = parse_bytes(budget)
    if size <= 0:
        raise BudgetError("a budget must be positive", found=size, fix="None ends a budget")
    chooser = heuristic("dtr-eq")
    if STATE.sampling or STATE.ignore_small:
        chooser = Candidates(chooser, sample=STATE.sampling, skip_small=STATE.ignore_small)
    STATE.online = Online(size, heuristic=chooser)
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
