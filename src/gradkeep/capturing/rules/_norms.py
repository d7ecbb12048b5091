"""Normalisation layers: few parameters, so their gradients are kept as they are.

gamma = sum over positions of g * xhat, beta = sum over positions of g, with xhat the normalised
input before scale and shift.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional as F

from gradkeep.capturing.rules._gradients import LayerGradients, by_sample, runs_as
from gradkeep.factors._dense import Dense, DenseRows
from gradkeep.factors._form import widened

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gradkeep.capturing._calls import LayerCall
    from gradkeep.capturing.rules._gradients import SampleAxis
    from gradkeep.factors._form import Parameter

_BATCH = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def is_norm(module: nn.Module) -> bool:
    """Layer, group, RMS and (with running statistics) batch normalisation."""
    if isinstance(module, _BATCH):
        return runs_as(module, *_BATCH) and module.running_mean is not None
    return runs_as(module, nn.LayerNorm, nn.GroupNorm) or _is_rms(module)


def norm_gradients(
    name: str,
    module: nn.Module,
    parameters: tuple[Parameter, ...],
    calls: Sequence[LayerCall],
    *,
    rows: int,
    axis: SampleAxis,
) -> LayerGradients:
    """The summed gradients of scale and shift over all positions of all calls."""
    total: torch.Tensor | None = None
    for call in calls:
        g = call.suffix()
        parts = _both_at_once(module, parameters, call.input, g) if axis == "first" else []
        for parameter in parameters if not parts else ():
            term = g
            if not parameter.name.endswith("bias"):
                # In place: this is made where a backward pass has the least room.
                term = _normalised(module, call.input.to(g.dtype)).mul_(g)
            if isinstance(module, nn.LayerNorm) or _is_rms(module):
                # The parameter has the shape of the last dimensions.
                kept = by_sample(term, rows, axis).reshape(rows, -1, parameter.size)
                parts.append(kept.sum(1))
            else:
                channels = by_sample(term, rows, axis)
                if axis != "first":
                    channels = channels.transpose(1, 2)
                parts.append(channels.reshape(rows, parameter.size, -1).sum(2))
        gradient = torch.cat(parts, 1)
        total = gradient if total is None else total + gradient
    assert total is not None
    return LayerGradients(Dense(parameters, f"{name}.gradient", total.shape[1]), DenseRows(total))


def _both_at_once(
    module: Any, parameters: tuple[Parameter, ...], x: torch.Tensor, g: torch.Tensor
) -> list[torch.Tensor]:
    """Of images of a batch normalisation, in one pass by torch's own kernel; none where it cannot.

    Every channel of every row is a channel of one image that has them all.
    """
    if not (isinstance(module, _BATCH) and x.dim() > 2 and len(x)):
        return []
    if (
        x.dtype != g.dtype
        or x.dtype not in (torch.float32, torch.float64)
        or x.device.type != "cpu"
    ):
        return []
    rows = len(x)
    statistics: list[Any] = [module.running_mean, module.running_var]
    both = torch.ops.aten.native_batch_norm_backward(
        *(part.reshape(1, -1, *part.shape[2:]) for part in (g, x)),
        None,
        *(one.to(x.dtype).repeat(rows) for one in statistics),
        *(None, None, False, module.eps, [False, True, True]),
    )
    return [both[2 if p.name.endswith("bias") else 1].view(rows, -1) for p in parameters]


def norm_terms(
    call: LayerCall, parameters: tuple[Parameter, ...], *, rows: int, axis: SampleAxis
) -> torch.Tensor | None:
    """What each position adds to the gradients of scale and shift, `[B, T, P]`.

    None where the norm is not one over the last dimension of `[B, T, d]`.
    """
    g = widened(call.suffix())
    if not (isinstance(call.module, nn.LayerNorm) or _is_rms(call.module)):
        return None
    if any(parameter.size != g.shape[-1] for parameter in parameters):
        return None
    terms = [
        g if p.name.endswith("bias") else _normalised(call.module, call.input.to(g.dtype)) * g
        for p in parameters
    ]
    return torch.cat([by_sample(term, rows, axis) for term in terms], 2)


def _normalised(module: Any, x: torch.Tensor) -> torch.Tensor:
    if isinstance(module, nn.LayerNorm):
        return F.layer_norm(x, module.normalized_shape, None, None, module.eps)
    if isinstance(module, nn.GroupNorm):
        return F.group_norm(x, module.num_groups, None, None, module.eps)
    if isinstance(module, _BATCH):
        mean, var = module.running_mean, module.running_var
        return F.batch_norm(x, mean, var, None, None, training=False, eps=module.eps)
    return F.rms_norm(x, list(module.weight.shape), None, _epsilon(module))


def _is_rms(module: nn.Module) -> bool:
    """`nn.RMSNorm`, and those of model libraries, which all have this name and one weight."""
    return type(module).__name__.endswith("RMSNorm") and hasattr(module, "weight")


def _epsilon(module: Any) -> float | None:
    for name in ("eps", "variance_epsilon", "epsilon"):
        if hasattr(module, name):
            found: float | None = getattr(module, name)
            return found
    return None
