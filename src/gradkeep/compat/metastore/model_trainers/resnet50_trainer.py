"""ResNet-50 on images of 64 x 64: `python -m gradkeep.compat.metastore.model_trainers.resnet50_trainer`."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from gradkeep.compat.metastore.model_trainers._trainer import (
    check_no_appended_layer,
    current_folder,
    run_trainer,
    trainer_flags,
)

if TYPE_CHECKING:
    import torch

_BORDER = 4


def main(arguments: list[str] | None = None) -> int:
    """Train with SGD and momentum on the images in `./data/imagenet64`; nothing is downloaded."""
    parser = trainer_flags("resnet50_trainer", n_epochs=1, batch_size=128, lr=1e-3)
    parser.add_argument("--hidden_size", type=int)
    parser.add_argument("--weights", help="a file to begin with, such as torchvision's resnet50")
    options = parser.parse_args(arguments)

    def train() -> None:
        import torch

        from gradkeep.compat.metastore._data import DataSource
        from gradkeep.compat.metastore.model_trainers._trainer import Trainer

        check_no_appended_layer(options.hidden_size)
        places = current_folder()
        Trainer(
            "resnet50",
            lambda net: torch.optim.SGD(net.parameters(), lr=options.lr, momentum=options.momentum),
            epochs=options.n_epochs,
            batch_size=options.batch_size,
            seed=1,
            sizes=options.sizes,
            augment=augment_images,
            begin_from=options.weights,
        ).train(*DataSource("imagenet", {}, places, places.current, "resnet50_trainer").load())

    return run_trainer(train)


def augment_images(pictures: torch.Tensor) -> torch.Tensor:
    """Shift each image by up to four pixels, with replicated edges, and mirror every other one."""
    import torch
    from torch.nn import functional as F

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
