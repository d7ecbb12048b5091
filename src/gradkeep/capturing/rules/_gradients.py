"""What a rule makes of a layer's calls, and which dimension of its tensors counts the samples."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch
    from torch import nn

    from gradkeep.factors._form import AnyForm, GradientRows


@dataclass(frozen=True, slots=True, eq=False)
class LayerGradients:
    """The gradients of B samples for one layer, with the form they are in."""

    form: AnyForm
    rows: GradientRows
    source: torch.Tensor | None = None
    """The tensor that the prefix was read from, untouched: layers that read one share it."""
    sequence: int | None = None
    """T, if the positions of every sample are those of one sequence `[B, T, ...]`, in order."""


def runs_as(module: nn.Module, *kinds: type[nn.Module]) -> bool:
    """Whether a module is of one of the classes, or of a subclass that has their `forward`.

    >>> import torch
    >>> class Scaled(torch.nn.Linear):
    ...     def forward(self, x):
    ...         return 2 * super().forward(x)
    >>> runs_as(torch.nn.Linear(2, 3), torch.nn.Linear), runs_as(Scaled(2, 3), torch.nn.Linear)
    (True, False)
    """
    own = type(module)
    return any(issubclass(own, kind) and own.forward is kind.forward for kind in kinds)


SampleAxis = Literal["first", "second", "flat", "interleaved", "shared"]
"""Which dimension counts the samples: `[B, ...]`, `[T, B, ...]`, `[B * T, ...]` or `[T * B, ...]`; of a
call that all samples share, such as positions `[T]`, none does until its output is spread to all of them."""
SAMPLE_AXES: tuple[SampleAxis, ...] = ("first", "second", "flat")
INTERLEAVED: tuple[SampleAxis, ...] = ("interleaved",)
"""Of time-major tensors that were flattened: sizes do not tell it from `flat`, only a proof does."""


def possible(shape: torch.Size, rows: int, axis: SampleAxis) -> bool:
    """Whether a tensor of this shape can be read so for that many samples."""
    if axis == "first":
        return len(shape) >= 1 and shape[0] == rows
    if axis == "second":
        return len(shape) >= 2 and shape[1] == rows
    return len(shape) >= 1 and rows > 0 and shape[0] > rows and shape[0] % rows == 0


def by_sample(tensor: torch.Tensor, rows: int, axis: SampleAxis) -> torch.Tensor:
    """The tensor as `[B, ...]`.

    `first` is `[B, ...]`, `second` `[T, B, ...]`, `flat` `[B * T, ...]`, `interleaved` `[T * B, ...]`.

    >>> import torch
    >>> by_sample(torch.zeros(5, 2, 3), 2, "second").shape
    torch.Size([2, 5, 3])
    """
    if axis in ("first", "shared"):
        return tensor
    if axis == "second":
        return tensor.transpose(0, 1)
    if axis == "interleaved":
        return tensor.reshape(len(tensor) // rows, rows, *tensor.shape[1:]).transpose(0, 1)
    return tensor.reshape(rows, len(tensor) // rows, *tensor.shape[1:])
