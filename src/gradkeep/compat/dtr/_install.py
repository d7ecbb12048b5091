"""Install the prototype's names on `torch` and `torch.Tensor`."""

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
"""Replaced attributes, in the order of replacement."""


class InstalledNames:
    """Context manager of the installed names; exiting it, or `uninstall`, removes them."""

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
    """Add the prototype's functions to `torch` and its methods to `torch.Tensor`.

    Without CUDA, CUDA functions of its scripts are replaced too: `.cuda()` leaves tensors
    and modules where they are, `torch.cuda.Event` is a clock, `torch.cuda.max_memory_allocated` returns
    the live bytes within a budget and 0 without one.

    Returns:
        A context manager that removes the names.

    Raises:
        RematError: If the names exist already.

    Example:
        >>> import torch
        >>> with install():
        ...     torch.set_memory_budget(1e6)
        ...     x = torch.ones(4).checkpoint()
        ...     y = (x * 2).decheckpoint()
        >>> y.tolist(), hasattr(torch, "set_memory_budget"), hasattr(x, "checkpoint")
        ([2.0, 2.0, 2.0, 2.0], False, False)
    """
    import torch

    from gradkeep.compat.dtr._cuda_replacements import cuda_replacements

    if _before:
        raise RematError(
            "the prototype's names are already installed",
            code="compat.installed",
            fix="Call uninstall() first.",
        )
    replacements: list[tuple[Any, str, Any]] = [
        (torch, name, getattr(_prototype, name)) for name in FUNCTIONS
    ]
    replacements += [(torch.Tensor, name, _method(name)) for name in METHODS]
    taken = [name for owner, name, _ in replacements if hasattr(owner, name)]
    if taken:
        raise RematError(
            "torch already has names of the prototype",
            code="compat.names_taken",
            found=", ".join(taken),
            fix="Do not call install() if this is the prototype's own build of torch.",
        )
    for owner, name, replacement in (*replacements, *cuda_replacements()):
        _before.append((owner, name, vars(owner).get(name, _MISSING)))
        setattr(owner, name, replacement)
    return InstalledNames()


def uninstall() -> None:
    """End the budget and the log, and remove all names."""
    try:
        _prototype.end_all()
    finally:
        while _before:
            owner, name, original = _before.pop()
            if original is _MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, original)


def _method(name: str) -> Any:
    function = getattr(_prototype, name)

    def method(self: Any) -> Any:
        done = function(self)
        # The prototype's pin returns None.
        return None if name == "pin" else done

    method.__name__ = name
    method.__doc__ = function.__doc__
    return method
