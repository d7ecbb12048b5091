"""Methods, and the requests they answer: queries, training rows, checkpoints."""

from __future__ import annotations

import dataclasses
import difflib
import math
import tempfile
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch

from gradkeep import _arguments
from gradkeep._arguments import check_fields, checked
from gradkeep._budgets import parse_bytes
from gradkeep.errors import AttributionError
from gradkeep.query._engine import GradientPair, check_pairs
from gradkeep.query._gradients import gradients_of, open_capture
from gradkeep.store import CaptureKey

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor

    from gradkeep.curvature._cholesky import Solution
    from gradkeep.query import Gradients
    from gradkeep.query._engine import ComputeSpec
    from gradkeep.query._gradients import GradientOf, LayerChoice
    from gradkeep.query._planner import QueryPlan
    from gradkeep.store import Block, Store

    Floats = np.ndarray[Any, np.dtype[np.float32]]
    Ids = np.ndarray[Any, np.dtype[np.int64]]

OverCheckpoints = Literal["one", "sum", "mean"]
IN_MEMORY = 4 << 30
"""Default limit in bytes of scores in memory; larger ones are written to disk."""


@dataclass(frozen=True, slots=True, eq=False)
class Scorer:
    """A method prepared at one checkpoint.

    Args:
        score: Function from (start, stop) to the scores `[stop - start, N]` of these queries, or
            `[L, stop - start, N]` per layer.
        plan: Function that returns how gradients were multiplied last, or None.
        approximate: Description of the approximation, or None if the scores are exact.
        solution: Function that returns how linear systems were solved so far, or None.
    """

    score: Callable[[int, int], Tensor]
    plan: Callable[[], QueryPlan | None] = lambda: None
    approximate: str | None = None
    solution: Callable[[], Solution | None] = lambda: None


@dataclass(frozen=True, slots=True)
class NoOptions:
    """Options of a method that has none."""


@dataclass(frozen=True, slots=True)
class Method:
    """A method that scores training rows.

    Args:
        name: Name for `gk.attribute(method=...)`.
        summary: The formula in words.
        needs: Captures that it needs, in words.
        cost: Its cost, in words.
        exact: True if the formula is computed without approximation.
        reference: Publication.
        prepare: Function that is called once per checkpoint with a `CheckpointView` and the options, and
            returns a `Scorer`.
        pool: Function that is called once for all checkpoints with the request and the options; its result
            is `CheckpointView.pooled`.
        over: How scores of several checkpoints are combined: `one` (refused), `sum` or `mean`.
        options: Frozen dataclass of the options, with defaults.
        tuned: Option that may be "auto".
        candidates: Values among which "auto" chooses.
        about_queries: False if the score of a training row is the same for every query.
        layered: True if the scores are sums over layers.
        whitened: True if it works on whitened coordinates, whose products are influences already.
    """

    name: str
    summary: str
    needs: str
    cost: str
    exact: bool
    reference: str
    prepare: Callable[[CheckpointView, Any], Scorer] = field(repr=False)
    pool: Callable[[AttributionQuestion, Any], Any] | None = field(default=None, repr=False)
    over: OverCheckpoints = field(default="mean", repr=False)
    options: type = field(default=NoOptions, repr=False)
    tuned: str | None = field(default=None, repr=False)
    candidates: tuple[float, ...] = field(default=(), repr=False)
    about_queries: bool = field(default=True, repr=False)
    layered: bool = field(default=False, repr=False)
    whitened: bool = field(default=False, repr=False)


_TOP_OPTIONS = ("refine", "candidates")
"""Options of `gk.query.top`."""


def options_for(method: Method, options: Mapping[str, Any]) -> Any:
    """Build the method's options dataclass; raise for unknown options, offering similar names."""
    known = [part.name for part in dataclasses.fields(method.options)]
    for name in options:
        if name not in known:
            if name in _TOP_OPTIONS:
                raise AttributionError(
                    "attribute does not refine scores, because another capture has another scale",
                    code="attribute.refine",
                    found=f"{name}=",
                    fix="Use gk.query.top(queries, train, k, refine=...) to rank the best rows.",
                )
            near = difflib.get_close_matches(name, known, n=2, cutoff=0.4)
            raise AttributionError(
                f"{method.name} has no option {name!r}",
                code="attribute.unknown_option",
                expected=", ".join(known) or "no options",
                fix=f"Did you mean {' or '.join(near)}?" if near else None,
            )
    parsed = method.options(**options)
    check_fields(parsed, AttributionError)
    return parsed


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
    """Everything that a method may use, for all checkpoints."""

    store: Store
    queries: str
    """Split of the queries."""
    train: str
    name: str
    """Name of the captures."""
    checkpoints: tuple[RunCheckpoint, ...]
    positions: Ids
    """Positions `[Q]` of the queries in their captures."""
    layers: LayerChoice = None
    compute: ComputeSpec = None
    memory_budget: float | str | None = None
    per_layer: bool = False
    report: Callable[[str], None] = field(default=lambda doing: None, repr=False)
    """Progress callback, called with a description of the current step."""

    opened: dict[CaptureKey, Block] = field(default_factory=dict, repr=False)
    """Opened captures; each is opened and checked once."""

    def block(self, key: CaptureKey) -> Block:
        """Open a capture, once."""
        if key not in self.opened:
            self.opened[key] = open_capture(self.store, key)
        return self.opened[key]

    def at(self, pooled: Any = None) -> list[CheckpointView]:
        """List the views of all checkpoints."""
        return [CheckpointView(self, place, pooled) for place in self.checkpoints]


