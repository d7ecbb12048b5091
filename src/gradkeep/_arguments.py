"""Validation of the arguments of public functions by annotation, type and range."""

from __future__ import annotations

import builtins
import collections.abc
import difflib
import functools
import inspect
import math
import numbers
import operator
import os
import sys
import types
import typing
from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING, Any, ParamSpec, SupportsIndex, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import numpy as np

    from gradkeep.errors import GradkeepError


LARGEST = 2**63 - 1
"""Largest count: the range of int64 arrays and files."""
P = ParamSpec("P")
T = TypeVar("T")

_MAX_REPR = 80


def count(
    name: str,
    value: object,
    *,
    error: type[GradkeepError],
    least: int = 0,
    most: int = LARGEST,
) -> int:
    """Validate a whole number from `least` to `most`; numpy and tensor integers pass, floats and bools do not.

    >>> from gradkeep.errors import QueryError
    >>> count("rows", 3, error=QueryError)
    3
    >>> count("rows", 2.5, error=QueryError)
    Traceback (most recent call last):
    gradkeep.errors.QueryError: rows must be a whole number of at least 0, got 2.5
    """
    expected = _range("a whole number", least, None if most == LARGEST else most)
    if type(value).__name__ in ("bool", "bool_") or not isinstance(value, SupportsIndex):
        raise argument_error(name, value, error=error, expected=expected)
    try:
        result = operator.index(value)
    except Exception:  # an array or tensor that is not one whole number
        raise argument_error(name, value, error=error, expected=expected) from None
    if not least <= result <= most:
        raise argument_error(name, value, error=error, expected=expected)
    return result


def number(
    name: str,
    value: object,
    *,
    error: type[GradkeepError],
    least: float | None = None,
    above: float | None = None,
    most: float | None = None,
) -> float:
    """Validate a finite number in a range: from `least`, or above `above`, to `most`.

    >>> from gradkeep.errors import QueryError
    >>> number("damping", 3, error=QueryError, above=0)
    3.0
    >>> number("damping", float("nan"), error=QueryError, above=0)
    Traceback (most recent call last):
    gradkeep.errors.QueryError: damping must be a finite number above 0, got nan
    """
    expected = _range("a finite number", least, most, above=above)
    invalid = argument_error(name, value, error=error, expected=expected)
    if isinstance(value, str | bytes) or type(value).__name__ in ("bool", "bool_"):
        raise invalid
    try:
        result = float(value)  # type: ignore[arg-type]
    except Exception:  # no number, an array of several, an int beyond all floats
        raise invalid from None
    if (
        not math.isfinite(result)
        or (least is not None and result < least)
        or (above is not None and result <= above)
        or (most is not None and result > most)
    ):
        raise invalid
    return result


def flag(name: str, value: object, *, error: type[GradkeepError]) -> bool:
    """Validate a bool; truthy values such as `"no"` are argument_error."""
    if type(value).__name__ not in ("bool", "bool_"):
        raise argument_error(name, value, error=error, expected="True or False")
    return bool(value)


def text(
    name: str, value: object, *, error: type[GradkeepError], expected: str = "some text"
) -> str:
    """Validate a non-empty string without NUL or lone surrogates.

    >>> from gradkeep.errors import QueryError
    >>> text("split", "train", error=QueryError)
    'train'
    """
    if not isinstance(value, str) or not value or not writable(value):
        raise argument_error(name, value, error=error, expected=expected)
    return value


def texts(name: str, value: object, *, error: type[GradkeepError]) -> tuple[str, ...]:
    """Validate one string or several and return a tuple.

    >>> from gradkeep.errors import QueryError
    >>> texts("run", "main", error=QueryError), texts("run", ["a", "b"], error=QueryError)
    (('main',), ('a', 'b'))
    """
    items = [value] if isinstance(value, str) else value
    if not isinstance(items, Sequence | AbstractSet) or isinstance(items, bytes):
        raise argument_error(name, value, error=error, expected="some text, or a list of such")
    return tuple(text(name, item, error=error) for item in items)


