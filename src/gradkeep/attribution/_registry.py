"""The methods by name: ours, and those that were registered from outside."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING

from gradkeep.attribution._question import Method
from gradkeep.attribution.scorers import ALL
from gradkeep.errors import AttributionError
from gradkeep.factors._registry import form_from_fields
from gradkeep.query._gradients import open_capture

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gradkeep.store import Schema, Store

_SEQUENCES = "gradkeep.LanguageModelling"

_METHODS: dict[str, Method] = {method.name: method for method in ALL}


def methods() -> tuple[Method, ...]:
    """All methods that `gk.attribute` knows.

    >>> [method.name for method in methods()][:3]
    ['kernel', 'trak', 'dot']
    """
    return tuple(_METHODS.values())


def register_method(method: Method) -> None:
    """Let `gk.attribute(method=...)` and the commands find a method of one's own by its name.

    `method.prepare(view, options)` is called once per checkpoint with a `gk.CheckpointView`, which
    reads the captures of both splits, and gives a `gk.Scorer`.
    """
    if not isinstance(method, Method):
        raise AttributionError(
            "a method is a gk.Method", found=type(method).__name__, fix="gk.Method(name, ...)"
        )
    if method.name in _METHODS:
        raise AttributionError(
            f"there is a method {method.name!r} already",
            found=", ".join(_METHODS),
            fix="give it another name",
        )
    _METHODS[method.name] = method


def unregister_method(name: str) -> None:
    """Forget a method that was registered; ours stay."""
    if name not in _METHODS or any(method.name == name for method in ALL):
        raise AttributionError(f"no method {name!r} was registered")
    del _METHODS[name]


def method_named(name: str) -> Method:
    """The method of that name; the nearest ones are offered if there is none."""
    if name in _METHODS:
        return _METHODS[name]
    near = difflib.get_close_matches(name, _METHODS, n=2, cutoff=0.3)
    raise AttributionError(
        f"no method {name!r}",
        expected=", ".join(_METHODS),
        fix=f"did you mean {' or '.join(near)}?" if near else "gk.methods() lists them",
    )


def holds_sequences(schema: Schema) -> bool:
    """Tell whether the rows of a capture are sequences of tokens with a loss each."""
    tokens = any(array.name == "token_loss" for array in schema.arrays)
    return tokens or str(schema.fingerprints.get("task")).startswith(_SEQUENCES)


def default_method(store: Store, *, run: str | Sequence[str], train: str, name: str) -> str:
    """The method that won for what was captured: `ekfac` for sequences, else `kernel`."""
    runs = [run] if isinstance(run, str) else list(run)
    for key in store.captures():
        if key.run in runs and (key.split, key.capture) == (train, name):
            schema = open_capture(store, key).schema
            forms = [form_from_fields(layer.form) for layer in schema.layers if layer.form]
            if holds_sequences(schema) or (forms and all(form.whitened for form in forms)):
                return "ekfac"
            return "kernel"
    return "kernel"
