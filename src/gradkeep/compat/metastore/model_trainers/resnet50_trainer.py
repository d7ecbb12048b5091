"""ResNet-50 on images of 64 x 64: `python -m gradkeep.compat.metastore.model_trainers.resnet50_trainer`."""

from __future__ import annotations

import sys

import torch
from torch.nn import functional as F

from gradkeep.compat.metastore.model_trainers._trainer import run_trainer, trainer_flags

_BORDER = 4


def main(arguments: list[str] | None = None) -> int:
    """Train with SGD and momentum on the images in `./data/imagenet64`; nothing is downloaded."""
    parser = trainer_flags("resnet50_trainer", n_epochs=1, batch_size=128, lr=1e-3)
    parser.add_argument("--hidden_size", type=int)
    parser.add_argument("--weights", help="a file to begin with, such as torchvision's resnet50")
    options = parser.parse_args(arguments)
    if options.hidden_size is not None:
        message = "--hidden_size appends a layer that MetaStore's program cannot read"
        print(f"trainer: {message}", file=sys.stderr)
        return 1
    return run_trainer(
        "resnet50", "imagenet", options, augment=augment_images, begin_from=options.weights
    )


def augment_images(pictures: torch.Tensor) -> torch.Tensor:
    """Shift each image by up to four pixels, with replicated edges, and mirror every other one."""
    side = pictures.shape[-1]
    wide = F.pad(pictures, (_BORDER,) * 4, mode="replicate")
    augmented = []
    for picture in wide:
        top, start = torch.randint(0, 2 * _BORDER + 1, (2,)).tolist()
        moved = picture[:, top : top + side, start : start + side]
        augmented.append(moved.flip(-1) if torch.rand(()) < 0.5 else moved)
    return torch.stack(augmented)


if __name__ == "__main__":
    sys.exit(main())
