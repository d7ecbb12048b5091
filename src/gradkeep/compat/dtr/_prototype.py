"""Functions of the DTR prototype: budget, times and logs of this thread."""

from __future__ import annotations

import atexit
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gradkeep._budgets import parse_bytes
from gradkeep.errors import RematError
from gradkeep.remat.simulator._heuristics import PoolSample

if TYPE_CHECKING:
    import os

    from torch import Tensor

    from gradkeep.remat import Recorder
    from gradkeep.remat.online._runtime import OnlineRuntime

DEFAULT_LOG = "default.log"


@dataclass(slots=True, eq=False)
class PrototypeState:
    """The active runtime and its options."""

    online: OnlineRuntime | None = None
    sample: PoolSample = field(default_factory=PoolSample)
    """Storages that are scored when one is evicted."""
    recorder: Recorder | None = None
    log: Path = Path(DEFAULT_LOG)
    marked: Any = None
    """Tensors marked as checkpoints, held weakly."""
    profiling: bool = True
    base: int = 0
    """Nanoseconds of finished runtimes, like the following fields."""
    remat: int = 0
    search: int = 0
    copy: int = 0


STATE = PrototypeState()


def base_compute_time() -> int:
    """Return the nanoseconds of running every operator once."""
    return STATE.base + (STATE.online.live.base_compute if STATE.online else 0)


def remat_compute_time() -> int:
    """Return the nanoseconds of recomputation."""
    return STATE.remat + (STATE.online.live.remat_compute if STATE.online else 0)


def compute_time() -> int:
    """Return the nanoseconds of all runs of operators."""
    return base_compute_time() + remat_compute_time()


def search_time() -> int:
    """Return the nanoseconds of choosing storages to evict."""
    return STATE.search + (STATE.online.live.search_time if STATE.online else 0)


def cost_time() -> int:
    """Return the nanoseconds of copying values back; the prototype counted its cost model here."""
    return STATE.copy + (STATE.online.live.copy_time if STATE.online else 0)


def loop_time() -> int:
    """Return the nanoseconds of looping over tensors, which is all of the search here."""
    return search_time()


def reset_profile() -> None:
    """Reset all times to zero."""
    STATE.base = STATE.remat = STATE.search = STATE.copy = 0
    if STATE.online is not None:
        live = STATE.online.live
        live.base_compute = live.remat_compute = live.search_time = live.copy_time = 0


def toggle_profile(on: bool) -> None:
    """Choose whether budgets that end add to the times.

    Args:
        on: Add them.
    """
    STATE.profiling = on


def add_times(online: OnlineRuntime) -> None:
    """Add the times of a finished runtime."""
    if STATE.profiling:
        live = online.live
        STATE.base += live.base_compute
        STATE.remat += live.remat_compute
        STATE.search += live.search_time
        STATE.copy += live.copy_time


def set_memory_budget(budget: float | str | None) -> None:
    """Keep the live bytes of this thread's tensors within a budget from now on.

    Args:
        budget: Bytes, as a number or as text such as `"2GiB"`; None ends the budget.

    Raises:
        BudgetError: If the budget is not positive. A later operator raises it too if no storage can be
            evicted, where the prototype runs out of memory.

    Warns:
        BudgetWarning: If recomputation takes too long: from then on nothing is evicted.
    """
    size = None if budget is None else parse_bytes(budget)
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
    """Restore everything and end the budget."""
    if STATE.recorder is not None and STATE.online is not None:
        raise RematError(
            "a budget cannot end while a log is being recorded in it",
            code="remat.log_active",
            fix="Call toggle_log(False) first.",
        )
    online, STATE.online = STATE.online, None
    if online is not None:
        online.__exit__(None, None, None)
        add_times(online)


def checkpoint(tensor: Tensor) -> Tensor:
    """Mark a tensor as a checkpoint; within a budget all tensors are managed anyway.

    Args:
        tensor: The tensor.

    Returns:
        The same tensor.
    """
    _marked()[tensor] = True
    return tensor


def try_checkpoint(tensor: Tensor) -> Tensor:
    """Mark a tensor as a checkpoint, even if it is one already.

    Args:
        tensor: The tensor.

    Returns:
        The same tensor.
    """
    return checkpoint(tensor)


def decheckpoint(tensor: Tensor) -> Tensor:
    """Bring a tensor into memory and keep it there.

    Args:
        tensor: The tensor.

    Returns:
        The same tensor.
    """
    _marked().pop(tensor, None)
    if STATE.online is not None:
        STATE.online.pin(tensor)
    return tensor


def uncheckpoint(tensor: Tensor) -> Tensor:
    """Bring a checkpoint into memory and keep it there.

    Args:
        tensor: A checkpoint.

    Returns:
        The same tensor.

    Raises:
        RematError: If it is not a checkpoint.
    """
    if not is_checkpoint(tensor):
        raise RematError(
            "the tensor is not a checkpoint",
            code="remat.not_a_checkpoint",
            fix="Use decheckpoint(), which accepts any tensor.",
        )
    return decheckpoint(tensor)


def is_checkpoint(tensor: Tensor) -> bool:
    """Return True if the tensor may be evicted, or is marked as a checkpoint.

    Args:
        tensor: The tensor.
    """
    if tensor in _marked():
        return True
    if STATE.online is None:
        return False
    node = STATE.online.live.latest.get(id(tensor.untyped_storage()))
    return node is not None and not node.storage.pinned


def pin(tensor: Tensor) -> Tensor:
    """Never evict a tensor.

    Args:
        tensor: The tensor.

    Returns:
        The same tensor.
    """
    return decheckpoint(tensor)


def _marked() -> Any:
    if STATE.marked is None:
        from torch.utils.weak import WeakTensorKeyDictionary  # loads torch

        STATE.marked = WeakTensorKeyDictionary()
    return STATE.marked


def toggle_sampling(on: bool) -> None:
    """Choose among about 2 sqrt(n) storages instead of all.

    Args:
        on: Enable sampling.
    """
    STATE.sample.sample = on


def toggle_ignore_small_tensors(on: bool) -> None:
    """Never evict storages below 1 % of the mean size.

    Args:
        on: Enable it.
    """
    STATE.sample.skip_small = on


def end_all() -> None:
    """End the log and the budget."""
    toggle_log(on=False)
    clear_checkpointpool()


# Tensors that are used at exit must not be empty.
atexit.register(end_all)


def new_log(name: str) -> None:
    """Write logs that begin from now on to the file `NAME.log`.

    Args:
        name: Name of the log.
    """
    STATE.log = Path(name if name.endswith(".log") else f"{name}.log")
    if STATE.recorder is not None:
        toggle_log(on=True)


def toggle_log(on: bool, *, path: str | os.PathLike[str] | None = None) -> None:
    """Begin or end a log, which `gradkeep remat simulate` reads.

    Within a budget the log is that of the step without one: recomputation is not recorded.

    Args:
        on: Begin a log.
        path: File to write; the name of `new_log` by default.
    """
    recorder, STATE.recorder = STATE.recorder, None
    if recorder is not None:
        recorder.__exit__(None, None, None)
    if on:
        from gradkeep.remat import Recorder  # loads torch

        STATE.recorder = Recorder(path or STATE.log, runtime=STATE.online)
        STATE.recorder.__enter__()


def annotate_log(annotation: str) -> None:
    """Annotate the log: `START` discards everything before it. The backward pass is detected automatically.

    Args:
        annotation: The annotation.
    """
    if STATE.recorder is not None and annotation == "START":
        toggle_log(on=True, path=STATE.recorder.path)
