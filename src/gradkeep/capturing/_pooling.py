"""Max pooling over windows of 2 x 2, several times as fast as torch on the CPU.

Torch searches the windows one after another. Comparing all left pixels with all right ones, and then all upper
with all lower ones, gives the same values and chooses the same pixels: the first of equal ones. It saves
which one it chose instead of indices.
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
    """Replace the forward of each `nn.MaxPool2d` over separate windows of 2 x 2 until the block ends."""
    # A forward that somebody replaced, such as a compiled one, is not touched.
    pools = [m for m in model.modules() if type(m) is nn.MaxPool2d and "forward" not in vars(m)]
    pools = [pool for pool in pools if _has_separate_windows(pool)]
    for pool in pools:
        pool.forward = _build_forward(pool)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for pool in pools:
            del pool.forward


def _has_separate_windows(pool: nn.MaxPool2d) -> bool:
    stride = pool.kernel_size if pool.stride is None else pool.stride
    settings = ((pool.kernel_size, 2), (stride, 2), (pool.padding, 0), (pool.dilation, 1))
    return not pool.return_indices and all(
        value in (side, (side, side)) for value, side in settings
    )


def _build_forward(pool: nn.MaxPool2d) -> Any:
    def forward(x: Any) -> Any:
        if not _is_supported(x):
            return nn.MaxPool2d.forward(pool, x)
        return _HalvingMaxPool.apply(x)  # type: ignore[no-untyped-call]

    return forward


def _is_supported(x: Any) -> bool:
    """Return True for contiguous float32 images `[B, C, H, W]` of even sizes on the CPU that need a gradient."""
    return (
        type(x) is torch.Tensor
        and x.dim() == 4
        and x.shape[2] % 2 == x.shape[3] % 2 == 0
        and x.dtype == torch.float32
        and x.device.type == "cpu"
        and x.is_contiguous()
        and x.requires_grad
    )


class _HalvingMaxPool(torch.autograd.Function):
    """Max pooling `[B, C, H, W]` -> `[B, C, H / 2, W / 2]`."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        left, right = x[..., ::2], x[..., 1::2]
        columns = torch.maximum(left, right)
        upper, lower = columns[:, :, ::2], columns[:, :, 1::2]
        ctx.save_for_backward(right > left, lower > upper)
        return torch.maximum(upper, lower)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        in_right, in_lower = ctx.saved_tensors
        result = gradient.new_empty(*in_right.shape[:3], 2 * in_right.shape[3])
        size = result[0].numel() if len(result) else 0
        for start, stop in tiles(len(result), size, result.element_size(), CACHED):
            part = slice(start, stop)
            columns = gradient.new_empty(in_right[part].shape)
            _split(gradient[part], in_lower[part], columns[:, :, ::2], columns[:, :, 1::2])
            _split(columns, in_right[part], result[part][..., ::2], result[part][..., 1::2])
        return result


def _split(
    values: torch.Tensor, is_second: torch.Tensor, first: torch.Tensor, second: torch.Tensor
) -> None:
    """Write each finite value to `first` or `second`, and zero to the other."""
    torch.mul(values, is_second, out=second)
    torch.sub(values, second, out=first)
