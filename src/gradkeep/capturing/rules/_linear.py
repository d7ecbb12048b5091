"""Linear layers: the prefix is the input, the suffix the output's gradient."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from gradkeep.capturing.rules._gradients import LayerGradients, by_sample, runs_as
from gradkeep.factors._outer import Outer, OuterRows

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gradkeep.capturing._calls import LayerCall
    from gradkeep.capturing.rules._gradients import SampleAxis
    from gradkeep.factors._form import Parameter


def is_linear(module: nn.Module) -> bool:
    """`nn.Linear`, and the `Conv1D` of Hugging Face, which is a linear layer laid out the other way."""
    return runs_as(module, nn.Linear) or is_turned(module)


def is_turned(module: nn.Module) -> bool:
    """Whether the weight is laid out `[d_in, d_out]`."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf")


def linear_gradients(
    name: str,
    module: nn.Module,
    parameters: tuple[Parameter, ...],
    calls: Sequence[LayerCall],
    *,
    rows: int,
    axis: SampleAxis,
) -> LayerGradients:
    """All positions of all calls of each sample, one after the other."""
    inputs = [by_sample(call.input, rows, axis) for call in calls]
    suffixes = [by_sample(call.suffix(), rows, axis) for call in calls]
    d_in, d_out = inputs[0].shape[-1], suffixes[0].shape[-1]
    xs = [x.reshape(rows, -1, d_in) for x in inputs]
    gs = [g.reshape(rows, -1, d_out) for g in suffixes]
    x = xs[0] if len(xs) == 1 else torch.cat(xs, 1)
    g = gs[0] if len(gs) == 1 else torch.cat(gs, 1)
    positions = x.shape[1]
    single = len(calls) == 1 and inputs[0].dim() == 2
    offsets = None if single else torch.arange(rows + 1) * positions
    form = Outer(
        parameters,
        prefix=f"{name}.prefix",
        suffix=f"{name}.suffix",
        d_in=d_in,
        d_out=d_out,
        bias=len(parameters) > 1,
        transposed=is_turned(module),
    )
    kept = OuterRows(x.reshape(-1, d_in).to(g.dtype), g.reshape(-1, d_out), offsets)
    once = len(calls) == 1
    sequence = positions if once and inputs[0].dim() == 3 else None
    return LayerGradients(form, kept, calls[0].original if once else None, sequence)