def one_of(name: str, value: object, words: Iterable[T], *, error: type[GradkeepError]) -> T:
    """Validate a choice; the message lists the choices and suggests the nearest.

    >>> from gradkeep.errors import QueryError
    >>> one_of("uncovered", "dens", ["dense", "error"], error=QueryError)
    Traceback (most recent call last):
    gradkeep.errors.QueryError: uncovered must be 'dense' or 'error', got 'dens'
    Did you mean 'dense'?
    """
    known = list(words)
    for word in known:
        if type(value) is type(word) and value == word:
            return word
    choices = [repr(word) for word in known]
    listed = " or ".join([", ".join(choices[:-1]), choices[-1]] if len(choices) > 1 else choices)
    spelt = [word for word in known if isinstance(word, str)]
    near = (
        difflib.get_close_matches(value[:_MAX_REPR], spelt, n=1) if isinstance(value, str) else []
    )
    fix = f"Did you mean {near[0]!r}?" if near else None
    raise argument_error(name, value, error=error, expected=listed, fix=fix)


def instance(
    name: str,
    value: object,
    kind: type[T] | tuple[type[T], ...],
    *,
    error: type[GradkeepError],
    expected: str | None = None,
) -> T:
    """Validate an instance of a class, or of one of several."""
    kinds: tuple[type[Any], ...] = kind if isinstance(kind, tuple) else (kind,)
    if not isinstance(value, kinds):
        names = expected or " or ".join(one.__name__ for one in kinds)
        raise argument_error(name, value, error=error, expected=names)
    result: T = value
    return result


def function(name: str, value: T, *, error: type[GradkeepError], expected: str = "a function") -> T:
    """Validate a callable."""
    if not callable(value):
        raise argument_error(name, value, error=error, expected=expected)
    return value


def file_path(name: str, value: object, *, error: type[GradkeepError]) -> str:
    """Validate a path and return it as a string; the file need not exist."""
    expected = "a path"
    try:
        result = os.fspath(value)  # type: ignore[call-overload]
    except TypeError:
        raise argument_error(name, value, error=error, expected=expected) from None
    if not isinstance(result, str) or not result or "\0" in result:
        raise argument_error(name, value, error=error, expected=expected)
    try:
        os.fsencode(result)
    except UnicodeError:
        raise argument_error(name, value, error=error, expected=expected) from None
    return result


