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
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ParamSpec, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    import numpy as np

    from gradkeep.errors import GradkeepError

    Error = type[GradkeepError]


LARGEST = 2**63 - 1
"""Largest count: the range of int64 arrays and files."""
P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Limits:
    """Range of a number in an annotation: `Annotated[float, Limits(above=0, most=1)]`."""

    least: float = -math.inf
    above: float = -math.inf
    most: float = math.inf
    below: float = math.inf

    def __contains__(self, value: Any) -> bool:
        return bool(self.least <= value <= self.most and self.above < value < self.below)


PositiveInt = Annotated[int, Limits(1)]
NonNegativeInt = Annotated[int, Limits(0)]


def count(name: str, value: object, *, error: Error, least: int = 0, most: int = LARGEST) -> int:
    """Validate a whole number from `least` to `most`; numpy and tensor integers pass, floats and bools do not.

    >>> from gradkeep.errors import QueryError
    >>> count("rows", 3, error=QueryError)
    3
    >>> count("rows", 2.5, error=QueryError)
    Traceback (most recent call last):
    gradkeep.errors.QueryError: rows must be a whole number of at least 0, got 2.5
    """
    if not _fits(value, int) or not least <= operator.index(value) <= most:  # type: ignore[arg-type]
        expected = _range("a whole number", least, math.inf if most == LARGEST else most)
        raise argument_error(name, value, error=error, expected=expected)
    return operator.index(value)  # type: ignore[arg-type]


def number(
    name: str,
    value: Any,
    *,
    error: Error,
    least: float = -math.inf,
    above: float = -math.inf,
    most: float = math.inf,
) -> float:
    """Validate a finite number in a range: from `least`, or above `above`, to `most`.

    >>> from gradkeep.errors import QueryError
    >>> number("damping", 3, error=QueryError, above=0)
    3.0
    >>> number("damping", float("nan"), error=QueryError, above=0)
    Traceback (most recent call last):
    gradkeep.errors.QueryError: damping must be a finite number above 0, got nan
    """
    try:
        result = math.nan if isinstance(value, str | bytes) or _is_bool(value) else float(value)
    except Exception:  # no number, an array of several, an int beyond all floats
        result = math.nan
    if not math.isfinite(result) or result <= above or not least <= result <= most:
        expected = _range("a finite number", least, most, above=above)
        raise argument_error(name, value, error=error, expected=expected)
    return result


def flag(name: str, value: object, *, error: Error) -> bool:
    """Validate a bool; truthy values such as `"no"` are refused."""
    if not _is_bool(value):
        raise argument_error(name, value, error=error, expected="True or False")
    return bool(value)


def text(name: str, value: object, *, error: Error, expected: str = "some text") -> str:
    """Validate a non-empty string without NUL or lone surrogates.

    >>> from gradkeep.errors import QueryError
    >>> text("split", "train", error=QueryError)
    'train'
    """
    if not isinstance(value, str) or not value or not writable(value):
        raise argument_error(name, value, error=error, expected=expected)
    return value


def texts(name: str, value: object, *, error: Error) -> tuple[str, ...]:
    """Validate one string or several and return a tuple.

    >>> from gradkeep.errors import QueryError
    >>> texts("run", "main", error=QueryError), texts("run", ["a", "b"], error=QueryError)
    (('main',), ('a', 'b'))
    """
    items = [value] if isinstance(value, str) else value
    if not isinstance(items, Sequence | AbstractSet) or isinstance(items, bytes):
        raise argument_error(name, value, error=error, expected="some text, or a list of such")
    return tuple(text(name, item, error=error) for item in items)


