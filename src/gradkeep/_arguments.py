"""Checks of the arguments of public functions: by annotation, type and range, with one kind of message."""

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
"""The largest count: what fits into the integers of arrays and files."""
P = ParamSpec("P")
T = TypeVar("T")

_SHOWN = 80


def count(
    name: str,
    value: object,
    *,
    error: type[GradkeepError],
    least: int = 0,
    most: int = LARGEST,
) -> int:
    """A whole number from `least` to `most`; also one of numpy's or a tensor's, never a float or bool.

    >>> from gradkeep.errors import QueryError
    >>> count("rows", 3, error=QueryError)
    3
    >>> count("rows", 2.5, error=QueryError)
    Traceback (most recent call last):
    gradkeep.errors.QueryError: rows cannot be 2.5
      found:    float
      expected: a whole number of at least 0
    """
    expected = _range("a whole number", least, None if most == LARGEST else most)
    if type(value).__name__ in ("bool", "bool_") or not isinstance(value, SupportsIndex):
        raise refused(name, value, error=error, expected=expected)
    try:
        found = operator.index(value)
    except Exception:  # an array or tensor that is not one whole number
        raise refused(name, value, error=error, expected=expected) from None
    if not least <= found <= most:
        raise refused(name, value, error=error, expected=expected)
    return found


def number(
    name: str,
    value: object,
    *,
    error: type[GradkeepError],
    least: float | None = None,
    above: float | None = None,
    most: float | None = None,
) -> float:
    """A finite number within its range: from `least`, or above `above`, to `most`.

    >>> from gradkeep.errors import QueryError
    >>> number("damping", 3, error=QueryError, above=0)
    3.0
    >>> number("damping", float("nan"), error=QueryError, above=0)
    Traceback (most recent call last):
    gradkeep.errors.QueryError: damping cannot be nan
      found:    float
      expected: a finite number above 0
    """
    expected = _range("a finite number", least, most, above=above)
    refuse = refused(name, value, error=error, expected=expected)
    if isinstance(value, str | bytes) or type(value).__name__ in ("bool", "bool_"):
        raise refuse
    try:
        found = float(value)  # type: ignore[arg-type]
    except Exception:  # no number, an array of several, an int beyond all floats
        raise refuse from None
    if (
        not math.isfinite(found)
        or (least is not None and found < least)
        or (above is not None and found <= above)
        or (most is not None and found > most)
    ):
        raise refuse
    return found


def flag(name: str, value: object, *, error: type[GradkeepError]) -> bool:
    """True or False; nothing that only counts as one, since `"no"` would be true."""
    if type(value).__name__ not in ("bool", "bool_"):
        raise refused(name, value, error=error, expected="True or False")
    return bool(value)


def text(
    name: str, value: object, *, error: type[GradkeepError], expected: str = "some text"
) -> str:
    """Text that is not empty and can be written: no NUL, no half of a surrogate pair.

    >>> from gradkeep.errors import QueryError
    >>> text("split", "train", error=QueryError)
    'train'
    """
    if not isinstance(value, str) or not value or not writable(value):
        raise refused(name, value, error=error, expected=expected)
    return value


def texts(name: str, value: object, *, error: type[GradkeepError]) -> tuple[str, ...]:
    """One text or several, as a tuple.

    >>> from gradkeep.errors import QueryError
    >>> texts("run", "main", error=QueryError), texts("run", ["a", "b"], error=QueryError)
    (('main',), ('a', 'b'))
    """
    given = [value] if isinstance(value, str) else value
    if not isinstance(given, Sequence | AbstractSet) or isinstance(given, bytes):
        raise refused(name, value, error=error, expected="some text, or a list of such")
    return tuple(text(name, item, error=error) for item in given)


def one_of(name: str, value: object, words: Iterable[T], *, error: type[GradkeepError]) -> T:
    """One of the known words; the message lists them and offers the nearest.

    >>> from gradkeep.errors import QueryError
    >>> one_of("uncovered", "dens", ["dense", "error"], error=QueryError)
    Traceback (most recent call last):
    gradkeep.errors.QueryError: uncovered cannot be 'dens'
      found:    str
      expected: 'dense' or 'error'
      next:     did you mean 'dense'?
    """
    known = list(words)
    for word in known:
        if type(value) is type(word) and value == word:
            return word
    told = [repr(word) for word in known]
    listed = " or ".join([", ".join(told[:-1]), told[-1]] if len(told) > 1 else told)
    spelt = [word for word in known if isinstance(word, str)]
    near = difflib.get_close_matches(value[:_SHOWN], spelt, n=1) if isinstance(value, str) else []
    fix = f"did you mean {near[0]!r}?" if near else None
    raise refused(name, value, error=error, expected=listed, fix=fix)


def instance(
    name: str,
    value: object,
    kind: type[T] | tuple[type[T], ...],
    *,
    error: type[GradkeepError],
    expected: str | None = None,
) -> T:
    """An object of a class (or of one of several)."""
    kinds: tuple[type[Any], ...] = kind if isinstance(kind, tuple) else (kind,)
    if not isinstance(value, kinds):
        said = expected or " or ".join(one.__name__ for one in kinds)
        raise refused(name, value, error=error, expected=said)
    found: T = value
    return found


