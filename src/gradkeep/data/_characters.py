"""Plain text as characters, cut into windows, each character with the one that follows."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from gradkeep.data._examples import Examples
from gradkeep.data._names import known_name
from gradkeep.errors import DataError

if TYPE_CHECKING:
    import os


def load_characters(
    path: str | os.PathLike[str],
    *,
    split: str = "train",
    length: int = 64,
    stride: int | None = None,
    held_out: float = 0.1,
) -> Examples:
    """Windows `[length]` of a UTF-8 text; the labels `[length]` are the same, one character on.

    The last `held_out` of the text is the split "test". `classes` are the characters of the whole
    text in order, so that both splits number them alike. Windows begin every `stride` characters,
    by default side by side; what is left at the end is shorter than a window and not used.
    """
    import torch

    known_name(split, ("train", "test"), what="split", path=path)
    stride = length if stride is None else stride
    if length < 1 or stride < 1 or not 0 <= held_out < 1:
        raise DataError(
            "windows cannot be cut like this",
            found=f"length={length}, stride={stride}, held_out={held_out}",
            expected="length and stride at least 1, held_out from 0 up to 1",
        )
    try:
        text = Path(path).read_bytes().decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError("the text cannot be read", path=path, found=error) from error
    points = np.frombuffer(text.encode("utf-32-le"), "<u4")
    alphabet, numbers = np.unique(points, return_inverse=True)
    end = len(text) - round(len(text) * held_out)
    tokens = torch.from_numpy(numbers.astype(np.int64))
    tokens = tokens[:end] if split == "train" else tokens[end:]
    if len(tokens) <= length:
        raise DataError(
            f"the text of {split!r} is shorter than one window",
            path=path,
            found=f"{len(tokens)} characters",
            expected=f"more than length={length}",
        )
    # Views of one tensor: windows that overlap cost nothing.
    x, y = tokens[:-1].unfold(0, length, stride), tokens[1:].unfold(0, length, stride)
    return Examples(x, y, tuple(map(chr, alphabet.tolist())))
