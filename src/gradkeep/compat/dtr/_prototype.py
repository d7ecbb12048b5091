"""The prototype's functions of torch, on gk.memory_budget."""

from __future__ import annotations

import atexit
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch

from gradkeep._budgets import parse_bytes
from gradkeep.compat.dtr import _prototype
from gradkeep.errors import BudgetError, RematError
from gradkeep.remat.simulator._heuristics import PoolSample

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator
    from types import TracebackType

    from torch import Tensor

    from gradkeep.remat import Recorder
    from gradkeep.remat.online._runtime import OnlineRuntime


class ClockEvent:
    """As `torch.cuda.Event`, by the clock of the machine."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self._at = time.perf_counter()

    def record(self, *_: Any) -> None:
        """Now."""
        self._at = time.perf_counter()

    def synchronize(self) -> None:
        """It is done already."""

    def elapsed_time(self, end: ClockEvent) -> float:
        """Milliseconds from this to the other."""
        return (end._at - self._at) * 1e3


def _same(self: Any, *_: Any, **__: Any) -> Any:
    return self


def _nothing(*_: Any, **__: Any) -> None:
    pass


def _live_bytes(*_: Any, **__: Any) -> int:
    return 0 if STATE.online is None else STATE.online.live_bytes()


def _most_bytes(*_: Any, **__: Any) -> int:
    return 0 if STATE.online is None else STATE.online.live.peak


def _count_anew(*_: Any, **__: Any) -> None:
    if STATE.online is not None:
        STATE.online.reset_peak()


def stand_ins() -> Iterator[tuple[Any, str, Any]]:
    """Owner, name and replacement of each."""
    if torch.cuda.is_available():
        return
    yield torch.Tensor, "cuda", _same
    yield torch.nn.Module, "cuda", _same
    yield torch.cuda, "Event", ClockEvent
    yield torch.cuda, "synchronize", _nothing
    yield torch.cuda, "memory_allocated", _live_bytes
    yield torch.cuda, "max_memory_allocated", _most_bytes
    yield torch.cuda, "reset_max_memory_allocated", _count_anew
    yield torch.cuda, "reset_peak_memory_stats", _count_anew


FUNCTIONS = (
    *("annotate_log", "base_compute_time", "clear_checkpointpool", "compute_time", "cost_time"),
    *("loop_time", "new_log", "remat_compute_time", "reset_profile", "search_time"),
    *("set_memory_budget", "toggle_ignore_small_tensors", "toggle_log", "toggle_profile"),
    *("toggle_sampling", "unset_memory_budget"),
)
METHODS = (
    *("checkpoint", "decheckpoint", "is_checkpoint", "pin", "try_checkpoint", "uncheckpoint"),
)
_MISSING = object()
_before: list[tuple[Any, str, Any]] = []
"""What was there, in the order in which it was replaced."""


class InstalledNames:
    """The names are there; leaving `with`, or `uninstall`, takes them away."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        uninstall()


def install() -> InstalledNames:
    """Put the prototype's functions on `torch` and its methods on `torch.Tensor`.

    On a machine without CUDA what its scripts ask of CUDA is answered too: `.cuda()` leaves tensors
    and modules where they are, `torch.cuda.Event` is a clock, `torch.cuda.max_memory_allocated` gives
    live bytes in a budget and 0 without one.

    >>> import torch
    >>> with install():
    ...     torch.set_memory_budget(1e6)
    ...     x = torch.ones(4).checkpoint()
    ...     y = (x * 2).decheckpoint()
    >>> y.tolist(), hasattr(torch, "set_memory_budget"), hasattr(x, "checkpoint")
    ([2.0, 2.0, 2.0, 2.0], False, False)
    """
    import torch

    from gradkeep.compat.dtr._prototype import stand_ins

    if _before:
        raise RematError("the prototype's names are installed already", fix="uninstall() first")
    wanted: list[tuple[Any, str, Any]] = [
        (torch, name, getattr(_prototype, name)) for name in FUNCTIONS
    ]
    wanted += [(torch.Tensor, name, _method(name)) for name in METHODS]
    taken = [name for owner, name, _ in wanted if hasattr(owner, name)]
    if taken:
        raise RematError(
            "this torch has names of the prototype already",
            found=", ".join(taken),
            fix="is it the prototype's own build? Then nothing needs to be installed",
        )
    for owner, name, made in (*wanted, *stand_ins()):
        _before.append((owner, name, vars(owner).get(name, _MISSING)))
        setattr(owner, name, made)
    return InstalledNames()


def uninstall() -> None:
    """End the budget and the log, and take all names away again."""
    try:
        _prototype.end_all()
    finally:
        while _before:
            owner, name, was = _before.pop()
            if was is _MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, was)


def _method(name: str) -> Any:
    function = getattr(_prototype, name)

    def method(self: Any) -> Any:
        done = function(self)
        # The prototype's pin gives nothing.
        return None if name == "pin" else done

    method.__name__ = name
    method.__doc__ = function.__doc__
    return method


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

        STATE.recorder = Recorder(path or STATE.log, beneath=STATE.online)
        STATE.recorder.__enter__()


def annotate_log(annotation: str) -> None:
    """`START` drops what was logged before it; the backward pass is found by itself."""
    if STATE.recorder is not None and annotation == "START":
        toggle_log(on=True, path=STATE.recorder.path)
