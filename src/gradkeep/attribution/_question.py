"""Methods, and the questions they answer: which queries, which training rows, at which checkpoints."""

from __future__ import annotations

import dataclasses
import difflib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from gradkeep import _arguments
from gradkeep._arguments import check_fields, checked
from gradkeep.errors import AttributionError
from gradkeep.query._engine import GradientPair, check_pairs
from gradkeep.query._gradients import gradients_of, open_capture
from gradkeep.store import CaptureKey

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from gradkeep.query import Gradients
    from gradkeep.query._engine import ComputeWish
    from gradkeep.query._gradients import GradientOf
    from gradkeep.query._layers import LayerChoice
    from gradkeep.store import Block, Store

    Ids = np.ndarray[Any, np.dtype[np.int64]]
    from collections.abc import Mapping

    from torch import Tensor

    from gradkeep.curvature._cholesky import Solution
    from gradkeep.query._planner import QueryPlan


OverCheckpoints = Literal["one", "sum", "mean"]


@dataclass(frozen=True, slots=True, eq=False)
class Scorer:
    """A method made ready at one checkpoint."""

    score: Callable[[int, int], Tensor]
    """Scores `[stop - start, N]` of queries start to stop; per layer `[L, stop - start, N]`."""
    plan: Callable[[], QueryPlan | None] = lambda: None
    """How gradients were multiplied last, where they are."""
    approximate: str | None = None
    """What was approximated, if anything was."""
    solution: Callable[[], Solution | None] = lambda: None
    """How linear systems were solved so far, where there are any."""


@dataclass(frozen=True, slots=True)
class NoOptions:
    """A method that cannot be told anything."""


@dataclass(frozen=True, slots=True)
class Method:
    """One way to score training rows."""

    name: str
    summary: str
    """The formula, in words."""
    needs: str
    cost: str
    exact: bool
    """Whether the formula is computed without approximation."""
    reference: str
    prepare: Callable[[CheckpointView, Any], Scorer] = field(repr=False)
    """What is done once per checkpoint; gives what scores some queries."""
    pool: Callable[[AttributionQuestion, Any], Any] | None = field(default=None, repr=False)
    """What is done once for all checkpoints together; `prepare` finds it in `at.pooled`."""
    over: OverCheckpoints = field(default="mean", repr=False)
    """What becomes of several checkpoints."""
    options: type = field(default=NoOptions, repr=False)
    """A frozen dataclass: what the method can be told, with defaults."""
    tuned: str | None = field(default=None, repr=False)
    """The option that may be "auto"."""
    candidates: tuple[float, ...] = field(default=(), repr=False)
    """What "auto" chooses from."""
    about_queries: bool = field(default=True, repr=False)
    """False: the score of a training row is the same for every query."""
    layered: bool = field(default=False, repr=False)
    """Whether its scores are sums over layers, which can be told apart."""
    whitened: bool = field(default=False, repr=False)
    """Whether it can be asked of whitened coordinates, whose products are influence already."""


_OF_FEW_ROWS = ("refine", "candidates")
"""Options of `gk.query.top`."""


def options_for(method: Method, given: Mapping[str, Any]) -> Any:
    """The method's options as its dataclass; an unknown one is an error with the nearest names."""
    known = [part.name for part in dataclasses.fields(method.options)]
    for name in given:
        if name not in known:
            if name in _OF_FEW_ROWS:
                raise AttributionError(
                    "only the best rows are refined: among all scores, those of another capture would "
                    "be on another scale",
                    found=f"{name}=",
                    fix="gk.query.top(queries, train, k, refine=...) gives the best by another capture",
                )
            near = difflib.get_close_matches(name, known, n=2, cutoff=0.4)
            raise AttributionError(
                f"{method.name} has no option {name!r}",
                expected=", ".join(known) or "no options",
                fix=f"did you mean {' or '.join(near)}?" if near else None,
            )
    told = method.options(**given)
    check_fields(told, AttributionError)
    return told


@dataclass(frozen=True, slots=True)
class RunCheckpoint:
    """One checkpoint of one run."""

    run: str
    checkpoint: str
    lr: float | None = None

    def __str__(self) -> str:
        return self.checkpoint if self.run == "main" else f"{self.run}/{self.checkpoint}"


@dataclass(frozen=True, slots=True, eq=False)
class AttributionQuestion:
    """Everything that a method may look at, the same for all its checkpoints."""

    store: Store
    queries: str
    """The split that the queries are from."""
    train: str
    name: str
    """The name of the captures."""
    checkpoints: tuple[RunCheckpoint, ...]
    positions: Ids
    """Which rows of the queries' captures are asked about `[Q]`."""
    layers: LayerChoice = None
    compute: ComputeWish = None
    memory_budget: float | str | None = None
    per_layer: bool = False
    report: Callable[[str], None] = field(default=lambda doing: None, repr=False)
    """Is told what is being done, where that takes long."""

    opened: dict[CaptureKey, Block] = field(default_factory=dict, repr=False)
    """The captures that were opened for it: each is read and checked once."""

    def block(self, key: CaptureKey) -> Block:
        """Everything that a capture keeps."""
        if key not in self.opened:
            self.opened[key] = open_capture(self.store, key)
        return self.opened[key]

    def at(self, pooled: Any = None) -> list[CheckpointView]:
        """The checkpoints, one by one."""
        return [CheckpointView(self, place, pooled) for place in self.checkpoints]


