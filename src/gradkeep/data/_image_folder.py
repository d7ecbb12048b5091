"""Images in folders, one folder per class, decoded on access."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from gradkeep._arguments import PositiveInt, checked
from gradkeep._environment import import_extra
from gradkeep.data._examples import Scaling, check_name
from gradkeep.errors import DataError

if TYPE_CHECKING:
    import torch
    from PIL.Image import Image

_SUFFIXES = {".jpeg", ".jpg", ".png", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm"}
_SPLITS = ("train", "val", "test")
IMAGENET = Scaling((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


@dataclass(frozen=True, slots=True, eq=False)
class ImageFolder:
    """Files and labels in a fixed order: `folder[i]` is `(x, y)`, x float32 `[3, H, W]`."""

    files: tuple[Path, ...]
    labels: torch.Tensor
    """`[N]`, int64"""
    classes: tuple[str, ...]
    scaling: Scaling
    resize: int | None
    crop: int | None

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, position: int) -> tuple[torch.Tensor, torch.Tensor]:
        import torch

        file = self.files[position]
        pixels = torch.from_numpy(np.array(self._decoded(file)).transpose(2, 0, 1))
        return self.scaling(pixels), self.labels[position]

    def _decoded(self, file: Path) -> Image:
        from PIL import Image

        try:
            with Image.open(file) as file_image:
                image = file_image.convert("RGB")
        except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
            raise DataError(
                "the image cannot be decoded", code="data.image_damaged", path=file, found=error
            ) from error
        if self.resize is not None:
            scale = self.resize / min(image.size)
            width, height = (max(self.resize, round(side * scale)) for side in image.size)
            image = image.resize((width, height), Image.Resampling.BILINEAR)
        if self.crop is None:
            return image
        if min(image.size) < self.crop:
            raise DataError(
                "the image is smaller than the crop",
                code="data.image_too_small",
                path=file,
                found=f"{image.width} x {image.height}",
                expected=f"at least {self.crop} x {self.crop}",
                fix=f"Add resize={self.crop}.",
            )
        x, y = (image.width - self.crop) // 2, (image.height - self.crop) // 2
        return image.crop((x, y, x + self.crop, y + self.crop))


@checked(DataError)
def load_image_folder(
    path: str | os.PathLike[str],
    *,
    split: str = "train",
    resize: PositiveInt | None = None,
    crop: PositiveInt | None = None,
    normalise: bool = True,
) -> ImageFolder:
    """Load images from `path/split/class/`, or from `path/class/` if there are no splits.

    Classes and files are sorted by name; folders inside a class are searched, hidden and other files are ignored.
    `resize` sets the shorter side, then `crop` cuts a square from the center: nothing is random. Normalized by
    ImageNet's mean and standard deviation.
    """
    import torch

    import_extra("PIL.Image", extra="images", what="an image folder")
    top = _top(Path(path), split)
    folders = sorted(one for one in top.iterdir() if one.is_dir() and not _hidden(one.name))
    files: list[Path] = []
    labels: list[int] = []
    for label, folder in enumerate(folders):
        images = _find_images(folder)
        if not images:
            raise DataError(
                "the folder of a class holds no images",
                code="data.empty_class",
                path=folder,
                found="no " + " ".join(sorted(_SUFFIXES)),
                fix="Remove the folder, or add images.",
            )
        files += images
        labels += [label] * len(images)
    if not files:
        raise DataError(
            "there are no folders of classes",
            code="data.no_classes",
            path=top,
            expected="one folder per class",
        )
    names = tuple(folder.name for folder in folders)
    scaling = IMAGENET if normalise else Scaling()
    return ImageFolder(tuple(files), torch.tensor(labels), names, scaling, resize, crop)


def _top(path: Path, split: str) -> Path:
    """Return the folder of the split; a folder without splits is the training split."""
    check_name(path, split)
    if (path / split).is_dir():
        return path / split
    splits = [name for name in _SPLITS if (path / name).is_dir()]
    if path.is_dir() and (path.name == split or (split == "train" and not splits)):
        return path
    raise DataError(
        f"there is no folder for the split {split!r}",
        code="data.no_split",
        path=path,
        found=", ".join(splits) or ("no splits" if path.is_dir() else "no such folder"),
        expected=f"{split}, with one folder per class",
    )


def _find_images(folder: Path) -> list[Path]:
    images = []
    for place, inside, names in os.walk(folder):
        inside[:] = [name for name in inside if not _hidden(name)]
        pictures = [n for n in names if Path(n).suffix.lower() in _SUFFIXES and not _hidden(n)]
        images += [Path(place, name) for name in pictures]
    return sorted(images)


def _hidden(name: str) -> bool:
    return name.startswith((".", "__"))
