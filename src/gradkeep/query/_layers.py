"""Choosing layers by name, glob or type: one way for captures, questions and scores."""

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
    """What a layer is chosen by."""

    @property
    def names(self) -> tuple[str, ...]:
        """Its name, and others that it is known by."""

    @property
    def type(self) -> str:
        """What its class is called."""

    def is_a(self, kind: builtins.type) -> bool:
        """Whether it is of that class."""


L = TypeVar("L", bound=NamedLayer)


def select_layers(
    layers: Sequence[L], choice: LayerChoice, *, error: type[GradkeepError], hint: str
) -> list[L]:
    """The layers that a choice names, in their own order.

    A name also stands for all that is inside it: `"encoder"` for `"encoder.fc1"`. A leading `!`
    leaves out: `["*", "!*.bias"]`. A choice that matches nothing is an error that offers the nearest
    names; `hint` says where all are listed.
    """
    if choice is None:
        return list(layers)
    several: Any = choice if isinstance(choice, list | tuple | set | frozenset) else [choice]
    wanted: list[str | type] = list(several)
    for item in wanted:
        _arguments.instance("layers", item, (str, type), error=error, expected=_EXPECTED)
    keep = [False] * len(layers)
    if wanted and all(isinstance(item, str) and item.startswith("!") for item in wanted):
        keep = [True] * len(layers)
    for item in wanted:
        leave_out = isinstance(item, str) and item.startswith("!")
        pattern = item[1:] if isinstance(item, str) and leave_out else item
        found = [index for index, layer in enumerate(layers) if _matches(layer, pattern)]
        if not found:
            raise _nothing(layers, pattern, error=error, hint=hint)
        for index in found:
            keep[index] = not leave_out
    chosen = [layer for layer, kept in zip(layers, keep, strict=True) if kept]
    if not chosen:
        raise error("no layer is left", found=f"layers={choice!r}", fix="choose at least one layer")
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
    asked = pattern if isinstance(pattern, str) else pattern.__name__
    near = difflib.get_close_matches(asked[:200], [*names, *types], n=3, cutoff=0.4)
    return error(
        f"no layer matches {_arguments.short_repr(asked)}",
        found=f"{len(names)} layers: {', '.join(names[:8])}{' ...' if len(names) > 8 else ''}",
        expected=f"a name, a glob such as 'layer4.*', or a type of {', '.join(types)}",
        fix=f"did you mean {' or '.join(near)}? {hint}" if near else hint,
    )
