"""Answers as JSON: frozen dataclasses, arrays and numbers in its types, and what to say instead of one."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from gradkeep.errors import GradkeepError


def to_json(answer: Any) -> bytes:
    """The bytes of an answer; what JSON has no number for becomes null."""
    text = json.dumps(_plain(answer), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    # Half a pair of surrogates, as broken file names have it, is no text.
    return text.encode(errors="replace")


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, np.ndarray):
        return _plain(value.tolist())
    if isinstance(value, np.generic):
        return _plain(value.item())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [part.name for part in dataclasses.fields(value)]
        return {name: _plain(getattr(value, name)) for name in names}
    if isinstance(value, dict):
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return str(value)


@dataclasses.dataclass(frozen=True, slots=True)
class ProblemView:
    """Why there is no answer, in the parts of a message of gradkeep."""

    kind: str
    what: str
    path: str | None = None
    found: str | None = None
    expected: str | None = None
    fix: str | None = None


def problem_of(error: GradkeepError) -> ProblemView:
    """An error of gradkeep as it is shown in place of an answer."""
    return ProblemView(
        type(error).__name__,
        error.what,
        error.path,
        None if error.found is None else str(error.found).strip()[:2000],
        None if error.expected is None else str(error.expected)[:2000],
        error.fix,
    )
