"""What an operator is given and what it changes, by its schema."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch


SEQUENCES = frozenset((list, tuple))
"""In what operators take and give several tensors; looking up a type is the fastest test."""


@dataclass(frozen=True, slots=True)
class Signature:
    """What the log needs to know of an operator."""

    name: str
    writes: tuple[tuple[int, str], ...]
    """Position and name of the arguments that it changes in place."""


def signature_of(func: Any) -> Signature:
    """Read the schema once: this is kept per operator."""
    arguments = func._schema.arguments
    writes = tuple(
        (at, argument.name)
        for at, argument in enumerate(arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )
    return Signature(func._schema.name.partition("::")[2], writes)


def written(
    signature: Signature, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[int, torch.UntypedStorage]:
    """The storages that the operator changed, in the order of its arguments."""
    tensors: list[Tensor] = []
    for position, name in signature.writes:
        collect((args[position] if position < len(args) else kwargs.get(name),), tensors)
    storages = [tensor.untyped_storage() for tensor in tensors]
    return {id(storage): storage for storage in storages}


def collect(values: Iterable[Any], found: list[Tensor]) -> None:
    """Add the tensors among the values, and in lists among them."""
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif type(value) in SEQUENCES:
            found += [item for item in value if isinstance(item, Tensor)]


def geometry(tensor: Tensor) -> tuple[Any, ...]:
    """Which part of its storage a tensor shows, and how."""
    return (tensor.storage_offset(), tensor.size(), tensor.stride(), tensor.dtype)
