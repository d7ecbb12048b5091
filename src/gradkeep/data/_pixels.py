"""Arrays of pictures, brought into one shape: channels first."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from gradkeep.errors import DataError

if TYPE_CHECKING:
    import os

    import torch

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
