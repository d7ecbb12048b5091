"""Which tokens of training rows carry their scores."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from gradkeep import _arguments
from gradkeep._arguments import checked
from gradkeep.attribution._attribute import kept_as
from gradkeep.attribution._question import make_question, options_for
from gradkeep.attribution._registry import default_method, method_named
from gradkeep.attribution._scores import place_of
from gradkeep.attribution.scorers._kfac import fisher_solver
from gradkeep.capturing._token_replay import replay_tokens
from gradkeep.curvature._row_parts import dense_rows
from gradkeep.errors import AttributionError
from gradkeep.query import along_tokens
from gradkeep.query._sums import Directions
from gradkeep.store import open as open_store

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterable

    from torch import Tensor, nn

    from gradkeep.attribution._question import CheckpointView
    from gradkeep.capturing.tasks._tasks import Task
    from gradkeep.query import Gradients
    from gradkeep.query._layers import LayerChoice
    from gradkeep.store import Store

    Ids = np.ndarray[Any, np.dtype[np.int64]]
    Floats = np.ndarray[Any, np.dtype[np.float32]]

_LINEAR = ("dot", "kfac", "ekfac")


@dataclass(frozen=True, slots=True, eq=False)
class TokenScores:
    """How much each token of some training rows carries of their scores; **positive helps**.

    Token t is the place at which the model read it; what it carries is there by what it is and by all
    that the model made of it, with what stood before it.
    """

    values: Floats
    """`[Q, N, T]`; zeros from `lengths` on"""
    rest: Floats
    """`[Q, N]`: what layers without positions add to the row as a whole"""
    lengths: Ids
    """`[N]`: from which token on nothing is kept of a row, as of padding"""
    query_ids: Ids
    """`[Q]`"""
    train_ids: Ids
    """`[N]`"""
    method: str
    layers: tuple[str, ...]
    """Layers whose positions are told apart."""
    rest_layers: tuple[str, ...]
    """Layers that add to `rest`, with all that they are or with a part of it."""
    replayed: bool
    """Whether the rows were run again."""
    approximate: str | None = None
    """What was approximated, if anything was."""

    @property
    def sums(self) -> Floats:
        """`[Q, N]`: tokens and rest together, the score of the row."""
        total: Floats = (self.values.sum(2, dtype=np.float64) + self.rest).astype(np.float32)
        return total

    @checked(AttributionError)
    def of(self, query: int, row: int) -> Floats:
        """What each token `[T]` of a training row carries, by the ids of query and row."""
        at, place = place_of(self.query_ids, query, "query"), place_of(self.train_ids, row, "row")
        tokens: Floats = self.values[at, place, : int(self.lengths[place])]
        return tokens

    @checked(AttributionError)
    def top(self, k: int, *, query: int, row: int) -> list[tuple[int, float]]:
        """The `k` tokens of a row that carry most, as (place, value), the largest first."""
        _arguments.count("k", k, error=AttributionError)
        found = self.of(query, row)
        order = np.argsort(-found, kind="stable")[:k]
        return [(int(place), float(found[place])) for place in order]

    def __repr__(self) -> str:
        how = "run again" if self.replayed else "from factors"
        high, wide, tokens = self.values.shape
        return (
            f"TokenScores({self.method}: {high} queries x {wide} rows x {tokens} tokens, {how}; "
            f"{len(self.layers)} layers by token, {len(self.rest_layers)} in the rest, positive helps)"
        )


@checked(AttributionError)
def attribute_tokens(
    store: Store | str | os.PathLike[str],
    *,
    ids: Any = None,
    train_ids: Any = None,
    method: str | None = None,
    queries: str = "test",
    train: str = "train",
    checkpoints: str | None = None,
    layers: LayerChoice = None,
    run: str = "main",
    name: str = "main",
    model: nn.Module | None = None,
    loader: Iterable[Any] | None = None,
    task: Task | None = None,
    loader_ids: Any = None,
    columns: Any = None,
    memory_budget: float | str | None = None,
    **options: Any,
) -> TokenScores:
    """Which tokens of training rows carry their scores: `[Q, N, T]`, whose sums are the scores.

    `ids` are queries, `train_ids` training rows; choose few of both, such as those of
    `gk.attribute(...).top(...)`. `method` is "dot", "kfac" or "ekfac", with its options: scores that
    are linear in the training gradient, as sums over tokens must be. From kept factors nothing is run;
    embeddings, norms and dense layers are then in `rest`. With the captured `model`, `loader` and
    `task` (and with `loader_ids` and `columns`, where the capture was given ids and columns) the
    chosen rows are run again: embeddings and norms have tokens then too, and rows of which only
    coordinates are kept can be asked about, where sums are those of the rows before rounding.
    Cost: 2 Q T P operations a row, and Q restored gradients, of one layer at a time from factors.

    >>> import gradkeep as gk, tempfile, torch
    >>> from gradkeep.data import GPT
    >>> store, model = gk.open(tempfile.mkdtemp()), GPT(vocabulary=9, length=8, dim=4, heads=2)
    >>> data, task = [{"input_ids": torch.randint(9, (3, 8))}], gk.LanguageModeling()
    >>> _ = gk.capture(store, model, data, task=task, split="train", keep="factors")
    >>> found = gk.attribute_tokens(store, queries="train", ids=[0], train_ids=[2], method="dot")
    >>> whole = gk.attribute(store, queries="train", method="dot").numpy()
    >>> found.values.shape, bool(np.allclose(found.sums, whole[:1, 2:], rtol=1e-4))
    ((1, 1, 8), True)
    """
    store = open_store(store)
    given = {"model": model, "loader": loader, "task": task}
    missing = [part for part, value in given.items() if value is None]
    replayed = not missing
    if missing and len(missing) < len(given):
        raise AttributionError(
            f"to run rows again, {' and '.join(missing)} must be given too",
            fix="pass those of the capture, or none of them to ask kept factors",
        )
    asked = method or default_method(store, run=run, train=train, name=name)
    chosen = method_named("dot" if method is None and asked not in _LINEAR else asked)
    if chosen.name not in _LINEAR:
        raise AttributionError(
            f"the scores of {chosen.name} are no sums over tokens",
            expected=", ".join(_LINEAR),
            fix="method='ekfac'",
        )
    told = options_for(chosen, options)
    question = make_question(
        store,
        queries=queries,
        train=train,
        name=name,
        run=run,
        checkpoints=checkpoints,
        ids=ids,
        layers=layers,
        memory_budget=memory_budget,
    )
    at = question.checkpoints
    if len(at) > 1:
        raise AttributionError(
            f"tokens are those of one checkpoint, not of {', '.join(map(str, at))}",
            fix=f"pass checkpoints={at[-1].checkpoint!r}",
        )
    kept = kept_as(chosen, question)
    (view,) = question.at()
    rows = view.train()
    solve = None if chosen.name == "dot" else fisher_solver(view, told, chosen.name)
    directions = _QueryLayers(view, solve)
    if replayed:
        assert model is not None
        assert loader is not None
        assert task is not None
        wanted = rows.ids if train_ids is None else rows.ids[rows.positions(train_ids)]
        found: Any = replay_tokens(
            store,
            rows,
            directions,
            model,
            loader,
            task=task,
            train_ids=wanted,
            ids=loader_ids,
            columns=columns,
        )
    else:
        found = along_tokens(
            rows,
            Directions(tuple(question.positions.tolist()), directions, rows.forms, rows.weights),
            ids=train_ids,
            memory_budget=memory_budget,
        )
        wanted = found.train_ids
    approximate = None if chosen.exact else f"{chosen.name}: {chosen.summary}"
    return TokenScores(
        values=found.values.numpy(),
        rest=found.rest.numpy(),
        lengths=found.lengths.numpy(),
        query_ids=view.query_block.ids[question.positions],
        train_ids=wanted,
        method=chosen.name,
        layers=found.layers,
        rest_layers=found.rest_layers,
        replayed=replayed,
        approximate="; ".join(filter(None, (approximate, kept))) or None,
    )


class _QueryLayers(Mapping[str, "Tensor"]):
    """Each layer's directions of the queries, made when it is their turn."""

    def __init__(self, at: CheckpointView, solve: Callable[[str, Tensor], Tensor] | None) -> None:
        self._asked: Gradients = at.queries()
        self._positions = at.question.positions.tolist()
        self._solve = solve

    def __getitem__(self, layer: str) -> Tensor:
        dense = dense_rows(self._asked, layer, self._positions)
        return dense if self._solve is None else self._solve(layer, dense)

    def __contains__(self, layer: object) -> bool:
        return layer in self._asked.forms  # not by making it

    def __iter__(self) -> Iterator[str]:
        return iter(self._asked.forms)

    def __len__(self) -> int:
        return len(self._asked.forms)
