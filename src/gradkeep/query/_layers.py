"""Select layers by name, glob or type."""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from gradkeep import _arguments

if TYPE_CHECKING:
    import builtins

    from gradkeep.errors import GradkeepError

LayerChoice = str | type | Sequence[str | type] | None
"""`"fc*"`, `nn.Linear`, `"Linear"`, `"!*.bias"`, several of them, None for all."""


_EXPECTED = "a name, a glob, a type, or a list of such"


class NamedLayer(Protocol):
    """Interface of a layer that can be selected."""

    @property
    def names(self) -> tuple[str, ...]:
        """Its name, and aliases."""

    @property
    def type(self) -> str:
        """Name of its class."""

    def is_a(self, kind: builtins.type) -> bool:
        """Return True if it is of that class."""


L = TypeVar("L", bound=NamedLayer)


def select_layers(
    layers: Sequence[L], choice: LayerChoice, *, error: type[GradkeepError], hint: str
) -> list[L]:
    """Return the layers that a choice selects, in their own order.

    A name also selects everything inside: `"encoder"` selects `"encoder.fc1"`. A leading `!` excludes:
    `["*", "!*.bias"]`. A pattern that matches nothing raises an error with similar names; `hint` tells where
    all layers are listed.
    """
    if choice is None:
        return list(layers)
    several: Any = choice if isinstance(choice, list | tuple | set | frozenset) else [choice]
    patterns: list[str | type] = list(several)
    for item in patterns:
        _arguments.instance("layers", item, (str, type), error=error, expected=_EXPECTED)
    is_selected = [False] * len(layers)
    if patterns and all(isinstance(item, str) and item.startswith("!") for item in patterns):
        is_selected = [True] * len(layers)
    for item in patterns:
        is_excluded = isinstance(item, str) and item.startswith("!")
        pattern = item[1:] if isinstance(item, str) and is_excluded else item
        matches = [index for index, layer in enumerate(layers) if _matches(layer, pattern)]
        if not matches:
            raise _nothing(layers, pattern, error=error, hint=hint)
        for index in matches:
            is_selected[index] = not is_excluded
    chosen = [layer for layer, selected in zip(layers, is_selected, strict=True) if selected]
    if not chosen:
        raise error(
            "no layer is selected",
            code=f"{error.code.partition('.')[0]}.no_layers",
            found=f"layers={choice!r}",
            fix="Select at least one layer.",
        )
    return chosen


def _matches(layer: NamedLayer, pattern: str | type) -> bool:
    if isinstance(pattern, type):
        return layer.is_a(pattern)
    if layer.type == pattern or pattern in layer.names:
        return True
    return any(
        fnmatch.fnmatchcase(name, pattern) or name.startswith(f"{pattern}.") for name in layer.names
    )


def _nothing(
    layers: Sequence[NamedLayer], pattern: str | type, *, error: type[GradkeepError], hint: str
) -> GradkeepError:
    names = [layer.names[0] for layer in layers]
    types = sorted({layer.type for layer in layers})
    shown = pattern if isinstance(pattern, str) else pattern.__name__
    near = difflib.get_close_matches(shown[:200], [*names, *types], n=3, cutoff=0.4)
    return error(
        f"no layer matches {_arguments.short_repr(shown)}",
        code=f"{error.code.partition('.')[0]}.unknown_layer",
        found=f"{len(names)} layers: {', '.join(names[:8])}{' ...' if len(names) > 8 else ''}",
        expected=f"a name, a glob such as 'layer4.*', or a type of {', '.join(types)}",
        fix=f"Did you mean {' or '.join(near)}? {hint}" if near else hint,
    )
