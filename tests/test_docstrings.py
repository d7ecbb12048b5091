"""Every public callable documents each of its parameters (Google style)."""

import dataclasses
import importlib
import inspect
import re

import pytest

SUBPACKAGES = (
    *(
        "store",
        "query",
        "datamodels",
        "evaluate",
        "farm",
        "remat",
        "errors",
        "data",
        "integrations",
    ),
    *("compat.trak", "compat.datamodels", "compat.dtr", "compat.metastore"),
)


def _public_objects():
    seen = {}
    for module_name in ("", *SUBPACKAGES):
        module = importlib.import_module(f"gradkeep.{module_name}" if module_name else "gradkeep")
        for name in module.__all__:
            value = getattr(module, name)
            if inspect.ismodule(value) or not callable(value):
                continue
            seen.setdefault(id(value), (f"{module.__name__}.{name}", value))
    return sorted(seen.values(), key=lambda item: item[0])


def _callables():
    for path, value in _public_objects():
        yield path, value
        if inspect.isclass(value) and not issubclass(value, Exception | Warning):
            for name, member in vars(value).items():
                member = getattr(member, "__func__", member)
                inherited = any(hasattr(base, name) for base in value.__mro__[1:])
                if name.startswith("_") or not inspect.isfunction(member):
                    continue
                if member.__doc__ or not inherited:  # else documented by the base class
                    yield f"{path}.{name}", member


def _documented(docstring: str) -> set[str]:
    """Names listed in the sections Args and Attributes."""
    names: set[str] = set()
    lines = inspect.cleandoc(docstring).splitlines()
    for number, line in enumerate(lines):
        if line not in ("Args:", "Attributes:"):
            continue
        for entry in lines[number + 1 :]:
            if entry and not entry.startswith(" "):
                break
            match = re.match(r"    (\**\w+(?:, \**\w+)*)(?: \([^)]*\))?:", entry)
            if match:
                names.update(name.strip("* ") for name in match.group(1).split(","))
    return names


def _missing(value) -> list[str]:
    try:
        parameters = inspect.signature(value).parameters
    except (TypeError, ValueError):  # no Python signature
        return []
    docstring = value.__doc__ or ""
    if not docstring.strip():
        return ["(no docstring)"]
    if inspect.isclass(value) and "__init__" not in vars(value):
        return []  # documented by the base class
    if inspect.isclass(value):
        documented = _documented(value.__doc__) | _documented(value.__init__.__doc__ or "")
        for base in value.__mro__[1:]:
            if dataclasses.is_dataclass(base):
                documented |= _documented(base.__doc__ or "")
    else:
        documented = _documented(docstring)
    skipped = {"self", "cls", "args", "kwargs"}
    return [name for name in parameters if name not in documented | skipped and name[0] != "_"]


CALLABLES = dict(_callables())


@pytest.mark.parametrize("path", CALLABLES)
def test_every_parameter_is_documented(path):
    assert _missing(CALLABLES[path]) == []


def test_the_surface_is_not_empty():
    assert len(CALLABLES) > 300
