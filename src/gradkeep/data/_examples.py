"""Examples in memory, with the face that every dataset here has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from gradkeep import _arguments
from gradkeep._annotations import check_fields
from gradkeep.errors import DataError

if TYPE_CHECKING:
    import os
    from collections.abc import Sequence

    import torch

    Positions = int | slice | Sequence[int] | torch.Tensor

    import torch


@dataclass(frozen=True, slots=True)
class Scaling:
    """Turns bytes into float32: divided by 255, less `mean`, divided by `std`, per channel."""

    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)

    def __post_init__(self) -> None:
        for value in (*_numbers("mean", self.mean), *_numbers("std", self.std)):
            _arguments.number("mean or std", value, error=DataError)
        for value in self.std:
            _arguments.number("std", value, error=DataError, above=0)

    def __call__(self, pixels: torch.Tensor) -> torch.Tensor:
        """Scale pixels `[..., C, H, W]`."""
        import torch

        mean, std = (torch.tensor(values)[:, None, None] for values in (self.mean, self.std))
        return (pixels.to(torch.float32) / 255 - mean) / std


def _numbers(name: str, values: object) -> tuple[float, ...]:
    kinds: tuple[type[tuple[float, ...]], ...] = (tuple,)
    return _arguments.instance(name, values, kinds, error=DataError, expected="a tuple of numbers")


@dataclass(frozen=True, slots=True, eq=False)
class Examples:
    """Inputs and labels in a fixed order: `examples[i]` is `(x, y)`, as a `DataLoader` needs it.

    A slice or a list of positions gives many at once, stacked.

    >>> import torch
    >>> examples = Examples(torch.eye(3), torch.tensor([0, 1, 1]), ("no", "yes"))
    >>> len(examples), examples[2]
    (3, (tensor([0., 0., 1.]), tensor(1)))
    """

    inputs: torch.Tensor
    """`[N, ...]` as kept; with `scaling`, bytes that become float32 when they are asked for"""
    labels: torch.Tensor
    """`[N]` or, for a label at each position, `[N, T]`; int64, each a place in `classes`"""
    classes: tuple[str, ...]
    scaling: Scaling | None = None

    def __post_init__(self) -> None:
        check_fields(self, DataError)
        if self.inputs.ndim == 0:
            raise DataError("inputs are one per row", found="a single number")
        check_labels(self.labels, rows=len(self.inputs), classes=self.classes)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, positions: Positions) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.inputs[positions]
        return x if self.scaling is None else self.scaling(x), self.labels[positions]


def whole_labels(
    values: np.ndarray[Any, Any], *, path: str | os.PathLike[str] | None = None
) -> torch.Tensor:
    """Labels of any whole type as int64 `[N]`."""
    import torch

    if values.dtype.kind not in "iu" or values.ndim != 1:
        raise DataError(
            "labels are whole numbers, one per row",
            path=path,
            found=f"{values.dtype} of shape {list(values.shape)}",
        )
    return torch.from_numpy(values.astype("int64"))


def numbered(labels: torch.Tensor) -> tuple[str, ...]:
    """Names for classes that have none: the numbers from 0 to the highest label."""
    return tuple(map(str, range(int(labels.max()) + 1 if len(labels) else 0)))


def check_labels(
    labels: torch.Tensor,
    *,
    rows: int,
    classes: Sequence[str],
    path: str | os.PathLike[str] | None = None,
) -> None:
    """Refuse labels that are not int64, not as many as the rows, or in no class."""
    import torch

    if labels.dtype != torch.int64 or labels.ndim == 0:
        found = f"{labels.dtype} of shape {list(labels.shape)}"
        raise DataError("labels are whole numbers, one per row", path=path, found=found)
    if len(labels) != rows:
        raise DataError(
            "there are not as many labels as rows",
            path=path,
            found=f"{len(labels)} labels",
            expected=f"{rows}",
        )
    wrong = ((labels < 0) | (labels >= len(classes))).nonzero()
    if len(wrong):
        first = tuple(wrong[0].tolist())
        raise DataError(
            f"{len(wrong)} labels are out of range",
            path=path,
            found=f"{int(labels[first])} in row {first[0]}",
            expected=f"0 to {len(classes) - 1}, for {len(classes)} classes",
        )


_CHANNELS = (1, 3, 4)


def channels_first(
    images: np.ndarray[Any, Any],
    *,
    path: str | os.PathLike[str],
    channels: Literal["first", "last"] | None = None,
) -> torch.Tensor:
    """Pictures `[N, H, W]`, `[N, H, W, C]` or `[N, C, H, W]` as `[N, C, H, W]`, same dtype.

    Where the channels are is seen from the shape; `channels` decides where it cannot be seen.
    """
    import torch

    shape = list(images.shape)
    if len(shape) == 3:
        images = images[:, None]
    elif len(shape) != 4:
        raise DataError(
            "these are no pictures", path=path, found=shape, expected="[N, H, W] or [N, H, W, C]"
        )
    else:
        places = {"first": shape[1] in _CHANNELS, "last": shape[3] in _CHANNELS}
        if channels is None and places["first"] == places["last"]:
            raise DataError(
                "the shape does not say where the channels are",
                path=path,
                found=shape,
                fix='say channels="first" or channels="last"',
            )
        if channels == "last" or (channels is None and places["last"]):
            images = images.transpose(0, 3, 1, 2)
    return torch.from_numpy(np.ascontiguousarray(images))
