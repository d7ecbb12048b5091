"""Named arrays in an .npz file, read without unpickling anything."""

from __future__ import annotations

import zipfile
import zlib
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from gradkeep._annotations import checked
from gradkeep.data._examples import (
    Examples,
    Scaling,
    channels_first,
    check_labels,
    numbered,
    whole_labels,
)
from gradkeep.data._names import known_name
from gradkeep.errors import DataError

if TYPE_CHECKING:
    import os
    from collections.abc import Sequence


def read_npz(
    path: str | os.PathLike[str], *names: str, optional: Sequence[str] = ()
) -> dict[str, np.ndarray[Any, Any]]:
    """The named arrays; those that are optional may be missing."""
    if not zipfile.is_zipfile(path):
        raise DataError(
            "this is no .npz file", path=path, found="no archive, or none that is whole"
        )
    try:
        with np.load(path, allow_pickle=False) as file:
            for name in names:
                known_name(name, file.files, what="array in the file", path=path)
            wanted = [*names, *(name for name in optional if name in file.files)]
            return {name: file[name] for name in wanted}
    except DataError:
        raise
    except (OSError, EOFError, ValueError, zipfile.BadZipFile, zlib.error) as error:
        raise DataError("the .npz file cannot be read", path=path, found=error) from error


@checked(DataError)
def load_npz(
    path: str | os.PathLike[str],
    *,
    split: str = "train",
    inputs: str = "x_{split}",
    labels: str = "y_{split}",
    classes: str | Sequence[str] = "classes",
    channels: Literal["first", "last"] | None = None,
    mean: Sequence[float] = (0.0,),
    std: Sequence[float] = (1.0,),
) -> Examples:
    """Inputs and labels by the names of their arrays, in which `{split}` stands for the split.

    Pictures in bytes become float32 `[C, H, W]`, 0 to 1 unless `mean` and `std` say otherwise;
    other types are left as they are. Without an array of `classes`, numbers are their names.
    """
    import torch

    x, y = inputs.format(split=split), labels.format(split=split)
    arrays = read_npz(path, x, y, optional=[classes] if isinstance(classes, str) else [])
    values = arrays[x]
    if values.ndim == 0 or len(values) == 0:
        raise DataError(f"{x} has no rows", path=path, found=list(values.shape))
    marks = whole_labels(arrays[y], path=path)
    if not isinstance(classes, str):
        names = tuple(classes)
    elif classes in arrays:
        names = tuple(map(str, arrays[classes].tolist()))
    else:
        names = numbered(marks)
    check_labels(marks, rows=len(values), classes=names, path=path)
    if values.dtype == np.uint8 and values.ndim in (3, 4):
        pixels = channels_first(values, path=path, channels=channels)
        return Examples(pixels, marks, names, Scaling(tuple(mean), tuple(std)))
    if values.dtype.kind not in "biuf":
        raise DataError(f"{x} holds no numbers", path=path, found=values.dtype)
    return Examples(torch.from_numpy(np.ascontiguousarray(values)), marks, names)
