"""What the user names as `module:name` or has in a script, found also in files of a folder."""

from __future__ import annotations

import contextlib
import importlib
import runpy
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gradkeep._arguments import shown
from gradkeep._surroundings import enclosing_store
from gradkeep.cli._door import given_code
from gradkeep.cli._edges import input_file

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator

    from gradkeep.errors import GradkeepError


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
