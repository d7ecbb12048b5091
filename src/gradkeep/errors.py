"""Errors and warnings of gradkeep.

    GradkeepError
    |-- AttributionError          (also a ValueError)
    |-- BudgetError               (also a ValueError)
    |-- CaptureError              (also a ValueError)
    |-- DataError                 (also a ValueError)
    |-- DatamodelsError           (also a ValueError)
    |-- EvaluationError           (also a ValueError)
    |-- FarmError
    |-- MissingExtraError
    |-- QueryError                (also a ValueError)
    |-- RematError                (also a ValueError)
    |   `-- StepChangedError
    `-- StoreError
        |-- NotAStoreError
        |-- FormatTooNewError
        |-- SchemaMismatchError
        |-- InvalidRowsError      (also a ValueError)
        |-- MissingRowsError      (also a LookupError)
        |-- NotSealedError
        |-- ConflictError
        |-- DamagedError
        |-- LeaseLostError
        `-- WriteFailedError      (also an OSError)
            `-- ReadOnlyError

    BudgetWarning
    EvidenceWarning

Every error has a stable `code` such as `store.damaged` or `capture.shuffled_loader`.
"""

from __future__ import annotations

import os
import textwrap
from typing import Any

__all__ = [
    "AttributionError",
    "BudgetError",
    "BudgetWarning",
    "CaptureError",
    "ConflictError",
    "DamagedError",
    "DataError",
    "DatamodelsError",
    "EvaluationError",
    "EvidenceWarning",
    "FarmError",
    "FormatTooNewError",
    "GradkeepError",
    "InvalidRowsError",
    "LeaseLostError",
    "MissingExtraError",
    "MissingRowsError",
    "NotAStoreError",
    "NotSealedError",
    "QueryError",
    "ReadOnlyError",
    "RematError",
    "SchemaMismatchError",
    "StepChangedError",
    "StoreError",
    "WriteFailedError",
]


class GradkeepError(Exception):
    """Base class of the errors that gradkeep raises.

    The text reads `<message>: <found>; expected <expected>.`, followed by what to do next.

    Args:
        message: What went wrong, as the beginning of a sentence.
        code: Stable identifier of this failure; the class's own `code` by default.
        path: File, folder or URL that the error is about.
        found: The value that was found.
        expected: What would have been accepted.
        fix: What the user can do, as a sentence.

    Example:
        >>> print(GradkeepError("batch_size is wrong", found=0, expected="at least 1"))
        batch_size is wrong: 0; expected at least 1
    """

    code: str = "error"
    """Stable identifier: `<area>.<reason>`. Programs and tests compare it, never the text."""
    default_fix: str | None = None
    """What the user can do, where the error itself does not say."""

    def __init__(
        self,
        message: str,
        *,
        code: str | None = None,
        path: str | os.PathLike[str] | None = None,
        found: object = None,
        expected: object = None,
        fix: str | None = None,
    ) -> None:
        self.message = message
        self.code = code or type(self).code
        self.path = None if path is None else os.fspath(path)
        self.found = found
        self.expected = expected
        self.fix = fix or type(self).default_fix
        super().__init__(self._text())

    def _text(self) -> str:
        text = self.message if self.path is None else f"{self.path}: {self.message}"
        found = None if self.found is None else str(self.found).strip("\n")
        if found is not None and "\n" in found:
            text += ":\n" + textwrap.indent(found, "  ")
        elif found is not None:
            text += f": {found}"
        if self.expected is not None:
            text += f"; expected {self.expected}"
        return text if self.fix is None else f"{text}\n{self.fix}"

    def __reduce__(self) -> tuple[Any, ...]:
        # Exceptions are rebuilt from positional arguments; these keywords must survive the way
        # back from a worker process.
        names = ("code", "path", "found", "expected", "fix")
        return (_rebuild, (type(self), self.message, {name: getattr(self, name) for name in names}))


def _rebuild(kind: type[GradkeepError], message: str, details: dict[str, Any]) -> GradkeepError:
    return kind(message, **details)


class DataError(GradkeepError, ValueError):
    """A data set or reference model has a wrong name, file or size."""

    code = "data.invalid"


class DatamodelsError(GradkeepError, ValueError):
    """A study, spec, mask, output or option cannot be used for a datamodel."""

    code = "datamodels.invalid"


class EvaluationError(GradkeepError, ValueError):
    """The evaluation cannot be computed from the available data."""

    code = "evaluate.invalid"


class FarmError(GradkeepError):
    """Jobs cannot run: no worker starts, or none of the jobs succeeds."""

    code = "farm.failed"


class MissingExtraError(GradkeepError):
    """An optional dependency is not installed."""

    code = "extra.missing"


class AttributionError(GradkeepError, ValueError):
    """Scores cannot be computed from the stored gradients with these options."""

    code = "attribute.invalid"


class BudgetError(GradkeepError, ValueError):
    """A memory budget cannot be parsed, or is below the smallest possible one."""

    code = "budget.invalid"


class BudgetWarning(UserWarning):
    """Training continues, but over its memory budget or without a plan."""


class EvidenceWarning(UserWarning):
    """The data hardly supports the answer."""


class CaptureError(GradkeepError, ValueError):
    """A model, task, loader or choice of layers cannot be captured."""

    code = "capture.invalid"


class QueryError(GradkeepError, ValueError):
    """The stored gradients cannot answer a query."""

    code = "query.invalid"


class RematError(GradkeepError, ValueError):
    """A training step, its log or a rematerialization option cannot be used."""

    code = "remat.invalid"


class StepChangedError(RematError):
    """A training step ran other operations than the recorded and planned one."""

    code = "remat.step_changed"


class StoreError(GradkeepError):
    """Base class of the errors of a store and its files."""

    code = "store.error"


class NotAStoreError(StoreError):
    """The path does not hold a store."""

    code = "store.not_a_store"


class FormatTooNewError(StoreError):
    """The store was written by a later version of gradkeep."""

    code = "store.format_too_new"


class SchemaMismatchError(StoreError):
    """The request does not match the stored schema; `found` is a readable diff."""

    code = "store.schema_mismatch"


class InvalidRowsError(StoreError, ValueError):
    """Rows have a wrong dtype, shape, id or value."""

    code = "store.invalid_rows"


class MissingRowsError(StoreError, LookupError):
    """The store does not hold the requested rows."""

    code = "store.missing_rows"


class NotSealedError(StoreError):
    """The block is still being written; its rows are not complete."""

    code = "store.not_sealed"


class ConflictError(StoreError):
    """Another writer has stored different bytes under this name."""

    code = "store.conflict"


class DamagedError(StoreError):
    """Bytes on disk differ from the bytes that were written."""

    code = "store.damaged"
    default_fix = "Move it aside with `gradkeep verify STORE --repair`, then run the work again."

    @property
    def tensor(self) -> str | None:
        """Name of the damaged tensor inside a segment, if known."""
        marker = "tensor "
        return self.message.split(marker, 1)[1].split("'")[1] if marker in self.message else None


class LeaseLostError(StoreError):
    """The lease expired or was taken over while its owner was still working."""

    code = "store.lease_lost"


class WriteFailedError(StoreError, OSError):
    """The operating system refused a write; nothing was acknowledged."""

    code = "store.write_failed"


class ReadOnlyError(WriteFailedError):
    """The location is not writable."""

    code = "store.read_only"
