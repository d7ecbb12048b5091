"""What is asked: which queries, which training rows, at which checkpoints."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from gradkeep import query
from gradkeep.errors import AttributionError, NotSealed, QueryError
from gradkeep.query._engine import Pair, check_pairs
from gradkeep.store import CaptureKey

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gradkeep.query import Gradients
    from gradkeep.query._engine import Wanted
    from gradkeep.query._gradients import Of
    from gradkeep.store import Block, Store

    Ids = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True, slots=True)
class Place:
    """One checkpoint of one run."""

    run: str
    checkpoint: str
    lr: float | None = None

    def __str__(self) -> str:
        return self.checkpoint if self.run == "main" else f"{self.run}/{self.checkpoint}"


@dataclass(frozen=True, slots=True, eq=False)
class Question:
    """Everything that a method may look at, the same for all its checkpoints."""

    store: Store
    queries: str
    """The split that the queries are from."""
    train: str
    name: str
    """The name of the captures."""
    places: tuple[Place, ...]
    positions: Ids
    """Which rows of the queries' captures are asked about `[Q]`."""
    layers: str | Sequence[str] | None = None
    plan: Wanted = None
    memory_budget: int | str | None = None
    per_layer: bool = False

    def at(self, pooled: Any = None) -> list[At]:
        """The checkpoints, one by one."""
        return [At(self, place, pooled) for place in self.places]


@dataclass(frozen=True, slots=True, eq=False)
class At:
    """One checkpoint of a question: what a method is given to work with."""

    question: Question
    place: Place
    pooled: Any = None
    """What the method found out about all checkpoints together."""

    def train(self, of: Of = "loss", *, name: str | None = None) -> Gradients:
        """The gradients of the training rows; `name` is that of another capture of them."""
        return self._gradients(self.question.train, of, name or self.question.name)

    def queries(self, of: Of = "loss") -> Gradients:
        """The gradients of the split that the queries are from; `question.positions` are asked."""
        found = self._gradients(self.question.queries, of, self.question.name)
        check_pairs([Pair(found, self.train(of))])
        return found

    @property
    def train_block(self) -> Block:
        """Everything kept of the training rows."""
        return self._block(self.question.train)

    @property
    def query_block(self) -> Block:
        """Everything kept of the split that the queries are from."""
        return self._block(self.question.queries)

    def has_outputs(self) -> bool:
        """Whether both splits keep the gradients of outputs."""
        return all(
            block.schema.fingerprints.get("of") == "output"
            for block in (self.train_block, self.query_block)
        )

    def _gradients(self, split: str, of: Of, name: str) -> Gradients:
        return query.gradients(
            self.question.store,
            split=split,
            checkpoint=self.place.checkpoint,
            run=self.place.run,
            name=name,
            layers=self.question.layers,
            of=of,
        )

    def _block(self, split: str) -> Block:
        key = CaptureKey(self.place.checkpoint, split, self.place.run, self.question.name)
        return open_block(self.question.store, key)


def open_block(store: Store, key: CaptureKey) -> Block:
    """A finished capture, or an error that says how to get it."""
    if not store.has(key):
        raise QueryError(
            f"no capture of {key.split!r} at {key.checkpoint!r} in run {key.run!r}",
            path=store.location,
            fix=f"gk.capture(store, model, loader, task=task, split={key.split!r}, "
            f"checkpoint={key.checkpoint!r}, run={key.run!r})",
        )
    try:
        return store.read(key)
    except NotSealed as error:
        raise QueryError(
            f"the capture of {key.split} at {key.checkpoint} is not finished",
            path=error.path,
            fix="run the same gk.capture(...) again: it resumes",
        ) from error


def asked(
    store: Store,
    *,
    queries: str,
    train: str,
    name: str,
    places: Sequence[Place],
    ids: Any,
    layers: str | Sequence[str] | None,
    plan: Wanted,
    memory_budget: int | str | None,
    per_layer: bool,
) -> Question:
    """A question, once all its captures are seen to be finished and of the same rows."""
    first: dict[str, Block] = {}
    for place in places:
        for split in dict.fromkeys((queries, train)):
            block = open_block(store, CaptureKey(place.checkpoint, split, place.run, name))
            other = first.setdefault(split, block)
            if not np.array_equal(block.ids, other.ids):
                raise AttributionError(
                    f"{split} was captured with different rows, or in another order, at "
                    f"{places[0]} and at {place}",
                    found=f"{len(other)} and {len(block)} rows",
                    fix="capture the same rows in the same order at every checkpoint, or pass "
                    "checkpoints=",
                )
    count = len(first[queries])
    positions = np.arange(count) if ids is None else first[queries].positions(ids)
    if not len(positions):
        raise AttributionError("no queries were asked about", fix="pass ids= of some rows")
    return Question(
        store=store,
        queries=queries,
        train=train,
        name=name,
        places=tuple(places),
        positions=np.asarray(positions, np.int64),
        layers=layers,
        plan=plan,
        memory_budget=memory_budget,
        per_layer=per_layer,
    )
