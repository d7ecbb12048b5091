"""Storages followed by weak references, which fire when the last owner lets go."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import torch


class Watch(weakref.ref[torch.UntypedStorage]):
    """Calls back when the storage is gone, and still knows which one it was."""

    __slots__ = ("key",)
    key: int


@dataclass(slots=True, eq=False)
class Followed:
    """A storage that is alive, and the numbers that its tensors have in the log."""

    root: int
    size: int
    watch: Watch
    views: dict[tuple[Any, ...], int] | None = None
