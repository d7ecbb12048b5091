"""CIFAR-10 from the files of its authors, pickled or binary, or from an .npz file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from gradkeep.data._examples import Examples, Scaling, check_labels, whole_labels
from gradkeep.data._names import known_name
from gradkeep.data._npz import read_npz
from gradkeep.data._pickled import read_pickled
from gradkeep.data._pixels import channels_first
from gradkeep.errors import DataError

if TYPE_CHECKING:
    import os

    Arrays = tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]

_CLASSES = (
    *("airplane", "automobile", "bird", "cat", "deer"),
    *("dog", "frog", "horse", "ship", "truck"),
)
_BATCHES = {"train": tuple(f"data_batch_{n}" for n in range(1, 6)), "test": ("test_batch",)}
_SHAPE = (3, 32, 32)
_PIXELS = 3 * 32 * 32
CIFAR10 = Scaling((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616))


def load_cifar10(
    path: str | os.PathLike[str], *, split: str = "train", normalise: bool = True
) -> Examples:
    """Pictures float32 `[3, 32, 32]`, normalised by the training set's mean and deviation.

    `path` is the folder `cifar-10-batches-py` or `cifar-10-batches-bin`, the folder around it, or
    an .npz file with `x_train`, `y_train`, `x_test`, `y_test`. The order is that of the files.
    """
    known_name(split, _BATCHES, what="split", path=path)
    place = Path(path)
    if place.is_file():
        arrays = read_npz(place, f"x_{split}", f"y_{split}")
        images, values = arrays[f"x_{split}"], arrays[f"y_{split}"]
    else:
        read, files = _files(place, split)
        parts = [read(file) for file in files]
        images, values = (np.concatenate(columns) for columns in zip(*parts, strict=True))
    if images.dtype != np.uint8 or sorted(images.shape[1:]) != sorted(_SHAPE):
        raise DataError(
            "these are no pictures of CIFAR-10",
            path=path,
            found=f"{images.dtype} of shape {list(images.shape)}",
            expected="uint8 of shape [N, 32, 32, 3]",
        )
    labels = whole_labels(values, path=path)
    check_labels(labels, rows=len(images), classes=_CLASSES, path=path)
    pixels = channels_first(images, path=path)
    return Examples(pixels, labels, _CLASSES, CIFAR10 if normalise else Scaling())


def _files(place: Path, split: str) -> tuple[Any, list[Path]]:
    """How to read the batches of a split, and where they are."""
    names = _BATCHES[split]
    for folder in (place, place / "cifar-10-batches-py", place / "cifar-10-batches-bin"):
        for suffix, read in (("", _pickled), (".bin", _binary)):
            files = [folder / f"{name}{suffix}" for name in names]
            missing = [file.name for file in files if not file.is_file()]
            if not missing:
                return read, files
            if len(missing) < len(files):
                raise DataError(
                    "batches of CIFAR-10 are missing", path=folder, found=", ".join(missing)
                )
    raise DataError(
        "CIFAR-10 is not here",
        path=place,
        found="no such place" if not place.exists() else f"no {names[0]}",
        expected="cifar-10-batches-py, cifar-10-batches-bin or an .npz file",
    )


def _pickled(path: Path) -> Arrays:
    batch = read_pickled(path)
    data, labels = (batch.get(key, batch.get(key.encode())) for key in ("data", "labels"))
    if (
        not isinstance(data, np.ndarray)
        or data.shape[1:] != (_PIXELS,)
        or not isinstance(labels, list)
        or not all(type(label) is int for label in labels)
    ):
        raise DataError(
            "this is no batch of CIFAR-10",
            path=path,
            found=", ".join(sorted(map(str, batch))) or "an empty dictionary",
            expected=f"data [N, {_PIXELS}] and a list of labels",
        )
    if len(labels) != len(data):
        raise DataError(
            "there are not as many labels as rows",
            path=path,
            found=f"{len(labels)} labels",
            expected=len(data),
        )
    return data.reshape(-1, *_SHAPE), np.array(labels, np.int64)


def _binary(path: Path) -> Arrays:
    """Rows of one byte label, then red, green and blue, each row by row."""
    content = np.fromfile(path, np.uint8)
    if not len(content) or len(content) % (1 + _PIXELS):
        raise DataError(
            "this is no whole batch of CIFAR-10",
            path=path,
            found=f"{len(content):,} bytes",
            expected=f"a multiple of {1 + _PIXELS:,}",
            fix="copy or download it again",
        )
    rows = content.reshape(-1, 1 + _PIXELS)
    return rows[:, 1:].reshape(-1, *_SHAPE), rows[:, 0].astype(np.int64)
