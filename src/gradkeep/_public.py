"""Public names that are loaded when they are first used, and old names that still work."""

from __future__ import annotations

import functools
import importlib
import warnings
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

P = ParamSpec("P")
T = TypeVar("T")


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


def renamed_arguments(**renamed: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """A decorator: keyword arguments of an earlier version are taken by their new names, and warn.

    >>> @renamed_arguments(plan="compute")
    ... def dot(*, compute=None):
    ...     return compute
    >>> with warnings.catch_warnings(record=True) as told:
    ...     warnings.simplefilter("always")
    ...     found = dot(plan="half")
    >>> found, str(told[0].message)[:29]
    ('half', 'dot(plan=) is now compute=; t')
    """

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> T:
            for old, new in renamed.items():
                if old in kwargs:
                    if new in kwargs:
                        raise TypeError(
                            f"{function.__name__}() got {new}= and {old}=, which is its old name"
                        )
                    warnings.warn(
                        f"{function.__name__}({old}=) is now {new}=; the old name goes away in the "
                        f"next version",
                        DeprecationWarning,
                        stacklevel=2,
                    )
                    kwargs[new] = kwargs.pop(old)
            return function(*args, **kwargs)

        return call

    return decorate


def renamed_attribute(old: str, new: str) -> Any:
    """A property for a class: the attribute of an earlier version by its new name, with a warning."""

    def get(self: Any) -> Any:
        warnings.warn(
            f"{type(self).__name__}.{old} is now .{new}; the old name goes away in the next version",
            DeprecationWarning,
            stacklevel=2,
        )
        return getattr(self, new)

    return property(get, doc=f"Now `{new}`.")
