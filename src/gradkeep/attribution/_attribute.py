"""`gk.attribute`: score training rows for queries with any method."""

from __future__ import annotations

import dataclasses
import json
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from gradkeep._arguments import checked
from gradkeep._budgets import parse_bytes
from gradkeep._display import progress as progress_bar
from gradkeep.attribution._question import (
    AttributionQuestion,
    Method,
    ScoreAccumulator,
    build_question,
    options_for,
    zeros_on_disk_or_in_memory,
)
from gradkeep.attribution._registry import default_method, find_method
from gradkeep.attribution._saved_scores import check_free, save_scores
from gradkeep.attribution._scores import Scores
from gradkeep.attribution._tuning import AUTO, choose_option
from gradkeep.curvature._cholesky import summarize_solutions
from gradkeep.errors import AttributionError, FarmError
from gradkeep.factors import form_from_fields, is_whitened
from gradkeep.farm._run import count_workers, run_parts, split_blocks, validate_workers
from gradkeep.store import Array, Store
from gradkeep.store import open as open_store

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from gradkeep._display import ProgressReport
    from gradkeep.attribution._question import Scorer
    from gradkeep.capturing._report import Captured
    from gradkeep.curvature._cholesky import Solution
    from gradkeep.farm._run import Engine, Progress
    from gradkeep.query._engine import ComputeSpec
    from gradkeep.query._gradients import GradientOf, LayerChoice
    from gradkeep.query._planner import QueryPlan
    from gradkeep.store import Block

    Floats = np.ndarray[Any, np.dtype[np.float32]]

_TEXT_FIELDS = ("approximate", "solved")
"""Texts that each part returns with its scores."""


@dataclass(frozen=True, slots=True, eq=False)
class ComputedScores:
    """Scores of a method before their provenance is attached."""

    values: Floats
    """`[Q, N]`, or `[L, Q, N]` per layer"""
    confidence: Floats | None
    approximate: str | None
    solved: str | None = None
    """How linear systems were solved, if there are any."""
    plan: QueryPlan | None = None


