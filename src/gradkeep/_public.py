"""Lazy imports of public names."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


def lazy_names(package: str, modules: Mapping[str, str]) -> Callable[[str], Any]:
    """Build the `__getattr__` of a package (PEP 562) from a map of names to modules.

    A name mapped to `package.name` is that module itself.

    >>> getattr_ = lazy_names("gradkeep", {"Store": "gradkeep.store"})
    >>> getattr_("Store").__name__
    'Store'
    """

    def getattr_(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module = importlib.import_module(modules[name])
        return module if modules[name] == f"{package}.{name}" else getattr(module, name)

    return getattr_
