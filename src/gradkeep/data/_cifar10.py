"""CIFAR-10 from the files of its authors, pickled or binary, or from an .npz file."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from gradkeep._annotations import checked
from gradkeep.data._examples import Examples, Scaling, channels_first, check_labels, whole_labels
from gradkeep.data._names import check_name, known_name
from gradkeep.data._npz import read_npz
from gradkeep.errors import DataError

if TYPE_CHECKING:
    import os

    Arrays = tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]


class _Type:
    """Stands for `numpy.dtype`: bytes only, so no crafted type can reach numpy."""

    def __init__(self, code: str | bytes, *_: object) -> None:
        if code not in ("u1", b"u1"):
            raise pickle.UnpicklingError(f"an array of type {code!r}, where only u1 is read")

    def __setstate__(self, state: object) -> None:
        pass


class _Array:
    """Stands for an array until the pickle has given its shape and bytes."""

    def __init__(self, *_: object) -> None:
        self.values: np.ndarray[Any, Any] | None = None

    def __setstate__(self, state: tuple[object, tuple[int, ...], _Type, bool, bytes]) -> None:
        _, shape, dtype, fortran, content = state
        if not isinstance(dtype, _Type) or not isinstance(content, bytes):
            raise pickle.UnpicklingError("an array that is not made of bytes")
        order = "F" if fortran else "C"
        self.values = np.frombuffer(content, np.uint8).reshape(shape, order=order)  # type: ignore[call-overload]


def _encode(text: str, encoding: str) -> bytes:
    """How Python 3 writes bytes in the protocol of Python 2."""
    if encoding not in ("latin1", b"latin1"):
        raise pickle.UnpicklingError(f"bytes encoded as {encoding!r}")
    return text.encode("latin1")


_NAMES = {
    ("numpy", "dtype"): _Type,
    ("numpy", "ndarray"): _Array,
    ("numpy.core.multiarray", "_reconstruct"): _Array,
    ("numpy._core.multiarray", "_reconstruct"): _Array,
    ("_codecs", "encode"): _encode,
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _NAMES:
            raise pickle.UnpicklingError(f"it names {module}.{name}")
        return _NAMES[module, name]


def read_pickled(path: str | os.PathLike[str]) -> dict[Any, Any]:
    """The dictionary in a pickle; nothing that the pickle names is ever called."""
    try:
        with open(path, "rb") as file:
            found = _Unpickler(file, encoding="bytes").load()
    except Exception as error:  # damaged pickles raise nearly anything
        raise DataError(
            "the pickle is damaged or holds more than data",
            path=path,
            found=error,
            expected="a dictionary of arrays of bytes, lists and texts",
        ) from error
    if not isinstance(found, dict):
        raise DataError(
            "the pickle holds no dictionary", path=path, found=type(found).__name__, expected="dict"
        )
    return {
        key: value.values if isinstance(value, _Array) else value for key, value in found.items()
    }


_CLASSES = (
    *("airplane", "automobile", "bird", "cat", "deer"),
    *("dog", "frog", "horse", "ship", "truck"),
)
_BATCHES = {"train": tuple(f"data_batch_{n}" for n in range(1, 6)), "test": ("test_batch",)}
_SHAPE = (3, 32, 32)
_PIXELS = 3 * 32 * 32
CIFAR10 = Scaling((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616))


@checked(DataError)
def load_cifar10(
    path: str | os.PathLike[str], *, split: str = "train", normalise: bool = True
) -> Examples:
    """Pictures float32 `[3, 32, 32]`, normalised by the training set's mean and deviation.

    `path` is the folder `cifar-10-batches-py` or `cifar-10-batches-bin`, the folder around it, or
    an .npz file with `x_train`, `y_train`, `x_test`, `y_test`. The order is that of the files.
    """
    known_name(split, _BATCHES, what="split", path=path)
    place = Path(path)
    check_name(place, "")
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
