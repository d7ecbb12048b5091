"""Every error that gradkeep raises on purpose.

    GradkeepError
    |-- AttributionError     scores that cannot be made from what is kept (also a ValueError)
    |-- BudgetError          a budget that is none, or too small (also a ValueError)
    |-- CaptureError         a model, task, loader or layer that cannot be captured (also a ValueError)
    |-- DataError            example data or a model that is not what was asked for (also a ValueError)
    |-- DatamodelsError      a study, a spec, masks or outputs that cannot be used (also a ValueError)
    |-- EvaluationError      a figure that cannot be found honestly with what there is (also a ValueError)
    |-- FarmError            jobs that cannot be run, or none of which succeeds
    |-- MissingExtra         an optional dependency is needed for this
    |-- QueryError           a question that the kept gradients cannot answer (also a ValueError)
    |-- RematError           a recorded step, or a log of one, that cannot be used (also a ValueError)
    |   `-- StepChanged      a training step that was planned did something else
    `-- StoreError
        |-- NotAStore        the path holds something else, or nothing
        |-- FormatTooNew     written by a later gradkeep
        |-- SchemaMismatch   what is asked for differs from what is stored
        |-- InvalidRows      wrong dtype, shape, ids or not-a-number (also a ValueError)
        |-- MissingRows      rows that were never written, or are gone (also a LookupError)
        |-- NotSealed        a block that is still being written
        |-- Conflict         the name is taken by other bytes
        |-- Damaged          bytes that are not what was written
        |-- LeaseLost        somebody else holds the row now
        `-- WriteFailed      the disk said no (also an OSError)
            `-- ReadOnly     the place does not take writes at all

    BudgetWarning            a warning: training goes on, but not inside of its budget
    EvidenceWarning          a warning: an answer that the data hardly supports

A message says where, what was found, what was expected and what to do next.
"""

from __future__ import annotations

import os
from typing import Any

__all__ = [
    "AttributionError",
    "BudgetError",
    "BudgetWarning",
    "CaptureError",
    "Conflict",
    "Damaged",
    "DataError",
    "DatamodelsError",
    "EvaluationError",
    "EvidenceWarning",
    "FarmError",
    "FormatTooNew",
    "GradkeepError",
    "InvalidRows",
    "LeaseLost",
    "MissingExtra",
    "MissingRows",
    "NotAStore",
    "NotSealed",
    "QueryError",
    "ReadOnly",
    "RematError",
    "SchemaMismatch",
    "StepChanged",
    "StoreError",
    "WriteFailed",
]


class GradkeepError(Exception):
    """Base of all errors raised on purpose; the parts of the message stay readable as attributes."""

    def __init__(
        self,
        what: str,
        *,
        path: str | os.PathLike[str] | None = None,
        found: object = None,
        expected: object = None,
        fix: str | None = None,
    ) -> None:
        self.what = what
        self.path = None if path is None else os.fspath(path)
        self.found = found
        self.expected = expected
        self.fix = fix
        super().__init__(self._message())

    def _message(self) -> str:
        lines = [self.what if self.path is None else f"{self.path}: {self.what}"]
        if self.found is not None:
            lines.append(f"  found:    {self.found}")
        if self.expected is not None:
            lines.append(f"  expected: {self.expected}")
        if self.fix is not None:
            lines.append(f"  next:     {self.fix}")
        return "\n".join(lines)

    def __reduce__(self) -> tuple[Any, ...]:
        # Exceptions are rebuilt from their positional arguments; ours are keywords and must
        # survive the way back from a worker process.
        state = (self.what, self.path, self.found, self.expected, self.fix)
        return (_rebuild, (type(self), *state))


def _rebuild(
    kind: type[GradkeepError],
    what: str,
    path: str | None,
    found: object,
    expected: object,
    fix: str | None,
) -> GradkeepError:
    return kind(what, path=path, found=found, expected=expected, fix=fix)


class DataError(GradkeepError, ValueError):
    """Example data or a reference model: a file, a name or a size that is not right."""


class DatamodelsError(GradkeepError, ValueError):
    """Masks, outputs or options that no datamodel can be fitted with or asked about."""


class EvaluationError(GradkeepError, ValueError):
    """A figure cannot be found honestly with what there is."""


class FarmError(GradkeepError):
    """Jobs that cannot be run: no worker starts, or none of them succeeds."""


class MissingExtra(GradkeepError):
    """An optional dependency is not installed."""


class AttributionError(GradkeepError, ValueError):
    """Scores that cannot be made from what the store holds."""


class BudgetError(GradkeepError, ValueError):
    """A budget that cannot be understood, or that is below the least possible."""


class BudgetWarning(UserWarning):
    """Training goes on, but not as its budget promises: over it, or without a plan."""


class EvidenceWarning(UserWarning):
    """There is an answer, but the data hardly supports it."""


class CaptureError(GradkeepError, ValueError):
    """A model, task, loader or choice of layers that cannot be captured."""


class QueryError(GradkeepError, ValueError):
    """A question that the kept gradients cannot answer."""


class RematError(GradkeepError, ValueError):
    """Something about rematerialization: a budget, a heuristic, a program."""


class StepChanged(RematError):
    """A training step did something else than the one that was recorded and planned."""


class StoreError(GradkeepError):
    """Something about a store, its files or what was asked of it."""


class NotAStore(StoreError):
    """The path does not hold a store."""


class FormatTooNew(StoreError):
    """The store was written by a later version of gradkeep."""


class SchemaMismatch(StoreError):
    """What is asked for differs from what the store holds; `found` is a readable diff."""


class InvalidRows(StoreError, ValueError):
    """Rows with a wrong dtype, shape, id or value."""


class MissingRows(StoreError, LookupError):
    """Rows that the store does not hold."""


class NotSealed(StoreError):
    """The block is still being written; its rows are not complete."""


class Conflict(StoreError):
    """The name is already taken by other bytes."""


class Damaged(StoreError):
    """Bytes on disk are not the bytes that were written; `tensor` names the array if known."""

    @property
    def tensor(self) -> str | None:
        """The damaged tensor inside a segment, if the damage is inside one."""
        marker = "tensor "
        return self.what.split(marker, 1)[1].split("'")[1] if marker in self.what else None


class LeaseLost(StoreError):
    """The lease ended or was taken over while its owner still worked."""


class WriteFailed(StoreError, OSError):
    """The operating system refused a write; nothing was acknowledged."""


class ReadOnly(WriteFailed):
    """The place does not take writes."""
