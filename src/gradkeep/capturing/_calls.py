"""Watching modules while the model runs: what went into each call, and its output's gradient."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils._pytree import tree_flatten, tree_map_only

from gradkeep.remat import stash

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

    from gradkeep.remat.planned._session import StashedTensor


@dataclass(slots=True, eq=False)
class LayerCall:
    """One call of a watched module; the suffixes are filled in when the backward pass ran."""

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    shapes: tuple[torch.Size, ...]
    """The shapes of the output tensors that carry gradients."""
    given: torch.Size
    """The shape of the first input tensor."""
    edges: tuple[GradientEdge, ...]
    """Where the gradients of those tensors will pass, as they were before any in-place change."""
    suffixes: list[torch.Tensor | None] = field(default_factory=list)
    original: torch.Tensor | None = None
    """The first input as it came, which tells whether two layers share one."""
    stashed: StashedTensor | None = None
    """The input, where a memory budget may drop it meanwhile."""
    differentiated: bool = False
    """Whether a backward pass came by that can itself be differentiated."""

    @property
    def input(self) -> torch.Tensor:
        """The first tensor that the module was given."""
        self.keep_input()
        for value in (*self.args, *self.kwargs.values()):
            if isinstance(value, torch.Tensor):
                return value
        raise TypeError(f"{type(self.module).__name__} was called without a tensor")

    def keep_input(self) -> None:
        """Take the input back, if it was left to the budget."""
        if self.stashed is not None:
            self.args, self.stashed = (self.stashed.get(),), None

    def let_go(self) -> None:
        """Give back what the call holds; nothing asks for it any more."""
        self.args, self.kwargs, self.original, self.stashed = (), {}, None, None
        self.suffixes = [None] * len(self.suffixes)

    def suffix(self, index: int = 0) -> torch.Tensor:
        """The gradient at an output; zeros where the loss does not depend on it."""
        found = self.suffixes[index] if index < len(self.suffixes) else None
        if found is not None:
            return found
        reference = self.input
        dtype = reference.dtype if reference.dtype.is_floating_point else torch.get_default_dtype()
        return torch.zeros(self.shapes[index], dtype=dtype, device=reference.device)


@contextlib.contextmanager
def watching(
    modules: Sequence[nn.Module],
    *,
    by_hooks: bool = False,
    light: Collection[nn.Module] = (),
    spread: Collection[nn.Module] = (),
    rows: int = 0,
) -> Iterator[list[LayerCall]]:
    """The calls of these modules, in order, until the block ends; hooks are removed on any exit.

    Inputs are kept by reference: torch itself refuses models that overwrite what a weight's
    gradient needs. The single input of `light` modules is stashed, so that a memory budget can drop
    it and make it again when the module's turn comes in the backward pass. The outputs of `spread`
    modules, which all `rows` samples share, are spread to all of them, so that each has a gradient
    of its own. With `by_hooks` the suffixes are filled by whatever backward pass the caller
    runs; else by `fill`.
    """
    calls: list[LayerCall] = []

    def saw(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        # Positions `[T]` or `[1, T]`, not the samples' own.
        is_spread = module in spread and (args[0].dim() == 1 or args[0].shape[0] != rows)
        if is_spread:
            args, output = (spread_to(args[0], rows), *args[1:]), spread_to(output, rows)
        outputs = [t for t in _tensors(output) if t.requires_grad]
        if not outputs:
            return None  # under no_grad, or cut off from the loss: the first batch's check tells
        inputs = _tensors(args[0] if len(args) == 1 and not kwargs else (args, kwargs))
        if not kwargs and len(args) == len(inputs) == 1 and inputs[0] is args[0]:
            args = (inputs[0].detach(),)
        else:
            args, kwargs = tree_map_only(torch.Tensor, torch.Tensor.detach, (args, kwargs))
        call = LayerCall(
            module=module,
            args=args,
            kwargs=kwargs,
            shapes=tuple(t.shape for t in outputs),
            given=inputs[0].shape if inputs else torch.Size(),
            edges=() if by_hooks else tuple(get_gradient_edge(t) for t in outputs),
            original=inputs[0] if inputs else None,
        )
        if by_hooks:
            call.suffixes = [None] * len(outputs)
            for index, tensor in enumerate(outputs):
                tensor.register_hook(_into(call, index))  # type: ignore[no-untyped-call]
        if module in light and len(inputs) == len(args) == 1 and not kwargs:
            call.stashed = stash(inputs[0])
            call.args, call.original = (), None
        calls.append(call)
        return output if is_spread else None

    with contextlib.ExitStack() as stack:
        for module in dict.fromkeys(modules):
            handle = module.register_forward_hook(saw, with_kwargs=True)
            stack.callback(handle.remove)
        # The fused inference path of transformer layers calls no hooks.
        fused = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(False)
        stack.callback(torch.backends.mha.set_fastpath_enabled, fused)
        yield calls


def _tensors(given: Any) -> list[torch.Tensor]:
    """All tensors in what a module was given or gave: nearly always a single one."""
    if isinstance(given, torch.Tensor):
        return [given]
    return [t for t in tree_flatten(given)[0] if isinstance(t, torch.Tensor)]


def spread_to(tensor: torch.Tensor, rows: int) -> torch.Tensor:
    """A view `[B, ...]` of what all samples share, `[...]` or `[1, ...]`."""
    one = tensor if tensor.shape[0] == 1 else tensor.unsqueeze(0)
    return one.expand(rows, *one.shape[1:])


def call_pattern(calls: Iterable[LayerCall], rows: int, *, spread: bool = False) -> tuple[Any, ...]:
    """What a rule's validity depends on: one row or several, one call or several, their shapes."""
    seen = []
    for call in calls:
        pair = call.given, call.shapes[0]
        if spread:
            one, other = (torch.Size(s[1:] if s[0] == 1 else s) for s in pair)
            pair = torch.Size((rows, *one)), torch.Size((rows, *other))
        seen.append(tuple((len(shape), _size_class(shape, rows)) for shape in pair))
    return (rows == 1, len(seen) > 1, frozenset(seen)) if seen else ()