def compute_scores_by_workers(
    question: AttributionQuestion,
    arguments: Mapping[str, Any],
    *,
    layers: int,
    workers: int | None,
    engine: Engine | None,
    report: Callable[[int, int], None] | None,
) -> ComputedScores:
    """Compute the scores of `attribute` in worker processes, in blocks of queries.

    A query's scores do not depend on the other queries, up to rounding, so blocks are concatenated. Every
    worker prepares the method itself.
    """
    at = question.at()[0]
    queries, rows = len(question.positions), len(at.train_block)
    ids = at.query_block.ids[question.positions]
    shape = (layers, queries, rows) if question.per_layer else (queries, rows)
    # A worker holds the scores of one part in memory: at most 256 MiB.
    least = -(-int(np.prod(shape, dtype=np.int64)) * 4 // (256 << 20))
    blocks = split_blocks(queries, max(least, count_workers(workers, engine)))
    size = len(blocks[0])
    arrays = (
        Array("values", "float32", (*shape[:-2], rows), kind="data", ragged=True),
        Array("confidence", "float32", kind="data", ragged=True, nan="keep"),
        *(Array(name, "uint8", kind="text", ragged=True) for name in _TEXT_FIELDS),
    )
    job = _ScoreJob(question.store.location, tuple(ids[block] for block in blocks), arguments)

    def report_progress(progress: Progress) -> None:
        if report is not None:
            report(progress.done * size * rows, progress.total * size * rows)

    try:
        parts = run_parts(
            question.store,
            f"scores of {queries} queries",
            arrays,
            len(blocks),
            job,
            workers=workers,
            engine=engine,
            progress=report_progress,
        )
    except FarmError as error:
        raise AttributionError(error.message, found=error.found, fix=error.fix) from error
    values = zeros_on_disk_or_in_memory(shape)
    several = len(question.checkpoints) > 1
    confidence = np.empty(queries, np.float32)
    for block, part, agreement in zip(blocks, parts["values"], parts["confidence"], strict=True):
        values[..., block.start : block.stop, :] = np.swapaxes(part, 0, -2)
        confidence[block.start : block.stop] = agreement
    approximate, solved = (parts[name].texts()[0] or None for name in _TEXT_FIELDS)
    return ComputedScores(values, confidence if several else None, approximate, solved)


@dataclass(frozen=True, slots=True, eq=False)
class _ScoreJob:
    """Farm job that scores blocks of queries."""

    store: str
    blocks: tuple[np.ndarray[Any, np.dtype[np.int64]], ...]
    arguments: Mapping[str, Any]

    def __call__(self, numbers: Sequence[int]) -> list[dict[str, Any]]:
        """Score the queries of these blocks."""
        return [self._score_block(number) for number in numbers]

    def _score_block(self, number: int) -> dict[str, Any]:
        scores = attribute(self.store, ids=self.blocks[number], **self.arguments)
        values = scores.values if scores.per_layer is None else scores.per_layer
        confidence = scores.confidence
        texts = {name: (getattr(scores, name) or "").encode() for name in _TEXT_FIELDS}
        return {
            "values": np.swapaxes(values, 0, -2),  # rows of queries
            "confidence": np.zeros(len(scores), np.float32) if confidence is None else confidence,
            **{name: np.frombuffer(text, np.uint8) for name, text in texts.items()},
        }


_TILE = 256 << 20
"""Bytes of scores that a method computes at a time."""


@dataclass(frozen=True, slots=True)
class _CapturedSplits:
    """Two captured splits of one store."""

    store: Store
    queries: str
    runs: tuple[str, ...]
    name: str
    checkpoints: tuple[str, ...]


def _parse_reports(reports: Captured | Sequence[Any], train: str) -> _CapturedSplits:
    """Find the store, the query split and the checkpoints of reports, which may be nested lists."""
    from gradkeep.capturing._report import Captured  # not needed for stores

    flat: list[Any] = []
    for report in [reports] if isinstance(reports, Captured) else reports:
        flat += report if isinstance(report, list | tuple) else [report]
    captured = [report for report in flat if isinstance(report, Captured)]
    keys = [report.key for report in captured]
    splits = sorted({key.split for key in keys})
    stores = {
        report.store.location: report.store for report in captured if report.store is not None
    }
    names = {key.capture for key in keys}
    if len(captured) < len(flat) or train not in splits or len(splits) != 2:
        raise AttributionError(
            "captures must be reports of gk.capture of the training split and one other split",
            code="attribute.captured_splits",
            found=f"splits {', '.join(splits) or 'none'}",
            fix=f"Pass [gk.capture(..., split={train!r}), gk.capture(..., split='test')], or a store.",
        )
    if len(stores) != 1 or len(names) != 1:
        raise AttributionError(
            "the captures are in different stores or have different names",
            code="attribute.captured_elsewhere",
            found=f"stores {', '.join(map(str, stores))}; names {', '.join(sorted(names))}",
        )
    return _CapturedSplits(
        store=next(iter(stores.values())),
        queries=next(split for split in splits if split != train),
        runs=tuple(dict.fromkeys(key.run for key in keys)),
        name=names.pop(),
        checkpoints=tuple(dict.fromkeys(key.checkpoint for key in keys)),
    )


@checked(
    AttributionError,
    store="For a model and loaders, use gk.attribute_once(model, train, queries, task=...).",
)
def attribute(
    store: Store | str | os.PathLike[str] | Captured | Sequence[Any],
    *,
    method: str | None = None,
    queries: str = "test",
    train: str = "train",
    checkpoints: str | Sequence[str] | None = None,
    layers: LayerChoice = None,
    ids: Any = None,
    run: str | Sequence[str] = "main",
    name: str = "main",
    compute: ComputeSpec = None,
    memory_budget: float | str | None = None,
    per_layer: bool = False,
    subsets: Any = None,
    documents: Any = None,
    query_documents: Any = None,
    save: str | None = None,
    workers: int | None = None,
    engine: Engine | None = None,
    progress: bool = False,
    **options: Any,
) -> Scores:
    """Score every training row for every query from captured gradients, without running the model.

    Args:
        store: The store, or its path; or reports of `gk.capture` of the training rows and the queries, which also
            set `queries`, `checkpoints`, `run` and `name`.
        method: Name of a method; `gk.methods()` lists them. By default `ekfac` for sequences and whitened
            coordinates, else `kernel`.
        queries: Split of the queries.
        train: Split of the training rows.
        checkpoints: Names of checkpoints. By default all at which both splits were captured, in each run;
            methods for one checkpoint need exactly one.
        layers: Use only these layers.
        ids: Ids of the queries; all by default.
        run: Name of the run, or of several.
        name: Name of the captures.
        compute: How gradients are multiplied; chosen by default.
        memory_budget: Most memory, such as "4GiB"; larger scores are written to disk.
        per_layer: Also return the scores of each layer.
        subsets: Models trained on subsets, by which an option "auto" is chosen: the name of a set in the
            store, (masks `[m, N]`, outputs `[m, Q]`), or a ground truth of `gk.evaluate`, of which only the
            half for choosing is used.
        documents: Document of each training row `[N]`, if rows are chunks; scores are summed as by
            `Scores.by_document`.
        query_documents: Document of each query `[Q]`.
        save: Save the scores in the store under this name.
        workers: Number of processes that score blocks of queries; each prepares the method itself.
        engine: Engine of `gk.farm.engine` that starts the workers.
        progress: Show progress.
        options: Options of the method.

    Returns:
        Scores `[queries, train]`; positive helps.

    Raises:
        AttributionError: The captures do not fit the request, or scores are not finite.

    Example:
        >>> import gradkeep as gk, tempfile, torch
        >>> store, model = gk.open(tempfile.mkdtemp()), torch.nn.Linear(4, 3)
        >>> for split, rows in (("train", 6), ("test", 2)):
        ...     data = [(torch.randn(rows, 4), torch.arange(rows) % 3)]
        ...     _ = gk.capture(store, model, data, task=gk.Classification(), split=split)
        >>> gk.attribute(store).shape
        (2, 6)
    """
    validate_workers(workers, engine, least=1)
    place: Any = store
    if not isinstance(place, Store | str | os.PathLike):
        reports = _parse_reports(place, train)
        place, queries, run, name = reports.store, reports.queries, reports.runs, reports.name
        checkpoints = reports.checkpoints if checkpoints is None else checkpoints
    store = open_store(place)
    chosen = find_method(method or default_method(store, run=run, train=train, name=name))
    method_options = options_for(chosen, options)
    question = build_question(
        store,
        queries=queries if chosen.about_queries else train,
        train=train,
        name=name,
        run=run,
        checkpoints=checkpoints,
        ids=ids if chosen.about_queries else None,
        layers=layers,
        compute=compute,
        memory_budget=memory_budget,
        per_layer=per_layer,
    )
    at = tuple(str(place) for place in question.checkpoints)
    if len(at) > 1 and chosen.over == "one":
        raise AttributionError(
            f"{chosen.name} scores one checkpoint at a time",
            code="attribute.several_checkpoints",
            found=", ".join(at),
            fix=f"Pass checkpoints={at[-1]!r}, or method='tracin' for all of them.",
        )
    if per_layer and not chosen.layered:
        raise AttributionError(
            f"the scores of {chosen.name} are not sums over layers",
            code="attribute.not_per_layer",
            fix="Pass layers= to score single layers, or use dot, tracin or kernel.",
        )
    if save is not None:
        check_free(store, save, method=chosen.name, checkpoints=at)
    with progress_bar(f"attribute by {chosen.name}", "scores") as report:
        follow = report if progress else None
        if (workers is not None or engine is not None) and chosen.about_queries:
            if _wants_choice(chosen, method_options):
                raise AttributionError(
                    'an option "auto" cannot be chosen by workers',
                    code="attribute.auto_with_workers",
                    fix="Choose it without workers= first, then pass the chosen value.",
                )
            arguments = {
                "method": chosen.name,
                "queries": queries,
                "train": train,
                "checkpoints": checkpoints,
                "layers": layers,
                "run": run,
                "name": name,
                "compute": compute,
                "memory_budget": memory_budget,
                "per_layer": per_layer,
                **options,
            }
            computed = compute_scores_by_workers(
                question,
                arguments,
                layers=len(_layers(question.at()[0].train_block, question)),
                workers=workers,
                engine=engine,
                report=follow,
            )
            scores = _as_scores(chosen, question, method_options, computed)
        elif _wants_choice(chosen, method_options):
            scores = choose_option(
                chosen,
                question,
                method_options,
                lambda candidate: _compute_scores(chosen, question, candidate, follow),
                subsets,
            )
        else:
            scores = _compute_scores(chosen, question, method_options, follow)
    if documents is not None or query_documents is not None:
        scores = scores.by_document(documents, queries=query_documents)
    if save is not None:
        save_scores(store, save, scores)
    return scores


def _compute_scores(
    chosen: Method,
    question: AttributionQuestion,
    method_options: Any,
    report: ProgressReport | None,
) -> Scores:
    train = question.at()[0].train_block
    count = len(question.positions) if chosen.about_queries else 1
    rows, layers = len(train), _layers(train, question)
    parts = (len(layers),) if question.per_layer else ()
    tally = ScoreAccumulator(
        (*parts, count, rows),
        checkpoints=len(question.checkpoints),
        over=chosen.over,
        memory_budget=question.memory_budget,
    )
    budget = question.memory_budget
    tile = _TILE if budget is None else min(_TILE, parse_bytes(budget) // 8)
    step = max(1, min(count, tile // max(1, 4 * rows * (len(layers) if parts else 1))))
    scorer: Scorer | None = None
    solutions: list[Solution | None] = []
    done, total = 0, len(question.checkpoints) * count * rows
    if report is not None:
        follow = report
        question = dataclasses.replace(question, report=lambda doing: follow(done, total, doing))
    compression = describe_compression(chosen, question)
    pooled = None if chosen.pool is None else chosen.pool(question, method_options)
    for number, at in enumerate(question.at(pooled)):
        # Free the factorization of this checkpoint before computing the next one.
        scorer = None
        scorer = chosen.prepare(at, method_options)
        for start in range(0, count, step):
            part = scorer.score(start, min(start + step, count))
            if not bool(part.isfinite().all()):
                raise AttributionError(
                    f"{chosen.name} produced non-finite scores at {at.place}",
                    code="attribute.not_finite",
                    fix="Look for exploded gradients with gk.gradients(store, split=...).norms().",
                )
            tally.add(start, part)
            done = (number * count + start + part.shape[-2]) * rows
            if report is not None:
                report(done, total, "")
        solutions.append(scorer.solution())
    assert scorer is not None
    approximate = "; ".join(filter(None, (scorer.approximate, compression))) or None
    computed = ComputedScores(
        tally.values, tally.confidence(), approximate, summarize_solutions(solutions), scorer.plan()
    )
    return _as_scores(chosen, question, method_options, computed)


def _as_scores(
    chosen: Method, question: AttributionQuestion, method_options: Any, computed: ComputedScores
) -> Scores:
    first = question.at()[0]
    train, block = first.train_block, first.query_block
    labels = _labels(block) if chosen.about_queries else None
    outputs = getattr(method_options, "target", "loss") == "output"
    about_output = "; about the query's output, not its loss" if outputs else ""
    # Arrays and other large options are recorded by their type.
    options = {
        part.name: getattr(method_options, part.name) for part in dataclasses.fields(method_options)
    }
    return Scores(
        values=computed.values.sum(0) if question.per_layer else computed.values,
        query_ids=block.ids[question.positions] if chosen.about_queries else np.zeros(1, np.int64),
        train_ids=train.ids,
        method=chosen.name,
        queries=question.queries,
        train=question.train,
        checkpoints=tuple(str(place) for place in question.checkpoints),
        layers=_layers(train, question),
        scale=chosen.summary + about_output,
        exact=chosen.exact and computed.approximate is None,
        approximate=computed.approximate,
        options=json.dumps(options, default=lambda value: type(value).__name__, sort_keys=True),
        query_labels=None if labels is None else labels[question.positions],
        train_labels=_labels(train),
        confidence=computed.confidence,
        per_layer=computed.values if question.per_layer else None,
        captures={
            key.folder: block.manifest.identity
            for key, block in question.opened.items()
            if chosen.about_queries or key.split == question.train
        },
        solved=computed.solved,
        plan=computed.plan,
        store=question.store,
    )


def describe_compression(chosen: Method, question: AttributionQuestion) -> str | None:
    """Describe the compression of the captures; raise if the method needs gradients."""
    descriptions: list[str] = []
    for block in question.opened.values():
        forms = [form_from_fields(layer.form) for layer in block.schema.layers if layer.form]
        if any(is_whitened(form) for form in forms) and not chosen.whitened:
            raise AttributionError(
                f"{chosen.name} needs gradients, but the captures hold whitened coordinates",
                code="attribute.whitened",
                found=block.schema.fingerprints.get("kept"),
                fix="Use method='ekfac', or capture with keep='exact' or gk.Keep(bytes, "
                "coordinates='random') under another name=.",
            )
        words = dict.fromkeys(form.approximate for form in forms if form.approximate)
        if words:
            descriptions.append(str(block.schema.fingerprints.get("kept") or ", ".join(words)))
    return "; ".join(dict.fromkeys(descriptions)) or None


def _layers(block: Block, question: AttributionQuestion) -> tuple[str, ...]:
    at = question.at()[0]
    if not any(layer.form for layer in block.schema.layers):
        return ()
    of: GradientOf = "output" if block.schema.fingerprints.get("of") == "output" else "loss"
    return tuple(at.train(of).forms)


def _labels(block: Block) -> Any:
    return block.column("label") if "label" in block.names else None


def _wants_choice(method: Method, options: Any) -> bool:
    """Return True if an option of the method is "auto"."""
    value = None if method.tuned is None else getattr(options, method.tuned)
    return isinstance(value, str) and value == AUTO