@dataclass(frozen=True, slots=True, eq=False)
class CheckpointView:
    """One checkpoint of a request: the input of `Method.prepare`."""

    question: AttributionQuestion
    place: RunCheckpoint
    pooled: Any = None
    """Result of `Method.pool`."""

    @checked(AttributionError)
    def train(self, of: GradientOf = "loss", *, name: str | None = None) -> Gradients:
        """Return the gradients of the training rows.

        Args:
            of: `loss` or `output`.
            name: Name of another capture of the same rows.
        """
        return self._gradients(self.question.train, of, name or self.question.name)

    @checked(AttributionError)
    def queries(self, of: GradientOf = "loss") -> Gradients:
        """Return the gradients of the queries' split; `question.positions` are the queries.

        Args:
            of: `loss` or `output`.
        """
        gradients = self._gradients(self.question.queries, of, self.question.name)
        check_pairs([GradientPair(gradients, self.train(of))])
        return gradients

    @property
    def train_block(self) -> Block:
        """Captured arrays of the training rows."""
        return self._block(self.question.train)

    @property
    def query_block(self) -> Block:
        """Captured arrays of the queries' split."""
        return self._block(self.question.queries)

    def has_outputs(self) -> bool:
        """Return True if both splits hold gradients of outputs."""
        return all(
            block.schema.fingerprints.get("of") == "output"
            for block in (self.train_block, self.query_block)
        )

    def all_zero(self) -> AttributionError:
        """Return the error for training gradients that are all zero."""
        return AttributionError(
            f"all gradients of {self.question.train} at {self.place} are zero",
            code="attribute.zero_gradients",
            fix="Capture a checkpoint that does not fit its data perfectly, or other layers.",
        )

    def _gradients(self, split: str, of: GradientOf, name: str) -> Gradients:
        key = CaptureKey(self.place.checkpoint, split, self.place.run, name)
        return gradients_of(self.question.block(key), key, self.question.layers, of)

    def _block(self, split: str) -> Block:
        key = CaptureKey(self.place.checkpoint, split, self.place.run, self.question.name)
        return self.question.block(key)


def build_question(
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
    """Open the captures of a request, which must be sealed and hold the same rows.

    `settings` are fields of `AttributionQuestion`: layers, compute, memory_budget, per_layer.
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
                    f"and at {place}",
                    code="attribute.different_rows",
                    found=f"{len(other)} and {len(block)} rows",
                    fix=_SAME_ROWS,
                )
            if block is not other:
                _check_examples(other, block, split)
    positions = np.arange(len(first[queries]))
    if ids is not None:
        least = -_arguments.LARGEST
        query_ids = _arguments.whole_numbers("ids", ids, error=AttributionError, least=least)
        positions = np.asarray(first[queries].positions(query_ids), np.int64)
    if not len(positions):
        raise AttributionError(
            "there are no queries", code="attribute.no_queries", fix="Pass ids= of some rows."
        )
    return AttributionQuestion(
        *(store, queries, train, name, tuple(places), positions), opened=opened, **settings
    )


_SAME_ROWS = "Capture the same rows in the same order at every checkpoint, or pass checkpoints=."


def _check_examples(one: Block, other: Block, split: str) -> None:
    """Raise if two captures of a split hold the same samples, or labels, under other ids.

    Samples that only one of them holds are not compared: padding changes a sample's digest.
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
                code="attribute.different_rows",
                fix=_SAME_ROWS,
            )


