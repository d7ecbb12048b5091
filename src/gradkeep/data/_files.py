"""Image data in files: IDX (MNIST), NPZ and the CIFAR-10 archives."""

from __future__ import annotations

import gzip
import math
import os
import pickle
import zipfile
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from gradkeep._arguments import checked
from gradkeep.data._examples import (
    Examples,
    Scaling,
    channels_first,
    check_labels,
    check_name,
    known_name,
    numbered,
    whole_labels,
)
from gradkeep.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Sequence

    Arrays = tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]


_TYPES = {0x08: ">u1", 0x09: ">i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}
_PREFIXES = {"train": ("train",), "test": ("t10k", "test")}
MNIST = Scaling((0.1307,), (0.3081,))


def read_idx(path: str | os.PathLike[str]) -> np.ndarray[Any, np.dtype[Any]]:
    """Read the array of an idx file, in this machine's byte order.

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
            "the file is not an idx file",
            code="data.not_idx",
            path=path,
            found=f"first bytes {head.hex(' ') or 'missing'}",
            expected=f"00 00, then one of {' '.join(f'{code:02x}' for code in _TYPES)}",
        )
    dtype, start = np.dtype(_TYPES[head[2]]), 4 + 4 * head[3]
    shape = tuple(np.frombuffer(content[4:start], ">u4").tolist()) if len(content) >= start else ()
    expected = start + math.prod(shape) * dtype.itemsize
    if len(shape) != head[3] or len(content) != expected:
        cut = len(shape) != head[3] or len(content) < expected
        raise DataError(
            "the idx file is truncated" if cut else "the idx file has bytes after its last value",
            code="data.idx_truncated" if cut else "data.idx_too_long",
            path=path,
            found=f"{len(content):,} bytes",
            expected=f"{expected:,} bytes" + (f" for shape {list(shape)}" if shape else ""),
            fix="Copy or download it again.",
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
    """Load images and labels from a folder of idx files with the names of MNIST, or with given names.

    Bytes `[N, H, W]` become float32 `[1, H, W]`, normalized by MNIST's mean and standard deviation by default;
    other types stay as they are. Classes are named by their numbers.
    """
    import torch

    known_name(split, _PREFIXES, noun="split", path=path)
    folder = Path(path)
    image_file = _find(folder, split, "images", images)
    label_file = _find(folder, split, "labels", labels)
    values = read_idx(image_file)
    if values.ndim == 0 or len(values) == 0:
        raise DataError(
            "the idx file has no rows",
            code="data.no_rows",
            path=image_file,
            found=list(values.shape),
        )
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
        # By its first bytes: packages rename unpacked files.
        return gzip.decompress(content) if content[:2] == b"\x1f\x8b" else content
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(
            "the idx file cannot be read", code="data.unreadable", path=path, found=error
        ) from error


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
    names_found = sorted(os.listdir(folder))[:8] if folder.is_dir() else "no folder"
    raise DataError(
        f"there is no file with the {kind} of {split!r}",
        code="data.file_missing",
        path=folder,
        found=", ".join(names_found) or "an empty folder"
        if isinstance(names_found, list)
        else names_found,
        expected=" or ".join(names),
        fix=f"Pass the name of the file as {kind}=.",
    )


def read_npz(
    path: str | os.PathLike[str], *names: str, optional: Sequence[str] = ()
) -> dict[str, np.ndarray[Any, Any]]:
    """Read the named arrays; optional ones may be missing."""
    try:
        # numpy leaves a broken archive open.
        with open(path, "rb") as source, np.load(source, allow_pickle=False) as file:
            for name in names:
                known_name(name, file.files, noun="array in the file", path=path)
            present = [*names, *(name for name in optional if name in file.files)]
            return {name: file[name] for name in present}
    except DataError:
        raise
    except (OSError, EOFError, ValueError, TypeError, zipfile.BadZipFile, zlib.error) as error:
        raise DataError(
            "the file is not a complete .npz archive",
            code="data.not_npz",
            path=path,
            found=error,
            fix="Check the path, or copy the file again.",
        ) from error


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
    """Load inputs and labels by the names of their arrays, in which `{split}` is replaced by the split.

    Images in bytes become float32 `[C, H, W]`, from 0 to 1 unless `mean` and `std` are given; other types stay as
    they are. Without an array of `classes`, numbers are their names.
    """
    import torch

    x, y = inputs.format(split=split), labels.format(split=split)
    arrays = read_npz(path, x, y, optional=[classes] if isinstance(classes, str) else [])
    values = arrays[x]
    if values.ndim == 0 or len(values) == 0:
        raise DataError(
            f"{x} has no rows", code="data.no_rows", path=path, found=list(values.shape)
        )
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
        raise DataError(
            f"{x} does not hold numbers", code="data.not_numbers", path=path, found=values.dtype
        )
    return Examples(torch.from_numpy(np.ascontiguousarray(values)), marks, names)


class _Type:
    """Replaces `numpy.dtype` in pickles: only bytes, so that no crafted type reaches numpy."""

    def __init__(self, code: str | bytes, *_: object) -> None:
        if code not in ("u1", b"u1"):
            raise pickle.UnpicklingError(f"an array of type {code!r}, but only u1 is allowed")

    def __setstate__(self, state: object) -> None:
        pass


class _Array:
    """Holds an array until the pickle has set its shape and bytes."""

    def __init__(self, *_: object) -> None:
        self.values: np.ndarray[Any, Any] | None = None

    def __setstate__(self, state: tuple[object, tuple[int, ...], _Type, bool, bytes]) -> None:
        _, shape, dtype, fortran, content = state
        if not isinstance(dtype, _Type) or not isinstance(content, bytes):
            raise pickle.UnpicklingError("an array that does not consist of bytes")
        order = "F" if fortran else "C"
        self.values = np.frombuffer(content, np.uint8).reshape(shape, order=order)  # type: ignore[call-overload]


def _encode(text: str, encoding: str) -> bytes:
    """Decode bytes that Python 3 wrote in the protocol of Python 2."""
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
    """Read the dictionary of a pickle without calling anything that the pickle names."""
    try:
        with open(path, "rb") as file:
            content = _Unpickler(file, encoding="bytes").load()
    except Exception as error:  # damaged pickles raise nearly anything
        raise DataError(
            "the pickle is damaged or holds more than data",
            code="data.unsafe_pickle",
            path=path,
            found=str(error),
            expected="a dictionary of arrays of bytes, lists and texts",
        ) from error
    if not isinstance(content, dict):
        raise DataError(
            "the pickle does not hold a dictionary",
            code="data.pickle_not_dict",
            path=path,
            found=type(content).__name__,
            expected="dict",
        )
    return {
        key: value.values if isinstance(value, _Array) else value for key, value in content.items()
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
    """Load CIFAR-10 as images float32 `[3, 32, 32]`, in the order of the files.

    Args:
        path: Folder `cifar-10-batches-py` or `cifar-10-batches-bin`, its parent, or an .npz file with
            `x_train`, `y_train`, `x_test`, `y_test`.
        split: `"train"` or `"test"`.
        normalise: Normalize by the training set's mean and standard deviation; False for 0 to 1.

    Returns:
        Images and labels.

    Raises:
        DataError: The split is unknown, or the files are missing or damaged.
    """
    known_name(split, _BATCHES, noun="split", path=path)
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
            "these are not images of CIFAR-10",
            code="data.not_cifar10",
            path=path,
            found=f"{images.dtype} of shape {list(images.shape)}",
            expected="uint8 of shape [N, 32, 32, 3]",
        )
    labels = whole_labels(values, path=path)
    check_labels(labels, rows=len(images), classes=_CLASSES, path=path)
    pixels = channels_first(images, path=path)
    return Examples(pixels, labels, _CLASSES, CIFAR10 if normalise else Scaling())


def _files(place: Path, split: str) -> tuple[Any, list[Path]]:
    """Return the reader and the files of a split."""
    names = _BATCHES[split]
    for folder in (place, place / "cifar-10-batches-py", place / "cifar-10-batches-bin"):
        for suffix, read in (("", _pickled), (".bin", _binary)):
            files = [folder / f"{name}{suffix}" for name in names]
            missing = [file.name for file in files if not file.is_file()]
            if not missing:
                return read, files
            if len(missing) < len(files):
                raise DataError(
                    "batches of CIFAR-10 are missing",
                    code="data.batches_missing",
                    path=folder,
                    found=", ".join(missing),
                )
    raise DataError(
        "CIFAR-10 was not found",
        code="data.cifar10_missing",
        path=place,
        found="no such path" if not place.exists() else f"no {names[0]}",
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
            "the file is not a batch of CIFAR-10",
            code="data.not_a_batch",
            path=path,
            found=", ".join(sorted(map(str, batch))) or "an empty dictionary",
            expected=f"data [N, {_PIXELS}] and a list of labels",
        )
    if len(labels) != len(data):
        raise DataError(
            "the number of labels differs from the number of rows",
            code="data.label_count",
            path=path,
            found=f"{len(labels)} labels",
            expected=len(data),
        )
    return data.reshape(-1, *_SHAPE), np.array(labels, np.int64)


def _binary(path: Path) -> Arrays:
    """Read rows of one byte label, then red, green and blue planes."""
    content = np.fromfile(path, np.uint8)
    if not len(content) or len(content) % (1 + _PIXELS):
        raise DataError(
            "the file is not a complete batch of CIFAR-10",
            code="data.batch_truncated",
            path=path,
            found=f"{len(content):,} bytes",
            expected=f"a multiple of {1 + _PIXELS:,}",
            fix="Copy or download it again.",
        )
    rows = content.reshape(-1, 1 + _PIXELS)
    return rows[:, 1:].reshape(-1, *_SHAPE), rows[:, 0].astype(np.int64)
