"""Uses of weights that are no call of their module: matrix products and broadcast parameters.

Attention reads the weights of its projections without calling a layer, and models add class tokens, position
embeddings or scales to their activations. A matrix product is found in the graph of autograd, which saves its
input. A broadcast parameter is replaced by a view with one copy per sample while the model runs, so that the
gradient at the view is that of each sample. Both give gradients in the pass of all other layers, and are proved
on the first batch as they are.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from torch import Tensor


class WeightUse(nn.Module):
    """Placeholder for the module whose calls a rule reads; it is never called."""

    owner: nn.Module
    """Module that holds the weight."""
    weight: nn.Parameter

    def __init__(self, owner: nn.Module, weight: nn.Parameter) -> None:
        super().__init__()
        # Not as a submodule and a parameter of this one.
        self.__dict__.update(owner=owner, weight=weight)

    def __eq__(self, other: object) -> bool:
        # Rules of several call patterns may each have created it.
        return type(self) is type(other) and hash(self) == hash(other)

    def __hash__(self) -> int:
        return hash((type(self), id(self.owner), id(self.weight)))


class ProductUse(WeightUse):
    """Matrix products with a weight `[d_out, d_in]`, such as `F.linear` calls."""


class BroadcastUse(WeightUse):
    """A parameter that is broadcast over the samples."""

    def __init__(
        self, owner: nn.Module, name: str, weight: nn.Parameter, inner: tuple[int, ...]
    ) -> None:
        super().__init__(owner, weight)
        self.name = name
        self.inner = inner
        """Shape of each sample's copy."""

    def __eq__(self, other: object) -> bool:
        return WeightUse.__eq__(self, other) and self.inner == getattr(other, "inner", None)

    __hash__ = WeightUse.__hash__

    def expanded(self, rows: int) -> Tensor:
        """Return a view `[B, *inner]` of the parameter: a leaf, as parameters are."""
        view = self.weight.detach().view(1, *self.inner).expand(rows, *self.inner)
        return view.requires_grad_()


@dataclass(frozen=True, slots=True, eq=False)
class FoundUse:
    """One use of a weight: its input, and where the gradient at its output arrives."""

    use: WeightUse
    input: Tensor
    shape: torch.Size
    """Shape of the output."""
    edge: GradientEdge


def inner_shapes(shape: torch.Size) -> list[tuple[int, ...]]:
    """Return the shapes that a sample's copy of a parameter may have, the likeliest first.

    A leading dimension of 1 is that of the samples. Others are aligned with the last dimensions, so that a vector
    may need dimensions of 1 for tokens or pixels.
    """
    rest = tuple(shape[1:])
    own = [rest] if len(shape) > 1 and shape[0] == 1 else []
    return [*own, tuple(shape), (1, *shape), (1, 1, *shape)]


@contextlib.contextmanager
def broadcasting(uses: Iterable[nn.Module], rows: int) -> Iterator[list[FoundUse]]:
    """Replace broadcast parameters by views with a copy per sample, until the block ends."""
    results: list[FoundUse] = []
    with contextlib.ExitStack() as stack:
        for use in dict.fromkeys(uses):
            if isinstance(use, BroadcastUse):
                view = use.expanded(rows)
                parameters: Any = use.owner._parameters
                if parameters[use.name] is not use.weight:
                    raise ValueError("a parameter is broadcast in two ways")
                stack.callback(parameters.__setitem__, use.name, parameters[use.name])
                parameters[use.name] = view
                edge = get_gradient_edge(view)
                results.append(FoundUse(use, use.weight.detach(), view.shape, edge))
        yield results


_INPUTS = {"MmBackward0": "_saved_self", "AddmmBackward0": "_saved_mat1"}
"""Nodes of matrix products, and where they hold the first factor."""


def find_products(target: Tensor, uses: Iterable[nn.Module]) -> list[FoundUse]:
    """Find the matrix products of an input `[S, d_in]` with a transposed weight in the graph of a target."""
    by_weight = {use.weight: use for use in uses if isinstance(use, ProductUse)}
    if not by_weight or target.grad_fn is None:
        return []
    results: list[FoundUse] = []
    seen: set[Any] = {target.grad_fn}
    stack: list[Any] = [target.grad_fn]
    while stack:
        node = stack.pop()
        saved = _INPUTS.get(node.name())
        children = [child for child, _ in node.next_functions if child is not None]
        if saved is not None:
            use = by_weight.get(_transposed_weight(node.next_functions[-1][0]))
            if use is not None:
                x = getattr(node, saved).detach()
                shape = torch.Size((len(x), use.weight.shape[0]))
                results.append(FoundUse(use, x, shape, GradientEdge(node, 0)))
        new = [child for child in children if child not in seen]
        seen.update(new)
        stack += new
    return results


def _transposed_weight(node: Any) -> Any:
    """Return the leaf of which a node is the transpose."""
    if node is None or node.name() != "TBackward0":
        return None
    return getattr(node.next_functions[0][0], "variable", None)


def product_use(unit: Any) -> ProductUse | None:
    """Return the use of a unit's weight in matrix products, if it can be one: a matrix, and perhaps its bias."""
    weight, *others = unit.weights
    is_matrix = weight.dim() == 2 and len(unit.modules) == 1
    biases = [other.shape == weight.shape[:1] for other in others]
    if not is_matrix or unit.rule not in ("linear", "module") or biases not in ([], [True]):
        return None
    return ProductUse(unit.modules[0], weight)


def broadcast_uses(unit: Any, inner: Iterable[tuple[int, ...]]) -> tuple[BroadcastUse, ...]:
    """Return the uses of all parameters of a unit, with these shapes of a sample's copies."""
    owner = unit.modules[0]
    names = {weight: name for name, weight in owner.named_parameters(recurse=False)}
    return tuple(
        BroadcastUse(owner, names[weight], weight, shape)
        for weight, shape in zip(unit.weights, inner, strict=True)
    )
