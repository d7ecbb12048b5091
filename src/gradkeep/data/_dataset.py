"""Data sets by the name of their kind, as in configuration files."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from gradkeep._arguments import checked
from gradkeep.data._examples import known_name, load_digit_images
from gradkeep.data._files import load_cifar10, load_idx, load_npz
from gradkeep.data._image_folder import load_image_folder
from gradkeep.data._texts import load_agnews, load_characters
from gradkeep.errors import DataError

if TYPE_CHECKING:
    import os
    from collections.abc import Callable

    from gradkeep.data._examples import Examples
    from gradkeep.data._image_folder import ImageFolder
    from gradkeep.data._texts import Texts

    Dataset = Examples | ImageFolder | Texts

_KINDS: dict[str, Callable[..., Dataset]] = {
    "digits": load_digit_images,
    "cifar10": load_cifar10,
    "agnews": load_agnews,
    "imagefolder": load_image_folder,
    "idx": load_idx,
    "npz": load_npz,
    "text": load_characters,
}


@checked(DataError)
def dataset(
    kind: str, path: str | os.PathLike[str] | None = None, split: str = "train", **options: Any
) -> Dataset:
    """Load a split of a data set by the name of its kind.

    Args:
        kind: One of digits, cifar10, agnews, imagefolder, idx, npz and text.
        path: File or folder of the data set; None only for digits, which a package contains.
        split: Name of the split.
        **options: Further options of the loader, such as `normalise=False`.

    Returns:
        Inputs and labels in a fixed order.

    Raises:
        DataError: The kind, an option or the split is unknown, or the files cannot be read.

    Example:
        >>> train = dataset("digits", normalise=False)
        >>> len(train), train.classes[:3], train.labels.dtype
        (1437, ('0', '1', '2'), torch.int64)
    """
    load = _KINDS[known_name(kind, _KINDS, noun="kind of dataset")]
    known = [name for name in inspect.signature(load).parameters if name not in ("path", "split")]
    for name in options:
        known_name(name, known, noun=f"option of {kind}")
    if (path is None) != (kind == "digits"):
        raise DataError(
            f"{kind} needs a path" if path is None else f"{kind} takes no path",
            code="data.path_missing" if path is None else "data.path_unused",
            found=f"path={path!r}",
        )
    places = () if path is None else (path,)
    return load(*places, split=split, **options)
