"""The largest of many values that pass in tiles, in few passes over them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from gradkeep import _arguments
from gradkeep._arguments import checked
from gradkeep.errors import QueryError
from gradkeep.farm._run import check_place
from gradkeep.query._engine import ComputeWish, GradientPair, ProductEngine
from gradkeep.query._gradients import Gradients
from gradkeep.query._small_codes import SmallCodes, by_codes
from gradkeep.query._top_by_workers import top_by_workers

if TYPE_CHECKING:
    from gradkeep.farm._run import Engine
    from gradkeep.query._planner import QueryPlan

    Ids = np.ndarray[Any, np.dtype[np.int64]]


class LargestRows:
    """The `k` largest values of each query so far, and the rows they belong to.

    Of equal values, those of earlier rows come first: rows must pass in order. Of most tiles a comparison
    shows that no value exceeds what was seen, and nothing is sorted.

    >>> best = LargestRows(1, 2)
    >>> best.add(torch.tensor([[3.0, 5.0, 5.0]]), 0, 0)
    >>> best.add(torch.tensor([[5.0, 6.0]]), 0, 3)
    >>> best.values, best.rows
    (tensor([[6., 5.]]), tensor([[4, 1]]))
    """

    def __init__(self, queries: int, k: int) -> None:
        self.values = torch.full((queries, k), -torch.inf)
        """`[Q, k]`, falling"""
        self.rows = torch.zeros((queries, k), dtype=torch.int64)
        """`[Q, k]`"""
        self._k = k

    def add(self, values: torch.Tensor, query_start: int, row_start: int) -> None:
        """Look at values `[q, n]` of the queries from `query_start` and the rows from `row_start`."""
        queries = torch.arange(query_start, query_start + len(values))
        if row_start >= self._k:  # before, some places are not taken
            above = values > self.values[queries, -1:]
            better = above.any(1)
            queries, values = queries[better], values[better]
            if not len(queries):
                return
        places = _largest_places(values, self._k)
        both = torch.cat([self.values[queries], values.gather(1, places)], 1)
        both_rows = torch.cat([self.rows[queries], places + row_start], 1)
        # Earlier rows stand first, and a stable sort leaves equals in place.
        order = both.sort(dim=1, descending=True, stable=True).indices[:, : self._k]
        self.values[queries] = both.gather(1, order)
        self.rows[queries] = both_rows.gather(1, order)


def _largest_places(values: torch.Tensor, k: int) -> torch.Tensor:
    """Where the `k` largest of `[q, n]` are, the first of equal ones, in rising order `[q, k]`."""
    if values.shape[1] <= k:
        return torch.arange(values.shape[1]).expand_as(values)
    found = values.topk(k, dim=1)
    if bool(((values >= found.values[:, -1:]).sum(1) == k).all()):
        return found.indices.sort(dim=1).values
    # Which of equal values topk takes is not said.
    order = values.sort(dim=1, descending=True, stable=True).indices[:, :k]
    return order.sort(dim=1).values


@dataclass(frozen=True, slots=True, eq=False)
class Products:
    """Inner products (or cosines) of gradients `[Q, N]`."""

    values: torch.Tensor
    """`[Q, N]` float32"""
    query_ids: Ids
    train_ids: Ids
    plan: QueryPlan
    layers: tuple[str, ...]
    per_layer: torch.Tensor | None = None
    """`[L, Q, N]`, where it was asked for"""


@dataclass(frozen=True, slots=True, eq=False)
class TopRows:
    """The k largest products of each query."""

    values: torch.Tensor
    """`[Q, k]`, falling"""
    ids: torch.Tensor
    """`[Q, k]` int64: the training rows"""
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
    compute: ComputeWish = None,
    memory_budget: float | str | None = None,
    per_layer: bool = False,
) -> Products:
    """Inner products `[Q, N]` of every query's gradient with every training row's.

    Over several checkpoints (equally long lists, `weights` such as learning rates) their weighted
    sum. `ids` picks queries. Exact; the planner's way, or the one that `compute` names.

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
    compute: ComputeWish = None,
    memory_budget: float | str | None = None,
) -> Products:
    """Cosines `[Q, N]` of the angles between gradients, averaged over checkpoints by `weights`.

    A gradient of length zero has cosine 0 with everything.
    """
    pairs = _pairs(queries, train, weights)
    return _matrix(pairs, ids, compute, memory_budget, per_layer=False, cosine=True)


