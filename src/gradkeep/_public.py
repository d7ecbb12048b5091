"""Public names that are loaded when they are first used, and old names that still work."""

from __future__ import annotations

import importlib
import warnings
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


def lazy_names(
    module: str,
    homes: Mapping[str, str] | None = None,
    *,
    renamed: Mapping[str, str] | None = None,
) -> Callable[[str], Any]:
    """The `__getattr__` of a package (PEP 562): names by the module that defines them.

    `homes` maps a name to its module; a name mapped to itself below `module` is a module.
    `renamed` maps a name of an earlier version to the whole path of the one that replaced it; using
    it gives that one, with a DeprecationWarning.

    >>> find = lazy_names("gradkeep", {"Store": "gradkeep.store"})
    >>> find("Store").__name__
    'Store'
    """
    names, old = homes or {}, renamed or {}

    def find(name: str) -> Any:
        if name in names:
            if names[name] == f"{module}.{name}":
                return importlib.import_module(names[name])
            return getattr(importlib.import_module(names[name]), name)
        if name in old:
            home, _, new = old[name].rpartition(".")
            warnings.warn(
                f"{module}.{name} is now {old[name]}; the old name goes away in the next version",
                DeprecationWarning,
                stacklevel=2,
            )
            return getattr(importlib.import_module(home), new)
        raise AttributeError(f"module {module!r} has no attribute {name!r}")

    return find
