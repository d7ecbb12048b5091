"""The prototype's names where its scripts look for them: on `torch` and `torch.Tensor`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

from gradkeep.compat.dtr import _prototype
from gradkeep.errors import RematError

if TYPE_CHECKING:
    from types import TracebackType

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

    from gradkeep.compat.dtr._cuda_stand_ins import stand_ins

    if _before:
        raise RematError("the prototype's names are installed already", fix="uninstall() first")
    wanted: list[tuple[Any, str, Any]] = [
        (torch, name, getattr(_prototype, name)) for name in FUNCTIONS
    ]
    wanted += [(torch.Tensor, name, _method(name)) for name in METHODS]
    taken = [name for owner, name, _ in wanted if hasattr(owner, name)]
    if taken:
        raise RematError(
            f"this torch has names of the prototype already: {', '.join(taken)}",
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
            owner, name, evicted_hash = _before.pop()
            if evicted_hash is _MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, evicted_hash)


def _method(name: str) -> Any:
    function = getattr(_prototype, name)

    def method(self: Any) -> Any:
        done = function(self)
        # The prototype's pin gives nothing.
        return None if name == "pin" else done

    method.__name__ = name
    method.__doc__ = function.__doc__
    return method
