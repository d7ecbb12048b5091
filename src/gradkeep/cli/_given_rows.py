"""What commands about rows are given: ids in files, and recipes by name."""

from __future__ import annotations

import contextlib
import os
import re
from typing import TYPE_CHECKING, Any

from gradkeep._arguments import shown
from gradkeep.cli._edges import input_text
from gradkeep.cli._imports import imported, script_names
from gradkeep.errors import EvaluationError

if TYPE_CHECKING:
    from gradkeep.evaluate import Recipe
    from gradkeep.store import Store

_NUMBER = re.compile(r"-?\d+")


def ids_in(path: str) -> Any:
    """The ids `[K]` in a text file, one to a line; more on a line is passed over."""
    return numbers_in(path, each=1)[:, 0]


def numbers_in(path: str, *, each: int) -> Any:
    """Whole numbers from a text file, so many to a line: split by commas, tabs or spaces."""
    import numpy as np

    rows = []
    for number, line in enumerate(input_text(path, error=EvaluationError).splitlines(), 1):
        parts = re.split(r"[\s,;]+", line.strip())
        if parts == [""] or (number == 1 and not _NUMBER.fullmatch(parts[0])):
            continue  # an empty line, or the names of columns
        if len(parts) < each or not _are_numbers(parts[:each]):
            raise EvaluationError(
                f"line {number} does not hold {each} whole number{'s' * (each > 1)}",
                path=path,
                found=shown(line),
            )
        rows.append([int(part) for part in parts[:each]])
    if not rows:
        raise EvaluationError("the file holds no ids", path=path)
    return np.array(rows, np.int64)


def _are_numbers(parts: list[str]) -> bool:
    """Whether all of these are whole numbers that fit into 64 bits."""
    return not [p for p in parts if not _NUMBER.fullmatch(p) or abs(int(p)) >= 2**62]


def recipe_named(source: str | None, store: Store | None) -> Recipe:
    """Import the recipe that the user names; one that only the store names is shown, never imported."""
    import dataclasses

    import gradkeep as gk

    if source is None:
        known = None
        if store is not None:
            with contextlib.suppress(EvaluationError):  # no ground truth, or several
                known = gk.evaluate.load_truth(store).recipe
        raise EvaluationError(
            "how models are trained is not known",
            found=None if known is None else f"the store names {shown(known)}, which is not run",
            expected="--recipe module:name or file.py:name, a gk.evaluate.Recipe",
            fix="pass --recipe with your own code, or with code that you have read",
        )
    place, _, name = source.rpartition(":")
    if place.endswith(".py"):
        found = script_names(place, error=EvaluationError).get(name)
    else:
        found = imported(source, os.getcwd(), error=EvaluationError)
    if callable(found) and not isinstance(found, gk.evaluate.Recipe):
        found = found()
    if not isinstance(found, gk.evaluate.Recipe):
        raise EvaluationError(
            f"{shown(source)} is no recipe",
            found=type(found).__name__,
            expected="a gk.evaluate.Recipe, or a function that returns one",
        )
    return dataclasses.replace(found, source=source)