@checked(QueryError)
def gram(
    gradients: Gradients, *, compute: ComputeWish = None, memory_budget: float | str | None = None
) -> Products:
    """Inner products `[N, N]` of all rows with each other."""
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
    compute: ComputeWish = None,
    memory_budget: float | str | None = None,
    refine: str | tuple[Gradients, Gradients] | None = None,
    candidates: int | None = None,
    workers: int | None = None,
    engine: Engine | None = None,
    codes: SmallCodes | None = None,
) -> TopRows:
    """The `k` training rows with the largest (or smallest) product for each query.

    The matrix is never held: Q x (k + a tile) values at a time. Equal products come in the order
    of the training rows.

    `refine` is for rows that are kept in few bytes: of the best `candidates` of each query, 10 k unless
    it is said, the products are made anew from another capture of both splits, by its name or as
    (queries, training rows), and the best `k` by those are given. That capture needs no other rows
    than the candidates. Its products are what it keeps: of whole gradients plain ones, of
    `gk.Keep(bits=32)` whitened ones that are not rounded.

    `workers` processes, or those of an `engine` (`gk.farm.engine`), search for blocks of the queries.

    `codes` (`gk.query.small_codes`) are for millions of rows: the best `candidates` of each query by codes
    are ranked by exact products, and no other row is read. Unless it is said how many, 100 k at first, and
    twice as many until the last ones bring none of the best `k`, at most 1600 k.
    """
    check_place(workers, engine, least=1)
    pairs = _pairs(queries, train, weights)
    positions = _positions(pairs[0].queries, ids)
    if k < 1:
        raise QueryError("k must be at least 1", found=k)
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
                "codes are of one checkpoint, and their candidates are ranked by exact products here",
                found=f"{len(pairs)} checkpoints" if len(pairs) > 1 else named[0],
                fix="ask about one checkpoint, without refine=, workers= or engine=",
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
        found_ids = torch.from_numpy(flat.ids.reshape(rows.shape))
        return TopRows(values, found_ids, pairs[0].queries.ids[positions], used.plan)
    if refine is not None:
        if len(pairs) > 1:
            raise QueryError(
                "rows are refined at one checkpoint",
                found=f"{len(pairs)} checkpoints",
                fix="ask about one of them, or without refine=",
            )
        _arguments.optional(_arguments.count, "candidates", candidates, error=QueryError, least=1)
        wide = max(k, 10 * k if candidates is None else candidates)
        found = top(queries, train, wide, ids=ids, workers=workers, engine=engine, **common)
        return _refined(found, pairs[0], refine, k, smallest=smallest, memory_budget=memory_budget)
    planned = ProductEngine(
        pairs,
        compute=compute,
        memory_budget=memory_budget,
        answer=len(positions) * k * 16,
        positions=positions,
    )
    query_ids = pairs[0].queries.ids[positions]
    if workers is not None or engine is not None:
        values, found_ids = top_by_workers(
            pairs, query_ids, k, common, workers=workers, engine=engine
        )
        return TopRows(values, found_ids, query_ids, planned.plan)
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


def _refined(
    found: TopRows,
    pair: GradientPair,
    refine: str | tuple[Gradients, Gradients],
    k: int,
    *,
    smallest: bool,
    memory_budget: float | str | None,
) -> TopRows:
    """The best of what was found, by the products of another capture of the same rows."""
    finer = _finer(pair, refine)
    rows = pair.train.positions(np.unique(found.ids.numpy()))
    rows.sort()
    ids = pair.train.ids[rows]
    asked = _there(finer.queries, found.query_ids, "asked about")
    engine = ProductEngine(
        [finer],
        memory_budget=memory_budget,
        answer=4 * len(asked) * len(rows),
        positions=asked,
        rows=_there(finer.train, ids, "found"),
    )
    values = engine.matrix()
    # Only a query's own candidates count, in the order of training rows.
    places = torch.searchsorted(torch.from_numpy(rows), _positions_of(pair.train, found.ids))
    places = places.sort(1).values
    own = values.gather(1, places)
    order = own.sort(dim=1, descending=not smallest, stable=True).indices[:, :k]
    return TopRows(
        values=own.gather(1, order),
        ids=torch.from_numpy(ids.copy())[places.gather(1, order)],
        query_ids=found.query_ids,
        plan=engine.plan,
    )


def _positions_of(side: Gradients, ids: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(side.positions(ids.flatten().numpy())).view_as(ids)


def _finer(pair: GradientPair, refine: str | tuple[Gradients, Gradients]) -> GradientPair:
    if not isinstance(refine, str):
        return GradientPair(*refine, pair.weight)
    queries, train = (side.named(refine) for side in (pair.queries, pair.train))
    return GradientPair(queries, train, pair.weight)


def _there(side: Gradients, ids: Ids, what: str) -> list[int]:
    """Where the rows are; an error that says which are not."""
    missing = np.setdiff1d(ids, side.ids)
    if len(missing):
        raise QueryError(
            f"the capture {side.key.capture!r} of {side.key.split} lacks rows that were {what}",
            found=f"{len(missing)} of {len(ids)} are missing: {missing[:5].tolist()} ...",
            fix=f"capture them with gk.capture(..., split={side.key.split!r}, "
            f"name={side.key.capture!r}, ids=...), or ask for fewer candidates=",
        )
    found: list[int] = side.positions(ids).tolist()
    return found


def _matrix(
    pairs: list[GradientPair],
    ids: Any,
    compute: ComputeWish,
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
    # Cosines are normalised per checkpoint, so their checkpoints are gone through one by one.
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
    asked, rows = _listed("queries", queries), _listed("train", train)
    if len(asked) != len(rows):
        raise QueryError(
            "queries and training rows at different numbers of checkpoints",
            found=f"{len(asked)} and {len(rows)}",
            fix="pass one capture of each per checkpoint, in the same order",
        )
    for side, given in (("queries", asked), ("train", rows)):
        for one in given:
            _arguments.instance(side, one, Gradients, error=QueryError)
    by = [1.0] * len(rows) if weights is None else [float(weight) for weight in weights]
    if len(by) != len(rows):
        raise QueryError(
            "one weight per checkpoint is needed",
            found=f"{len(by)} weights for {len(rows)} checkpoints",
        )
    return [GradientPair(q, t, w) for q, t, w in zip(asked, rows, by, strict=True)]


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
    found: list[int] = queries.positions(ids).tolist()
    if not found:
        raise QueryError("no queries were asked about", fix="pass ids= of some rows")
    return found
