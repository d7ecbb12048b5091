"""Gradients of each kind of layer from its calls: linear, convolution, embedding, normalization.

Layers without a rule have dense gradients, by running the module, or the whole model, for each sample.
"""

from __future__ import annotations

import dataclasses
import functools
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from gradkeep.capturing._batches import rows_of
from gradkeep.errors import CaptureError
from gradkeep.factors._convolution import Convolution, ConvolutionRows
from gradkeep.factors._dense import Dense, DenseRows
from gradkeep.factors._form import widened
from gradkeep.factors._lookup import Lookup, LookupRows
from gradkeep.factors._outer import Outer, OuterRows
from gradkeep.factors._tied import Tied, TiedRows

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from gradkeep.capturing._tracer import LayerCall
    from gradkeep.capturing.rules._rules import LayerUnit
    from gradkeep.factors._form import AnyForm, GradientRows, Parameter


@dataclass(frozen=True, slots=True, eq=False)
class LayerGradients:
    """Gradients of B samples for one layer, with the form they are in.

    Attributes:
        form: Form of the gradients.
        rows: Gradients in that form.
        source: Tensor that the prefix was read from; layers with the same source share a prefix.
        sequence: T, if the positions of every sample are those of one sequence `[B, T, ...]`, in order.
    """

    form: AnyForm
    rows: GradientRows
    source: torch.Tensor | None = None
    sequence: int | None = None


def dense_gradients(
    name: str, parameters: tuple[Parameter, ...], values: torch.Tensor
) -> LayerGradients:
    """Wrap whole gradients `[B, P]` of a layer."""
    return LayerGradients(Dense(parameters, f"{name}.gradient", values.shape[1]), DenseRows(values))


def runs_as(module: nn.Module, *kinds: type[nn.Module]) -> bool:
    """Return True if a module is of one of the classes, or of a subclass with their `forward`.

    >>> import torch
    >>> class Scaled(torch.nn.Linear):
    ...     def forward(self, x):
    ...         return 2 * super().forward(x)
    >>> runs_as(torch.nn.Linear(2, 3), torch.nn.Linear), runs_as(Scaled(2, 3), torch.nn.Linear)
    (True, False)
    """
    own = type(module)
    return any(issubclass(own, kind) and own.forward is kind.forward for kind in kinds)


SampleAxis = Literal["first", "second", "flat", "interleaved", "shared"]
"""Dimension that counts the samples: `[B, ...]`, `[T, B, ...]`, `[B * T, ...]` or `[T * B, ...]`;
none in a call that all samples share, such as positions `[T]`, until its output is expanded."""
SAMPLE_AXES: tuple[SampleAxis, ...] = ("first", "second", "flat")


def possible(shape: torch.Size, rows: int, axis: SampleAxis) -> bool:
    """Return True if a tensor of this shape can have this axis for that many samples."""
    if axis == "first":
        return len(shape) >= 1 and shape[0] == rows
    if axis == "second":
        return len(shape) >= 2 and shape[1] == rows
    return len(shape) >= 1 and rows > 0 and shape[0] > rows and shape[0] % rows == 0