def one_of(
    name: str,
    value: object,
    words: Iterable[T],
    *,
    error: Error,
    code: str = "argument.invalid",
    path: str | os.PathLike[str] | None = None,
) -> T:
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
    *others, last = (repr(word) for word in known)
    listed = f"{', '.join(others)} or {last}" if others else last
    spelt = [word for word in known if isinstance(word, str)]
    near = difflib.get_close_matches(value[:80], spelt, n=1) if isinstance(value, str) else []
    fix = f"Did you mean {near[0]!r}?" if near else None
    raise argument_error(name, value, error=error, expected=listed, fix=fix, code=code, path=path)


def instance(
    name: str,
    value: object,
    kind: type[T] | tuple[type[T], ...],
    *,
    error: Error,
    expected: str | None = None,
) -> T:
    """Validate an instance of a class, or of one of several."""
    if not isinstance(value, kind):
        kinds = kind if isinstance(kind, tuple) else (kind,)
        names = expected or " or ".join(one.__name__ for one in kinds)
        raise argument_error(name, value, error=error, expected=names)
    return value


def file_path(name: str, value: Any, *, error: Error) -> str:
    """Validate a path and return it as a string; the file need not exist."""
    path = os.fspath(value) if hasattr(value, "__fspath__") else value
    if not _names_a_file(path):
        raise argument_error(name, value, error=error, expected="a path")
    result: str = path
    return result


def whole_numbers(
    name: str,
    values: object,
    *,
    error: Error,
    least: int = 0,
    most: int = LARGEST,
    length: int | None = None,
    code: str | None = None,
) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Validate a list of whole numbers and return int64 `[n]`; floats are refused, not truncated.

    With a `length`, another one is an error with this `code`.

    >>> from gradkeep.errors import QueryError
    >>> whole_numbers("ids", [3, 1], error=QueryError).tolist()
    [3, 1]
    >>> whole_numbers("ids", [3.7], error=QueryError)
    Traceback (most recent call last):
    gradkeep.errors.QueryError: ids must be a list of whole numbers of at least 0, got [3.7]
    """
    import numpy as np

    try:
        result = np.asarray(values)
    except Exception:
        result = np.asarray("")
    # numpy converts True to 1 beside other numbers.
    bools = isinstance(values, list | tuple) and any(isinstance(item, bool) for item in values)
    is_list = result.ndim == 1 and not isinstance(values, str | bytes | dict | set | frozenset)
    if (
        not is_list
        or bools
        or (result.size and result.dtype.kind not in "iu")
        or (result.size and not (least <= int(result.min()) and int(result.max()) <= most))
    ):
        expected = _range("a list of whole numbers", least, math.inf if most == LARGEST else most)
        raise argument_error(name, values, error=error, expected=expected)
    if length is not None and len(result) != length:
        message = f"{name} must have one number for each of {length} rows"
        raise error(message, code=code, found=f"{len(result)} numbers")
    return result.astype(np.int64)


def array(
    name: str,
    values: Any,
    *,
    error: Error,
    kinds: str = "biuf",
    expected: str = "an array of numbers",
    shape: tuple[int | str, ...] | None = None,
    code: str | None = None,
) -> np.ndarray[Any, Any]:
    """Convert an array, tensor or list to a numeric numpy array; object arrays are refused.

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
    return "\0" not in value and not any("\ud800" <= letter <= "\udfff" for letter in value)


def short_repr(value: object) -> str:
    """Represent a value on one line of at most 80 characters, even if its own `repr` fails.

    >>> short_repr("train"), short_repr("a" * 200)[-6:]
    ("'train'", ' (...)')
    """
    try:
        line = repr(value[:160] if isinstance(value, str | bytes) else value)
    except Exception:
        line = f"<{type(value).__name__}>"
    line = " ".join(line.encode("utf-8", "backslashreplace").decode().split())
    return line if len(line) <= 80 else f"{line[:74]} (...)"


def argument_error(
    name: str,
    value: object,
    *,
    error: Error,
    expected: str,
    fix: str | None = None,
    code: str = "argument.invalid",
    path: str | os.PathLike[str] | None = None,
) -> GradkeepError:
    """Build the error for an argument of a wrong type or value."""
    message = f"{name} must be {expected}, got {short_repr(value)}"
    return error(message, code=code, path=path, fix=fix)


