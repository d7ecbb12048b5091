"""Example data: the bundled digits, arrays with classes and scaling, and checks of labels."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
import xxhash

from gradkeep import _arguments
from gradkeep._arguments import Limits, NonNegativeInt, check_fields, checked, one_of
from gradkeep._environment import import_extra
from gradkeep.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    import torch

    Positions = int | slice | Sequence[int] | torch.Tensor


def check_name(path: Path, name: str) -> None:
    """Raise for names that no file can have."""
    longest = max(len(os.fsencode(part)) for part in (*path.parts, name, "."))
    if longest > 255 or not _arguments.writable(f"{path}{name}"):
        raise DataError(
            "the file name is invalid",
            code="data.invalid_name",
            found=_arguments.short_repr(name or str(path)),
        )


def known_name(
    name: str,
    known: Iterable[str],
    *,
    noun: str,
    path: str | os.PathLike[str] | None = None,
) -> str:
    """Return the name if it is known; else raise with similar names. `noun` describes it."""
    return one_of(f"the {noun}", name, known, error=DataError, code="data.unknown_name", path=path)


@dataclass(frozen=True, slots=True)
class Scaling:
    """Convert bytes to float32: divide by 255, subtract `mean`, divide by `std`, per channel."""

    mean: tuple[float, ...] = (0.0,)
    std: tuple[Annotated[float, Limits(above=0)], ...] = (1.0,)

    def __post_init__(self) -> None:
        check_fields(self, DataError)

    def __call__(self, pixels: torch.Tensor) -> torch.Tensor:
        """Scale pixels `[..., C, H, W]`."""
        import torch

        mean, std = (torch.tensor(values)[:, None, None] for values in (self.mean, self.std))
        return (pixels.to(torch.float32) / 255 - mean) / std


@dataclass(frozen=True, slots=True, eq=False)
class Examples:
    """Inputs and labels in a fixed order: `examples[i]` is `(x, y)`, as a `DataLoader` needs it.

    A slice or a list of positions gives several, stacked.

    >>> import torch
    >>> examples = Examples(torch.eye(3), torch.tensor([0, 1, 1]), ("no", "yes"))
    >>> len(examples), examples[2]
    (3, (tensor([0., 0., 1.]), tensor(1)))
    """

    inputs: torch.Tensor
    """`[N, ...]` as stored; with `scaling`, bytes that are converted to float32 on access"""
    labels: torch.Tensor
    """`[N]` or, for a label at each position, `[N, T]`; int64 indices of `classes`"""
    classes: tuple[str, ...]
    scaling: Scaling | None = None

    def __post_init__(self) -> None:
        check_fields(self, DataError)
        if self.inputs.ndim == 0:
            raise DataError(
                "inputs must have one row per example",
                code="data.inputs_shape",
                found="a single number",
            )
        check_labels(self.labels, rows=len(self.inputs), classes=self.classes)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, positions: Positions) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.inputs[positions]
        return x if self.scaling is None else self.scaling(x), self.labels[positions]


def whole_labels(
    values: np.ndarray[Any, Any], *, path: str | os.PathLike[str] | None = None
) -> torch.Tensor:
    """Convert labels of any integer type to int64 `[N]`."""
    import torch

    if values.dtype.kind not in "iu" or values.ndim != 1:
        raise DataError(
            "labels must be whole numbers, one per row",
            code="data.label_type",
            path=path,
            found=f"{values.dtype} of shape {list(values.shape)}",
        )
    return torch.from_numpy(values.astype("int64"))


def numbered(labels: torch.Tensor) -> tuple[str, ...]:
    """Name classes by the numbers from 0 to the highest label."""
    return tuple(map(str, range(int(labels.max()) + 1 if len(labels) else 0)))


def check_labels(
    labels: torch.Tensor,
    *,
    rows: int,
    classes: Sequence[str],
    path: str | os.PathLike[str] | None = None,
) -> None:
    """Raise for labels that are not int64, not as many as the rows, or out of range."""
    import torch

    if labels.dtype != torch.int64 or labels.ndim == 0:
        raise DataError(
            "labels must be whole numbers, one per row",
            code="data.label_type",
            path=path,
            found=f"{labels.dtype} of shape {list(labels.shape)}",
        )
    if len(labels) != rows:
        raise DataError(
            "the number of labels differs from the number of rows",
            code="data.label_count",
            path=path,
            found=f"{len(labels)} labels",
            expected=rows,
        )
    wrong = ((labels < 0) | (labels >= len(classes))).nonzero()
    if len(wrong):
        first = tuple(wrong[0].tolist())
        raise DataError(
            f"{len(wrong)} labels are out of range",
            code="data.label_range",
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
    """Convert images `[N, H, W]`, `[N, H, W, C]` or `[N, C, H, W]` to `[N, C, H, W]`, same dtype.

    `channels` says which if the shape is ambiguous.
    """
    import torch

    shape = list(images.shape)
    if len(shape) == 3:
        images = images[:, None]
    elif len(shape) != 4:
        raise DataError(
            "the array does not hold images",
            code="data.image_shape",
            path=path,
            found=shape,
            expected="[N, H, W] or [N, H, W, C]",
        )
    else:
        places = {"first": shape[1] in _CHANNELS, "last": shape[3] in _CHANNELS}
        if channels is None and places["first"] == places["last"]:
            raise DataError(
                "the shape does not determine the axis of the channels",
                code="data.ambiguous_channels",
                path=path,
                found=shape,
                fix="Pass channels='first' or channels='last'.",
            )
        if channels == "last" or (channels is None and places["last"]):
            images = images.transpose(0, 3, 1, 2)
    return torch.from_numpy(np.ascontiguousarray(images))


_TRAIN = 1437


@dataclass(frozen=True, slots=True, eq=False)
class Digits:
    """1,797 scans of 8 x 8 pixels, split at random into 1,437 for training and 360 for testing.

    Attributes:
        train_images: `[1437, 64]`, values from 0 to 1.
        train_labels: `[1437]`, some of them wrong on purpose.
        test_images: `[360, 64]`, values from 0 to 1.
        test_labels: `[360]`, all correct.
        planted: `[1437]`, True where a wrong label was planted.
    """

    train_images: np.ndarray[Any, np.dtype[np.float32]]
    train_labels: np.ndarray[Any, np.dtype[np.int64]]
    test_images: np.ndarray[Any, np.dtype[np.float32]]
    test_labels: np.ndarray[Any, np.dtype[np.int64]]
    planted: np.ndarray[Any, np.dtype[np.bool_]]

    @property
    def fingerprint(self) -> str:
        """Digest of all images and labels."""
        digest = xxhash.xxh3_128()
        for values in (self.train_images, self.train_labels, self.test_images, self.test_labels):
            digest.update(values.tobytes())
        return digest.hexdigest()


@checked(DataError)
def load_digits(
    *, wrong_labels: Annotated[float, Limits(least=0, most=1)] = 0.0, seed: NonNegativeInt = 0
) -> Digits:
    """Load the digits of scikit-learn, with a share of the training labels replaced by wrong ones.

    Args:
        wrong_labels: Share of wrong training labels, from 0 to 1.
        seed: Seed of the split and of the wrong labels.

    Returns:
        Images and labels as numpy arrays.

    Raises:
        MissingExtraError: scikit-learn is not installed.

    Example:
        >>> digits = load_digits(wrong_labels=0.08)
        >>> digits.train_images.shape, int(digits.planted.sum())
        ((1437, 64), 115)
    """
    datasets = import_extra("sklearn.datasets", extra="demo", what="the set of digits")
    data = datasets.load_digits()
    rng = np.random.default_rng(seed)
    order = rng.permutation(len(data.target))
    images = (data.data[order] / 16).astype(np.float32)
    labels = data.target[order].astype(np.int64)
    planted = np.zeros(_TRAIN, np.bool_)
    planted[rng.choice(_TRAIN, round(wrong_labels * _TRAIN), replace=False)] = True
    train_labels = labels[:_TRAIN].copy()
    # Any of the nine other digits.
    train_labels[planted] += rng.integers(1, 10, int(planted.sum()))
    train_labels %= 10
    return Digits(images[:_TRAIN], train_labels, images[_TRAIN:], labels[_TRAIN:], planted)


_MEAN, _STD = 0.3053, 0.3761


@checked(DataError)
def load_digit_images(
    *, split: str = "train", normalise: bool = True, wrong_labels: float = 0.0, seed: int = 0
) -> Examples:
    """Load the digits as images float32 `[1, 8, 8]`.

    Args:
        split: `"train"` or `"test"`.
        normalise: Normalize by mean and standard deviation; False for values from 0 to 1.
        wrong_labels: Share of wrong training labels, from 0 to 1.
        seed: Seed of the split and of the wrong labels.

    Returns:
        Images and labels.

    Raises:
        DataError: The split is unknown.
        MissingExtraError: scikit-learn is not installed.

    Example:
        >>> digits = load_digit_images(split="test")
        >>> len(digits), digits[0][0].shape
        (360, torch.Size([1, 8, 8]))
    """
    import torch

    known_name(split, ("train", "test"), noun="split")
    digits = load_digits(wrong_labels=wrong_labels, seed=seed)
    train = split == "train"
    images = torch.from_numpy(digits.train_images if train else digits.test_images)
    labels = torch.from_numpy(digits.train_labels if train else digits.test_labels)
    images = images.view(-1, 1, 8, 8)
    return Examples(
        (images - _MEAN) / _STD if normalise else images, labels, tuple(map(str, range(10)))
    )
