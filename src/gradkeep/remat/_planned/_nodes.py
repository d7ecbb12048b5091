"""Looking at the autograd graph while it grows: names, scalars and edges of new nodes.

Whatever changes in a step (a layer skipped, an operator swapped, another scalar) changes this graph.
Each saved tensor is looked at from its own node downwards, before it is let go, and every node only
once: about a microsecond per node.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.nn import Parameter

_LEAF = 2**64 - 1
"""The sequence number of nodes that gather a parameter's gradient."""
_WITH_NUMBERS = ("_saved_other", "_saved_self")
"""Where products and quotients keep a Python number: as a tensor that no hook has seen."""


_ONE_NAME = {"ReshapeAliasBackward0": "ViewBackward0", "UnsafeViewBackward0": "ViewBackward0"}
"""Which of these a reshape becomes depends on whether a mode watches it."""


class Walked(NamedTuple):
    """A node: what it is called, its scalars, and its parents by number (or parameters by id)."""

    name: str
    scalars: tuple[Any, ...]
    parents: tuple[int, ...]


class Seen(NamedTuple):
    """What there is below a saved tensor."""

    node: int
    """The number of the node that made it; -1 for none."""
    new: tuple[Walked, ...]
    """Nodes that no earlier saved tensor showed."""


_NOTHING = Seen(-1, ())


class Walk:
    """The nodes of one step seen so far, numbered in the order of first sight."""

    __slots__ = ("_numbers",)

    def __init__(self) -> None:
        self._numbers: dict[int, int] = {}

    def below(self, node: Any) -> Seen:
        """A node's number, and the nodes from it down that were not seen before."""
        if node is None:
            return _NOTHING
        numbers = self._numbers
        sequence = node._sequence_nr()
        number = numbers.get(sequence)
        if number is not None:
            return Seen(number, ())
        found = []
        stack = [node]
        first = numbers[sequence] = len(numbers)
        while stack:
            current = stack.pop()
            parents = []
            for parent, _ in current.next_functions:
                if parent is None:
                    parents.append(-1)
                    continue
                sequence = parent._sequence_nr()
                if sequence == _LEAF:
                    leaf = getattr(parent, "variable", None)
                    # Parameters stay from step to step; a batch that wants gradients is new each time.
                    parents.append(-2 - id(leaf) if isinstance(leaf, Parameter) else -1)
                    continue
                number = numbers.get(sequence)
                if number is None:
                    number = numbers[sequence] = len(numbers)
                    stack.append(parent)
                parents.append(number)
            name = current.name()
            name = _ONE_NAME.get(name, name)
            found.append(Walked(name, _scalars(current), tuple(parents)))
        return Seen(first, tuple(found))


def _scalars(node: Any) -> tuple[Any, ...]:
    kind = type(node)
    names = _SCALARS.get(kind)
    if names is None:
        names = _SCALARS[kind] = _names_of(node)
    plain, numbers = names
    found = [getattr(node, name) for name in plain]
    for name in numbers:
        raw = getattr(node, name)
        # What a hook has packed is a tensor; unpacking it here could run anything.
        if getattr(raw, "unpack_hook", raw) is None:
            value = raw.data
            if value is not None and value.dim() == 0:
                # A mode would be handed the number where it expects a tensor.
                with torch._C._DisableTorchDispatch():
                    found.append(value.item())
    return tuple(found)


_SCALARS: dict[type, tuple[tuple[str, ...], tuple[str, ...]]] = {}
"""Per type of node: its plain attributes, and those that may hold a number as a tensor."""


def _names_of(node: Any) -> tuple[tuple[str, ...], tuple[str, ...]]:
    names = set(dir(type(node)))
    saved = sorted(name for name in names if name.startswith("_saved_"))
    plain = tuple(name for name in saved if f"_raw{name}" not in names and name != "_saved_tensors")
    numbers = tuple(f"_raw{name}" for name in _WITH_NUMBERS if f"_raw{name}" in names)
    return plain, numbers
