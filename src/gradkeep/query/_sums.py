"""Sums over groups of rows: mean gradients, variances, and products with them."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from gradkeep import _arguments
from gradkeep._arguments import checked
from gradkeep.errors import QueryError
from gradkeep.factors._arithmetic import tiles
from gradkeep.factors._form import dot_directions
from gradkeep.query._engine import stream_shares
from gradkeep.query._gradients import check_restorable, split_parameters

if TYPE_CHECKING:
    from collections.abc import Mapping

    from gradkeep.factors._form import AnyForm
    from gradkeep.query._gradients import Gradients


@dataclass(frozen=True, slots=True, eq=False)
class Directions:
    """Dense gradients of K groups, with which `along` multiplies every row.

    Attributes:
        groups: Names of the groups.
        layers: Values `[K, P]` of each layer.
        forms: Form of each layer.
        weights: Fingerprint of the model's weights.
    """

    groups: tuple[Any, ...]
    layers: Mapping[str, torch.Tensor]
    forms: Mapping[str, AnyForm]
    weights: str

    def parameters(self) -> dict[str, torch.Tensor]:
        """Return one tensor `[K, *shape]` per parameter of the model."""
        check_restorable(self.forms)
        parameters: dict[str, torch.Tensor] = {}
        for name, values in self.layers.items():
            parameters |= split_parameters(self.forms[name], values)
        return parameters


@checked(QueryError)
def mean(
    gradients: Gradients,
    *,
    by: Any = None,
    weights: Any = None,
    ids: Any = None,
    memory_budget: float | str | None = None,
) -> Directions:
    """Compute the mean gradient of all rows, or of each group; one product per layer, nothing is restored.

    Args:
        gradients: Gradients of the rows.
        by: Name of a captured value (`"label"`), or one value per row `[N]`, that defines the groups.
        weights: Weights of the rows `[N]`; the result is divided by their sum.
        ids: Use only these rows.
        memory_budget: Most memory, such as "4GiB".

    Returns:
        Directions of K groups.

    Raises:
        QueryError: The weights of a group sum to zero, or a shape is wrong.
    """
    summed = total(gradients, by=by, weights=weights, ids=ids, memory_budget=memory_budget)
    member, groups = _membership(gradients, by=by, weights=weights, ids=ids)
    sizes = member.sum(1, keepdim=True)
    empty = (sizes == 0).squeeze(1)
    if bool(empty.any()):
        raise QueryError(
            "the weights of a group sum to zero",
            code="query.zero_weights",
            found=f"group {groups[int(empty.nonzero()[0])]}",
        )
    values = {name: sums / sizes.to(sums.dtype) for name, sums in summed.layers.items()}
    return dataclasses.replace(summed, layers=values)


@checked(QueryError)
def total(
    gradients: Gradients,
    *,
    by: Any = None,
    weights: Any = None,
    ids: Any = None,
    memory_budget: float | str | None = None,
) -> Directions:
    """Compute the (weighted) sum of the gradients of all rows, or of each group.

    Args:
        gradients: Gradients of the rows.
        by: Name of a captured value, or one value per row `[N]`, that defines the groups.
        weights: Weights of the rows `[N]`.
        ids: Use only these rows.
        memory_budget: Most memory, such as "4GiB".

    Returns:
        Directions of K groups.
    """
    member, groups = _membership(gradients, by=by, weights=weights, ids=ids)
    sums = _sums(gradients, member, memory_budget, squares=False)
    return Directions(groups, sums, gradients.forms, gradients.weights)


@checked(QueryError)
def squares(
    gradients: Gradients,
    *,
    by: Any = None,
    weights: Any = None,
    ids: Any = None,
    memory_budget: float | str | None = None,
) -> Directions:
    """Compute the (weighted) sum of squared gradient entries of all rows, or of each group.

    For losses this is the diagonal of the empirical Fisher matrix. Cost: every row is restored once, a tile
    at a time.

    Args:
        gradients: Gradients of the rows.
        by: Name of a captured value, or one value per row `[N]`, that defines the groups.
        weights: Weights of the rows `[N]`.
        ids: Use only these rows.
        memory_budget: Most memory, such as "4GiB".

    Returns:
        Directions of K groups.
    """
    member, groups = _membership(gradients, by=by, weights=weights, ids=ids)
    sums = _sums(gradients, member, memory_budget, squares=True)
    return Directions(groups, sums, gradients.forms, gradients.weights)


@checked(QueryError)
def variance(
    gradients: Gradients,
    *,
    by: Any = None,
    ids: Any = None,
    memory_budget: float | str | None = None,
) -> Directions:
    """Compute the variance of every gradient entry over all rows, or over each group.

    Divides by the number of rows. Cost: every row is restored once, a tile at a time, after a pass for the
    mean.

    Args:
        gradients: Gradients of the rows.
        by: Name of a captured value, or one value per row `[N]`, that defines the groups.
        ids: Use only these rows.
        memory_budget: Most memory, such as "4GiB".

    Returns:
        Directions of K groups.
    """
    member, groups = _membership(gradients, by=by, weights=None, ids=ids)
    center = mean(gradients, by=by, ids=ids, memory_budget=memory_budget).layers
    slopes = gradients.slopes()
    # Deviations are squared first: the difference of two large sums would lose digits.
    sums = {name: torch.zeros_like(values) for name, values in center.items()}
    rows, scratch = _tiling(gradients, 2 * len(member), memory_budget, answer=0)
    group = member.argmax(0)
    counts = member.any(0)
    for some in gradients.stream(rows):
        for name, form in gradients.forms.items():
            count = some.stop - some.start
            for start, stop in tiles(count, form.gradient_size, 8, scratch):
                at = slice(some.start + start, some.start + stop)
                part = some.factors[name].take(start, stop)
                dense = form.restore(part)
                if slopes is not None:
                    dense *= slopes[at].unsqueeze(1).to(dense.dtype)
                dense -= center[name][group[at]]
                dense = dense.square_() * counts[at].unsqueeze(1)
                sums[name].index_add_(0, group[at], dense.to(sums[name].dtype))
    sizes = member.sum(1, keepdim=True)
    values = {name: total / sizes for name, total in sums.items()}
    return Directions(groups, values, gradients.forms, gradients.weights)


@checked(QueryError)
def along(
    gradients: Gradients, directions: Directions, *, memory_budget: float | str | None = None
) -> torch.Tensor:
    """Multiply every row's gradient with some directions, such as a mean query.

    Args:
        gradients: Gradients of the rows.
        directions: Directions of K groups, at the same weights and layers.
        memory_budget: Most memory, such as "4GiB".

    Returns:
        Products `[K, N]`.

    Raises:
        QueryError: Weights or layers differ.
    """
    check_directions(directions, gradients)
    count = len(directions.groups)
    out = torch.empty(count, len(gradients))
    rows, scratch = _tiling(gradients, count, memory_budget, answer=count * len(gradients) * 4)
    for some in gradients.stream(rows):
        products = torch.zeros(count, some.stop - some.start)
        for name, form in gradients.forms.items():
            factors = some.factors[name]
            moved = directions.layers[name].to(factors.example.dtype)
            products += dot_directions(form, factors, moved, scratch=scratch).float()
        out[:, some.start : some.stop] = products
    slopes = gradients.slopes()
    return out if slopes is None else out * slopes


def check_directions(directions: Directions, gradients: Gradients) -> None:
    """Raise unless the directions have the weights and the layers of the rows."""
    if directions.weights != gradients.weights:
        raise QueryError(
            "directions and rows were captured with different weights",
            code="query.different_weights",
            fix="Compute the directions from a capture at the same checkpoint.",
        )
    if list(directions.layers) != list(gradients.forms):
        raise QueryError(
            "directions and rows hold different layers",
            code="query.different_layers",
            found=", ".join(sorted(set(directions.layers) ^ set(gradients.forms))[:8]),
        )


def _sums(
    gradients: Gradients,
    member: torch.Tensor,
    memory_budget: float | str | None,
    *,
    squares: bool,
) -> dict[str, torch.Tensor]:
    slopes = gradients.slopes()
    if slopes is not None:
        member = member * (slopes.double().square() if squares else slopes.double())
    sums: dict[str, torch.Tensor] = {}
    rows, _ = _tiling(gradients, len(member), memory_budget, answer=0)
    for some in gradients.stream(rows):
        part = member[:, some.start : some.stop]
        if not bool(part.any()):
            continue
        for name, form in gradients.forms.items():
            factors = some.factors[name]
            add_up = form.weighted_squares if squares else form.weighted_sum
            part_sums = add_up(factors, part.to(factors.example.dtype))
            if name in sums:
                sums[name] += part_sums
            else:
                sums[name] = part_sums
    for name, form in gradients.forms.items():
        sums.setdefault(name, torch.zeros(len(member), form.gradient_size))
    return {name: sums[name] for name in gradients.forms}


def _membership(
    gradients: Gradients, *, by: Any, weights: Any, ids: Any
) -> tuple[torch.Tensor, tuple[Any, ...]]:
    """Return the weight of each row in each group `[K, N]`, and the names of the groups."""
    count = len(gradients)
    if by is None:
        labels, names = np.zeros(count, np.int64), np.zeros(1, np.int64)
    else:
        groups = gradients.column(by) if isinstance(by, str) else by
        values = _arguments.array(
            "by",
            groups,
            error=QueryError,
            kinds="biufUS",
            expected="one group per row",
            shape=(count,),
            code="query.wrong_groups",
        )
        names, labels = np.unique(values, return_inverse=True)
    amounts = np.ones(count)
    if weights is not None:
        amounts = _arguments.array(
            "weights", weights, error=QueryError, shape=(count,), code="query.wrong_weights"
        ).astype(np.float64)
    if not np.isfinite(amounts).all():
        raise QueryError(
            "weights must be finite", code="query.wrong_weights", found="NaN or infinity"
        )
    if ids is not None:
        chosen = np.zeros(count, bool)
        chosen[gradients.positions(ids)] = True
        amounts = amounts * chosen
    member = torch.zeros(len(names), count, dtype=torch.float64)
    member[torch.from_numpy(labels), torch.arange(count)] = torch.from_numpy(amounts)
    return member, tuple(names.tolist()) if by is not None else (None,)


def _tiling(
    gradients: Gradients, groups: int, memory_budget: float | str | None, *, answer: int
) -> tuple[int, int]:
    """Return rows per tile and bytes of temporaries; the directions count as part of the result."""
    held = answer + groups * gradients.size * 4
    split = stream_shares(gradients, memory_budget, answer=held)
    return split.train_rows, split.scratch
