"""The idx format of MNIST: a typed array, big endian, plain or gzip."""

from __future__ import annotations

import gzip
import math
import os
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
from gradkeep.data._names import check_name, known_name
from gradkeep.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Sequence

_TYPES = {0x08: ">u1", 0x09: ">i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}
_PREFIXES = {"train": ("train",), "test": ("t10k", "test")}
MNIST = Scaling((0.1307,), (0.3081,))


@checked(DataError)
def read_idx(path: str | os.PathLike[str]) -> np.ndarray[Any, np.dtype[Any]]:
    """The array in an idx file, in this machine's byte order.

    >>> import tempfile
    >>> with tempfile.NamedTemporaryFile() as file:
    ...     _ = file.write(bytes([0, 0, 8, 1, 0, 0, 0, 2, 7, 9]))
    ...     file.flush()
    ...     read_idx(file.name).tolist()
    [7, 9]
    """
    content = _content(Path(path))
    head = content[:4]
    if len(head) < 4 or head[:2] != b"\0\0" or head[2] not in _TYPES:
        raise DataError(
            "this is no idx file",
            path=path,
            found=f"it begins with {head.hex(' ') or 'nothing'}",
            expected=f"00 00, then one of {' '.join(f'{code:02x}' for code in _TYPES)}",
        )
    dtype, start = np.dtype(_TYPES[head[2]]), 4 + 4 * head[3]
    shape = tuple(np.frombuffer(content[4:start], ">u4").tolist()) if len(content) >= start else ()
    expected = start + math.prod(shape) * dtype.itemsize
    if len(shape) != head[3] or len(content) != expected:
        cut = len(shape) != head[3] or len(content) < expected
        raise DataError(
            "the idx file is cut short" if cut else "the idx file goes on after its last value",
            path=path,
            found=f"{len(content):,} bytes",
            expected=f"{expected:,} bytes" + (f" for shape {list(shape)}" if shape else ""),
            fix="copy or download it again",
        )
    values = np.frombuffer(content, dtype, offset=start).reshape(shape)
    return values.astype(dtype.newbyteorder("="))


@checked(DataError)
def load_idx(
    path: str | os.PathLike[str],
    *,
    split: str = "train",
    images: str | None = None,
    labels: str | None = None,
    classes: Sequence[str] | None = None,
    normalise: bool = True,
    mean: Sequence[float] = MNIST.mean,
    std: Sequence[float] = MNIST.std,
) -> Examples:
    """Pictures and labels from a folder of idx files, named as MNIST names them or as told.

    Bytes `[N, H, W]` become float32 `[1, H, W]`, normalised by MNIST's mean and deviation unless
    told otherwise; other types are left as they are. Classes are named by their numbers.
    """
    import torch

    known_name(split, _PREFIXES, what="split", path=path)
    folder = Path(path)
    image_file = _find(folder, split, "images", images)
    label_file = _find(folder, split, "labels", labels)
    values = read_idx(image_file)
    if values.ndim == 0 or len(values) == 0:
        raise DataError("the idx file holds no rows", path=image_file, found=list(values.shape))
    marks = whole_labels(read_idx(label_file), path=label_file)
    names = numbered(marks) if classes is None else tuple(classes)
    check_labels(marks, rows=len(values), classes=names, path=label_file)
    if values.dtype != np.uint8 or values.ndim not in (3, 4):
        return Examples(torch.from_numpy(values), marks, names)
    scaling = Scaling(tuple(mean), tuple(std)) if normalise else Scaling()
    return Examples(channels_first(values, path=image_file), marks, names, scaling)


def _content(path: Path) -> bytes:
    try:
        content = path.read_bytes()
        # By its first bytes, for packages rename what they unpack.
        return gzip.decompress(content) if content[:2] == b"\x1f\x8b" else content
    except (OSError, EOFError, zlib.error) as error:
        raise DataError("the idx file cannot be read", path=path, found=error) from error


def _find(folder: Path, split: str, kind: str, name: str | None) -> Path:
    if name is not None:
        names = [name]
    else:
        dims = "idx3" if kind == "images" else "idx1"
        stems = [f"{prefix}-{kind}" for prefix in _PREFIXES[split]]
        plain = [f"{stem}{joint}{dims}-ubyte" for stem in stems for joint in "-."]
        names = [*plain, *(f"{one}.gz" for one in plain)]
    check_name(folder, name or "")
    for one in names:
        if (folder / one).is_file():
            return folder / one
    there = sorted(os.listdir(folder))[:8] if folder.is_dir() else "no folder"
    raise DataError(
        f"there is no file with the {kind} of {split!r}",
        path=folder,
        found=", ".join(there) or "an empty folder" if isinstance(there, list) else there,
        expected=" or ".join(names),
        fix=f"name the file with {kind}=...",
    )
