"""Code that the user names as `module:name` or has in a script, and ids in files."""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import runpy
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gradkeep._arguments import shown
from gradkeep._surroundings import enclosing_store
from gradkeep.cli._errors import given_code
from gradkeep.cli._files import input_file, input_text
from gradkeep.errors import EvaluationError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gradkeep.errors import GradkeepError
    from gradkeep.evaluate import Recipe
    from gradkeep.store import Store


def imported(source: str, folder: str, *, error: type[GradkeepError]) -> Any:
    """Import the object that `module:name` names, also from `folder` unless that is in a store.

    What the module itself raises is the user's to see.
    """
    module, _, name = source.partition(":")
    if not name or not all(part.isidentifier() for part in module.split(".")):
        raise error(f"{shown(source)} names nothing to import", expected="module:name")
    *packages, last = module.split(".")
    for file in (Path(folder, *packages, f"{last}.py"), Path(folder, *packages, last)):
        if file.exists():
            refuse_stored_code(file, error=error)
    with importing_from(folder):
        try:
            return getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError) as problem:
            if given_code(problem):
                raise
            raise error(f"{shown(source)} cannot be imported", found=str(problem)) from problem


def script_names(script: str | os.PathLike[str], *, error: type[GradkeepError]) -> dict[str, Any]:
    """Run a Python file, but not as `__main__`, and return all names that it defines."""
    path = input_file(script, error=error)
    refuse_stored_code(path, error=error)
    with importing_from(str(path.resolve().parent)):
        try:
            compile(path.read_bytes(), str(path), "exec")
            return runpy.run_path(str(path), run_name="__gradkeep__")
        except (SyntaxError, ValueError) as problem:
            if given_code(problem):
                raise
            raise error("this is no Python script", path=path, found=str(problem)) from problem
        except SystemExit as problem:
            raise script_ended(path, problem, error) from problem


def refuse_stored_code(path: str | os.PathLike[str], *, error: type[GradkeepError]) -> None:
    """Raise if a file of code lies in the folder of a store."""
    store = enclosing_store(path)
    if store is not None:
        raise error(
            "code in the folder of a store is never run",
            path=path,
            found=f"a store at {store}",
            fix="read it, and if you trust it move it out of the store",
        )


@contextlib.contextmanager
def importing_from(folder: str) -> Iterator[None]:
    """Let modules of a folder be imported, unless the folder is in a store."""
    if enclosing_store(folder) is not None:
        yield
        return
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):  # the code that was run may have removed it
            sys.path.remove(folder)


def script_ended(
    script: str | os.PathLike[str], problem: SystemExit, error: type[GradkeepError]
) -> GradkeepError:
    """What to say of a script that ends the process it is run in."""
    return error(
        "the script ended itself",
        path=script,
        found=f"sys.exit({'' if problem.code is None else shown(problem.code)})",
        expected="a function that returns",
        fix='put what ends it under `if __name__ == "__main__":`',
    )


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