@dataclass(frozen=True, slots=True, eq=False)
class CheckpointView:
    """One checkpoint of a question: what a method is given to work with."""

    question: AttributionQuestion
    place: RunCheckpoint
    pooled: Any = None
    """What the method found out about all checkpoints together."""

    @checked(AttributionError)
    def train(self, of: GradientOf = "loss", *, name: str | None = None) -> Gradients:
        """The gradients of the training rows; `name` is that of another capture of them."""
        return self._gradients(self.question.train, of, name or self.question.name)

    @checked(AttributionError)
    def queries(self, of: GradientOf = "loss") -> Gradients:
        """The gradients of the split that the queries are from; `question.positions` are asked."""
        found = self._gradients(self.question.queries, of, self.question.name)
        check_pairs([GradientPair(found, self.train(of))])
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

    def all_zero(self) -> AttributionError:
        """The error of a method that needs a gradient that is not zero."""
        return AttributionError(
            f"all gradients of {self.question.train} at {self.place} are zero",
            fix="capture a checkpoint that does not fit its data perfectly, or other layers",
        )

    def _gradients(self, split: str, of: GradientOf, name: str) -> Gradients:
        key = CaptureKey(self.place.checkpoint, split, self.place.run, name)
        return gradients_of(self.question.block(key), key, self.question.layers, of)

    def _block(self, split: str) -> Block:
        key = CaptureKey(self.place.checkpoint, split, self.place.run, self.question.name)
        return self.question.block(key)


def make_question(
    store: Store,
    *,
    queries: str,
    train: str,
    name: str,
    run: str | Sequence[str],
    checkpoints: str | Sequence[str] | None,
    ids: Any = None,
    **settings: Any,
) -> AttributionQuestion:
    """Open the captures of a question, which must be finished and of the same rows.

    `settings` are those of an `AttributionQuestion`: layers, compute, memory_budget, per_layer.
    """
    first: dict[str, Block] = {}
    opened: dict[CaptureKey, Block] = {}
    splits = list(dict.fromkeys((queries, train)))
    places = _find_checkpoints(store, run, checkpoints, splits, name)
    for place in places:
        for split in splits:
            key = CaptureKey(place.checkpoint, split, place.run, name)
            block = opened.setdefault(key, open_capture(store, key))
            other = first.setdefault(split, block)
            if not np.array_equal(block.ids, other.ids):
                raise AttributionError(
                    f"{split} was captured with different rows, or in another order, at {places[0]} "
                    f"({len(other)} rows) and at {place} ({len(block)} rows)",
                    fix=_SAME_ROWS,
                )
            if block is not other:
                _check_examples(other, block, split)
    positions = np.arange(len(first[queries]))
    if ids is not None:
        least = -_arguments.LARGEST
        wanted = _arguments.whole_numbers("ids", ids, error=AttributionError, least=least)
        positions = np.asarray(first[queries].positions(wanted), np.int64)
    if not len(positions):
        raise AttributionError("no queries were asked about", fix="pass ids= of some rows")
    return AttributionQuestion(
        *(store, queries, train, name, tuple(places), positions), opened=opened, **settings
    )


_SAME_ROWS = "capture the same rows in the same order at every checkpoint, or pass checkpoints="


def _check_examples(one: Block, other: Block, split: str) -> None:
    """Raise if two captures of a split hold the same samples, or labels, under other ids.

    Samples that only one of them holds are no evidence: padding changes a sample's digest.
    """
    for name in ("example", "label"):
        if name not in one.names or name not in other.names:
            continue
        if name == "label" and "sampled" in str(one.schema.fingerprints.get("task")):
            continue  # drawn from each checkpoint's own probabilities
        before, now = one.column(name), other.column(name)
        differ = before != now
        if name == "example":
            differ &= np.isin(before, now)
        if differ.any():
            raise AttributionError(
                f"{split} was captured with another {'sample' if name == 'example' else 'label'} "
                f"for row {int(one.ids[differ][0])} in {one.path} and in {other.path}",
                fix=_SAME_ROWS,
            )


def _find_checkpoints(
    store: Store,
    run: str | Sequence[str],
    checkpoints: str | Sequence[str] | None,
    splits: Sequence[str],
    name: str,
) -> list[RunCheckpoint]:
    """The named checkpoints of every run, or else all at which every split was captured."""
    runs = [run] if isinstance(run, str) else list(run)
    if not runs:
        raise AttributionError("no run was given")
    captures, places = store.captures(), []
    for one in runs:
        known = {c.name: c for c in store.checkpoints(one)}
        if checkpoints is None:
            keys = [key for key in captures if (key.run, key.capture) == (one, name)]
            at = ({key.checkpoint for key in keys if key.split == split} for split in splits)
            names = sorted(set.intersection(*at))
            steps = {c: known[c].step if c in known else None for c in names}
            names.sort(key=lambda c: (steps[c] is None, steps[c] or 0))
        else:
            names = [checkpoints] if isinstance(checkpoints, str) else list(checkpoints)
        places += [RunCheckpoint(one, c, known[c].lr if c in known else None) for c in names]
    if not places and checkpoints is not None:
        raise AttributionError("no checkpoint was given")
    if not places:
        there = (f"{k.split} at {k.checkpoint} (run {k.run}, name {k.capture})" for k in captures)
        raise AttributionError(
            f"{' and '.join(map(repr, splits))} were not captured at the same checkpoint of run "
            f"{', '.join(runs)} with the name {name}",
            path=store.location,
            found=", ".join(there) or "no captures",
            fix=f"gk.capture(store, model, loader, task=task, split={splits[0]!r}), "
            f"and the same for {splits[-1]!r}",
        )
    return places