def _find_checkpoints(
    store: Store,
    run: str | Sequence[str],
    checkpoints: str | Sequence[str] | None,
    splits: Sequence[str],
    name: str,
) -> list[RunCheckpoint]:
    """Return the named checkpoints of every run, or all at which every split was captured."""
    runs = [run] if isinstance(run, str) else list(run)
    if not runs:
        raise AttributionError("run is an empty list", code="attribute.no_run")
    captures, places = store.captures(), []
    for run_name in runs:
        known = {c.name: c for c in store.checkpoints(run_name)}
        if checkpoints is None:
            keys = [key for key in captures if (key.run, key.capture) == (run_name, name)]
            at = ({key.checkpoint for key in keys if key.split == split} for split in splits)
            names = sorted(set.intersection(*at))
            steps = {c: known[c].step if c in known else None for c in names}
            names.sort(key=lambda c: (steps[c] is None, steps[c] or 0))
        else:
            names = [checkpoints] if isinstance(checkpoints, str) else list(checkpoints)
        places += [RunCheckpoint(run_name, c, known[c].lr if c in known else None) for c in names]
    if not places and checkpoints is not None:
        raise AttributionError("checkpoints is an empty list", code="attribute.no_checkpoint")
    if not places:
        capture_names = (
            f"{k.split} at {k.checkpoint} (run {k.run}, name {k.capture})" for k in captures
        )
        raise AttributionError(
            f"{' and '.join(map(repr, splits))} were not captured at the same checkpoint of run "
            f"{', '.join(runs)} with the name {name}",
            code="attribute.no_captures",
            path=store.location,
            found=", ".join(capture_names) or "no captures",
            fix=f"Run gk.capture(store, model, loader, task=task, split={splits[0]!r}), "
            f"and the same for {splits[-1]!r}.",
        )
    return places


def column(block: Block, name: str, *, method: str) -> Tensor:
    """Return a captured value `[N]` of all rows."""
    if name not in block.names:
        raise AttributionError(
            f"{method} needs the {name} of every row, which this capture does not hold",
            code="attribute.missing_column",
            path=block.path,
            found=", ".join(n for n in block.names if "." not in n),
            fix="Capture with a task that measures it, such as gk.Classification.",
        )
    return torch.from_numpy(np.array(block.column(name)))


def zeros_on_disk_or_in_memory(shape: tuple[int, ...], *, limit: int = IN_MEMORY) -> Floats:
    """Allocate zeros in memory if they take at most `limit` bytes, else on disk.

    >>> zeros_on_disk_or_in_memory((2, 3)).shape, type(zeros_on_disk_or_in_memory((2, 3), limit=1)).__name__
    ((2, 3), 'memmap')
    """
    size = math.prod(shape) * 4
    if size <= limit:
        return np.zeros(shape, np.float32)
    # The file has no name: it is deleted with the last array that maps it.
    with tempfile.TemporaryFile(prefix="gradkeep-scores-") as file:
        file.truncate(size)
        return np.memmap(file, np.float32, "r+", shape=shape)


class ScoreAccumulator:
    """Sum of the scores `[Q, N]` of C checkpoints, and their agreement.

    For every query the scores of each checkpoint are centered and scaled to length one, z_c; their mean
    correlation is r = (|sum z_c|^2 - C) / (C (C - 1)), and the expected correlation of their mean with the
    mean of C others is C r / (1 + (C - 1) r), the confidence.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        *,
        checkpoints: int,
        over: OverCheckpoints,
        memory_budget: float | str | None,
    ) -> None:
        limit = IN_MEMORY if memory_budget is None else parse_bytes(memory_budget) // 2
        several = checkpoints > 1
        self.values = zeros_on_disk_or_in_memory(shape, limit=limit // 2 if several else limit)
        self.checkpoints, self.weight = checkpoints, 1 / checkpoints if over == "mean" else 1.0
        self._unit_sums = (
            zeros_on_disk_or_in_memory(shape[-2:], limit=limit // 2) if several else None
        )

    def add(self, start: int, scores: torch.Tensor) -> None:
        """Add a checkpoint's scores `[..., b, N]` of the queries from `start` on."""
        rows = slice(start, start + scores.shape[-2])
        self.values[..., rows, :] += self.weight * scores.detach().cpu().float().numpy()
        if self._unit_sums is None:
            return
        whole = scores.sum(0) if scores.dim() == 3 else scores
        centered = whole.detach().cpu().double()
        centered = centered - centered.mean(1, keepdim=True)
        length = centered.norm(dim=1, keepdim=True)
        scaled = torch.where(length > 0, centered / length, torch.zeros_like(centered))
        self._unit_sums[rows] += scaled.float().numpy()

    def confidence(self) -> Floats | None:
        """Return the expected agreement `[Q]` with the scores of as many other checkpoints."""
        if self._unit_sums is None:
            return None
        count = self.checkpoints
        confidence = np.empty(len(self._unit_sums), np.float32)
        for row, summed in enumerate(self._unit_sums):
            length = float(np.square(summed, dtype=np.float64).sum())
            r = (length - count) / (count * (count - 1))
            confidence[row] = count * r / (1 + (count - 1) * r) if r > 0 else 0.0
        return confidence
