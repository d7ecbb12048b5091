"""A fingerprint of the function that a model computes, beside that of its weights.

Two models with the same weights are other functions with Tanh than with ReLU. What tells them apart is
digested: the classes of modules, their numbers, texts and functions (`eps`, `activation="relu"`, `F.relu`),
those of a configuration, and what the code of own classes names. Flags, counters, sizes, devices and paths
are left out: they differ between processes that compute the same.
"""

from __future__ import annotations

import inspect
import re
import sys
import sysconfig
import types
from typing import TYPE_CHECKING, Any

import xxhash

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn

_LEFT_OUT = re.compile(r"device|path|name|dtype|implementation|version|loss|cache|dropout|forward")
_OF_CONFIGURATIONS = re.compile(r"act|eps|norm|scal|slope|temperature")
_INSTALLED = tuple(
    {sysconfig.get_paths()[kind] for kind in ("purelib", "platlib", "stdlib", "platstdlib")}
)


def fingerprint_function(model: nn.Module) -> str:
    """A digest that is another one where a model with the same weights computes something else.

    It begins with the version of Python, whose compiler decides what code names.
    """
    digest = xxhash.xxh3_128()
    for path, module in model.named_modules():
        digest.update(f"{path} {type(module).__qualname__}\n".encode())
        for line in _described(module):
            digest.update(f"  {line}\n".encode())
    return f"{sys.version_info.major}.{sys.version_info.minor} {digest.hexdigest()}"


def _described(module: nn.Module) -> Iterator[str]:
    for name, value in sorted(vars(module).items()):
        if name.startswith("_") or _LEFT_OUT.search(name.lower()):
            continue
        told = _value(value)
        if told is not None:
            yield f"{name} {told}"
        elif hasattr(value, "__dict__") and not isinstance(value, type) and not callable(value):
            yield from _configuration(name, value)
    for function in _own_functions(type(module)):
        yield f"{function.__name__} {' '.join(_names(function.__code__))}"


def _value(value: Any) -> str | None:
    """What is told of a setting; None of flags, counters, sizes, tensors and modules."""
    if isinstance(value, float | str):
        return repr(value)
    if isinstance(value, types.FunctionType):
        own = " ".join(_names(value.__code__)) if _is_own(value) else ""
        return f"{value.__qualname__} {own}"
    if isinstance(value, types.BuiltinFunctionType):
        return str(value.__qualname__)
    return None


def _configuration(name: str, value: Any) -> Iterator[str]:
    for key, inner in sorted(vars(value).items(), key=lambda item: str(item[0])):
        key = str(key).lower()
        if _OF_CONFIGURATIONS.search(key) and not _LEFT_OUT.search(key):
            told = _value(inner)
            if told is not None:
                yield f"{name}.{key} {told}"


def _own_functions(kind: type) -> Iterator[types.FunctionType]:
    """The functions of a class and its bases that no installed package brings, by name."""
    for base in kind.__mro__:
        for name, function in sorted(vars(base).items()):
            is_function = isinstance(function, types.FunctionType) and name != "__init__"
            if is_function and _is_own(function):
                yield function


def _is_own(function: types.FunctionType) -> bool:
    return not inspect.getfile(function).startswith(_INSTALLED)


def _names(code: types.CodeType) -> list[str]:
    """What code refers to: names, numbers with a fraction and texts, in its inner functions too."""
    found = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            found |= set(_names(constant))
        elif isinstance(constant, float):
            found.add(repr(constant))
    return sorted(found)
