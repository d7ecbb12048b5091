"""Paths and numbers on the command line, validated before the work begins."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import os
import re
import runpy
import stat
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gradkeep._arguments import short_repr
from gradkeep._environment import enclosing_store
from gradkeep.cli._errors import is_user_code
from gradkeep.errors import EvaluationError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gradkeep.errors import GradkeepError
    from gradkeep.evaluate import Recipe
    from gradkeep.store import Store

_MAX_TEXT_BYTES = 16 << 20


def input_file(path: str | os.PathLike[str], *, error: type[GradkeepError]) -> Path:
    """Return the path of a readable regular file."""
    status = _stat(path, error=error)
    if status is None:
        raise error("cannot read the file: there is no such file", path=_short(path))
    if not stat.S_ISREG(status.st_mode):
        kind = "a folder" if stat.S_ISDIR(status.st_mode) else "a pipe or a device"
        raise error(f"cannot read the file: this is {kind}", path=_short(path))
    if not os.access(path, os.R_OK):
        raise error("cannot read the file: permission denied", path=_short(path))
    return Path(path)


def input_folder(path: str | os.PathLike[str], *, error: type[GradkeepError]) -> Path:
    """Return the path of a readable folder."""
    status = _stat(path, error=error)
    if status is None or not stat.S_ISDIR(status.st_mode):
        raise error("there is no such folder", path=_short(path))
    if not os.access(path, os.R_OK | os.X_OK):
        raise error("cannot read the folder: permission denied", path=_short(path))
    return Path(path)


def output_file(path: str | os.PathLike[str], *, error: type[GradkeepError]) -> Path:
    """Return a path that a file can be written to."""
    status, parent = _stat(path, error=error), Path(path).parent
    if (status is not None and not stat.S_ISREG(status.st_mode)) or (
        status is None and os.path.islink(path)
    ):
        raise error("cannot write there: this is not a regular file", path=_short(path))
    parent_status = _stat(parent, error=error)
    if parent_status is None or not stat.S_ISDIR(parent_status.st_mode):
        raise error("cannot write there: there is no such folder", path=_short(parent))
    if not os.access(parent if status is None else path, os.W_OK):
        raise error("cannot write there: permission denied", path=_short(path))
    return Path(path)


def output_folder(path: str | os.PathLike[str], *, error: type[GradkeepError]) -> Path:
    """Return the path of a folder that exists or can be created."""
    status = _stat(path, error=error)
    existing = Path(os.path.abspath(path))
    while status is None and not existing.is_symlink() and existing != existing.parent:
        existing = existing.parent
        status = _stat(existing, error=error)
    if status is None or not stat.S_ISDIR(status.st_mode):
        raise error("cannot write there: this is not a folder", path=_short(existing))
    if not os.access(existing, os.W_OK | os.X_OK):
        raise error("cannot write there: permission denied", path=_short(existing))
    return Path(path)


def input_text(path: str | os.PathLike[str], *, error: type[GradkeepError]) -> str:
    """Read a UTF-8 text file of at most 16 MiB."""
    with open(input_file(path, error=error), "rb") as file:
        content = file.read(_MAX_TEXT_BYTES + 1)
    if len(content) > _MAX_TEXT_BYTES:
        limit = f"at most {_MAX_TEXT_BYTES >> 20} MiB"
        raise error("the file is too large", path=_short(path), expected=limit)
    try:
        text = content.decode()
    except UnicodeDecodeError as problem:
        raise error(f"the file is not UTF-8 text: {problem}", path=_short(path)) from None
    if "\0" in text:
        raise error("the file is not UTF-8 text: it contains NUL", path=_short(path))
    return text


def _stat(path: str | os.PathLike[str], *, error: type[GradkeepError]) -> os.stat_result | None:
    text = os.fspath(path)
    if not text or "\0" in text:
        raise error("invalid path", found=short_repr(text))
    try:
        return os.stat(text)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as problem:  # a name too long, links in a circle, no permission
        reason = problem.strerror or type(problem).__name__
        raise error(f"cannot access the path: {reason}", path=_short(path)) from None


def _short(path: str | os.PathLike[str]) -> str:
    text = os.fspath(path)
    return text if len(text) <= 300 else f"{text[:150]}...{text[-100:]}"


def import_object(source: str, folder: str, *, error: type[GradkeepError]) -> Any:
    """Import `module:name`, also from `folder` unless that is in a store.

    Exceptions of the module itself are not caught.
    """
    module, _, name = source.partition(":")
    if not name or not all(part.isidentifier() for part in module.split(".")):
        raise error(f"cannot import {short_repr(source)}", expected="module:name")
    *packages, last = module.split(".")
    for file in (Path(folder, *packages, f"{last}.py"), Path(folder, *packages, last)):
        if file.exists():
            refuse_stored_code(file, error=error)
    with importing_from(folder):
        try:
            return getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError) as problem:
            if is_user_code(problem):
                raise
            raise error(f"cannot import {short_repr(source)}", found=str(problem)) from problem


def load_object(source: str, kind: type, *, error: type[GradkeepError]) -> Any:
    """Load `module:name` or `file.py:name`, and call it if it is a function."""
    place, _, name = source.rpartition(":")
    if place.endswith(".py"):
        value = run_script(place, error=error).get(name)
    else:
        value = import_object(source, os.getcwd(), error=error)
    return value() if callable(value) and not isinstance(value, kind) else value


def run_script(script: str | os.PathLike[str], *, error: type[GradkeepError]) -> dict[str, Any]:
    """Run a Python file, not as `__main__`, and return the names that it defines."""
    path = input_file(script, error=error)
    refuse_stored_code(path, error=error)
    with importing_from(str(path.resolve().parent)):
        try:
            compile(path.read_bytes(), str(path), "exec")
            return runpy.run_path(str(path), run_name="__gradkeep__")
        except (SyntaxError, ValueError) as problem:
            if is_user_code(problem):
                raise
            raise error("not a Python script", path=path, found=str(problem)) from problem
        except SystemExit as problem:
            raise script_exit_error(path, problem, error) from problem


def refuse_stored_code(path: str | os.PathLike[str], *, error: type[GradkeepError]) -> None:
    """Raise if a file of code is in the folder of a store."""
    store = enclosing_store(path)
    if store is not None:
        raise error(
            f"code in the folder of a store is never run; this file is in the store {store}",
            path=path,
            fix="read it, and if you trust it move it out of the store",
        )


@contextlib.contextmanager
def importing_from(folder: str) -> Iterator[None]:
    """Allow imports from a folder, unless it is in a store."""
    if enclosing_store(folder) is not None:
        yield
        return
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):  # the imported code may have removed it
            sys.path.remove(folder)


def script_exit_error(
    script: str | os.PathLike[str], problem: SystemExit, error: type[GradkeepError]
) -> GradkeepError:
    """Build the error about a script that calls `sys.exit`."""
    code = "" if problem.code is None else short_repr(problem.code)
    return error(
        f"the script called sys.exit({code})",
        path=script,
        fix='put code that ends the process under `if __name__ == "__main__":`',
    )


def read_ids(path: str) -> Any:
    """Read ids `[K]` from a text file, the first number of each line."""
    return read_numbers(path, columns=1)[:, 0]


def read_numbers(path: str, *, columns: int) -> Any:
    """Read the first whole numbers of each line of a text file, `[K, columns]`.

    Numbers are separated by commas, semicolons or spaces; a first line of column names is skipped.
    """
    import numpy as np

    rows = []
    for number, line in enumerate(input_text(path, error=EvaluationError).splitlines(), 1):
        words = re.split(r"[\s,;]+", line.strip())
        if words == [""] or (number == 1 and not re.fullmatch(r"-?\d+", words[0])):
            continue
        values = [int(word) for word in words[:columns] if re.fullmatch(r"-?\d{1,18}", word)]
        if len(values) < columns:
            raise EvaluationError(
                f"line {number} must start with {columns} whole number{'s' * (columns > 1)}",
                code="cli.not_numbers",
                path=path,
                found=short_repr(line),
            )
        rows.append(values)
    if not rows:
        raise EvaluationError("the file has no ids", code="cli.no_ids", path=path)
    return np.array(rows, np.int64)


def load_recipe(source: str | None, store: Store | None) -> Recipe:
    """Load the recipe of `--recipe`; one that only the store names is never imported."""
    import gradkeep as gk

    if source is None:
        known = None
        if store is not None:
            with contextlib.suppress(EvaluationError):  # no ground truth, or several
                known = gk.evaluate.load_truth(store).recipe
        raise EvaluationError(
            "training needs --recipe module:name or file.py:name, a gk.evaluate.Recipe",
            code="cli.missing_option",
            found=None
            if known is None
            else f"the store names {short_repr(known)}, which is not run",
            fix="Pass --recipe with your own code, or with code that you have read.",
        )
    recipe = load_object(source, gk.evaluate.Recipe, error=EvaluationError)
    if not isinstance(recipe, gk.evaluate.Recipe):
        raise EvaluationError(
            f"{short_repr(source)} is not a recipe",
            code="cli.not_a_recipe",
            found=type(recipe).__name__,
            expected="a gk.evaluate.Recipe, or a function that returns one",
        )
    return dataclasses.replace(recipe, source=source)
