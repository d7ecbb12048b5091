"""`gk.attribute_tokens`: the contribution of each token of training rows to their scores."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from gradkeep._arguments import NonNegativeInt, checked
from gradkeep.attribution._attribute import describe_compression
from gradkeep.attribution._question import build_question, options_for
from gradkeep.attribution._registry import default_method, find_method
from gradkeep.attribution._scores import find_position
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
    from gradkeep.query._gradients import LayerChoice
    from gradkeep.store import Store

    Ids = np.ndarray[Any, np.dtype[np.int64]]
    Floats = np.ndarray[Any, np.dtype[np.float32]]

_LINEAR = ("dot", "kfac", "ekfac")


@dataclass(frozen=True, slots=True, eq=False)
class TokenScores:
    """Contribution of each token of some training rows to their scores; **positive helps**.

    Token t is the position at which the model read it; its contribution includes everything that the model
    computed there from the tokens before it.

    Attributes:
        values: Contributions `[Q, N, T]`; zero from `lengths` on.
        rest: Contributions `[Q, N]` of layers without positions to the whole row.
        lengths: Number of tokens of each row `[N]`; later ones are padding.
        query_ids: Ids of the queries `[Q]`.
        train_ids: Ids of the training rows `[N]`.
        method: Name of the method.
        layers: Layers whose contributions are split by token.
        rest_layers: Layers that contribute to `rest`, wholly or in part.
        replayed: True if the rows were run through the model again.
        approximate: Description of the approximation, or None.
    """

    values: Floats
    rest: Floats
    lengths: Ids
    query_ids: Ids
    train_ids: Ids
    method: str
    layers: tuple[str, ...]
    rest_layers: tuple[str, ...]
    replayed: bool
    approximate: str | None = None

    @property
    def sums(self) -> Floats:
        """Scores `[Q, N]` of the rows: tokens plus rest."""
        total: Floats = (self.values.sum(2, dtype=np.float64) + self.rest).astype(np.float32)
        return total

    @checked(AttributionError)
    def of(self, query: int, row: int) -> Floats:
        """Return the contribution of each token of a training row.

        Args:
            query: Id of the query.
            row: Id of the training row.

        Returns:
            Contributions `[T]`.
        """
        at, place = (
            find_position(self.query_ids, query, "query"),
            find_position(self.train_ids, row, "row"),
        )
        tokens: Floats = self.values[at, place, : int(self.lengths[place])]
        return tokens

    @checked(AttributionError)
    def top(self, k: NonNegativeInt, *, query: int, row: int) -> list[tuple[int, float]]:
        """Return the tokens of a row with the largest contributions.

        Args:
            k: Number of tokens.
            query: Id of the query.
            row: Id of the training row.

        Returns:
            (position, contribution), the largest first.
        """
        contributions = self.of(query, row)
        order = np.argsort(-contributions, kind="stable")[:k]
        return [(int(place), float(contributions[place])) for place in order]

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
    """Split scores of training rows into contributions of their tokens.

    Without a model, the contributions come from captured factors; those of embeddings, norms and dense layers
    are in `rest`. With the captured `model`, `loader` and `task`, the chosen rows are run again: embeddings
    and norms are then split by token too, and rows of compressed captures can be split (the sums are scores
    before rounding). Cost: 2 Q T P operations per row, and Q restored gradients, of one layer at a time from
    factors.

    Args:
        store: The store, or its path.
        ids: Ids of the queries; choose few, such as those of `gk.attribute(...).top(...)`.
        train_ids: Ids of the training rows; choose few.
        method: `dot`, `kfac` or `ekfac`: scores that are linear in the training gradient. By default the
            default of `gk.attribute` if it is one of these, else `dot`.
        queries: Split of the queries.
        train: Split of the training rows.
        checkpoints: Name of the checkpoint.
        layers: Use only these layers.
        run: Name of the run.
        name: Name of the captures.
        model: The captured model, to run rows again.
        loader: The captured loader, to run rows again.
        task: The captured task, to run rows again.
        loader_ids: Ids of the loader's rows, if the capture was passed ids.
        columns: Columns of the loader's rows, if the capture was passed columns.
        memory_budget: Most memory, such as "4GiB".
        options: Options of the method.

    Returns:
        Contributions `[Q, N, T]`, whose sums are the scores.

    Raises:
        AttributionError: The method is not linear, or there are several checkpoints.
        QueryError: The capture holds no factors by position.

    Example:
        >>> import gradkeep as gk, tempfile, torch
        >>> from gradkeep.data import GPT
        >>> store, model = gk.open(tempfile.mkdtemp()), GPT(vocabulary=9, length=8, dim=4, heads=2)
        >>> data, task = [{"input_ids": torch.randint(9, (3, 8))}], gk.LanguageModeling()
        >>> _ = gk.capture(store, model, data, task=task, split="train", keep="factors")
        >>> tokens = gk.attribute_tokens(store, queries="train", ids=[0], train_ids=[2], method="dot")
        >>> scores = gk.attribute(store, queries="train", method="dot").numpy()
        >>> tokens.values.shape, bool(np.allclose(tokens.sums, scores[:1, 2:], rtol=1e-4))
        ((1, 1, 8), True)
    """
    store = open_store(store)
    replay_arguments = {"model": model, "loader": loader, "task": task}
    missing = [part for part, value in replay_arguments.items() if value is None]
    replayed = not missing
    if missing and len(missing) < len(replay_arguments):
        raise AttributionError(
            f"to run rows again, pass {' and '.join(missing)} too",
            code="attribute.incomplete_replay",
            fix="Pass model=, loader= and task= of the capture, or none of them to use factors.",
        )
    method_name = method or default_method(store, run=run, train=train, name=name)
    chosen = find_method("dot" if method is None and method_name not in _LINEAR else method_name)
    if chosen.name not in _LINEAR:
        raise AttributionError(
            f"the scores of {chosen.name} are not sums over tokens",
            code="attribute.not_per_token",
            expected=", ".join(_LINEAR),
            fix="Pass method='ekfac'.",
        )
    method_options = options_for(chosen, options)
    question = build_question(
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
            "attribute_tokens needs one checkpoint",
            code="attribute.several_checkpoints",
            found=", ".join(map(str, at)),
            fix=f"Pass checkpoints={at[-1].checkpoint!r}.",
        )
    compression = describe_compression(chosen, question)
    (view,) = question.at()
    rows = view.train()
    solve = None if chosen.name == "dot" else fisher_solver(view, method_options, chosen.name)
    directions = _QueryLayers(view, solve)
    if replayed:
        assert model is not None
        assert loader is not None
        assert task is not None
        row_ids = rows.ids if train_ids is None else rows.ids[rows.positions(train_ids)]
        tokens: Any = replay_tokens(
            store,
            rows,
            directions,
            model,
            loader,
            task=task,
            train_ids=row_ids,
            ids=loader_ids,
            columns=columns,
        )
    else:
        tokens = along_tokens(
            rows,
            Directions(tuple(question.positions.tolist()), directions, rows.forms, rows.weights),
            ids=train_ids,
            memory_budget=memory_budget,
        )
        row_ids = tokens.train_ids
    approximate = None if chosen.exact else f"{chosen.name}: {chosen.summary}"
    return TokenScores(
        values=tokens.values.numpy(),
        rest=tokens.rest.numpy(),
        lengths=tokens.lengths.numpy(),
        query_ids=view.query_block.ids[question.positions],
        train_ids=row_ids,
        method=chosen.name,
        layers=tokens.layers,
        rest_layers=tokens.rest_layers,
        replayed=replayed,
        approximate="; ".join(filter(None, (approximate, compression))) or None,
    )


class _QueryLayers(Mapping[str, "Tensor"]):
    """Query directions by layer, computed on access."""

    def __init__(self, at: CheckpointView, solve: Callable[[str, Tensor], Tensor] | None) -> None:
        self._queries: Gradients = at.queries()
        self._positions = at.question.positions.tolist()
        self._solve = solve

    def __getitem__(self, layer: str) -> Tensor:
        dense = dense_rows(self._queries, layer, self._positions)
        return dense if self._solve is None else self._solve(layer, dense)

    def __contains__(self, layer: object) -> bool:
        return layer in self._queries.forms  # without computing it

    def __iter__(self) -> Iterator[str]:
        return iter(self._queries.forms)

    def __len__(self) -> int:
        return len(self._queries.forms)
