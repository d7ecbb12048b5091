"""Max pooling of halves, while a model is replayed, as torch would do it but several times as fast.

Torch looks for the largest of four pixels one window after the other. Comparing all left pixels with
all right ones, and then all upper ones with all lower ones, gives the same numbers and the same pixels,
the first of those that are equal, and needs no indices.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from gradkeep.factors._arithmetic import CACHED, tiles

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextlib.contextmanager
def fast_pooling(model: nn.Module) -> Iterator[None]:
    """Let each `nn.MaxPool2d` of windows 2 x 2 that do not overlap run so while the block runs."""
    # A forward of someone else's own, such as a compiled one, stays.
    pools = [m for m in model.modules() if type(m) is nn.MaxPool2d and "forward" not in vars(m)]
    pools = [pool for pool in pools if _halves(pool)]
    for pool in pools:
        pool.forward = _forward_of(pool)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for pool in pools:
            del pool.forward


def _halves(pool: nn.MaxPool2d) -> bool:
    step = pool.kernel_size if pool.stride is None else pool.stride
    wanted = ((pool.kernel_size, 2), (step, 2), (pool.padding, 0), (pool.dilation, 1))
    same = all(given in (value, (value, value)) for given, value in wanted)
    return same and not pool.return_indices


def _forward_of(pool: nn.MaxPool2d) -> Any:
    def forward(x: Any) -> Any:
        if not _is_slow(x):
            return nn.MaxPool2d.forward(pool, x)
        return _Halved.apply(x)  # type: ignore[no-untyped-call]

    return forward


def _is_slow(x: Any) -> bool:
    """Whether it is a plain batch of images, channel by channel, of even sizes."""
    return (
        type(x) is torch.Tensor
        and x.dim() == 4
        and x.shape[2] % 2 == x.shape[3] % 2 == 0
        and x.dtype == torch.float32
        and x.device.type == "cpu"
        and x.is_contiguous()
        and x.requires_grad
    )


class _Halved(torch.autograd.Function):
    """`[B, C, H, W]` -> `[B, C, H / 2, W / 2]`."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        left, right = x[..., ::2], x[..., 1::2]
        wide = torch.maximum(left, right)
        upper, lower = wide[:, :, ::2], wide[:, :, 1::2]
        ctx.save_for_backward(right > left, lower > upper)
        return torch.maximum(upper, lower)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        right, lower = ctx.saved_tensors
        found = gradient.new_empty(*right.shape[:3], 2 * right.shape[3])
        values = found[0].numel() if len(found) else 0
        for start, stop in tiles(len(found), values, found.element_size(), CACHED):
            some = slice(start, stop)
            _spread(gradient[some], right[some], lower[some], found[some])
        return found


def _spread(
    gradient: torch.Tensor, right: torch.Tensor, lower: torch.Tensor, into: torch.Tensor
) -> None:
    """Write each number where its pixel was found, and zeros beside it."""
    wide = gradient.new_empty(right.shape)
    torch.mul(gradient, lower, out=wide[:, :, 1::2])
    torch.sub(gradient, wide[:, :, 1::2], out=wide[:, :, ::2])
    torch.mul(wide, right, out=into[..., 1::2])
    torch.sub(wide, into[..., 1::2], out=into[..., ::2])
