"""What the user names as `module:name`, found also in files of a folder."""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

from gradkeep._arguments import shown
from gradkeep.cli._door import given_code

if TYPE_CHECKING:
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
