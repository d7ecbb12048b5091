"""Handwritten digits, real ones, as arrays or as pictures, with wrong labels planted on request."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash

from gradkeep import _arguments
from gradkeep._annotations import checked
from gradkeep._surroundings import install_hint
from gradkeep.data._examples import Examples
from gradkeep.data._names import known_name
from gradkeep.errors import DataError, MissingExtra

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
    _arguments.fraction("wrong_labels", wrong_labels, error=DataError)
    _arguments.count("seed", seed, error=DataError)
    try:
        import sklearn.datasets
    except ImportError as error:
        raise MissingExtra("the digits come with scikit-learn", fix=install_hint("demo")) from error
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
