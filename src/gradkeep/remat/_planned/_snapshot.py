"""What a step changes besides parameters: to be put back if the step is undone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    import weakref
    from collections.abc import Sequence

    from torch import Tensor


class Snapshot:
    """Random states and buffers at the beginning of a step, gradients when its first tensor is saved.

    The gradients come later, because most steps begin by clearing them.
    """

    def __init__(self) -> None:
        self._random = torch.get_rng_state()
        self._cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
        self._buffers: list[tuple[Tensor, Tensor]] = []
        self._gradients: list[tuple[Any, Tensor | None]] = []
        self.whole = True
        """Whether everything can be put back: gradients that were there before need a copy."""

    def look(
        self,
        buffers: Sequence[weakref.ref[Tensor]],
        parameters: Sequence[weakref.ref[Any]],
        *,
        copies: bool,
    ) -> None:
        """Remember these; gradients that are there already only if `copies` may be made."""
        found = [buffer for reference in buffers if (buffer := reference()) is not None]
        self._buffers = [(buffer, buffer.detach().clone()) for buffer in found]
        for reference in parameters:
            parameter = reference()
            if parameter is None:
                continue
            before = parameter.grad
            if before is None:
                self._gradients.append((parameter, None))
            elif copies:
                self._gradients.append((parameter, before.detach().clone()))
            else:
                self.whole = False

    @torch.no_grad()
    def restore(self) -> None:
        """Put everything back."""
        torch.set_rng_state(self._random)
        if self._cuda:
            torch.cuda.set_rng_state_all(self._cuda)
        for buffer, copy in self._buffers:
            buffer.copy_(copy)
        for parameter, gradient in self._gradients:
            if gradient is None or parameter.grad is None:
                parameter.grad = gradient
            else:
                parameter.grad.copy_(gradient)
