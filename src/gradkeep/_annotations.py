"""Arguments held against the annotations of the functions that take them.

`@checked(QueryError)` on a public function refuses what its signature does not allow, before anything
else is done: text for a number, NaN, a word that is not among the known ones, an object of another
class. Ranges are the function's own business.

Annotations are read when a function is first called. What they name is looked up in the function's
module and in those of gradkeep that are loaded, for most names are imported for type checkers only;
what is found nowhere is taken for anything.
"""

from __future__ import annotations

import builtins
import collections.abc
import functools
import inspect
import math
import numbers
import operator
import os
import sys
import types
import typing
from typing import TYPE_CHECKING, Any, ParamSpec, SupportsIndex, TypeVar

from gradkeep import _arguments

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from gradkeep.errors import GradkeepError

P = ParamSpec("P")
T = TypeVar("T")

_BUDGETS = ("memory_budget", "budget")
"""These have a parser and an error of their own: `_budgets.py`."""
_FEW = 1000
"""Of longer sequences only so many are looked at: what reads them looks at the rest."""


def checked(error: type[GradkeepError], **fixes: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """A decorator: arguments that the annotations do not allow are refused with `error`.

    `fixes` says by a parameter's name what to do when it is refused.

    >>> from gradkeep.errors import QueryError
    >>> @checked(QueryError)
    ... def top(k: int, *, share: float = 0.5):
    ...     return k
    >>> top(3)
    3
    >>> top("3")
    Traceback (most recent call last):
    gradkeep.errors.QueryError: k cannot be '3'
      found:    str
      expected: a whole number
    """

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        signature = inspect.signature(function)
        named = {
            name: parameter.annotation
            for name, parameter in signature.parameters.items()
            if parameter.annotation is not inspect.Parameter.empty
            and name not in _BUDGETS
            and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        }
        places = list(signature.parameters)
        defaults = {name: one.default for name, one in signature.parameters.items()}
        plain = inspect.unwrap(function)

        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> T:
            given = {**dict(zip(places, args, strict=False)), **kwargs}
            for name, annotation in named.items():
                # What stands in the signature itself may be given, such as a limit of infinity.
                if name in given and not _is_default(given[name], defaults[name]):
                    home = plain.__globals__
                    _check(name, given[name], annotation, home, error, fixes.get(name))
            return function(*args, **kwargs)

        return call

    return decorate


def _is_default(value: object, default: object) -> bool:
    return value is default or (
        type(value) is float and type(default) is float and value == default
    )


def check_fields(record: Any, error: type[GradkeepError]) -> None:
    """The same for the fields of a dataclass, to be called by its `__post_init__`."""
    home = vars(sys.modules[type(record).__module__])
    for field in record.__dataclass_fields__.values():
        if field.init:
            _check(field.name, getattr(record, field.name), field.type, home, error)


def _check(
    name: str,
    value: object,
    annotation: Any,
    home: dict[str, Any],
    error: type[GradkeepError],
    fix: str | None = None,
) -> None:
    hint = _resolved(annotation, home) if isinstance(annotation, str) else annotation
    if not _fits(value, hint):
        expected = " or ".join(_words(hint))
        raise _arguments.refused(name, value, error=error, expected=expected, fix=fix)


class _Names(dict[str, Any]):
    """Every name that an annotation may use."""

    complete: bool = True

    def __missing__(self, name: str) -> Any:
        if name == "os":
            return os
        for place in (builtins, typing, collections.abc):
            if hasattr(place, name):
                return getattr(place, name)
        found = {
            id(held): held
            for module_name, module in list(sys.modules.items())
            if module_name.startswith("gradkeep.")
            and (held := vars(module).get(name)) is not None
            and held is not Any  # one that leaves it open says nothing of the others
        }
        if not found:
            self.complete = False  # its module may be loaded later
            return Any
        try:
            # Two rooms may mean two things by one name.
            return functools.reduce(operator.or_, found.values())
        except TypeError:  # a name that is no type somewhere
            return Any


_known: dict[tuple[str, int], Any] = {}
"""Annotations that were understood in full, by their text and the module that they stand in."""


def _resolved(annotation: str, home: dict[str, Any]) -> Any:
    key = (annotation, id(home))
    if key in _known:
        return _known[key]
    names = _Names(home)
    try:
        found = eval(annotation, {"__builtins__": {}}, names)
    except Exception:  # a name inside of a package that is not loaded
        return Any
    if names.complete:  # else its module may be loaded later
        _known[key] = found
    return found


def _fits(value: object, hint: Any) -> bool:
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if isinstance(hint, str):
        return True
    if hint is Any or hint is object or isinstance(hint, TypeVar):
        return True
    if hint is None or hint is type(None):
        return value is None
    if origin in (typing.Union, types.UnionType):
        return any(_fits(value, one) for one in inner)
    if origin is typing.Literal:
        return any(type(value) is type(word) and value == word for word in inner)
    if origin is None:
        return _is_plain(value, hint)
    return _is_made_of(value, origin, inner)


def _is_plain(value: object, hint: Any) -> bool:
    is_bool = type(value).__name__ in ("bool", "bool_")
    if hint is bool:
        return is_bool
    if hint is int and type(value) is int:  # to ask a protocol takes longer than most functions
        return _is_whole(value)
    if hint is int:
        return not is_bool and isinstance(value, SupportsIndex) and _is_whole(value)
    if hint is float:
        return not is_bool and isinstance(value, numbers.Real) and _is_finite(value)
    if hint is str:
        return isinstance(value, str) and _arguments.writable(value)
    return _is_instance(value, hint)


def _is_instance(value: object, kind: Any) -> bool:
    # A protocol is told by what it has, which only shows when it is used.
    if not isinstance(kind, type) or getattr(kind, "_is_protocol", False):
        return True
    return isinstance(value, kind)


def _names_a_file(value: object) -> bool:
    """Whether text is a path that the system has a name for: also one that no encoding has."""
    try:
        return isinstance(value, str) and "\0" not in value and bool(os.fsencode(value))
    except UnicodeError:
        return False


def _is_whole(value: SupportsIndex) -> bool:
    try:
        return -_arguments.LARGEST <= value.__index__() <= _arguments.LARGEST
    except Exception:  # an array or tensor of several
        return False


def _is_finite(value: Any) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an int beyond floats
        return False


def _is_made_of(value: Any, origin: Any, inner: tuple[Any, ...]) -> bool:
    if origin is collections.abc.Callable:
        return callable(value)
    if origin is os.PathLike:
        return hasattr(value, "__fspath__") or _names_a_file(value)
    if origin is type:
        return isinstance(value, type)
    if origin in (list, tuple, set, frozenset, dict, collections.abc.Mapping):
        several = origin is tuple and len(inner) == 2 and inner[1] is ...
        if not several or not isinstance(value, tuple):
            return isinstance(value, origin)
        if inner[0] is str:  # texts to be read, which may hold anything
            return all(isinstance(item, str) for item in value[:_FEW])
        return all(_fits(item, inner[0]) for item in value[:_FEW])
    if getattr(origin, "__name__", "") == "ndarray":
        # Lists and tensors are taken for arrays everywhere; what is in them is seen there.
        return isinstance(value, list | tuple) or hasattr(value, "__array__")
    if origin is collections.abc.Iterable:
        return hasattr(value, "__iter__") and not isinstance(value, str | bytes)
    if origin is collections.abc.Sequence:
        # Arrays and tensors are no Sequence by name; those without dimensions are none at all.
        if isinstance(value, str | bytes | dict | set) or not hasattr(value, "__getitem__"):
            return False
        try:
            few = [value[place] for place in range(min(len(value), _FEW))]
        except Exception:
            return False
        if inner[0] is str:  # texts to be read, which may hold anything
            return all(isinstance(item, str) for item in few)
        return all(_fits(item, inner[0]) for item in few)
    return _is_instance(value, origin)


_SAID = {int: "a whole number", float: "a finite number", str: "some text", bool: "True or False"}

_SEVERAL = {int: "whole numbers", float: "finite numbers", str: "texts"}


def _words(hint: Any) -> Iterator[str]:
    """What fits, as a person says it."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        for one in inner:
            yield from _words(one)
    elif origin is typing.Literal:
        yield from (repr(word) for word in inner)
    elif hint in _SAID:
        yield _SAID[hint]
    elif origin is collections.abc.Sequence:
        yield f"a list of {_SEVERAL.get(inner[0]) or ' or '.join(_words(inner[0]))}"
    elif origin is collections.abc.Callable:
        yield "a function"
    elif origin is os.PathLike:
        yield "a path"
    elif hint is None or hint is type(None):
        yield "None"
    else:
        yield getattr(origin or hint, "__name__", str(hint))
