"""Example data by name: the bundled digits, arrays with classes and scaling, and loaders by kind."""

from __future__ import annotations

import difflib
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import xxhash

from gradkeep import _arguments
from gradkeep._arguments import check_fields, checked
from gradkeep._surroundings import install_hint
from gradkeep.errors import DataError, MissingExtraError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    import torch

    Positions = int | slice | Sequence[int] | torch.Tensor


def check_name(path: Path, name: str) -> None:
    """Refuse what no file can be called, before the system does."""
    longest = max(len(os.fsencode(part)) for part in (*path.parts, name, "."))
    if longest > 255 or not _arguments.writable(f"{path}{name}"):
        raise DataError("no file has such a name", found=_arguments.short_repr(name or str(path)))


def known_name(
    name: str,
    known: Iterable[str],
    *,
    what: str,
    path: str | os.PathLike[str] | None = None,
    fix: str | None = None,
) -> str:
    """The name itself, if it is known; `what` says what there is none of."""
    names = list(known)
    if isinstance(name, str) and name in names:
        return name
    near = difflib.get_close_matches(str(name)[:200], names, n=3, cutoff=0.4)
    raise DataError(
        f"there is no such {what}: {_arguments.short_repr(name)}; expected {', '.join(near or names)}",
        path=path,
        fix=fix,
    )


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
            f"labels are whole numbers, one per row: {values.dtype} of shape {list(values.shape)}",
            path=path,
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
            f"there are not as many labels as rows: {len(labels)} labels; expected {rows}",
            path=path,
        )
    wrong = ((labels < 0) | (labels >= len(classes))).nonzero()
    if len(wrong):
        first = tuple(wrong[0].tolist())
        raise DataError(
            f"{len(wrong)} labels are out of range: {int(labels[first])} in row {first[0]}",
            path=path,
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
                f"the shape does not say where the channels are: {shape}",
                path=path,
                fix='say channels="first" or channels="last"',
            )
        if channels == "last" or (channels is None and places["last"]):
            images = images.transpose(0, 3, 1, 2)
    return torch.from_numpy(np.ascontiguousarray(images))


_TRAIN = 1437


@dataclass(frozen=True, slots=True, eq=False)
class Digits:
    """1,797 scans of 8 x 8 pixels, split at random into 1,437 to train and 360 to test."""

    train_images: np.ndarray[Any, np.dtype[np.float32]]
    """`[1437, 64]`, values 0 to 1"""
    train_labels: np.ndarray[Any, np.dtype[np.int64]]
    """`[1437]`, some of them wrong on purpose"""
    test_images: np.ndarray[Any, np.dtype[np.float32]]
    """`[360, 64]`"""
    test_labels: np.ndarray[Any, np.dtype[np.int64]]
    """`[360]`, all right"""
    planted: np.ndarray[Any, np.dtype[np.bool_]]
    """`[1437]`, where a wrong label was planted"""

    @property
    def fingerprint(self) -> str:
        """A digest of all images and labels."""
        digest = xxhash.xxh3_128()
        for values in (self.train_images, self.train_labels, self.test_images, self.test_labels):
            digest.update(values.tobytes())
        return digest.hexdigest()


@checked(DataError)
def load_digits(*, wrong_labels: float = 0.0, seed: int = 0) -> Digits:
    """The digits that scikit-learn ships, with a share of the training labels made wrong.

    >>> digits = load_digits(wrong_labels=0.08)
    >>> digits.train_images.shape, int(digits.planted.sum())
    ((1437, 64), 115)
    """
    _arguments.number("wrong_labels", wrong_labels, error=DataError, least=0, most=1)
    _arguments.count("seed", seed, error=DataError)
    try:
        import sklearn.datasets
    except ImportError as error:
        raise MissingExtraError(
            "the digits come with scikit-learn", fix=install_hint("demo")
        ) from error
    data = sklearn.datasets.load_digits()
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
    """Digits float32 `[1, 8, 8]`, normalised by their mean and deviation, or 0 to 1.

    >>> digits = load_digit_images(split="test")
    >>> len(digits), digits[0][0].shape
    (360, torch.Size([1, 8, 8]))
    """
    import torch

    known_name(split, ("train", "test"), what="split")
    digits = load_digits(wrong_labels=wrong_labels, seed=seed)
    train = split == "train"
    images = torch.from_numpy(digits.train_images if train else digits.test_images)
    labels = torch.from_numpy(digits.train_labels if train else digits.test_labels)
    images = images.view(-1, 1, 8, 8)
    return Examples(
        (images - _MEAN) / _STD if normalise else images, labels, tuple(map(str, range(10)))
    )
