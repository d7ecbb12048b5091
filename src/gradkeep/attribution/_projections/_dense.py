"""Projections of dense gradients: of flat vectors, or of parameters by name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gradkeep.attribution._projections._dense_matrix import DenseMatrix
from gradkeep.attribution._projections._finite import require_finite
from gradkeep.attribution._projections._sketch import FLAT, sketch_of, wide
from gradkeep.attribution._projections._sum import Sum
from gradkeep.errors import AttributionError

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from gradkeep.attribution._projections._projection import Projection


def project_dense(
    gradients: torch.Tensor, projection: Projection, *, model: object = 0
) -> torch.Tensor:
    """The projections `[B, k]` of flat gradients `[B, P]`; `auto` folds them.

    >>> import torch
    >>> from gradkeep.attribution._projections import Projection
    >>> x = torch.sin(torch.arange(20_000.0)).view(2, 10_000)
    >>> low = project_dense(x, Projection(dim=1000))
    >>> bool((low.norm(dim=1) / x.norm(dim=1) - 1).abs().max() < 0.1)
    True
    """
    if gradients.dim() != 2:
        raise AttributionError(
            "gradients must be one row per sample",
            found=f"shape {tuple(gradients.shape)}",
            expected="[B, P]",
        )
    values = wide(gradients)
    into = Sum(len(values), projection.dim, dtype=values.dtype, device=values.device)
    if values.numel():
        sketch_of(projection, model).flat(FLAT, values.shape[1]).add(into, 0, values)
    return require_finite(into.values())


def signs_or_normals(size: int, projection: Projection, *, model: object = 0) -> torch.Tensor:
    """The matrix `[P, k]` that `rademacher` and `normal` multiply with, before / sqrt(k)."""
    made = sketch_of(projection, model).flat(FLAT, size)
    if not isinstance(made, DenseMatrix):
        raise AttributionError(
            f"a projection of kind {projection.kind!r} has no dense matrix",
            expected="rademacher or normal",
        )
    return made.matrix()


def project_parameters(
    gradients: Mapping[str, torch.Tensor], projection: Projection, *, model: object = 0
) -> torch.Tensor:
    """The projections `[B, k]` of gradients `[B, *shape]` of parameters, by their full names.

    The same numbers as `project` gives from the factors of the layers that hold them.
    """
    if not gradients:
        raise AttributionError("there is no gradient to project")
    named = {name: wide(value) for name, value in gradients.items()}
    like = next(iter(named.values()))
    sketch = sketch_of(projection, model)
    into = Sum(len(like), projection.dim, dtype=like.dtype, device=like.device)
    for name, value in named.items():
        if len(value) != len(like):
            raise AttributionError(
                "gradients of different numbers of samples",
                found=f"{len(like)} and, of {name}, {len(value)}",
            )
        if value.numel():
            flat = value.reshape(len(value), -1)
            sketch.add_values(into, 0, name, tuple(value.shape[1:]), flat)
    return require_finite(into.values())