def by_sample(tensor: torch.Tensor, rows: int, axis: SampleAxis) -> torch.Tensor:
    """Return the tensor as `[B, ...]`.

    `first` is `[B, ...]`, `second` `[T, B, ...]`, `flat` `[B * T, ...]`, `interleaved` `[T * B, ...]`.

    >>> import torch
    >>> by_sample(torch.zeros(5, 2, 3), 2, "second").shape
    torch.Size([2, 5, 3])
    """
    if axis in ("first", "shared"):
        return tensor
    if axis == "second":
        return tensor.transpose(0, 1)
    if axis == "interleaved":
        return tensor.reshape(len(tensor) // rows, rows, *tensor.shape[1:]).transpose(0, 1)
    return tensor.reshape(rows, len(tensor) // rows, *tensor.shape[1:])


def is_linear(module: nn.Module) -> bool:
    """Return True for `nn.Linear` and the `Conv1D` of Hugging Face, a transposed linear layer."""
    return runs_as(module, nn.Linear) or is_transposed(module)


def is_transposed(module: nn.Module) -> bool:
    """Return True if the weight is laid out `[d_in, d_out]`."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf")


def linear_gradients(unit: LayerUnit, calls: Sequence[LayerCall], rows: int) -> LayerGradients:
    """Return the positions of all calls of each sample, one after the other."""
    inputs = [by_sample(call.input, rows, unit.axis) for call in calls]
    suffixes = [by_sample(call.suffix(), rows, unit.axis) for call in calls]
    d_in, d_out, once = inputs[0].shape[-1], suffixes[0].shape[-1], len(calls) == 1
    xs = [x.reshape(rows, -1, d_in) for x in inputs]
    gs = [g.reshape(rows, -1, d_out) for g in suffixes]
    x, g = (xs[0], gs[0]) if once else (torch.cat(xs, 1), torch.cat(gs, 1))
    positions = x.shape[1]
    offsets = None if once and inputs[0].dim() == 2 else torch.arange(rows + 1) * positions
    form = Outer(
        unit.parameters,
        prefix=f"{unit.name}.prefix",
        suffix=f"{unit.name}.suffix",
        d_in=d_in,
        d_out=d_out,
        bias=len(unit.parameters) > 1,
        transposed=is_transposed(calls[0].module),
    )
    factors = OuterRows(x.reshape(-1, d_in).to(g.dtype), g.reshape(-1, d_out), offsets)
    sequence = positions if once and inputs[0].dim() == 3 else None
    return LayerGradients(form, factors, calls[0].original if once else None, sequence)


_PLAIN = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


def is_convolution(module: nn.Module) -> bool:
    """Return True for the convolutions of torch, with any stride, padding, dilation and groups."""
    return runs_as(module, *_PLAIN, *_TRANSPOSED)


def convolution_gradients(unit: LayerUnit, calls: Sequence[LayerCall], rows: int) -> LayerGradients:
    """Return the pixels of one call; of several calls, or images per sample, the summed gradients."""
    axis = unit.axis
    if len(calls) == 1 and axis == "first":
        call = calls[0]
        return _pixels(unit, call.input, call.suffix(), call.original)
    gradients = []
    for call in calls:
        images, suffixes = by_sample(call.input, rows, axis), by_sample(call.suffix(), rows, axis)
        if axis == "first":
            images, suffixes = images.unsqueeze(1), suffixes.unsqueeze(1)
        for image, suffix in zip(images.unbind(1), suffixes.unbind(1), strict=True):
            one = _pixels(unit, image, suffix, None)
            gradients.append(one.form.restore(one.rows))
    return dense_gradients(unit.name, unit.parameters, functools.reduce(torch.add, gradients))


def _pixels(
    unit: LayerUnit, images: torch.Tensor, suffix: torch.Tensor, source: torch.Tensor | None
) -> LayerGradients:
    module: Any = unit.modules[0]
    images = images.to(suffix.dtype)
    transposed = isinstance(module, _TRANSPOSED)
    padding = _before(module)
    if module.padding_mode != "zeros":
        # The layer pads its input; the padded tensor is the input of the convolution.
        images = F.pad(images, module._reversed_padding_repeated_twice, mode=module.padding_mode)
        padding, source = (0,) * len(padding), None
    wide, narrow = (suffix, images) if transposed else (images, suffix)
    prefix, ending = f"{unit.name}.prefix", f"{unit.name}.suffix"
    form = Convolution(
        unit.parameters,
        wide=ending if transposed else prefix,
        narrow=prefix if transposed else ending,
        channels=wide.shape[1],
        filters=narrow.shape[1],
        size=tuple(wide.shape[2:]),
        out=tuple(narrow.shape[2:]),
        kernel=tuple(module.kernel_size),
        stride=tuple(module.stride),
        padding=padding,
        dilation=tuple(module.dilation),
        groups=module.groups,
        bias=None if len(unit.parameters) == 1 else "wide" if transposed else "narrow",
    )
    return LayerGradients(form, ConvolutionRows(wide, narrow), source)


def _before(module: Any) -> tuple[int, ...]:
    """Return the zeros before the first pixel, per dimension."""
    if module.padding == "valid":
        return (0,) * len(module.kernel_size)
    if module.padding == "same":
        pairs = zip(module.dilation, module.kernel_size, strict=True)
        return tuple(dilation * (size - 1) // 2 for dilation, size in pairs)
    return tuple(module.padding)


def is_embedding(module: nn.Module) -> bool:
    """Return True for `nn.Embedding` without renormalization, which has no such gradient."""
    return runs_as(module, nn.Embedding) and module.max_norm is None


def embedding_gradients(unit: LayerUnit, calls: Sequence[LayerCall], rows: int) -> LayerGradients:
    """Return the tokens of each sample: equal ones summed, without padding and zero gradients."""
    module: Any = calls[0].module
    if module.scale_grad_by_freq:
        raise CaptureError(
            f"layer {unit.name}: scale_grad_by_freq depends on the whole batch",
            code="capture.scale_grad_by_freq",
            fix="Set scale_grad_by_freq=False for the capture, or leave the layer out.",
        )
    width = module.embedding_dim
    inputs = [by_sample(call.input, rows, unit.axis).reshape(rows, -1) for call in calls]
    suffixes = [by_sample(call.suffix(), rows, unit.axis) for call in calls]
    tokens, g = torch.cat(inputs, 1), torch.cat([g.reshape(rows, -1, width) for g in suffixes], 1)
    factors = _coalesced(tokens, g, rows=rows, size=module.num_embeddings, skip=module.padding_idx)
    return LayerGradients(lookup_form(unit, module), factors)


def lookup_form(unit: LayerUnit, table: Any) -> Lookup:
    """Return the form of the gradients of a table, whose first parameter it is."""
    prefix, suffix = f"{unit.name}.prefix", f"{unit.name}.suffix"
    sizes = table.num_embeddings, table.embedding_dim
    return Lookup(unit.parameters[:1], prefix, suffix, *sizes)


def _coalesced(
    tokens: torch.Tensor, g: torch.Tensor, *, rows: int, size: int, skip: int | None
) -> LookupRows:
    row = torch.arange(rows, device=tokens.device).unsqueeze(1).expand_as(tokens)
    valid = g.abs().amax(-1) > 0
    if skip is not None:
        valid &= tokens != skip
    keys, inverse = torch.unique(
        row[valid] * size + tokens[valid], sorted=True, return_inverse=True
    )
    summed = torch.zeros(len(keys), g.shape[-1], dtype=g.dtype, device=g.device)
    summed.index_add_(0, inverse, g[valid])
    counts = torch.bincount(keys // size, minlength=rows).cpu()
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
    return LookupRows(keys % size, summed, offsets)


def tied_gradients(unit: LayerUnit, calls: Sequence[LayerCall], rows: int) -> LayerGradients:
    """Return the tokens' vectors and the linear layer's positions of each sample."""
    looked = [call for call in calls if isinstance(call.module, nn.Embedding)]
    read = [call for call in calls if not isinstance(call.module, nn.Embedding)]
    low, high = embedding_gradients(unit, looked, rows), linear_gradients(unit, read, rows)
    return tied_pieces(unit, low, high)


def tied_pieces(unit: LayerUnit, low: LayerGradients, high: LayerGradients) -> LayerGradients:
    """Combine both uses of a table, as an embedding and as a linear layer."""
    assert isinstance(low.form, Lookup)
    assert isinstance(low.rows, LookupRows)
    assert isinstance(high.form, Outer)
    assert isinstance(high.rows, OuterRows)
    lookup = dataclasses.replace(
        low.form, prefix=f"{unit.name}.tokens", suffix=f"{unit.name}.token_suffix"
    )
    form, factors = Tied(unit.parameters, lookup, high.form), TiedRows(low.rows, high.rows)
    return LayerGradients(form, factors, sequence=high.sequence)


_BATCH = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def is_norm(module: nn.Module) -> bool:
    """Return True for layer, group, RMS and (with running statistics) batch normalization."""
    if isinstance(module, _BATCH):
        return runs_as(module, *_BATCH) and module.running_mean is not None
    return runs_as(module, nn.LayerNorm, nn.GroupNorm) or _is_rms(module)


def norm_gradients(unit: LayerUnit, calls: Sequence[LayerCall], rows: int) -> LayerGradients:
    """Return the gradients of scale and shift, summed over all positions of all calls."""
    gradients, module = [], unit.modules[0]
    for call in calls:
        g, parts = call.suffix(), []
        for parameter in unit.parameters:
            term = g
            if not parameter.name.endswith("bias"):
                # In place: memory is at its peak here.
                term = _normalized(module, call.input.to(g.dtype)).mul_(g)
            term = by_sample(term, rows, unit.axis)
            if isinstance(module, nn.LayerNorm) or _is_rms(module):
                # The parameter has the shape of the last dimensions.
                parts.append(term.reshape(rows, -1, parameter.size).sum(1))
            else:
                channels = term if unit.axis == "first" else term.transpose(1, 2)
                parts.append(channels.reshape(rows, parameter.size, -1).sum(2))
        gradients.append(torch.cat(parts, 1))
    return dense_gradients(unit.name, unit.parameters, functools.reduce(torch.add, gradients))


def norm_terms(unit: LayerUnit, call: LayerCall, rows: int) -> torch.Tensor | None:
    """Return what each position adds to the gradients of scale and shift, `[B, T, P]`.

    None unless the norm is over the last dimension of `[B, T, d]`.
    """
    g = widened(call.suffix())
    if not (isinstance(call.module, nn.LayerNorm) or _is_rms(call.module)):
        return None
    if any(parameter.size != g.shape[-1] for parameter in unit.parameters):
        return None
    terms = [
        g if p.name.endswith("bias") else _normalized(call.module, call.input.to(g.dtype)) * g
        for p in unit.parameters
    ]
    return torch.cat([by_sample(term, rows, unit.axis) for term in terms], 2)


def _normalized(module: Any, x: torch.Tensor) -> torch.Tensor:
    if isinstance(module, nn.LayerNorm):
        return F.layer_norm(x, module.normalized_shape, None, None, module.eps)
    if isinstance(module, nn.GroupNorm):
        return F.group_norm(x, module.num_groups, None, None, module.eps)
    if isinstance(module, _BATCH):
        mean, var = module.running_mean, module.running_var
        return F.batch_norm(x, mean, var, None, None, training=False, eps=module.eps)
    return F.rms_norm(x, list(module.weight.shape), None, _epsilon(module))


def _is_rms(module: nn.Module) -> bool:
    """Return True for `nn.RMSNorm` and those of model libraries, which have this name and one weight."""
    return type(module).__name__.endswith("RMSNorm") and hasattr(module, "weight")


def _epsilon(module: Any) -> float | None:
    for name in ("eps", "variance_epsilon", "epsilon"):
        if hasattr(module, name):
            value: float | None = getattr(module, name)
            return value
    return None


def broadcast_gradients(unit: LayerUnit, calls: Sequence[LayerCall], rows: int) -> LayerGradients:
    """Return the gradients at the samples' copies of all parameters of the unit."""
    values = torch.cat([call.suffix().reshape(rows, -1) for call in calls], 1)
    return dense_gradients(unit.name, unit.parameters, values)


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
    length = _input_length(call)
    first = _outputs(call.module, own, _of_row(call, 0, rows, axis))
    suffixes = [
        _split(call.suffix(index), tensor.shape, rows) for index, tensor in enumerate(first)
    ]
    varied = [
        _split_input(leaf, rows, axis)
        for leaf, tensor in zip(leaves, tensors, strict=True)
        if tensor and _counts_samples(leaf, rows, axis, length)
    ]

    def value(
        own: dict[str, torch.Tensor], varied: list[torch.Tensor], suffixes: list[torch.Tensor]
    ) -> torch.Tensor:
        inputs = iter(varied)
        filled = [
            next(inputs) if tensor and _counts_samples(leaf, rows, axis, length) else leaf
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
    args, kwargs = _of_row(call, row, rows, axis)
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


def _input_length(call: LayerCall) -> int:
    """Return the first dimension of the first input."""
    shape = call.input.shape
    return shape[0] if shape else 0


def _counts_samples(leaf: torch.Tensor, rows: int, axis: SampleAxis, length: int) -> bool:
    """Return True if a tensor has a part for each sample; masks of windows `[W, ...]` may only look so."""
    return possible(leaf.shape, rows, axis) and (axis != "flat" or len(leaf) == length)


def _of_row(call: LayerCall, row: int, rows: int, axis: SampleAxis) -> Any:
    """Return the inputs of one sample; tensors that do not count the samples are shared by all."""
    length = _input_length(call)

    def cut(leaf: torch.Tensor) -> torch.Tensor:
        if not leaf.dim() or not _counts_samples(leaf, rows, axis, length):
            return leaf
        if axis == "second":
            return leaf[:, row : row + 1]
        each = len(leaf) // rows
        return leaf[row * each : (row + 1) * each]

    return tree_map_only(torch.Tensor, cut, (call.args, call.kwargs))


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
