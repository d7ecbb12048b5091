"""The autograd graph around saved tensors: names, scalars and edges of its nodes.

Whatever changes in a step (a layer skipped, an operator swapped, another scalar) changes this graph.
A recording notes all of it. A run looks only at what it will make again: from a tensor that is about
to be dropped down to the tensors that it would be made from, every node once, about a microsecond
each, before the tensor is let go.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.nn import Parameter

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

_LEAF = 2**64 - 1
"""The sequence number of nodes that gather a parameter's gradient."""
_NONE = -1
_WITH_NUMBERS = ("_raw_saved_other", "_raw_saved_self")
"""Where products and quotients keep a Python number: as a tensor that no hook has seen."""
_CANONICAL_NAMES = {
    "ReshapeAliasBackward0": "ViewBackward0",
    "UnsafeViewBackward0": "ViewBackward0",
}
"""Which of these a reshape becomes depends on whether a mode watches it."""


class GraphNode(NamedTuple):
    """A node: its name, its scalars, and for each parent a number and which of its results is meant.

    Numbers are given in the order of first sight; a parameter stands as a negative number of its own.
    """

    name: str
    scalars: tuple[Any, ...]
    parents: tuple[int, ...]


class GraphBelow(NamedTuple):
    """Where a saved tensor stands in the graph."""

    node: int
    """The number of the node that made it; -1 for none."""
    result: int
    """Which of the node's results it is."""
    new: tuple[tuple[int, GraphNode], ...]
    """Nodes below it that were not seen before, with their numbers."""


_NO_NODE = GraphBelow(_NONE, 0, ())


class GraphWalk:
    """The nodes of one step seen so far."""

    __slots__ = ("_numbers",)

    def __init__(self) -> None:
        self._numbers: dict[int, int] = {}

    def below(self, tensor: torch.Tensor) -> GraphBelow:
        """Everything below a tensor that was not seen before."""
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
        """Take a tensor as it is: no look at what lies below it."""
        node = tensor.grad_fn
        if node is not None:
            self._numbers.setdefault(node._sequence_nr(), len(self._numbers))


class GraphExpectations:
    """Turns what was recorded into what a run must find, which looks at fewer tensors."""

    def __init__(self, seen: Iterable[GraphBelow]) -> None:
        self._nodes = {number: walked for one in seen for number, walked in one.new}
        self._numbers: dict[int, int] = {}

    def mark(self, seen: GraphBelow) -> None:
        """The run takes this tensor as it is."""
        if seen.node != _NONE:
            self._numbers.setdefault(seen.node, len(self._numbers))

    def below(self, seen: GraphBelow) -> GraphBelow:
        """The run looks below this tensor, in the same order as `GraphWalk.below`."""
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
    """Which parameter a tensor is, or is a view of; tells apart two models of one shape."""
    if isinstance(tensor, Parameter):
        return id(tensor)
    node = tensor.grad_fn
    if node is None or not node.next_functions:
        return None
    below = node.next_functions[0][0]
    leaf = getattr(below, "variable", None)
    return id(leaf) if isinstance(leaf, Parameter) else None


def _leaf(node: Any) -> int:
    # Parameters stay from step to step; a batch that wants gradients is new each time.
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
    # A number has no node: where all operands have one, there is none to read. Reading takes 1 us.
    if numbers and (not parents or any(parent is None for parent, _ in parents)):
        scalars += tuple([read(node) for read in numbers])
    return scalars


_NAMES: dict[type, str] = {}
_Readers = tuple[tuple["Callable[[Any], Any]", ...], tuple["Callable[[Any], Any]", ...]]
_READERS: dict[type, _Readers] = {}
"""Per type of node: how to read its scalars, and how to read the numbers it was given as operands."""


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
        # What a hook has packed is a tensor; unpacking it here could run anything.
        if getattr(raw, "unpack_hook", raw) is not None:
            return None
        value = raw.data
        if value is None or value.dim():
            return None
        # A mode would be handed the number where it expects a tensor.
        with torch._C._DisableTorchDispatch():
            return value.item()

    return read
