"""The autograd graph below saved tensors: names, scalars and edges of its nodes.

Any change in a step (a skipped layer, another operator, another scalar) changes this graph. A recording
stores all of it. A run checks only what it will recompute: from a tensor that is about to be dropped
down to the tensors that it would be recomputed from, every node once, about a microsecond each, before
the tensor is dropped.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.nn import Parameter

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

_LEAF = 2**64 - 1
"""Sequence number of nodes that accumulate a parameter's gradient."""
_NONE = -1
_WITH_NUMBERS = ("_raw_saved_other", "_raw_saved_self")
"""Attributes of products and quotients that store a Python number as a tensor without hooks."""
_CANONICAL_NAMES = {
    "ReshapeAliasBackward0": "ViewBackward0",
    "UnsafeViewBackward0": "ViewBackward0",
}
"""Nodes of a reshape whose type depends on whether a mode is active."""


class GraphNode(NamedTuple):
    """A node: its name, its scalars, and a number and output index per parent.

    Nodes are numbered in the order of the first visit; a parameter is a negative number of its own.
    """

    name: str
    scalars: tuple[Any, ...]
    parents: tuple[int, ...]


class GraphBelow(NamedTuple):
    """Position of a saved tensor in the graph."""

    node: int
    """Number of the node that made it; -1 for none."""
    result: int
    """Output index of the node."""
    new: tuple[tuple[int, GraphNode], ...]
    """Nodes below it that were not visited before, with their numbers."""


_NO_NODE = GraphBelow(_NONE, 0, ())


class GraphWalk:
    """Visited nodes of one step."""

    __slots__ = ("_numbers",)

    def __init__(self) -> None:
        self._numbers: dict[int, int] = {}

    def below(self, tensor: torch.Tensor) -> GraphBelow:
        """Return everything below a tensor that was not visited before."""
        node: Any = tensor.grad_fn
        if node is None:
            return _NO_NODE
        numbers = self._numbers
        sequence = node._sequence_nr()
        first = numbers.get(sequence)
        if first is not None:
            return GraphBelow(first, tensor.output_nr, ())
        first = numbers[sequence] = len(numbers)
        new_nodes = []
        stack = [(first, node)]
        while stack:
            number, node = stack.pop()
            above = node.next_functions
            parents: list[Any] = []
            for parent, result in above:
                at: int | None = _NONE
                if parent is not None:
                    sequence = parent._sequence_nr()
                    at = _leaf(parent) if sequence == _LEAF else numbers.get(sequence)
                    if at is None:
                        at = numbers[sequence] = len(numbers)
                        stack.append((at, parent))
                parents += (at, result)
            scalars = _scalars(node, above)
            new_nodes.append((number, GraphNode(_name(node), scalars, tuple(parents))))
        return GraphBelow(first, tensor.output_nr, tuple(new_nodes))

    def mark(self, tensor: torch.Tensor) -> None:
        """Mark a tensor's node as visited without visiting the graph below it."""
        node = tensor.grad_fn
        if node is not None:
            self._numbers.setdefault(node._sequence_nr(), len(self._numbers))


class GraphExpectations:
    """Convert recorded graphs into the graphs that a run visits, which skips some tensors."""

    def __init__(self, seen: Iterable[GraphBelow]) -> None:
        self._nodes = {number: walked for one in seen for number, walked in one.new}
        self._numbers: dict[int, int] = {}

    def mark(self, seen: GraphBelow) -> None:
        """Mark a tensor that the run does not look below."""
        if seen.node != _NONE:
            self._numbers.setdefault(seen.node, len(self._numbers))

    def below(self, seen: GraphBelow) -> GraphBelow:
        """Return what the run visits below a tensor, in the same order as `GraphWalk.below`."""
        numbers = self._numbers
        if seen.node == _NONE:
            return _NO_NODE
        if seen.node in numbers:
            return GraphBelow(numbers[seen.node], seen.result, ())
        first = numbers[seen.node] = len(numbers)
        new_nodes = []
        stack = [seen.node]
        while stack:
            number = stack.pop()
            walked = self._nodes[number]
            parents: list[int] = []
            for at, result in zip(walked.parents[::2], walked.parents[1::2], strict=True):
                if at >= 0 and at not in numbers:
                    numbers[at] = len(numbers)
                    stack.append(at)
                parents += (numbers[at] if at >= 0 else at, result)
            new_nodes.append((numbers[number], walked._replace(parents=tuple(parents))))
        return GraphBelow(first, seen.result, tuple(new_nodes))


def parameter_id(tensor: torch.Tensor) -> int | None:
    """Return the id of the parameter that a tensor is or views, to distinguish models of one shape."""
    if isinstance(tensor, Parameter):
        return id(tensor)
    node = tensor.grad_fn
    if node is None or not node.next_functions:
        return None
    below = node.next_functions[0][0]
    leaf = getattr(below, "variable", None)
    return id(leaf) if isinstance(leaf, Parameter) else None


def _leaf(node: Any) -> int:
    # Parameters persist across steps; an input that requires gradients is new each time.
    leaf = getattr(node, "variable", None)
    return -2 - id(leaf) if isinstance(leaf, Parameter) else _NONE


def _name(node: Any) -> str:
    kind = type(node)
    name = _NAMES.get(kind)
    if name is None:
        name = node.name()
        name = _NAMES[kind] = _CANONICAL_NAMES.get(name, name)
    return name


def _scalars(node: Any, parents: tuple[tuple[Any, int], ...]) -> tuple[Any, ...]:
    kind = type(node)
    readers = _READERS.get(kind)
    if readers is None:
        readers = _READERS[kind] = _build_readers(kind)
    plain, numbers = readers
    scalars = tuple([read(node) for read in plain]) if plain else ()
    # A number operand has no node; if all operands have one, skip reading (1 us).
    if numbers and (not parents or any(parent is None for parent, _ in parents)):
        scalars += tuple([read(node) for read in numbers])
    return scalars


_NAMES: dict[type, str] = {}
_Readers = tuple[tuple["Callable[[Any], Any]", ...], tuple["Callable[[Any], Any]", ...]]
_READERS: dict[type, _Readers] = {}
"""Per type of node: functions that read its scalars, and functions that read its number operands."""


def _build_readers(kind: type) -> _Readers:
    names = set(dir(kind))
    plain = [
        getattr(kind, name).__get__
        for name in sorted(names)
        if name.startswith("_saved_") and f"_raw{name}" not in names and name != "_saved_tensors"
    ]
    numbers = [_number_reader(name) for name in _WITH_NUMBERS if name in names]
    return tuple(plain), tuple(numbers)


def _number_reader(name: str) -> Callable[[Any], Any]:
    def read(node: Any) -> Any:
        raw = getattr(node, name)
        # A hook has packed a tensor; unpacking it here could have side effects.
        if getattr(raw, "unpack_hook", raw) is not None:
            return None
        value = raw.data
        if value is None or value.dim():
            return None
        # Hide the number from dispatch modes, which expect a tensor.
        with torch._C._DisableTorchDispatch():
            return value.item()

    return read
