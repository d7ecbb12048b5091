"""What later batches of a capture need beyond what its first batch showed."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Any

from gradkeep.errors import CaptureError


@dataclass(frozen=True, slots=True)
class Adjustments:
    """Layers, by name, that a later batch showed to need more than the first one did."""

    single: frozenset[str] = frozenset()
    """Captured by passes over single samples."""
    dense: frozenset[str] = frozenset()
    """Kept dense, as their factors change their shape."""
    ragged: frozenset[str] = frozenset()
    """Kept with any number of positions, though the first batch had one of each row."""
    late: frozenset[str] = frozenset()
    """Not used by the first batch; zero in rows that do not use them."""

    def __or__(self, other: Adjustments) -> Adjustments:
        parts = {f.name: getattr(self, f.name) | getattr(other, f.name) for f in _FIELDS}
        return Adjustments(**parts)

    def __bool__(self) -> bool:
        return any(getattr(self, f.name) for f in _FIELDS)

    @property
    def names(self) -> list[str]:
        """All layers that are adjusted."""
        return sorted(self.single | self.dense | self.ragged | self.late)

    def to_text(self) -> str:
        """A text that a schema can hold."""
        parts = {f.name: sorted(getattr(self, f.name)) for f in _FIELDS}
        return json.dumps({name: names for name, names in parts.items() if names}, sort_keys=True)

    @classmethod
    def from_text(cls, text: str) -> Adjustments:
        """Parse what a schema holds; nothing is adjusted where it holds no text."""
        known = {f.name for f in _FIELDS}
        try:
            given = json.loads(text) if text else {}
            return cls(**{name: frozenset(names) for name, names in given.items() if name in known})
        except (ValueError, TypeError, AttributeError, RecursionError):
            raise CaptureError(
                "the adjustments of an earlier capture cannot be read",
                found=text[:100],
                fix="delete that capture, or use another name=",
            ) from None


_FIELDS = dataclasses.fields(Adjustments)
NO_ADJUSTMENTS = Adjustments()


class BatchUnlikeFirst(CaptureError):
    """A batch that the choices made on the first one do not fit; a capture begins again adjusted."""

    adjustments: Adjustments = NO_ADJUSTMENTS
    candidates: frozenset[str] = frozenset()
    """Further layers that no batch has used so far, where one of them ran for the first time."""

    @classmethod
    def needing(cls, adjustments: Adjustments, what: str, **parts: Any) -> BatchUnlikeFirst:
        """The error, with what would make the batch fit."""
        error = cls(what, **parts)
        error.adjustments = adjustments
        return error
