"""An operator that ran, and how to run it again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from gradkeep.remat._core import Tensor as Node
    from gradkeep.remat._geometry import Geometry


class Argument(NamedTuple):
    """A tensor among the arguments: a value, and how it was seen."""

    node: Node
    geometry: Geometry


class Operator:
    """What the eviction core needs to know of an operator, and what it takes to run it again."""

    __slots__ = (
        "aliases",
        "args",
        "cost",
        "grad_mode",
        "kwargs",
        "name",
        "random",
        "results",
        "run",
        "sizes",
    )

    def __init__(
        self, name: str, *, cost: int, sizes: tuple[int, ...], aliases: tuple[int, ...]
    ) -> None:
        self.name = name
        self.cost = cost
        """Nanoseconds."""
        self.sizes = sizes
        """Bytes of each new storage; 0 for what is written in place."""
        self.aliases = aliases
        """For each result the index of the argument whose storage it changes, or -1."""
        self.run: Callable[..., Any] | None = None
        """None: it cannot be run again."""
        self.args: tuple[Any, ...] = ()
        self.kwargs: tuple[tuple[str, Any], ...] = ()
        self.results: tuple[tuple[int, Geometry], ...] = ()
        """For each new storage, which result shows it whole, and how."""
        self.grad_mode = True
        self.random: torch.Tensor | None = None
        """The state of the generator before it ran."""


def tensors_in(value: Any) -> list[torch.Tensor]:
    """The tensors in an operator's arguments or results, in order."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, tuple | list):
        return [tensor for item in value for tensor in tensors_in(item)]
    return []


def mapped(value: Any, change: Callable[[Any], Any], kind: type) -> Any:
    """The same arguments with everything of a type replaced."""
    if isinstance(value, kind):
        return change(value)
    if type(value) in (tuple, list):
        return type(value)(mapped(item, change, kind) for item in value)
    return value
