"""Products, cosines and largest products of stored gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from gradkeep import _arguments
from gradkeep._arguments import checked
from gradkeep.errors import QueryError
from gradkeep.farm._run import validate_workers
from gradkeep.query._engine import ComputeSpec, GradientPair, ProductEngine
from gradkeep.query._gradients import Gradients
from gradkeep.query._small_codes import SmallCodes, by_codes
from gradkeep.query._top_by_workers import top_by_workers

if TYPE_CHECKING:
    from gradkeep.farm._run import Engine
    from gradkeep.query._planner import QueryPlan

    Ids = np.ndarray[Any, np.dtype[np.int64]]


class LargestRows:
    """The `k` largest values of each query so far, and their rows.

    Ties go to earlier rows: rows must be added in order. Most tiles contain no larger value, which one
    comparison shows, and are not sorted.

    >>> best = LargestRows(1, 2)
    >>> best.add(torch.tensor([[3.0, 5.0, 5.0]]), 0, 0)
    >>> best.add(torch.tensor([[5.0, 6.0]]), 0, 3)
    >>> best.values, best.rows
    (tensor([[6., 5.]]), tensor([[4, 1]]))
    """

    def __init__(self, queries: int, k: int) -> None:
        self.values = torch.full((queries, k), -torch.inf)
        """`[Q, k]`, decreasing"""
        self.rows = torch.zeros((queries, k), dtype=torch.int64)
        """`[Q, k]`"""
        self._k = k

    def add(self, values: torch.Tensor, query_start: int, row_start: int) -> None:
        """Add values `[q, n]` of the queries from `query_start` and the rows from `row_start` on."""
        queries = torch.arange(query_start, query_start + len(values))
        if row_start >= self._k:  # all k entries are set
            above = values > self.values[queries, -1:]
            better = above.any(1)
            queries, values = queries[better], values[better]
            if not len(queries):
                return
        places = _largest_places(values, self._k)
        both = torch.cat([self.values[queries], values.gather(1, places)], 1)
        both_rows = torch.cat([self.rows[queries], places + row_start], 1)
        # Earlier rows are first, and the stable sort keeps ties in order.
        order = both.sort(dim=1, descending=True, stable=True).indices[:, : self._k]
        self.values[queries] = both.gather(1, order)
        self.rows[queries] = both_rows.gather(1, order)


def _largest_places(values: torch.Tensor, k: int) -> torch.Tensor:
    """Return the positions of the `k` largest of `[q, n]`, first of ties, in increasing order `[q, k]`."""
    if values.shape[1] <= k:
        return torch.arange(values.shape[1]).expand_as(values)
    largest = values.topk(k, dim=1)
    if bool(((values >= largest.values[:, -1:]).sum(1) == k).all()):
        return largest.indices.sort(dim=1).values
    # The order of ties in topk is not specified.
    order = values.sort(dim=1, descending=True, stable=True).indices[:, :k]
    return order.sort(dim=1).values


@dataclass(frozen=True, slots=True, eq=False)
class Products:
    """Inner products or cosines of gradients.

    Attributes:
        values: Products `[Q, N]` float32.
        query_ids: Ids of the queries `[Q]`.
        train_ids: Ids of the training rows `[N]`.
        plan: How they were computed.
        layers: Names of the layers.
        per_layer: Products `[L, Q, N]`, if requested.
    """

    values: torch.Tensor
    query_ids: Ids
    train_ids: Ids
    plan: QueryPlan
    layers: tuple[str, ...]
    per_layer: torch.Tensor | None = None


@dataclass(frozen=True, slots=True, eq=False)
class TopRows:
    """The k largest products of each query.

    Attributes:
        values: Products `[Q, k]`, decreasing.
        ids: Ids of the training rows `[Q, k]` int64.
        query_ids: Ids of the queries `[Q]`.
        plan: How they were computed.
    """

    values: torch.Tensor
    ids: torch.Tensor
    query_ids: Ids
    plan: QueryPlan


Side = Gradients | Sequence[Gradients]


@checked(QueryError)
def dot(
    queries: Side,
    train: Side,
    *,
    weights: Sequence[float] | None = None,
    ids: Any = None,
    compute: ComputeSpec = None,
    memory_budget: float | str | None = None,
    per_layer: bool = False,
) -> Products:
    """Compute the inner products of every query's gradient with every training row's, exactly.

    Args:
        queries: Gradients of the queries, or a list with one per checkpoint.
        train: Gradients of the training rows, or a list of the same length.
        weights: Weight of each checkpoint, such as learning rates; the products are summed.
        ids: Ids of the queries; all by default.
        compute: Name of the algorithm, or one per glob of layers; chosen by default.
        memory_budget: Most memory, such as "4GiB".
        per_layer: Also return the products of each layer.

    Returns:
        Products `[Q, N]`.

    Raises:
        QueryError: Queries and training rows cannot be compared.
        BudgetError: The budget is too small.

    Example:
        >>> import gradkeep as gk, tempfile
        >>> store, model = gk.open(tempfile.mkdtemp()), torch.nn.Linear(4, 3)
        >>> data = [(torch.randn(5, 4), torch.tensor([0, 1, 2, 0, 1]))]
        >>> _ = gk.capture(store, model, data, task=gk.Classification(), split="train")
        >>> train = gk.gradients(store, split="train")
        >>> gk.query.dot(train, train).values.shape
        torch.Size([5, 5])
    """
    pairs = _pairs(queries, train, weights)
    return _matrix(pairs, ids, compute, memory_budget, per_layer=per_layer, cosine=False)


@checked(QueryError)
def cosine(
    queries: Side,
    train: Side,
    *,
    weights: Sequence[float] | None = None,
    ids: Any = None,
    compute: ComputeSpec = None,
    memory_budget: float | str | None = None,
) -> Products:
    """Compute the cosines of the angles between gradients; 0 for gradients of length zero.

    Args:
        queries: Gradients of the queries, or a list with one per checkpoint.
        train: Gradients of the training rows, or a list of the same length.
        weights: Weight of each checkpoint; the cosines are averaged.
        ids: Ids of the queries; all by default.
        compute: Name of the algorithm, or one per glob of layers; chosen by default.
        memory_budget: Most memory, such as "4GiB".

    Returns:
        Cosines `[Q, N]`.

    Raises:
        QueryError: Queries and training rows cannot be compared.
    """
    pairs = _pairs(queries, train, weights)
    return _matrix(pairs, ids, compute, memory_budget, per_layer=False, cosine=True)


@checked(QueryError)
def gram(
    gradients: Gradients, *, compute: ComputeSpec = None, memory_budget: float | str | None = None
) -> Products:
    """Compute the inner products of all rows with each other.

    Args:
        gradients: Gradients of the rows.
        compute: Name of the algorithm, or one per glob of layers; chosen by default.
        memory_budget: Most memory, such as "4GiB".

    Returns:
        Products `[N, N]`.
    """
    return dot(gradients, gradients, compute=compute, memory_budget=memory_budget)


@checked(QueryError)
def top(
    queries: Side,
    train: Side,
    k: int,
    *,
    weights: Sequence[float] | None = None,
    ids: Any = None,
    smallest: bool = False,
    compute: ComputeSpec = None,
    memory_budget: float | str | None = None,
    refine: str | tuple[Gradients, Gradients] | None = None,
    candidates: int | None = None,
    workers: int | None = None,
    engine: Engine | None = None,
    codes: SmallCodes | None = None,
) -> TopRows:
    """Find the `k` training rows with the largest (or smallest) product for each query.

    The full matrix is never held: Q x (k + a tile) values at a time. Ties are in the order of the training
    rows.

    Args:
        queries: Gradients of the queries, or a list with one per checkpoint.
        train: Gradients of the training rows, or a list of the same length.
        k: Number of rows.
        weights: Weight of each checkpoint; the products are summed.
        ids: Ids of the queries; all by default.
        smallest: Find the smallest products.
        compute: Name of the algorithm, or one per glob of layers; chosen by default.
        memory_budget: Most memory, such as "4GiB".
        refine: Recompute the products of the best `candidates` from another capture of both splits, by its
            name or as (queries, training rows), and return the best `k` of those. For captures of few bytes
            per row; the other capture needs only the candidate rows.
        candidates: Rows per query that are refined (10 k by default) or ranked by exact products after
            `codes` (by default 100 k, doubled until the last ones bring none of the best `k`, at most
            1600 k).
        workers: Number of processes that search for blocks of queries.
        engine: Engine of `gk.farm.engine` that starts the workers.
        codes: Codes of `gk.query.small_codes`, for millions of rows: only the best candidates by codes are
            read and ranked by exact products.

    Returns:
        Values and ids `[Q, k]`.

    Raises:
        QueryError: Options contradict each other, or rows are missing.
    """
    validate_workers(workers, engine, least=1)
    pairs = _pairs(queries, train, weights)
    positions = _positions(pairs[0].queries, ids)
    if k < 1:
        raise QueryError(f"k must be at least 1, got {k}", code="argument.invalid")
    k = min(k, len(pairs[0].train))
    common: dict[str, Any] = {
        "weights": [pair.weight for pair in pairs],
        "smallest": smallest,
        "compute": compute,
        "memory_budget": memory_budget,
    }
    if codes is not None:
        together = {"refine=": refine, "workers=": workers, "engine=": engine}
        named = [name for name, value in together.items() if value is not None]
        if len(pairs) > 1 or named:
            raise QueryError(
                "codes= needs one checkpoint and no refine=, workers= or engine=",
                code="query.codes_options",
                found=f"{len(pairs)} checkpoints" if len(pairs) > 1 else named[0],
                fix="Pass one checkpoint, and omit refine=, workers= and engine=.",
            )
        values, rows, used = by_codes(
            pairs[0],
            codes,
            positions,
            k,
            candidates=candidates,
            smallest=smallest,
            memory_budget=memory_budget,
        )
        flat = pairs[0].train.block.read_rows(rows.flatten().numpy(), [])
        train_row_ids = torch.from_numpy(flat.ids.reshape(rows.shape))
        return TopRows(values, train_row_ids, pairs[0].queries.ids[positions], used.plan)
    if refine is not None:
        if len(pairs) > 1:
            raise QueryError(
                "refine= needs one checkpoint",
                code="query.refine_checkpoints",
                found=f"{len(pairs)} checkpoints",
                fix="Pass one checkpoint, or omit refine=.",
            )
        _arguments.optional(_arguments.count, "candidates", candidates, error=QueryError, least=1)
        wide = max(k, 10 * k if candidates is None else candidates)
        coarse = top(queries, train, wide, ids=ids, workers=workers, engine=engine, **common)
        return _refine(coarse, pairs[0], refine, k, smallest=smallest, memory_budget=memory_budget)
    planned = ProductEngine(
        pairs,
        compute=compute,
        memory_budget=memory_budget,
        answer=len(positions) * k * 16,
        positions=positions,
    )
    query_ids = pairs[0].queries.ids[positions]
    if workers is not None or engine is not None:
        values, train_row_ids = top_by_workers(
            pairs, query_ids, k, common, workers=workers, engine=engine
        )
        return TopRows(values, train_row_ids, query_ids, planned.plan)
    sign = -1.0 if smallest else 1.0
    best = LargestRows(len(positions), k)
    for tile in planned.tiles():
        best.add(tile.values[0] * sign, tile.query_start, tile.train_start)
    train_ids = torch.from_numpy(pairs[0].train.ids.copy())
    return TopRows(
        values=best.values * sign,
        ids=train_ids[best.rows],
        query_ids=query_ids,
        plan=planned.plan,
    )


def _refine(
    coarse: TopRows,
    pair: GradientPair,
    refine: str | tuple[Gradients, Gradients],
    k: int,
    *,
    smallest: bool,
    memory_budget: float | str | None,
) -> TopRows:
    """Rank the candidates by the products of another capture of the same rows."""
    finer = _finer(pair, refine)
    rows = pair.train.positions(np.unique(coarse.ids.numpy()))
    rows.sort()
    ids = pair.train.ids[rows]
    query_positions = _require_rows(finer.queries, coarse.query_ids, "queries")
    engine = ProductEngine(
        [finer],
        memory_budget=memory_budget,
        answer=4 * len(query_positions) * len(rows),
        positions=query_positions,
        rows=_require_rows(finer.train, ids, "candidates"),
    )
    values = engine.matrix()
    # Only a query's own candidates, in the order of training rows.
    places = torch.searchsorted(torch.from_numpy(rows), _positions_of(pair.train, coarse.ids))
    places = places.sort(1).values
    own = values.gather(1, places)
    order = own.sort(dim=1, descending=not smallest, stable=True).indices[:, :k]
    return TopRows(
        values=own.gather(1, order),
        ids=torch.from_numpy(ids.copy())[places.gather(1, order)],
        query_ids=coarse.query_ids,
        plan=engine.plan,
    )


def _positions_of(side: Gradients, ids: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(side.positions(ids.flatten().numpy())).view_as(ids)


def _finer(pair: GradientPair, refine: str | tuple[Gradients, Gradients]) -> GradientPair:
    if not isinstance(refine, str):
        return GradientPair(*refine, pair.weight)
    queries, train = (side.named(refine) for side in (pair.queries, pair.train))
    return GradientPair(queries, train, pair.weight)


def _require_rows(side: Gradients, ids: Ids, what: str) -> list[int]:
    """Return the positions of rows; raise if some are missing."""
    missing = np.setdiff1d(ids, side.ids)
    if len(missing):
        raise QueryError(
            f"the capture {side.key.capture!r} of {side.key.split} lacks some of the {what}",
            code=f"query.missing_{what}",
            found=f"{len(missing)} of {len(ids)} are missing: {missing[:5].tolist()} ...",
            fix=f"Capture them with gk.capture(..., split={side.key.split!r}, "
            f"name={side.key.capture!r}, ids=...), or pass fewer candidates=.",
        )
    positions: list[int] = side.positions(ids).tolist()
    return positions


def _matrix(
    pairs: list[GradientPair],
    ids: Any,
    compute: ComputeSpec,
    memory_budget: float | str | None,
    *,
    per_layer: bool,
    cosine: bool,
) -> Products:
    positions = _positions(pairs[0].queries, ids)
    layers = tuple(pairs[0].train.forms)
    count, rows = len(positions), len(pairs[0].train)
    parts = len(layers) if per_layer else 1
    answer = count * rows * 4 * (parts + 1 if per_layer else 1)
    total: torch.Tensor | None = None
    last = None
    # Cosines are normalized per checkpoint, so checkpoints are processed one by one.
    for group in [[pair] for pair in pairs] if cosine else [pairs]:
        engine = ProductEngine(
            group,
            compute=compute,
            memory_budget=memory_budget,
            per_layer=per_layer,
            answer=answer,
            positions=positions,
        )
        values = torch.empty(parts, count, rows) if total is None else total
        scale = _inverse_norms(group[0], positions) if cosine else None
        for tile in engine.tiles():
            n = slice(tile.train_start, tile.train_start + tile.values.shape[2])
            q = slice(tile.query_start, tile.query_start + tile.values.shape[1])
            part = tile.values
            if scale is not None:
                part = part * scale[0][q].unsqueeze(1) * scale[1][n]
            if total is None:
                values[:, q, n] = part
            else:
                values[:, q, n] += part
        total, last = values, engine
    assert total is not None
    assert last is not None
    return Products(
        values=total.sum(0) if per_layer else total[0],
        query_ids=pairs[0].queries.ids[positions],
        train_ids=pairs[0].train.ids,
        plan=last.plan,
        layers=layers,
        per_layer=total if per_layer else None,
    )


def _inverse_norms(pair: GradientPair, positions: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    queries, train = pair.queries.norms()[positions], pair.train.norms()
    return _inverse(queries), _inverse(train)


def _inverse(lengths: torch.Tensor) -> torch.Tensor:
    return torch.where(lengths > 0, 1 / lengths, torch.zeros_like(lengths))


def _pairs(queries: Side, train: Side, weights: Sequence[float] | None) -> list[GradientPair]:
    query_sides, rows = _listed("queries", queries), _listed("train", train)
    if len(query_sides) != len(rows):
        raise QueryError(
            "queries and training rows have different numbers of checkpoints",
            code="query.different_checkpoints",
            found=f"{len(query_sides)} and {len(rows)}",
            fix="Pass one capture of each per checkpoint, in the same order.",
        )
    for name, captures in (("queries", query_sides), ("train", rows)):
        for capture in captures:
            _arguments.instance(name, capture, Gradients, error=QueryError)
    by = [1.0] * len(rows) if weights is None else [float(weight) for weight in weights]
    if len(by) != len(rows):
        raise QueryError(
            "weights must have one weight per checkpoint",
            code="query.wrong_weights",
            found=f"{len(by)} weights for {len(rows)} checkpoints",
        )
    return [GradientPair(q, t, w) for q, t, w in zip(query_sides, rows, by, strict=True)]


def _listed(name: str, side: Side) -> list[Gradients]:
    if isinstance(side, Gradients):
        return [side]
    kinds: tuple[type[Sequence[Gradients]], ...] = (list, tuple)
    return list(
        _arguments.instance(name, side, kinds, error=QueryError, expected="gk.gradients(...)")
    )


def _positions(queries: Gradients, ids: Any) -> list[int]:
    if ids is None:
        return list(range(len(queries)))
    positions: list[int] = queries.positions(ids).tolist()
    if not positions:
        raise QueryError(
            "there are no queries", code="query.no_queries", fix="Pass ids= of some rows."
        )
    return positions
