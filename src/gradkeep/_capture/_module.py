"""Any module at all: each sample's gradient by running that module alone for one sample.

Its inputs and its outputs' gradients are known, so the model around it is not run again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.func import functional_call
from torch.utils._pytree import tree_flatten, tree_unflatten

from gradkeep._capture._piece import Piece
from gradkeep._capture._positions import possible
from gradkeep.query._factors import DenseRows
from gradkeep.query._forms import Dense

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from gradkeep._capture._calls import Call
    from gradkeep._capture._positions import Lay
    from gradkeep.query._forms import Parameter


def piece(
    name: str,
    parameters: tuple[Parameter, ...],
    weights: Mapping[str, torch.Tensor],
    calls: Sequence[Call],
    *,
    rows: int,
    lay: Lay,
) -> Piece:
    """The dense gradients `[B, P]` of the module's own `weights`, one sample after the other.

    Cost: one forward and backward of this module per sample, on top of the model's own.
    """
    total: torch.Tensor | None = None
    for call in calls:
        found = torch.stack([_one(call, weights, row, rows, lay) for row in range(rows)])
        total = found if total is None else total + found
    assert total is not None
    return Piece(Dense(parameters, f"{name}.gradient", total.shape[1]), DenseRows(total))


def _one(
    call: Call, weights: Mapping[str, torch.Tensor], row: int, rows: int, lay: Lay
) -> torch.Tensor:
    args, kwargs = _of_row((call.args, call.kwargs), row, rows, lay)
    own = {name: value.detach().requires_grad_() for name, value in weights.items()}
    with torch.enable_grad():
        output = functional_call(call.module, own, args, kwargs)
    outputs = [t for t in tree_flatten(output)[0] if isinstance(t, torch.Tensor)]
    outputs = [t for t in outputs if t.requires_grad]
    pairs = [
        (tensor, _row_of_output(call.suffix(index), tensor.shape, row))
        for index, tensor in enumerate(outputs)
    ]
    found = torch.autograd.grad(
        [tensor for tensor, _ in pairs],
        list(own.values()),
        [suffix.to(tensor.dtype) for tensor, suffix in pairs],
        allow_unused=True,
    )
    flat = [
        torch.zeros_like(weight).reshape(-1) if gradient is None else gradient.reshape(-1)
        for weight, gradient in zip(own.values(), found, strict=True)
    ]
    return torch.cat(flat)


def _of_row(inputs: Any, row: int, rows: int, lay: Lay) -> Any:
    """The inputs of one sample; tensors that do not count the samples are shared by all."""
    leaves, shape = tree_flatten(inputs)
    cut = [
        _cut(leaf, row, rows, lay) if isinstance(leaf, torch.Tensor) and leaf.dim() else leaf
        for leaf in leaves
    ]
    return tree_unflatten(cut, shape)


def _cut(leaf: torch.Tensor, row: int, rows: int, lay: Lay) -> torch.Tensor:
    if not possible(leaf.shape, rows, lay):
        return leaf
    if lay == "second":
        return leaf[:, row : row + 1]
    each = len(leaf) // rows
    return leaf[row * each : (row + 1) * each]


def _row_of_output(suffix: torch.Tensor, wanted: torch.Size, row: int) -> torch.Tensor:
    """One sample's part of an output's gradient: where a dimension shrank, that one counts samples.

    An output may count them elsewhere than the input, as the last state of a recurrent layer does.
    """
    if suffix.shape == wanted:
        return suffix
    for dim, (have, want) in enumerate(zip(suffix.shape, wanted, strict=True)):
        if have != want:
            return suffix.narrow(dim, row * want, want)
    raise AssertionError("shapes differ in some dimension")


def own_weights(
    module: nn.Module, names: Mapping[nn.Parameter, str]
) -> dict[str, torch.nn.Parameter]:
    """Those of the given parameters that the module or its children hold, by their local names."""
    found = module.named_parameters(remove_duplicate=False)
    return {local: parameter for local, parameter in found if parameter in names}