def optional(check: Callable[..., T], name: str, value: object, **limits: Any) -> T | None:
    """Apply a check unless the value is None.

    >>> from gradkeep.errors import FarmError
    >>> optional(count, "workers", None, error=FarmError) is None
    True
    """
    return None if value is None else check(name, value, **limits)


def _range(
    what: str, least: float, most: float, above: float = -math.inf, below: float = math.inf
) -> str:
    if below < math.inf:
        return f"{_range(what, least, math.inf, above)} and below {below:g}"
    if above == -math.inf and -math.inf < least and most < math.inf:
        return f"{what} from {least:g} to {most:g}"
    low = f" above {above:g}" if above > -math.inf else ""
    low = low or (f" of at least {least:g}" if least > -math.inf else "")
    high = f" and at most {most:g}" if low else f" of at most {most:g}"
    return what + low + (high if most < math.inf else "")


def file_to_write(path: str | os.PathLike[str], *, error: Error) -> str | os.PathLike[str]:
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


def checked(error: Error, **fixes: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Decorate a function to validate its arguments by their annotations.

    Budgets have their own parser. `fixes` maps parameter names to the advice added to the error.

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
        named = {
            name: parameter
            for name, parameter in inspect.signature(function).parameters.items()
            if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        }
        home = inspect.unwrap(function).__globals__

        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> T:
            for name, value in (*zip(named, args, strict=False), *kwargs.items()):
                parameter = named.get(name)
                # A default always passes, such as a limit of infinity.
                if parameter is None or value is parameter.default:
                    continue
                if name not in ("memory_budget", "budget"):
                    _check(name, value, parameter.annotation, home, error, fixes.get(name))
            return function(*args, **kwargs)

        return call

    return decorate


def check_fields(record: Any, error: Error) -> None:
    """Validate the fields of a dataclass; call it in `__post_init__`."""
    home = vars(sys.modules[type(record).__module__])
    for field in record.__dataclass_fields__.values():
        if field.init:
            _check(field.name, getattr(record, field.name), field.type, home, error)


def _check(
    name: str,
    value: object,
    annotation: Any,
    home: Mapping[str, Any],
    error: Error,
    fix: str | None = None,
) -> None:
    hint = _resolve(annotation, home)
    if not _fits(value, hint):
        expected = " or ".join(_words(hint))
        raise argument_error(name, value, error=error, expected=expected, fix=fix)


class _Names(dict[str, Any]):
    """Names of a module, and those that it imports for type checkers only, from loaded modules."""

    complete = True
    """False if a name was not found: its module may be loaded later."""

    def __missing__(self, name: str) -> Any:
        for place in (builtins, collections.abc, typing):
            if hasattr(place, name):
                return getattr(place, name)
        loaded = [m for key, m in sys.modules.copy().items() if key.startswith("gradkeep.")]
        types_of_name = [vars(m)[name] for m in loaded if vars(m).get(name, Any) is not Any]
        self.complete &= bool(types_of_name)
        try:
            # Two modules may use one name for two types.
            return functools.reduce(operator.or_, types_of_name) if types_of_name else Any
        except TypeError:
            return types_of_name[0]  # a module, such as numpy


_resolved: dict[tuple[str, int], Any] = {}
"""Evaluated annotations by text and module."""


def _resolve(annotation: Any, home: Mapping[str, Any]) -> Any:
    if not isinstance(annotation, str):
        return Any if annotation is inspect.Parameter.empty else annotation
    key = (annotation, id(home))
    if key in _resolved:
        return _resolved[key]
    names = _Names(home)
    try:
        hint = eval(annotation, {"__builtins__": {}}, names)
    except Exception:  # a name inside of a module that is not loaded
        return Any
    if names.complete:
        _resolved[key] = hint
    return hint


def _fits(value: Any, hint: Any) -> bool:
    """Return True if a value may be passed where this type is expected."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        return _fits(value, inner[0]) and value in inner[1]
    if hint is Any or hint is object or isinstance(hint, str | TypeVar):
        return True
    if hint is None or hint is type(None):
        return value is None
    if origin in (typing.Union, types.UnionType):
        return any(_fits(value, one) for one in inner)
    if origin is typing.Literal:
        return any(type(value) is type(word) and value == word for word in inner)
    if hint is bool:
        return _is_bool(value)
    if hint is int:
        return (type(value) is int and abs(value) <= LARGEST) or _is_whole(value)
    if hint is float:
        return not _is_bool(value) and isinstance(value, numbers.Real) and _is_finite(value)
    if hint is str:
        return isinstance(value, str) and writable(value)
    if origin is collections.abc.Callable:
        return callable(value)
    if origin is os.PathLike:
        return hasattr(value, "__fspath__") or _names_a_file(value)
    if getattr(origin, "__name__", "") == "ndarray":
        # Lists and tensors are converted to arrays later, which checks their items.
        return isinstance(value, list | tuple) or hasattr(value, "__array__")
    if origin is collections.abc.Iterable:
        return hasattr(value, "__iter__") and not isinstance(value, str | bytes)
    if origin is collections.abc.Sequence:
        # Arrays and tensors are not registered as Sequence; zero-dimensional ones are refused.
        sized = hasattr(value, "__getitem__") and not isinstance(value, str | bytes | dict | set)
        return sized and _items_fit(value, inner[0])
    if origin is tuple and inner[1:] == (...,):
        return isinstance(value, tuple) and _items_fit(value, inner[0])
    kind = origin or hint
    # Protocols are structural: using the value shows whether it fits.
    if not isinstance(kind, type) or getattr(kind, "_is_protocol", False):
        return True
    return isinstance(value, kind)


def _items_fit(values: Any, hint: Any) -> bool:
    """Check the first thousand items; the reader checks the rest."""
    try:
        items = [values[place] for place in range(min(len(values), 1000))]
    except Exception:
        return False
    if hint is str:  # content may hold any character
        return all(isinstance(item, str) for item in items)
    return all(_fits(item, hint) for item in items)


def _is_bool(value: object) -> bool:
    return type(value).__name__ in ("bool", "bool_")


def _is_whole(value: Any) -> bool:
    try:
        return not _is_bool(value) and -LARGEST - 1 <= operator.index(value) <= LARGEST
    except Exception:  # a float, an array or a tensor of several
        return False


def _is_finite(value: Any) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an int beyond floats
        return False


def _names_a_file(value: object) -> bool:
    """Return True if the text can be a file name on this system."""
    try:
        return isinstance(value, str) and "\0" not in value and bool(os.fsencode(value))
    except UnicodeError:
        return False


def _words(hint: Any) -> Iterator[str]:
    """Yield the accepted types in plain words."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    plain = {int: "a whole number", float: "a finite number", str: "some text", None: "None"}
    plain[bool] = "True or False"
    if origin is Annotated:
        (word,) = _words(inner[0])
        yield _range(word, inner[1].least, inner[1].most, inner[1].above, inner[1].below)
    elif origin in (typing.Union, types.UnionType):
        for one in inner:
            yield from _words(one)
    elif origin is typing.Literal:
        yield from (repr(word) for word in inner)
    elif origin is collections.abc.Sequence:
        plurals = {int: "whole numbers", float: "finite numbers", str: "texts"}
        yield f"a list of {plurals.get(inner[0]) or ' or '.join(_words(inner[0]))}"
    elif origin is collections.abc.Callable:
        yield "a function"
    elif origin is os.PathLike:
        yield "a path"
    elif hint is type(None) or (origin is None and hint in plain):
        yield plain.get(hint, "None")
    else:
        yield getattr(origin or hint, "__name__", str(hint))