def _size_class(shape: Sequence[int], rows: int) -> int:
    """How the first dimension counts the samples."""
    if not shape:
        return 3
    size = shape[0]
    return 0 if size == rows else 1 if size == 1 else 2 if rows and size % rows == 0 else 3


def fill(
    calls: Sequence[LayerCall],
    target: torch.Tensor,
    *,
    arrived: Callable[[LayerCall], None] | None = None,
    retain: bool = False,
) -> None:
    """Run the backward pass from the summed target to the calls; no weight gradient is computed.

    `arrived` is told of each call as soon as all its suffixes are there, while the pass goes on. The
    graph is let go, unless another pass is to come by (`retain`).
    """
    edges = [edge for call in calls for edge in call.edges]
    if not edges:
        return
    if arrived is None:
        found = iter(
            torch.autograd.grad(target.sum(), edges, allow_unused=True, retain_graph=retain)
        )
        for call in calls:
            call.suffixes = [next(found) for _ in call.edges]
        return
    # The pass ends where no other call lies beyond; on its way there it comes by all of them.
    ends = _ends({edge.node for edge in edges})
    with contextlib.ExitStack() as stack:
        for call in calls:
            call.suffixes = [None] * len(call.edges)
            for index, edge in enumerate(call.edges):
                if edge.node not in ends:
                    handle = edge.node.register_prehook(_passing(call, index, arrived))
                    stack.callback(handle.remove)
        indexed = [(call, index) for call in calls for index in range(len(call.edges))]
        last = [(call, index) for call, index in indexed if call.edges[index].node in ends]
        gradients = torch.autograd.grad(
            target.sum(), [call.edges[index] for call, index in last], allow_unused=True
        )
    for (call, index), gradient in zip(last, gradients, strict=True):
        call.suffixes[index] = gradient


def _passing(call: LayerCall, index: int, arrived: Callable[[LayerCall], None]) -> Any:
    number = call.edges[index].output_nr

    def keep(gradients: tuple[torch.Tensor | None, ...]) -> None:
        call.suffixes[index] = gradients[number]
        if all(suffix is not None for suffix in call.suffixes):
            arrived(call)

    return keep


def _ends(wanted: set[Any]) -> set[Any]:
    """Those of the nodes from which no other of them can be reached."""
    reaches: dict[Any, bool] = {}
    for root in wanted:
        stack = [root]
        while stack:
            node = stack[-1]
            if node in reaches:
                stack.pop()
                continue
            below = [child for child, _ in node.next_functions if child is not None]
            waiting = [child for child in below if child not in reaches]
            if waiting:
                stack += waiting
                continue
            reaches[node] = any(child in wanted or reaches[child] for child in below)
            stack.pop()
    return {node for node in wanted if not reaches[node]}


def _into(call: LayerCall, index: int) -> Any:
    def keep(gradient: torch.Tensor) -> None:
        before = call.suffixes[index]
        call.differentiated |= gradient.requires_grad
        # A second backward pass through the same graph adds up, as gradients do.
        call.suffixes[index] = gradient if before is None else before + gradient

    return keep
