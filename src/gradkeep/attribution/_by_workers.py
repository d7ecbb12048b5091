"""Scores by many workers: each scores some of the queries, from the same captures."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from gradkeep.attribution._accumulator import zeros_on_disk_or_in_memory
from gradkeep.errors import AttributionError, FarmError
from gradkeep.farm._sharing import blocks_of, share_out, size_of
from gradkeep.store import Array
from gradkeep.store import open as open_store

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from gradkeep.attribution._question import AttributionQuestion
    from gradkeep.farm._progress import Progress
    from gradkeep.farm._run import Engine
    from gradkeep.query._planner import QueryPlan
    from gradkeep.store import Store

    Floats = np.ndarray[Any, np.dtype[np.float32]]

_LONGEST = 2048
_TOLD = ("approximate", "solved")
"""What each part tells in words."""
_MOST = 256 << 20
"""Bytes of scores in one part, which a worker holds whole."""


@dataclass(frozen=True, slots=True, eq=False)
class MadeScores:
    """What a method's scores are, before it is said whose."""

    values: Floats
    """`[Q, N]`, or `[L, Q, N]` where layers are told apart"""
    confidence: Floats | None
    approximate: str | None
    solved: str | None = None
    """How linear systems were solved, where there are any."""
    plan: QueryPlan | None = None


def scores_by_workers(
    question: AttributionQuestion,
    arguments: Mapping[str, Any],
    *,
    layers: int,
    workers: int | None,
    engine: Engine | None,
    report: Callable[[int, int], None] | None,
) -> MadeScores:
    """The scores that `attribute` gives for these arguments, made block by block of queries.

    A query's scores do not depend on the others that are asked, up to rounding, so blocks of queries
    are put together as they are. Every worker prepares the method for itself.
    """
    at = question.at()[0]
    queries, rows = len(question.positions), len(at.train_block)
    ids = at.query_block.ids[question.positions]
    shape = (layers, queries, rows) if question.per_layer else (queries, rows)
    least = -(-int(np.prod(shape, dtype=np.int64)) * 4 // _MOST)
    blocks = blocks_of(queries, max(least, size_of(workers, engine)))
    size = len(blocks[0])
    arrays = (
        Array("values", "float32", (*shape[:-2], size, rows)),
        Array("confidence", "float32", (size,), nan="keep"),
        *(Array(name, "uint8", (_LONGEST,)) for name in _TOLD),
    )
    job = _ScoreJob(question.store.location, tuple(ids[block] for block in blocks), arguments, size)

    def told(seen: Progress) -> None:
        if report is not None:
            report(seen.done * size * rows, seen.total * size * rows)

    try:
        found = share_out(
            question.store,
            f"scores of {queries} queries",
            arrays,
            len(blocks),
            job,
            workers=workers,
            engine=engine,
            progress=told,
        )
    except FarmError as error:
        raise AttributionError(error.what, found=error.found, fix=error.fix) from error
    values = zeros_on_disk_or_in_memory(shape)
    several = len(question.checkpoints) > 1
    confidence = np.empty(queries, np.float32)
    for number, block in enumerate(blocks):
        here = slice(block.start, block.stop)
        values[..., here, :] = found["values"][number][..., : len(block), :]
        confidence[here] = found["confidence"][number][: len(block)]
    approximate, solved = (
        found[name][0].tobytes().rstrip(b"\0").decode("utf-8", "replace") or None for name in _TOLD
    )
    return MadeScores(values, confidence if several else None, approximate, solved)


@dataclass(frozen=True, slots=True, eq=False)
class _ScoreJob:
    """A job of the farm: the scores of blocks of queries."""

    store: str
    blocks: tuple[np.ndarray[Any, np.dtype[np.int64]], ...]
    arguments: Mapping[str, Any]
    size: int

    def __call__(self, numbers: Sequence[int]) -> list[dict[str, Any]]:
        """Score the queries of these blocks."""
        return [self._scored(open_store(self.store, create=False), n) for n in numbers]

    def _scored(self, store: Store, number: int) -> dict[str, Any]:
        from gradkeep.attribution._attribute import attribute

        scores = attribute(store, ids=self.blocks[number], **self.arguments)
        values = scores.values if scores.per_layer is None else scores.per_layer
        missing = self.size - values.shape[-2]
        whole = np.pad(values, [*[(0, 0)] * (values.ndim - 2), (0, missing), (0, 0)])
        sure = np.zeros(len(values[..., 0].T)) if scores.confidence is None else scores.confidence
        return {
            "values": whole.astype(np.float32),
            "confidence": np.pad(np.asarray(sure, np.float32), (0, missing)),
            **{name: _as_bytes(getattr(scores, name)) for name in _TOLD},
        }


def _as_bytes(text: str | None) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """A text at the beginning of an array of a fixed length."""
    told = np.zeros(_LONGEST, np.uint8)
    content = (text or "").encode()[:_LONGEST]
    told[: len(content)] = np.frombuffer(content, np.uint8)
    return told
