"""A training step from a script."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gradkeep.errors import RematError

if TYPE_CHECKING:
    import os
    from collections.abc import Callable


def step_of(script: str | os.PathLike[str], function: str = "step") -> Callable[[], Any]:
    """The function of that name in a Python file; the file is run, but not as `__main__`."""
    path = Path(script)
    if not path.is_file():
        raise RematError("there is no such script", path=path)
    folder = str(path.resolve().parent)
    sys.path.insert(0, folder)
    try:
        names = runpy.run_path(str(path), run_name="__gradkeep__")
    finally:
        sys.path.remove(folder)
    found = names.get(function)
    if not callable(found):
        defined = sorted(
            name for name, value in names.items() if callable(value) and name[0] != "_"
        )
        raise RematError(
            f"the script has no function {function}()",
            path=path,
            found=", ".join(defined) or "no functions",
            expected="a function without arguments that does one training step",
            fix="name another one with --function",
        )
    step: Callable[[], Any] = found
    return step
