"""The digits of scikit-learn as a dataset of pictures."""

from __future__ import annotations

from gradkeep.data._digits import load_digits
from gradkeep.data._examples import Examples
from gradkeep.data._names import known_name

_MEAN, _STD = 0.3053, 0.3761


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
