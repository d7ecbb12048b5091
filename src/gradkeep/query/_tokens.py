"""Split products of training rows with queries by token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from gradkeep._arguments import checked
from gradkeep._budgets import parse_bytes
from gradkeep.errors import QueryError
from gradkeep.factors import basis_of
from gradkeep.factors._arithmetic import sum_columns
from gradkeep.factors._form import FactoredForm, dot_directions
from gradkeep.factors._tied import places_array
from gradkeep.query._engine import DEFAULT_BUDGET, GradientPair, check_pairs
from gradkeep.query._gradients import Gradients
from gradkeep.query._sums import check_directions

if TYPE_CHECKING:
    from torch import Tensor

    from gradkeep.factors._form import GradientRows, PositionProducts
    from gradkeep.query._sums import Directions

    Ids = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True, slots=True, eq=False)
class TokenProducts:
    """Contribution of each token of some training rows to their products with queries.

    Attributes:
        values: Contributions `[Q, N, T]` float32; zero from `lengths` on.
        lengths: Number of tokens of each row `[N]` int64; later ones are padding.
        rest: Contributions `[Q, N]` float32 of layers without positions to the whole row.
        query_ids: Ids of the queries `[Q]`.
        train_ids: Ids of the training rows `[N]`.
        layers: Layers whose contributions are split by token.
        rest_layers: Layers that contribute to `rest`, wholly or in part.
    """

    values: Tensor
    lengths: Tensor
    rest: Tensor
    query_ids: Ids
    train_ids: Ids
    layers: tuple[str, ...]
    rest_layers: tuple[str, ...] = ()

    @property
    def sums(self) -> Tensor:
        """Products `[Q, N]` of whole rows: tokens plus rest."""
        return self.values.double().sum(2).add_(self.rest).float()


@checked(QueryError)
def tokens(
    queries: Gradients,
    train: Gradients,
    *,
    ids: Any = None,
    train_ids: Any = None,
    memory_budget: float | str | None = None,
) -> TokenProducts:
    """Split the products of training rows with queries into contributions of tokens.

    With g_q the query's gradient, layers that store prefixes x_t and suffixes h_t contribute
    `h_t . (g_q x_t)` at token t. Contributions without positions are in `rest`: norms and dense layers,
    embeddings (equal tokens of a row are summed), and convolutions. Cost: 2 Q T P operations per row, layer by
    layer, with the queries restored.

    Args:
        queries: Gradients of the queries.
        train: Gradients of the training rows.
        ids: Ids of the queries; all by default.
        train_ids: Ids of the training rows; all by default. The result has Q N T numbers.
        memory_budget: Most memory, such as "4GiB".

    Returns:
        Contributions `[Q, N, T]`.

    Raises:
        QueryError: The capture holds no positions, or the result is too large.

    Example:
        >>> import gradkeep as gk, tempfile
        >>> from gradkeep.data import GPT
        >>> store, model = gk.open(tempfile.mkdtemp()), GPT(vocabulary=9, length=8, dim=4, heads=2)
        >>> data = [{"input_ids": torch.randint(9, (3, 8))}]
        >>> _ = gk.capture(store, model, data, task=gk.LanguageModeling(), split="train",
        ...                keep="factors")
        >>> train = gk.gradients(store, split="train")
        >>> by_token = gk.query.tokens(train, train, ids=[0], train_ids=[2, 1])
        >>> by_row = gk.query.dot(train, train, ids=[0]).values[:, [2, 1]]
        >>> by_token.values.shape, torch.allclose(by_token.sums, by_row, rtol=1e-4, atol=1e-5)
        (torch.Size([1, 2, 8]), True)
    """
    check_pairs([GradientPair(queries, train)])
    positions = np.arange(len(queries)) if ids is None else queries.positions(ids)
    _check_some("queries", positions)
    rows = _TokenRows(train, train_ids, len(positions), memory_budget)
    slopes = queries.slopes()
    for layer in rows.layers:
        form = queries.forms[layer]
        for start in range(0, len(positions), rows.queries_at_once(layer)):
            some = positions[start : start + rows.queries_at_once(layer)]
            dense = form.restore(queries.rows(some).factors[layer].widened())
            if slopes is not None:
                dense = dense * slopes[torch.from_numpy(some), None].to(dense.dtype)
            rows.add(layer, dense, start)
    return rows.products(queries.ids[positions])


@checked(QueryError)
def along_tokens(
    gradients: Gradients,
    directions: Directions,
    *,
    ids: Any = None,
    memory_budget: float | str | None = None,
) -> TokenProducts:
    """Split the products of rows with some directions by token: `along`, token by token.

    Args:
        gradients: Gradients of the rows.
        directions: K directions, which are numbered from 0 as queries.
        ids: Ids of the rows; all by default.
        memory_budget: Most memory, such as "4GiB".

    Returns:
        Contributions `[K, N, T]`.

    Raises:
        QueryError: Weights or layers differ, or the capture holds no positions.
    """
    check_directions(directions, gradients)
    count = len(directions.groups)
    rows = _TokenRows(gradients, ids, count, memory_budget)
    for layer in rows.layers:
        rows.add(layer, directions.layers[layer], 0)
    return rows.products(np.arange(count))


class _TokenRows:
    """Products of some rows' tokens, accumulated layer by layer."""

    def __init__(
        self, train: Gradients, ids: Any, queries: int, memory_budget: float | str | None
    ) -> None:
        self.train, self.budget = train, memory_budget
        self.at = np.arange(len(train)) if ids is None else train.positions(ids)
        _check_some("training rows", self.at)
        self.layers = tuple(train.forms)
        self._check_positions()
        self.places = {layer: self._places(layer) for layer in self.layers}
        self.lengths = torch.zeros(len(self.at), dtype=torch.int64)
        for layer_places in self.places.values():
            for row, places in enumerate(layer_places or ()):
                if len(places):
                    self.lengths[row] = max(int(self.lengths[row]), int(places.max()) + 1)
        shape = (queries, len(self.at), int(self.lengths.max()))
        self._check_budget(shape)
        self.values = torch.zeros(shape)
        self.rest = torch.zeros(shape[:2])
        self.rest_layers: dict[str, None] = {}

    def queries_at_once(self, layer: str) -> int:
        """Return how many queries' restored gradients, with a copy, take a quarter of the budget."""
        limit = DEFAULT_BUDGET if self.budget is None else parse_bytes(self.budget)
        return max(1, limit // 4 // (16 * self.train.forms[layer].gradient_size))

    def add(self, layer: str, directions: Tensor, start: int) -> None:
        """Add the products of one layer with directions `[K, P]` of the queries from `start` on."""
        form = self.train.forms[layer]
        slopes = self.train.slopes()
        stop = start + len(directions)
        one = Gradients(self.train.key, self.train.block, {layer: form}, self.train.of)
        for row, position in enumerate(self.at.tolist()):
            factors = one.rows([position]).factors[layer].widened()
            moved = directions.to(factors.example.dtype)
            scale = 1.0 if slopes is None else float(slopes[position])
            values, rest = self._row(layer, factors, moved, row)
            if values is not None:
                into = self.values[start:stop, row, : values.shape[1]]
                into += scale * values.float()
            if rest is not None:
                self.rest[start:stop, row] += scale * rest.float()
                self.rest_layers[layer] = None

    def _row(
        self, layer: str, factors: GradientRows, directions: Tensor, row: int
    ) -> tuple[Tensor | None, Tensor | None]:
        """Return the contributions of the tokens `[K, T]` of one row, and of parts without positions `[K]`."""
        form, places = self.train.forms[layer], self.places[layer]
        parts = None
        if places is not None and isinstance(form, FactoredForm):
            parts = form.along_positions(factors, directions)
        if parts is None or places is None:
            return None, dot_directions(form, factors, directions, scratch=DEFAULT_BUDGET // 16)[
                :, 0
            ]
        first, *others = parts
        values = first.values.new_zeros(len(directions), int(self.lengths[row]))
        values.index_add_(1, places[row], first.values)
        # An embedding sums equal tokens: their positions are not stored.
        return values, _summed(others) if others else None

    def products(self, query_ids: Ids) -> TokenProducts:
        """Return the accumulated products."""
        return TokenProducts(
            values=self.values,
            lengths=self.lengths,
            rest=self.rest,
            query_ids=query_ids,
            train_ids=self.train.ids[self.at],
            layers=tuple(layer for layer in self.layers if self.places[layer] is not None),
            rest_layers=tuple(self.rest_layers),
        )

    def _places(self, layer: str) -> list[Tensor] | None:
        """Return the token of every position by row; None if some are unknown."""
        name = places_array(self.train.forms[layer])
        if name is None or name not in self.train.block.names:
            return None
        stored: Any = self.train.block.read_rows(self.at, [name])[name]
        places = torch.from_numpy(np.array(stored.values)).long()
        if bool((places < 0).any()):
            return None
        return list(torch.split(places, np.diff(stored.offsets).tolist()))

    def _check_positions(self) -> None:
        names = self.train.block.names
        forms = self.train.forms.values()
        if any(places_array(form) in names for form in forms):
            return
        split = self.train.key.split
        if any(basis_of(form) is not None for form in forms):
            raise QueryError(
                f"{split} is stored as coordinates of whole rows, which cannot be split by token",
                code="query.coordinates_only",
                fix="Use gk.attribute_tokens(store, ..., model=model, loader=loader, task=task), which "
                "runs the chosen rows again.",
            )
        raise QueryError(
            f"no layer of {split} is stored by token",
            code="query.no_tokens",
            found=", ".join(sorted({form.kind for form in forms})),
            expected="factors of a task with tokens, such as gk.LanguageModeling",
            fix="Capture with keep='factors' under another name=, or run the rows again with "
            "gk.attribute_tokens(store, ..., model=model, loader=loader, task=task).",
        )

    def _check_budget(self, shape: tuple[int, ...]) -> None:
        limit = DEFAULT_BUDGET if self.budget is None else parse_bytes(self.budget)
        if 4 * int(np.prod(shape)) > limit:
            raise QueryError(
                "the result has too many tokens",
                code="query.too_many_tokens",
                found=f"{shape[0]} queries x {shape[1]} rows x {shape[2]} tokens",
                expected=f"at most {limit // 4} numbers",
                fix="Select rows and queries with train_ids= and ids=, or raise memory_budget=.",
            )


def _summed(parts: list[PositionProducts]) -> Tensor:
    """Return the sums `[K]` over the positions of a single row."""
    return torch.stack([sum_columns(part.values, part.spans)[:, 0] for part in parts]).sum(0)


def _check_some(what: str, rows: Ids) -> None:
    if not len(rows):
        raise QueryError(
            f"there are no {what}",
            code=f"query.no_{what.replace(' ', '_')}",
            fix="Pass ids of some rows.",
        )
