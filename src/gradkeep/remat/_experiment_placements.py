"""Where `torch.utils.checkpoint` can be placed in a model, by name.

`K segments` cuts a chain of layers (`nn.Sequential`) into K pieces and keeps what lies between them;
the last piece is left as it is, for its backward pass comes first. `all`, `even`, `odd`,
`first half` and `last half` wrap parts of any model one by one.
"""

from __future__ import annotations

import contextlib
import itertools
import re
from typing import TYPE_CHECKING, Any

from gradkeep.errors import RematError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn

PLACEMENTS = (
    *("2 segments", "3 segments", "4 segments", "8 segments"),
    *("all", "even", "odd", "first half", "last half"),
)
_SEGMENTS = re.compile(r"([1-9]\d*) segments?")


def known_placement(name: str) -> bool:
    """Whether a name means something, whatever the model.

    >>> known_placement("5 segments"), known_placement("everywhere")
    (True, False)
    """
    return name in PLACEMENTS or _SEGMENTS.fullmatch(name) is not None


@contextlib.contextmanager
def placed(model: nn.Module, name: str) -> Iterator[None]:
    """Inside `with` the model has checkpoints there; raises `RematError` if it has no such places."""
    segments = _SEGMENTS.fullmatch(name)
    if segments is not None:
        wrapped = [(model, _in_segments(model, int(segments[1])))]
    else:
        wrapped = [(part, _checkpointed(part)) for part in _chosen(_parts(model), name)]
    for module, forward in wrapped:
        module.forward = forward
    try:
        yield
    finally:
        for module, _ in wrapped:
            del module.forward


def _in_segments(model: nn.Module, count: int) -> Any:
    from torch import nn
    from torch.utils.checkpoint import checkpoint

    if not isinstance(model, nn.Sequential) or len(model) < count:
        raise RematError(
            "this model has no such placement of checkpoints",
            found=f"{count} segments of {type(model).__name__}",
            expected=f"a chain (nn.Sequential) of at least {count} layers",
            fix="for other models: all, even, odd, first half, last half",
        )
    layers = list(model)
    edges = [round(part * len(layers) / count) for part in range(count + 1)]
    pieces = [nn.Sequential(*layers[low:high]) for low, high in itertools.pairwise(edges)]

    def forward(x: Any) -> Any:
        for piece in pieces[:-1]:
            x = checkpoint(piece, x, use_reentrant=False)
        return pieces[-1](x)

    return forward


def _checkpointed(part: nn.Module) -> Any:
    from torch.utils.checkpoint import checkpoint

    plain = part.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(plain, *args, use_reentrant=False, **kwargs)

    return forward


def _parts(model: nn.Module) -> list[nn.Module]:
    """The parts with parameters, lists of them opened."""
    from torch import nn

    found: list[nn.Module] = []
    for child in model.children():
        found += list(child) if isinstance(child, nn.ModuleList) else [child]
    return [part for part in found if next(part.parameters(), None) is not None]


def _chosen(parts: list[nn.Module], name: str) -> list[nn.Module]:
    half = len(parts) // 2
    chosen = {
        "all": parts,
        "even": parts[::2],
        "odd": parts[1::2],
        "first half": parts[:half],
        "last half": parts[half:],
    }[name]
    if not chosen:
        raise RematError(
            "this model has no such placement of checkpoints",
            found=f"{name!r} of {len(parts)} parts with parameters",
        )
    return chosen
