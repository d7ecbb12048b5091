"""Ways to a tensor's bytes that pass no operator: they bring the bytes back first."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from gradkeep.remat._online._mode import Online

NAMES = ("numpy", "tolist", "data_ptr", "__array__", "__dlpack__", "__reduce_ex__", "share_memory_")
_active: list[Online] = []
_plain: dict[str, Any] = {}


def raise_guards(online: Online) -> None:
    """From now on these methods of tensors ask the runtime first."""
    if not _active:
        for name in NAMES:
            _plain[name] = getattr(torch.Tensor, name)
            setattr(torch.Tensor, name, _guarded(_plain[name]))
    _active.append(online)


def lower_guards(online: Online) -> None:
    """They are torch's own again once no runtime is left."""
    _active.remove(online)
    if not _active:
        for name, plain in _plain.items():
            setattr(torch.Tensor, name, plain)
        _plain.clear()


def _guarded(plain: Any) -> Any:
    @functools.wraps(plain)
    def method(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if self.layout == torch.strided and not torch.nn.parameter.is_lazy(self):
            for online in _active:
                online.bring_back(self)
        return plain(self, *args, **kwargs)

    return method
