"""Layers without a rule: dense gradients by running the module, or the whole model, for each sample."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from gradkeep.capturing._batches import rows_of
from gradkeep.capturing.rules._layers import dense_gradients, possible

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from gradkeep.capturing._tracer import LayerCall
    from gradkeep.capturing.rules._layers import LayerGradients, SampleAxis
    from gradkeep.capturing.rules._rules import LayerUnit


def module_gradients(
    units: Sequence[LayerUnit], calls: Sequence[LayerCall], *, rows: int
) -> dict[LayerUnit, LayerGradients]:
    """Compute the dense gradients of all units that are captured by running the same module again.

    For all samples at once with `torch.func.vmap` or, where that fails, one after the other. Cost: one forward and
    backward of this module per sample, on top of the model's own.
    """
    first = units[0]
    names = {id(weight): name for name, weight in first.modules[0].named_parameters()}
    weights = {names[id(weight)]: weight for unit in units for weight in unit.weights}
    total: torch.Tensor | None = None
    for call in calls:
        if first.rule == "module":
            gradients = _all_samples(call, weights, rows, first.axis)
        else:
            each = (_one_sample(call, weights, row, rows, first.axis) for row in range(rows))
            gradients = torch.stack(list(each))
        total = gradients if total is None else total + gradients
    assert total is not None
    return _by_unit(units, total)


def _by_unit(units: Sequence[LayerUnit], values: torch.Tensor) -> dict[LayerUnit, LayerGradients]:
    """Split the gradients `[B, P]` by unit."""
    parts = torch.split(values, [unit.size for unit in units], 1)
    return {
        unit: dense_gradients(unit.name, unit.parameters, part)
        for unit, part in zip(units, parts, strict=True)
    }


def _flat(
    weights: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor | None]
) -> torch.Tensor:
    """Concatenate all gradients to one vector, with zeros for missing ones."""
    pairs = zip(weights, gradients, strict=True)
    return torch.cat(
        [(torch.zeros_like(w) if g is None else g.to_dense()).reshape(-1) for w, g in pairs]
    )


def _all_samples(
    call: LayerCall, weights: Mapping[str, torch.Tensor], rows: int, axis: SampleAxis
) -> torch.Tensor:
    leaves, shape = tree_flatten((call.args, call.kwargs))
    tensors = [isinstance(leaf, torch.Tensor) and leaf.dim() > 0 for leaf in leaves]
    own = {name: value.detach() for name, value in weights.items()}
    first = _outputs(call.module, own, _of_row((call.args, call.kwargs), 0, rows, axis))
    suffixes = [
        _split(call.suffix(index), tensor.shape, rows) for index, tensor in enumerate(first)
    ]
    varied = [
        _split_input(leaf, rows, axis)
        for leaf, tensor in zip(leaves, tensors, strict=True)
        if tensor and possible(leaf.shape, rows, axis)
    ]

    def value(
        own: dict[str, torch.Tensor], varied: list[torch.Tensor], suffixes: list[torch.Tensor]
    ) -> torch.Tensor:
        inputs = iter(varied)
        filled = [
            next(inputs) if tensor and possible(leaf.shape, rows, axis) else leaf
            for leaf, tensor in zip(leaves, tensors, strict=True)
        ]
        outputs = _outputs(call.module, own, tree_unflatten(filled, shape))
        pairs = zip(outputs, suffixes, strict=True)
        return torch.stack([(tensor * suffix).sum() for tensor, suffix in pairs]).sum()

    # Fused attention kernels have no batching rule; the plain one has. Other operators without one run
    # in a slow loop with a warning, and are better run one by one.
    with sdpa_kernel(SDPBackend.MATH), warnings.catch_warnings():
        warnings.filterwarnings("error", message="There is a performance drop")
        each = torch.func.vmap(torch.func.grad(value), in_dims=(None, 0, 0))
        gradients = each(own, varied, suffixes)
    return torch.cat([gradient.reshape(rows, -1) for gradient in gradients.values()], 1)


def _outputs(module: nn.Module, own: dict[str, torch.Tensor], inputs: Any) -> list[torch.Tensor]:
    args, kwargs = inputs
    output = functional_call(module, own, args, kwargs)
    tensors = [t for t in tree_flatten(output)[0] if isinstance(t, torch.Tensor)]
    return [t for t in tensors if t.is_floating_point()]


def _split_input(leaf: torch.Tensor, rows: int, axis: SampleAxis) -> torch.Tensor:
    """Return `[B, ...]`, each row shaped as the input of one sample."""
    if axis == "second":
        return leaf.transpose(0, 1).unsqueeze(2)
    return leaf.reshape(rows, len(leaf) // rows, *leaf.shape[1:])


def _split(suffix: torch.Tensor, one_shape: torch.Size, rows: int) -> torch.Tensor:
    """Return `[B, *one_shape]`: a dimension that is smaller in the one-sample output counts the samples."""
    for dim, (have, want) in enumerate(zip(suffix.shape, one_shape, strict=True)):
        if have != want:
            shape = (*suffix.shape[:dim], rows, want, *suffix.shape[dim + 1 :])
            return suffix.reshape(shape).movedim(dim, 0)
    return suffix.unsqueeze(0)


def _one_sample(
    call: LayerCall, weights: Mapping[str, torch.Tensor], row: int, rows: int, axis: SampleAxis
) -> torch.Tensor:
    args, kwargs = _of_row((call.args, call.kwargs), row, rows, axis)
    own = {name: value.detach().requires_grad_() for name, value in weights.items()}
    with torch.enable_grad():
        outputs = [t for t in _outputs(call.module, own, (args, kwargs)) if t.requires_grad]
    pairs = [
        (tensor, _split(call.suffix(index), tensor.shape, rows)[row])
        for index, tensor in enumerate(outputs)
    ]
    gradients = torch.autograd.grad(
        [tensor for tensor, _ in pairs],
        list(own.values()),
        [suffix.to(tensor.dtype) for tensor, suffix in pairs],
        allow_unused=True,
    )
    return _flat(list(own.values()), gradients)


def _of_row(inputs: Any, row: int, rows: int, axis: SampleAxis) -> Any:
    """Return the inputs of one sample; tensors that do not count the samples are shared by all."""

    def cut(leaf: torch.Tensor) -> torch.Tensor:
        if not leaf.dim() or not possible(leaf.shape, rows, axis):
            return leaf
        if axis == "second":
            return leaf[:, row : row + 1]
        each = len(leaf) // rows
        return leaf[row * each : (row + 1) * each]

    return tree_map_only(torch.Tensor, cut, inputs)


def whole_model_gradients(
    units: Sequence[LayerUnit],
    measure: Callable[[Any], tuple[Any, torch.Tensor]],
    batch: Any,
    *,
    rows: int,
) -> dict[LayerUnit, LayerGradients]:
    """Compute the dense gradients of these units' parameters, by autograd on batches of one.

    The second value of `measure(batch)` is differentiated. Cost: one forward and backward pass of the model per
    sample.
    """
    weights = [weight for unit in units for weight in unit.weights]
    gradients = [
        torch.autograd.grad(measure(rows_of(batch, row, row + 1))[1], weights, allow_unused=True)
        for row in range(rows)
    ]
    return _by_unit(units, torch.stack([_flat(weights, one) for one in gradients]))
