"""Embeddings: what named layers put out, one vector per sample."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_flatten

from gradkeep.errors import CaptureError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy as np
    from torch import nn


def modules_named(model: nn.Module, names: Sequence[str]) -> dict[str, nn.Module]:
    """The modules with these paths."""
    known = dict(model.named_modules())
    missing = [name for name in names if name not in known]
    if missing:
        raise CaptureError(
            f"no layer {missing[0]!r} to take embeddings from",
            found=f"{', '.join(list(known)[1:9])} ...",
            fix="give the path of a module, such as 'fc1'",
        )
    return {name: known[name] for name in names}


@contextlib.contextmanager
def seeing_outputs(modules: dict[str, nn.Module]) -> Iterator[dict[str, torch.Tensor]]:
    """The first output of each module while the block runs."""
    seen: dict[str, torch.Tensor] = {}

    def keeper(name: str) -> Any:
        def keep(module: nn.Module, args: Any, output: Any) -> None:
            tensors = [t for t in tree_flatten(output)[0] if isinstance(t, torch.Tensor)]
            if tensors:
                seen.setdefault(name, tensors[0].detach())

        return keep

    with contextlib.ExitStack() as stack:
        for name, module in modules.items():
            stack.callback(module.register_forward_hook(keeper(name)).remove)
        yield seen


def vectors(seen: dict[str, torch.Tensor], rows: int) -> dict[str, np.ndarray[Any, Any]]:
    """One vector `[B, D]` per sample: the mean over pixels `[B, D, ...]` or tokens `[B, T, D]`."""
    found = {}
    for name, output in seen.items():
        if output.dim() < 2 or len(output) != rows:
            raise CaptureError(
                f"layer {name} puts out no vector per sample",
                found=f"shape {tuple(output.shape)} for {rows} samples",
                expected="[B, D], [B, T, D] or [B, D, H, W]",
            )
        if output.dim() == 3:
            output = output.mean(1)
        elif output.dim() > 3:
            output = output.flatten(2).mean(2)
        found[f"embedding.{name}"] = output.float().cpu().numpy()
    return found
