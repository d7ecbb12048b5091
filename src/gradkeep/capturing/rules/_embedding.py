"""Embeddings, and tables that are also the last layer: the prefix is the token."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from gradkeep.capturing.rules._gradients import LayerGradients, by_sample, runs_as
from gradkeep.capturing.rules._linear import linear_gradients
from gradkeep.errors import CaptureError
from gradkeep.factors._lookup import Lookup, LookupRows
from gradkeep.factors._outer import Outer, OuterRows
from gradkeep.factors._tied import Tied, TiedRows

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gradkeep.capturing._calls import LayerCall
    from gradkeep.capturing.rules._gradients import SampleAxis
    from gradkeep.capturing.rules._units import LayerUnit
    from gradkeep.factors._form import Parameter


def is_embedding(module: nn.Module) -> bool:
    """`nn.Embedding`; one that renormalises its table while reading has no such gradient."""
    return runs_as(module, nn.Embedding) and module.max_norm is None


def embedding_gradients(
    name: str,
    module: Any,
    parameters: tuple[Parameter, ...],
    calls: Sequence[LayerCall],
    *,
    rows: int,
    axis: SampleAxis,
) -> LayerGradients:
    """The tokens of each sample, equal ones added up, padding and zero gradients left out."""
    if module.scale_grad_by_freq:
        raise CaptureError(
            f"layer {name}: scale_grad_by_freq divides by how often a token is in the batch, so "
            f"a sample has no gradient of its own",
            fix="set scale_grad_by_freq=False for the capture, or leave the layer out",
        )
    width = module.embedding_dim
    tokens = torch.cat([by_sample(c.input, rows, axis).reshape(rows, -1) for c in calls], 1)
    g = torch.cat([by_sample(c.suffix(), rows, axis).reshape(rows, -1, width) for c in calls], 1)
    kept = _coalesced(tokens, g, rows=rows, size=module.num_embeddings, skip=module.padding_idx)
    form = Lookup(
        parameters,
        prefix=f"{name}.prefix",
        suffix=f"{name}.suffix",
        rows=module.num_embeddings,
        width=width,
    )
    return LayerGradients(form, kept)


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


def tied_gradients(
    unit: LayerUnit, calls: Sequence[LayerCall], *, rows: int, axis: SampleAxis
) -> LayerGradients:
    """The tokens' vectors and the linear layer's positions of each sample."""
    looked = [call for call in calls if isinstance(call.module, nn.Embedding)]
    read = [call for call in calls if not isinstance(call.module, nn.Embedding)]
    weight = unit.parameters[:1]
    low = embedding_gradients(unit.name, looked[0].module, weight, looked, rows=rows, axis=axis)
    high = linear_gradients(unit.name, read[0].module, unit.parameters, read, rows=rows, axis=axis)
    return tied_pieces(unit, low, high)


def tied_pieces(unit: LayerUnit, low: LayerGradients, high: LayerGradients) -> LayerGradients:
    """Both uses of a table, as an embedding and as a linear layer, as one."""
    assert isinstance(low.form, Lookup)
    assert isinstance(low.rows, LookupRows)
    assert isinstance(high.form, Outer)
    assert isinstance(high.rows, OuterRows)
    lookup = dataclasses.replace(
        low.form, prefix=f"{unit.name}.tokens", suffix=f"{unit.name}.token_suffix"
    )
    form, kept = Tied(unit.parameters, lookup, high.form), TiedRows(low.rows, high.rows)
    return LayerGradients(form, kept, sequence=high.sequence)
