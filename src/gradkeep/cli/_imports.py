"""What the user names as `module:name` or has in a script, found also in files of a folder."""

from __future__ import annotations

import importlib
import runpy
import sys
from typing import TYPE_CHECKING, Any

from gradkeep._arguments import shown
from gradkeep.cli._door import given_code
from gradkeep.cli._edges import input_file

if TYPE_CHECKING:
    import os

    from gradkeep.errors import GradkeepError


def imported(source: str, folder: str, *, error: type[GradkeepError]) -> Any:
    """The object that `module:name` names; what the module itself raises is the user's to see."""
    module, _, name = source.partition(":")
    if not name or not all(part.isidentifier() for part in module.split(".")):
        raise error(f"{shown(source)} names nothing to import", expected="module:name")
    sys.path.insert(0, folder)
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as problem:
        if given_code(problem):
            raise
        raise error(f"{shown(source)} cannot be imported", found=str(problem)) from problem
    finally:
        sys.path.remove(folder)


def script_names(script: str | os.PathLike[str], *, error: type[GradkeepError]) -> dict[str, Any]:
    """All names that a Python file defines; it is run, but not as `__main__`."""
    path = input_file(script, error=error)
    folder = str(path.resolve().parent)
    sys.path.insert(0, folder)
    try:
        compile(path.read_bytes(), str(path), "exec")
        return runpy.run_path(str(path), run_name="__gradkeep__")
    except (SyntaxError, ValueError) as problem:
        if given_code(problem):
            raise
        raise error("this is no Python script", path=path, found=str(problem)) from problem
    except SystemExit as problem:
        raise script_ended(path, problem, error) from problem
    finally:
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