def function(name: str, value: T, *, error: type[GradkeepError], expected: str = "a function") -> T:
    """Something that can be called."""
    if not callable(value):
        raise refused(name, value, error=error, expected=expected)
    return value


def file_path(name: str, value: object, *, error: type[GradkeepError]) -> str:
    """A path as text: not empty, without NUL, encodable. Whether it exists is not looked at."""
    expected = "a path"
    try:
        found = os.fspath(value)  # type: ignore[call-overload]
    except TypeError:
        raise refused(name, value, error=error, expected=expected) from None
    if not isinstance(found, str) or not found or "\0" in found:
        raise refused(name, value, error=error, expected=expected)
    try:
        os.fsencode(found)
    except UnicodeError:
        raise refused(name, value, error=error, expected=expected) from None
    return found


def whole_numbers(
    name: str,
    values: object,
    *,
    error: type[GradkeepError],
    least: int = 0,
    most: int = LARGEST,
) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """A list of whole numbers as int64 `[n]`: never cut to one, so that 3.7 is not row 3.

    >>> from gradkeep.errors import QueryError
    >>> whole_numbers("ids", [3, 1], error=QueryError).tolist()
    [3, 1]
    >>> whole_numbers("ids", [3.7], error=QueryError)
    Traceback (most recent call last):
    gradkeep.errors.QueryError: ids cannot be [3.7]
      found:    list
      expected: a list of whole numbers of at least 0
    """
    import numpy as np

    expected = _range("a list of whole numbers", least, None if most == LARGEST else most)
    refuse = refused(name, values, error=error, expected=expected)
    if isinstance(values, str | bytes | dict | set | frozenset):
        raise refuse
    if isinstance(values, list | tuple) and any(isinstance(item, bool) for item in values):
        raise refuse  # numpy makes 1 of True beside other numbers
    try:
        found = np.asarray(values)
    except Exception:
        raise refuse from None
    if found.ndim != 1 or (found.size and found.dtype.kind not in "iu"):
        raise refuse
    if found.size and not (least <= int(found.min()) and int(found.max()) <= most):
        raise refuse
    return found.astype(np.int64)


def array(
    name: str,
    values: Any,
    *,
    error: type[GradkeepError],
    kinds: str = "biuf",
    expected: str = "an array of numbers",
) -> np.ndarray[Any, Any]:
    """Anything that is an array, a tensor or a list, as an array of numbers; never of objects.

    >>> from gradkeep.errors import QueryError
    >>> array("weights", [1, 2], error=QueryError).shape
    (2,)
    """
    import numpy as np

    given = values
    try:
        if hasattr(values, "detach"):  # a tensor, told without importing torch
            values = values.detach().cpu()
            # numpy has no bfloat16; float32 holds it exactly.
            values = values.float() if str(values.dtype) == "torch.bfloat16" else values
        found = np.asarray(values.numpy() if hasattr(values, "numpy") else values)
    except Exception:
        found = None
    # The error is made only where there is one: to show an array takes longer than to check it.
    if found is None or found.dtype.kind not in kinds:
        raise refused(name, given, error=error, expected=expected)
    return found


def writable(value: str) -> bool:
    """Whether the text can be stored and shown: valid Unicode without NUL.

    >>> writable("train"), writable("a" + chr(0)), writable(chr(0xD800))
    (True, False, False)
    """
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return "\0" not in value


def shown(value: object) -> str:
    """A value for a message: on one line, short, and whatever its own `repr` does.

    >>> shown("train"), shown("a" * 200)[-6:]
    ("'train'", ' (...)')
    """
    try:
        told = repr(value[: 2 * _SHOWN] if isinstance(value, str | bytes) else value)
    except Exception:
        told = f"<{type(value).__name__}>"
    told = " ".join(told.encode("utf-8", "backslashreplace").decode().split())
    return told if len(told) <= _SHOWN else f"{told[: _SHOWN - 6]} (...)"


def refused(
    name: str,
    value: object,
    *,
    error: type[GradkeepError],
    expected: str,
    fix: str | None = None,
) -> GradkeepError:
    """The error for an argument that cannot be what it is."""
    return error(
        f"{name} cannot be {shown(value)}", found=type(value).__name__, expected=expected, fix=fix
    )


def optional(check: Callable[..., T], name: str, value: object, **limits: Any) -> T | None:
    """The same check for an argument that may be left out.

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
    """A path whose file may be replaced: never a device's, a pipe's or a folder's place.

    >>> from gradkeep.errors import StoreError
    >>> file_to_write("no/such/file", error=StoreError)
    'no/such/file'
    """
    if os.path.lexists(path) and not os.path.isfile(path):
        raise error(
            "this is written to a file of its own",
            path=os.fspath(path)[:300],
            found="a folder" if os.path.isdir(path) else "a pipe, a device or a link to nowhere",
            expected="a file, or nothing yet",
        )
    return path


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
        raise refused(name, value, error=error, expected=expected, fix=fix)


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
        return isinstance(value, str) and writable(value)
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
