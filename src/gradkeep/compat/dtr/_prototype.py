"""The functions of the DTR prototype: budget, times and logs of this thread."""

from __future__ import annotations

import atexit
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gradkeep._budgets import parse_bytes
from gradkeep.errors import BudgetError, RematError
from gradkeep.remat.simulator._heuristics import PoolSample

if TYPE_CHECKING:
    import os

    from torch import Tensor

    from gradkeep.remat import Recorder
    from gradkeep.remat.online._runtime import OnlineRuntime

DEFAULT_LOG = "default.log"


@dataclass(slots=True, eq=False)
class PrototypeState:
    """The runtime in force, and how it is to choose."""

    online: OnlineRuntime | None = None
    sample: PoolSample = field(default_factory=PoolSample)
    """What is looked at to choose what to evict."""
    recorder: Recorder | None = None
    log: Path = Path(DEFAULT_LOG)
    marked: Any = None
    """Tensors that were told to be checkpoints, held weakly."""
    profiling: bool = True
    base: int = 0
    """Nanoseconds of runtimes that have ended; the others likewise."""
    remat: int = 0
    search: int = 0
    copy: int = 0


STATE = PrototypeState()


def base_compute_time() -> int:
    """Nanoseconds of running every operator once."""
    return STATE.base + (STATE.online.live.base_compute if STATE.online else 0)


def remat_compute_time() -> int:
    """Nanoseconds of running operators again."""
    return STATE.remat + (STATE.online.live.remat_compute if STATE.online else 0)


def compute_time() -> int:
    """Nanoseconds of running operators, once and again."""
    return base_compute_time() + remat_compute_time()


def search_time() -> int:
    """Nanoseconds of choosing what to evict."""
    return STATE.search + (STATE.online.live.search_time if STATE.online else 0)


def cost_time() -> int:
    """Nanoseconds of putting values back; the prototype counted its cost model here."""
    return STATE.copy + (STATE.online.live.copy_time if STATE.online else 0)


def loop_time() -> int:
    """Nanoseconds of looping over tensors: all of the search, which here holds no other costs."""
    return search_time()


def reset_profile() -> None:
    """Count from zero."""
    STATE.base = STATE.remat = STATE.search = STATE.copy = 0
    if STATE.online is not None:
        live = STATE.online.live
        live.base_compute = live.remat_compute = live.search_time = live.copy_time = 0


def toggle_profile(on: bool) -> None:
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


def set_memory_budget(budget: float | str | None) -> None:
    """Keep the live bytes of this thread's tensors within a budget from now on; None ends it.

    Args:
        budget: Bytes, as a number or as text such as `"2GiB"`.

    Raises:
        BudgetError: The budget is not positive. The same error is raised by a later operator where nothing
            is left to evict, as the prototype runs out of memory there.

    Warns:
        BudgetWarning: More is recomputed than is worth it: from there on nothing is evicted.
    """
    size = None if budget is None else parse_bytes(budget)
    if size is not None and size <= 0:
        raise BudgetError("a budget must be positive", found=size, fix="None ends a budget")
    clear_checkpointpool()
    if size is None:
        return
    from gradkeep.remat.online._runtime import OnlineRuntime  # loads torch

    STATE.online = OnlineRuntime(size, sample=STATE.sample, strict=True)
    STATE.online.__enter__()


def unset_memory_budget() -> None:
    """End the budget."""
    clear_checkpointpool()


def clear_checkpointpool() -> None:
    """Bring everything back and end the budget."""
    if STATE.recorder is not None and STATE.online is not None:
        raise RematError(
            "a budget cannot end while what runs in it is logged", fix="toggle_log(False) first"
        )
    online, STATE.online = STATE.online, None
    if online is not None:
        online.__exit__(None, None, None)
        remember(online)


def checkpoint(tensor: Tensor) -> Tensor:
    """The tensor itself: in a budget all are managed."""
    _marked()[tensor] = True
    return tensor


def try_checkpoint(tensor: Tensor) -> Tensor:
    """The same: a tensor that is managed already may be given too."""
    return checkpoint(tensor)


def decheckpoint(tensor: Tensor) -> Tensor:
    """The tensor, with its bytes in memory and there to stay."""
    _marked().pop(tensor, None)
    if STATE.online is not None:
        STATE.online.pin(tensor)
    return tensor


def uncheckpoint(tensor: Tensor) -> Tensor:
    """The same for a tensor that is a checkpoint; others are refused, as there."""
    if not is_checkpoint(tensor):
        raise RematError("this tensor is no checkpoint", fix="decheckpoint() takes any tensor")
    return decheckpoint(tensor)


def is_checkpoint(tensor: Tensor) -> bool:
    """Whether the tensor may be evicted, or was told to be a checkpoint and not otherwise since."""
    if tensor in _marked():
        return True
    if STATE.online is None:
        return False
    node = STATE.online.live.latest.get(id(tensor.untyped_storage()))
    return node is not None and not node.storage.pinned


def pin(tensor: Tensor) -> Tensor:
    """Never evict a tensor."""
    return decheckpoint(tensor)


def _marked() -> Any:
    if STATE.marked is None:
        from torch.utils.weak import WeakTensorKeyDictionary  # loads torch

        STATE.marked = WeakTensorKeyDictionary()
    return STATE.marked


def toggle_sampling(on: bool) -> None:
    """Choose among about 2 sqrt(n) storages in place of all, from now on."""
    STATE.sample.sample = on


def toggle_ignore_small_tensors(on: bool) -> None:
    """Never evict storages below 1 % of the mean size, from now on."""
    STATE.sample.skip_small = on


def end_all() -> None:
    """End the log and the budget."""
    toggle_log(on=False)
    clear_checkpointpool()


# A tensor that outlives the interpreter's last lines must not be left empty.
atexit.register(end_all)


def new_log(name: str) -> None:
    """Logs that begin from now on go to the file `NAME.log`."""
    STATE.log = Path(name if name.endswith(".log") else f"{name}.log")
    if STATE.recorder is not None:
        toggle_log(on=True)


def toggle_log(on: bool, *, path: str | os.PathLike[str] | None = None) -> None:
    """Begin or end a log of what runs, which `gradkeep remat simulate` reads.

    In a budget the log is that of the step without one: what is run again is not in it.
    """
    recorder, STATE.recorder = STATE.recorder, None
    if recorder is not None:
        recorder.__exit__(None, None, None)
    if on:
        from gradkeep.remat import Recorder  # loads torch

        STATE.recorder = Recorder(path or STATE.log, runtime=STATE.online)
        STATE.recorder.__enter__()


def annotate_log(annotation: str) -> None:
    """`START` drops what was logged before it; the backward pass is found by itself."""
    if STATE.recorder is not None and annotation == "START":
        toggle_log(on=True, path=STATE.recorder.path)
