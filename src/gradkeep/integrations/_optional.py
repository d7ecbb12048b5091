"""Classes of libraries that may not be installed."""

from __future__ import annotations

import importlib

from gradkeep.errors import MissingExtra


def base(module: str, name: str) -> type:
    """The class to derive from, or `object` where its library is missing."""
    try:
        found: type = getattr(importlib.import_module(module), name)
    except ImportError:
        return object
    return found


def need(found: type, extra: str) -> None:
    """Raise if the class to derive from is missing."""
    if found is object:
        raise MissingExtra(
            f"this callback is for {extra}, which is not installed",
            fix=f'pip install "gradkeep[{extra}]"',
        )
