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
_ONE_NAME = {"ReshapeAliasBackward0": "ViewBackward0", "UnsafeViewBackward0": "ViewBackward0"}
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


_NOWHERE = GraphBelow(_NONE, 0, ())


class GraphWalk:
    """The nodes of one step seen so far."""

    __slots__ = ("_numbers",)

    def __init__(self) -> None:
        self._numbers: dict[int, int] = {}

    def below(self, tensor: torch.Tensor) -> GraphBelow:
        """Everything below a tensor that was not seen before; for recordings."""
        node = tensor.grad_fn
        if node is None:
            return _NOWHERE
        numbers = self._numbers
        sequence = node._sequence_nr()
        number = numbers.get(sequence)
        if number is not None:
            return GraphBelow(number, tensor.output_nr, ())
        first = numbers[sequence] = len(numbers)
        found = []
        stack = [(first, node)]
        while stack:
            number, current = stack.pop()
            above = current.next_functions
            parents: list[int] = []
            for parent, result in above:
                at = _NONE if parent is None else self._number(parent, stack)
                parents += (at, result)
            scalars = _scalars(current, above)
            found.append((number, GraphNode(_name(current), scalars, tuple(parents))))
        return GraphBelow(first, tensor.output_nr, tuple(found))

    def _number(self, node: Any, stack: list[tuple[int, Any]]) -> int:
        sequence = node._sequence_nr()
        if sequence == _LEAF:
            return _leaf(node)
        number = self._numbers.get(sequence)
        if number is None:
            number = self._numbers[sequence] = len(self._numbers)
            stack.append((number, node))
        return number

    def mark(self, tensor: torch.Tensor) -> None:
        """Take a tensor as it is: no look at what lies below it."""
        node = tensor.grad_fn
        if node is not None:
            self._numbers.setdefault(node._sequence_nr(), len(self._numbers))

    def matches(self, tensor: torch.Tensor, expected: ExpectedGraph) -> bool:
        """Whether a tensor comes from what is known the way it did when it was recorded."""
        node: Any = tensor.grad_fn
        if node is None:
            return expected.node == _NONE
        numbers = self._numbers
        sequence = node._sequence_nr()
        number = numbers.get(sequence)
        if tensor.output_nr != expected.result:
            return False
        if number is not None:
            return number == expected.node and not expected.new
        numbers[sequence] = len(numbers)
        stack = [node]
        for name, scalars, edges in expected.new:
            if not stack:
                return False
            node = stack.pop()
            parents = node.next_functions
            if _name(node) != name or 2 * len(parents) != len(edges):
                return False
            if _scalars(node, parents) != scalars:
                return False
            at = 0
            for parent, result in parents:
                if parent is None:
                    number = _NONE
                else:
                    sequence = parent._sequence_nr()
                    if sequence == _LEAF:
                        number = _leaf(parent)
                    else:
                        number = numbers.get(sequence)
                        if number is None:
                            number = numbers[sequence] = len(numbers)
                            stack.append(parent)
                if number != edges[at] or result != edges[at + 1]:
                    return False
                at += 2
        return not stack


class ExpectedGraph(NamedTuple):
    """What a run must find below a tensor, in the order in which it looks."""

    node: int
    result: int
    new: tuple[GraphNode, ...]


class GraphExpectations:
    """Turns what was recorded into what a run must find, which looks at fewer tensors."""

    def __init__(self, seen: Iterable[GraphBelow]) -> None:
        self._nodes = {number: walked for one in seen for number, walked in one.new}
        self._numbers: dict[int, int] = {}

    def mark(self, seen: GraphBelow) -> None:
        """The run takes this tensor as it is."""
        if seen.node != _NONE:
            self._numbers.setdefault(seen.node, len(self._numbers))

    def below(self, seen: GraphBelow) -> ExpectedGraph:
        """The run looks below this tensor: the same order as in `Walk.matches`."""
        numbers = self._numbers
        if seen.node == _NONE:
            return ExpectedGraph(_NONE, 0, ())
        if seen.node in numbers:
            return ExpectedGraph(numbers[seen.node], seen.result, ())
        first = numbers[seen.node] = len(numbers)
        found = []
        stack = [seen.node]
        while stack:
            walked = self._nodes[stack.pop()]
            parents: list[int] = []
            for at, result in zip(walked.parents[::2], walked.parents[1::2], strict=True):
                if at >= 0 and at not in numbers:
                    numbers[at] = len(numbers)
                    stack.append(at)
                parents += (numbers[at] if at >= 0 else at, result)
            found.append(walked._replace(parents=tuple(parents)))
        return ExpectedGraph(first, seen.result, tuple(found))


def leaf_of(tensor: torch.Tensor) -> int | None:
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
        name = _NAMES[kind] = _ONE_NAME.get(name, name)
    return name


def _scalars(node: Any, parents: tuple[tuple[Any, int], ...]) -> tuple[Any, ...]:
    kind = type(node)
    readers = _READERS.get(kind)
    if readers is None:
        readers = _READERS[kind] = _readers_of(kind)
    plain, numbers = readers
    found = tuple([read(node) for read in plain]) if plain else ()
    # A number has no node: where all operands have one, there is none to read. Reading takes 1 us.
    if numbers and (not parents or any(parent is None for parent, _ in parents)):
        found += tuple([read(node) for read in numbers])
    return found


_NAMES: dict[type, str] = {}
_Readers = tuple[tuple["Callable[[Any], Any]", ...], tuple["Callable[[Any], Any]", ...]]
_READERS: dict[type, _Readers] = {}
"""Per type of node: how to read its scalars, and how to read the numbers it was given as operands."""


def _readers_of(kind: type) -> _Readers:
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
