"""Arguments of public functions, checked where they come in: by type and by range, with one kind of message.

Every check is given the argument's name and the error of its room, and returns the value in the type
that the rest of the code may rely on:

    rows = count("rows", rows, error=QueryError, least=1)

A bool is no number here, a number with a fraction is no count, and what is not finite is neither.
"""

from __future__ import annotations

import difflib
import math
import operator
import os
from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING, Any, SupportsIndex, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np

    from gradkeep.errors import GradkeepError

T = TypeVar("T")

LARGEST = 2**63 - 1
"""The largest count: what fits into the integers of arrays and files."""
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


def fraction(name: str, value: object, *, error: type[GradkeepError]) -> float:
    """A share: a number from 0 to 1, both included.

    >>> from gradkeep.errors import QueryError
    >>> fraction("share", 0.25, error=QueryError)
    0.25
    """
    return number(name, value, error=error, least=0, most=1)


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
