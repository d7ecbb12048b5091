"""Pickles that hold only data: dictionaries, lists, texts, numbers and arrays of bytes.

A pickle can name any function and have it called. Here the few names that arrays of bytes need
lead to the classes below, which can do nothing else; every other name is refused.
"""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, Any

import numpy as np

from gradkeep.errors import DataError

if TYPE_CHECKING:
    import os


class _Type:
    """Stands for `numpy.dtype`: bytes only, so no crafted type can reach numpy."""

    def __init__(self, code: str | bytes, *_: object) -> None:
        if code not in ("u1", b"u1"):
            raise pickle.UnpicklingError(f"an array of type {code!r}, where only u1 is read")

    def __setstate__(self, state: object) -> None:
        pass


class _Array:
    """Stands for an array until the pickle has given its shape and bytes."""

    def __init__(self, *_: object) -> None:
        self.values: np.ndarray[Any, Any] | None = None

    def __setstate__(self, state: tuple[object, tuple[int, ...], _Type, bool, bytes]) -> None:
        _, shape, dtype, fortran, content = state
        if not isinstance(dtype, _Type) or not isinstance(content, bytes):
            raise pickle.UnpicklingError("an array that is not made of bytes")
        order = "F" if fortran else "C"
        self.values = np.frombuffer(content, np.uint8).reshape(shape, order=order)  # type: ignore[call-overload]


def _encode(text: str, encoding: str) -> bytes:
    """How Python 3 writes bytes in the protocol of Python 2."""
    if encoding not in ("latin1", b"latin1"):
        raise pickle.UnpicklingError(f"bytes encoded as {encoding!r}")
    return text.encode("latin1")


_NAMES = {
    ("numpy", "dtype"): _Type,
    ("numpy", "ndarray"): _Array,
    ("numpy.core.multiarray", "_reconstruct"): _Array,
    ("numpy._core.multiarray", "_reconstruct"): _Array,
    ("_codecs", "encode"): _encode,
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _NAMES:
            raise pickle.UnpicklingError(f"it names {module}.{name}")
        return _NAMES[module, name]


def read_pickled(path: str | os.PathLike[str]) -> dict[Any, Any]:
    """The dictionary in a pickle; nothing that the pickle names is ever called."""
    try:
        with open(path, "rb") as file:
            found = _Unpickler(file, encoding="bytes").load()
    except Exception as error:  # damaged pickles raise nearly anything
        raise DataError(
            "the pickle is damaged or holds more than data",
            path=path,
            found=error,
            expected="a dictionary of arrays of bytes, lists and texts",
        ) from error
    if not isinstance(found, dict):
        raise DataError(
            "the pickle holds no dictionary", path=path, found=type(found).__name__, expected="dict"
        )
    return {
        key: value.values if isinstance(value, _Array) else value for key, value in found.items()
    }
