"""Registry of attribution methods, built-in and registered."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gradkeep._arguments import one_of
from gradkeep._display import ResultTable, TableDisplay
from gradkeep.attribution._question import Method
from gradkeep.attribution.scorers import ALL
from gradkeep.errors import AttributionError
from gradkeep.factors import form_from_fields, is_whitened
from gradkeep.query._gradients import open_capture

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gradkeep.store import Schema, Store

_SEQUENCES = "gradkeep.LanguageModelling"

_METHODS: dict[str, Method] = {method.name: method for method in ALL}


class MethodList(TableDisplay, tuple[Method, ...]):
    """The methods of `gk.attribute`, printed as a table."""

    __slots__ = ()

    def _table(self) -> ResultTable:
        names = ", ".join(method.name for method in self[10:])
        caption = f"{len(self)} methods for gk.attribute(method=...)"
        caption += f"; also {names}" if names else ""
        rows = [[method.name, method.summary[:80]] for method in self[:10]]
        return ResultTable(caption, ["method", "score"], rows)

    def _repr_html_(self) -> str:
        columns = ["method", "score", "needs", "cost"]
        rows = [[method.name, method.summary, method.needs, method.cost] for method in self]
        return ResultTable(f"{len(self)} methods", columns, rows).to_html()


def methods() -> MethodList:
    """List all methods of `gk.attribute`.

    Returns:
        The methods, the default first.

    Example:
        >>> [method.name for method in methods()][:3]
        ['kernel', 'trak', 'dot']
    """
    return MethodList(_METHODS.values())


def register_method(method: Method) -> None:
    """Register a method for `gk.attribute(method=...)` and the commands.

    `method.prepare(view, options)` is called once per checkpoint with a `gk.CheckpointView`, which reads the
    captures of both splits, and returns a `gk.Scorer`.

    Args:
        method: The method.

    Raises:
        AttributionError: The name is taken.
    """
    if not isinstance(method, Method):
        raise AttributionError(
            "method must be a gk.Method",
            code="attribute.not_a_method",
            found=type(method).__name__,
            fix="Build it with gk.Method(name, ...).",
        )
    if method.name in _METHODS:
        raise AttributionError(
            f"a method {method.name!r} is already registered",
            code="attribute.method_exists",
            found=", ".join(_METHODS),
            fix="Use another name.",
        )
    _METHODS[method.name] = method


def unregister_method(name: str) -> None:
    """Remove a registered method; built-in ones cannot be removed.

    Args:
        name: Name of the method.

    Raises:
        AttributionError: No such method was registered.
    """
    if name not in _METHODS or any(method.name == name for method in ALL):
        raise AttributionError(
            f"no method {name!r} was registered", code="attribute.not_registered"
        )
    del _METHODS[name]


def find_method(name: str) -> Method:
    """Return the method of that name; raise with similar names if there is none."""
    one_of("method", name, _METHODS, error=AttributionError, code="attribute.unknown_method")
    return _METHODS[name]


def holds_sequences(schema: Schema) -> bool:
    """Return True if the rows of a capture are token sequences with a loss per token."""
    tokens = any(array.name == "token_loss" for array in schema.arrays)
    return tokens or str(schema.fingerprints.get("task")).startswith(_SEQUENCES)


def default_method(store: Store, *, run: str | Sequence[str], train: str, name: str) -> str:
    """Return the default method for a capture: `ekfac` for sequences and whitened coordinates, else `kernel`."""
    runs = [run] if isinstance(run, str) else list(run)
    for key in store.captures():
        if key.run in runs and (key.split, key.capture) == (train, name):
            schema = open_capture(store, key).schema
            forms = [form_from_fields(layer.form) for layer in schema.layers if layer.form]
            if holds_sequences(schema) or (forms and all(is_whitened(form) for form in forms)):
                return "ekfac"
            return "kernel"
    return "kernel"
