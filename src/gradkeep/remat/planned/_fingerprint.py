"""A few numbers of a tensor, taken when it is let go and compared when it is back."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from gradkeep.remat.tracing._tensors import Geometry

_COUNT = 32
_MARKED = 4096
_FEW = 3


class TensorSample(NamedTuple):
    """Where to look: a coarse lattice in the tensor."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def of(self, tensor: Tensor) -> list[float]:
        """The numbers there; about 3 us."""
        found: list[float] = tensor.as_strided(self.size, self.stride, self.offset).tolist()
        return found


def sample_of(geometry: Geometry, count: int = _COUNT) -> TensorSample:
    """A lattice of about `count` places over the whole of a tensor."""
    numel = math.prod(geometry.size)
    extent = 1 + sum((n - 1) * step for n, step in zip(geometry.size, geometry.stride, strict=True))
    if numel and extent == numel:
        # Dense: any stride through memory stays inside. An odd one meets every channel.
        step = max(1, numel // count)
        step += 1 - step % 2 if step > 1 else 0
        return TensorSample((1 + (numel - 1) // step,), (step,), geometry.offset)
    left, size, stride = max(1, count), [], []
    for n, step in zip(geometry.size, geometry.stride, strict=True):
        some = max(1, min(n, left)) if n else 0
        left = max(1, left // max(some, 1))
        size.append(some)
        stride.append(step * max(1, n // max(some, 1)))
    return TensorSample(tuple(size), tuple(stride), geometry.offset)


def same_sample(left: object, right: object) -> bool:
    """Whether two samples are equal; not-a-number equals itself."""
    return left == right or repr(left) == repr(right)


def mask_numbers(tensor: Tensor) -> frozenset[float]:
    """The numbers of a mask; empty for tensors with more than a few different numbers."""
    if tensor.requires_grad or tensor.numel() < _COUNT or tensor.dtype.is_complex:
        return frozenset()
    with torch._C._DisableTorchDispatch():
        flat = tensor.detach().reshape(-1)
        some = torch.unique(flat[:: max(1, flat.numel() // _MARKED)])
        if len(some) > _FEW:
            return frozenset()
        return frozenset(some.tolist())