def whole_numbers(
    name: str,
    values: object,
    *,
    error: type[GradkeepError],
    least: int = 0,
    most: int = LARGEST,
) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Validate a list of whole numbers and return int64 `[n]`; floats are argument_error, not truncated.

    >>> from gradkeep.errors import QueryError
    >>> whole_numbers("ids", [3, 1], error=QueryError).tolist()
    [3, 1]
    >>> whole_numbers("ids", [3.7], error=QueryError)
    Traceback (most recent call last):
    gradkeep.errors.QueryError: ids must be a list of whole numbers of at least 0, got [3.7]
    """
    import numpy as np

    expected = _range("a list of whole numbers", least, None if most == LARGEST else most)
    invalid = argument_error(name, values, error=error, expected=expected)
    if isinstance(values, str | bytes | dict | set | frozenset):
        raise invalid
    if isinstance(values, list | tuple) and any(isinstance(item, bool) for item in values):
        raise invalid  # numpy converts True to 1 beside other numbers
    try:
        result = np.asarray(values)
    except Exception:
        raise invalid from None
    if result.ndim != 1 or (result.size and result.dtype.kind not in "iu"):
        raise invalid
    if result.size and not (least <= int(result.min()) and int(result.max()) <= most):
        raise invalid
    return result.astype(np.int64)


def array(
    name: str,
    values: Any,
    *,
    error: type[GradkeepError],
    kinds: str = "biuf",
    expected: str = "an array of numbers",
    shape: tuple[int | str, ...] | None = None,
    code: str | None = None,
) -> np.ndarray[Any, Any]:
    """Convert an array, tensor or list to a numeric numpy array; object arrays are argument_error.

    With a `shape`, another one is an error with this `code`; names stand for any length.

    >>> from gradkeep.errors import QueryError
    >>> array("weights", [1, 2], error=QueryError).shape
    (2,)
    >>> array("weights", [1, 2], error=QueryError, shape=(2, "D"))
    Traceback (most recent call last):
    gradkeep.errors.QueryError: weights must have the shape [2, D]: [2]
    """
    import numpy as np

    original = values
    try:
        if hasattr(values, "detach"):  # a tensor, without importing torch
            values = values.detach().cpu()
            # numpy has no bfloat16; float32 holds it exactly.
            values = values.float() if str(values.dtype) == "torch.bfloat16" else values
        result = np.asarray(values.numpy() if hasattr(values, "numpy") else values)
    except Exception:
        result = None
    # Built only on failure: representing an array takes longer than checking it.
    if result is None or result.dtype.kind not in kinds:
        raise argument_error(name, original, error=error, expected=expected)
    if shape is not None and (
        result.ndim != len(shape)
        or any(isinstance(a, int) and a != b for a, b in zip(shape, result.shape, strict=True))
    ):
        sizes = ", ".join(map(str, shape))
        raise error(f"{name} must have the shape [{sizes}]", code=code, found=list(result.shape))
    return result


def writable(value: str) -> bool:
    """Return True if the text is valid Unicode without NUL.

    >>> writable("train"), writable("a" + chr(0)), writable(chr(0xD800))
    (True, False, False)
    """
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return "\0" not in value


def short_repr(value: object) -> str:
    """Represent a value on one short line, even if its own `repr` fails.

    >>> short_repr("train"), short_repr("a" * 200)[-6:]
    ("'train'", ' (...)')
    """
    try:
        line = repr(value[: 2 * _MAX_REPR] if isinstance(value, str | bytes) else value)
    except Exception:
        line = f"<{type(value).__name__}>"
    line = " ".join(line.encode("utf-8", "backslashreplace").decode().split())
    return line if len(line) <= _MAX_REPR else f"{line[: _MAX_REPR - 6]} (...)"


def argument_error(
    name: str,
    value: object,
    *,
    error: type[GradkeepError],
    expected: str,
    fix: str | None = None,
) -> GradkeepError:
    """Build the error for an argument of a wrong type or value."""
    message = f"{name} must be {expected}, got {short_repr(value)}"
    return error(message, code="argument.invalid", fix=fix)


def optional(check: Callable[..., T], name: str, value: object, **limits: Any) -> T | None:
    """Apply a check unless the value is None.

    >>> from gradkeep.errors import FarmError
    >>> optional(count, "workers", None, error=FarmError) is None
    True
    """
    return None if value is None else check(name, value, **limits)


def _range(what: str, least: float | None, most: float | None, above: float | None = None) -> str:
    if above is not None:
        low = f"above {above:g}"
    else:
        low = "" if least is None else f"of at least {least:g}"
    if most is None:
        return f"{what} {low}".rstrip()
    if not low:
        return f"{what} of at most {most:g}"
    if above is None and least is not None:
        return f"{what} from {least:g} to {most:g}"
    return f"{what} {low} and at most {most:g}"


def file_to_write(
    path: str | os.PathLike[str], *, error: type[GradkeepError]
) -> str | os.PathLike[str]:
    """Validate an output path: a regular file or nothing, never a device, pipe or folder.

    >>> from gradkeep.errors import StoreError
    >>> file_to_write("no/such/file", error=StoreError)
    'no/such/file'
    """
    if os.path.lexists(path) and not os.path.isfile(path):
        raise error(
            "the output path is not a regular file",
            code="argument.not_a_file",
            path=os.fspath(path)[:300],
            found="a folder" if os.path.isdir(path) else "a pipe, a device or a link to nowhere",
            expected="a file, or nothing yet",
        )
    return path


_BUDGETS = ("memory_budget", "budget")
"""Parameters with their own parser in `_budgets.py`."""
_MAX_CHECKED_ITEMS = 1000
"""Items of a sequence that are checked; the reader checks the rest."""


def checked(error: type[GradkeepError], **fixes: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Decorate a function to validate its arguments by their annotations.

    `fixes` maps parameter names to the advice added to the error.

    >>> from gradkeep.errors import QueryError
    >>> @checked(QueryError)
    ... def top(k: int, *, share: float = 0.5):
    ...     return k
    >>> top(3)
    3
    >>> top("3")
    Traceback (most recent call last):
    gradkeep.errors.QueryError: k must be a whole number, got '3'
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
            values = {**dict(zip(places, args, strict=False)), **kwargs}
            for name, annotation in named.items():
                # A default always passes, such as a limit of infinity.
                if name in values and not _is_default(values[name], defaults[name]):
                    home = plain.__globals__
                    _check(name, values[name], annotation, home, error, fixes.get(name))
            return function(*args, **kwargs)

        return call

    return decorate


def _is_default(value: object, default: object) -> bool:
    return value is default or (
        type(value) is float and type(default) is float and value == default
    )


def check_fields(record: Any, error: type[GradkeepError]) -> None:
    """Validate the fields of a dataclass; call it in `__post_init__`."""
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
        raise argument_error(name, value, error=error, expected=expected, fix=fix)


class _Names(dict[str, Any]):
    """Namespace for evaluating annotations: builtins, typing and every loaded gradkeep module."""

    complete: bool = True

    def __missing__(self, name: str) -> Any:
        if name == "os":
            return os
        for place in (builtins, typing, collections.abc):
            if hasattr(place, name):
                return getattr(place, name)
        result = {
            id(held): held
            for module_name, module in list(sys.modules.items())
            if module_name.startswith("gradkeep.")
            and (held := vars(module).get(name)) is not None
            and held is not Any
        }
        if not result:
            self.complete = False  # its module may be loaded later
            return Any
        try:
            # Two modules may use one name for two types.
            return functools.reduce(operator.or_, result.values())
        except TypeError:  # a name that is no type somewhere
            return Any


_resolved_annotations: dict[tuple[str, int], Any] = {}
"""Evaluated annotations by text and module."""


def _resolved(annotation: str, home: dict[str, Any]) -> Any:
    key = (annotation, id(home))
    if key in _resolved_annotations:
        return _resolved_annotations[key]
    names = _Names(home)
    try:
        result = eval(annotation, {"__builtins__": {}}, names)
    except Exception:  # a name inside of a package that is not loaded
        return Any
    if names.complete:  # else its module may be loaded later
        _resolved_annotations[key] = result
    return result


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
    if hint is int and type(value) is int:  # a fast path: protocol checks are slow
        return _is_whole(value)
    if hint is int:
        return not is_bool and isinstance(value, SupportsIndex) and _is_whole(value)
    if hint is float:
        return not is_bool and isinstance(value, numbers.Real) and _is_finite(value)
    if hint is str:
        return isinstance(value, str) and writable(value)
    return _is_instance(value, hint)


def _is_instance(value: object, kind: Any) -> bool:
    # Protocols are structural: using the value shows whether it fits.
    if not isinstance(kind, type) or getattr(kind, "_is_protocol", False):
        return True
    return isinstance(value, kind)


def _names_a_file(value: object) -> bool:
    """Return True if the text can be a file name on this system."""
    try:
        return isinstance(value, str) and "\0" not in value and bool(os.fsencode(value))
    except UnicodeError:
        return False


def _is_whole(value: SupportsIndex) -> bool:
    try:
        return -LARGEST <= value.__index__() <= LARGEST
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
        if inner[0] is str:  # content may hold any character
            return all(isinstance(item, str) for item in value[:_MAX_CHECKED_ITEMS])
        return all(_fits(item, inner[0]) for item in value[:_MAX_CHECKED_ITEMS])
    if getattr(origin, "__name__", "") == "ndarray":
        # Lists and tensors are converted to arrays later, which checks their items.
        return isinstance(value, list | tuple) or hasattr(value, "__array__")
    if origin is collections.abc.Iterable:
        return hasattr(value, "__iter__") and not isinstance(value, str | bytes)
    if origin is collections.abc.Sequence:
        # Arrays and tensors are not registered as Sequence; zero-dimensional ones are argument_error.
        if isinstance(value, str | bytes | dict | set) or not hasattr(value, "__getitem__"):
            return False
        try:
            items = [value[place] for place in range(min(len(value), _MAX_CHECKED_ITEMS))]
        except Exception:
            return False
        if inner[0] is str:  # content may hold any character
            return all(isinstance(item, str) for item in items)
        return all(_fits(item, inner[0]) for item in items)
    return _is_instance(value, origin)


_TYPE_NAMES = {
    int: "a whole number",
    float: "a finite number",
    str: "some text",
    bool: "True or False",
}

_PLURALS = {int: "whole numbers", float: "finite numbers", str: "texts"}


def _words(hint: Any) -> Iterator[str]:
    """Yield the accepted types in plain words."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        for one in inner:
            yield from _words(one)
    elif origin is typing.Literal:
        yield from (repr(word) for word in inner)
    elif hint in _TYPE_NAMES:
        yield _TYPE_NAMES[hint]
    elif origin is collections.abc.Sequence:
        yield f"a list of {_PLURALS.get(inner[0]) or ' or '.join(_words(inner[0]))}"
    elif origin is collections.abc.Callable:
        yield "a function"
    elif origin is os.PathLike:
        yield "a path"
    elif hint is None or hint is type(None):
        yield "None"
    else:
        yield getattr(origin or hint, "__name__", str(hint))
