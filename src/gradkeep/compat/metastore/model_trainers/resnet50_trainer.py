"""ResNet-50 on pictures of 64 x 64: `python -m gradkeep.compat.metastore.model_trainers.resnet50_trainer`."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from gradkeep.compat.metastore.model_trainers._trainer import (
    ended,
    here,
    refuse_appended,
    trainer_flags,
)

if TYPE_CHECKING:
    import torch

_BORDER = 4


def main(arguments: list[str] | None = None) -> int:
    """Train by SGD with momentum; pictures are in `./data/imagenet64`, nothing is downloaded."""
    parser = trainer_flags("resnet50_trainer", n_epochs=1, batch_size=128, lr=1e-3)
    parser.add_argument("--hidden_size", type=int)
    parser.add_argument("--weights", help="a file to begin with, such as torchvision's resnet50")
    given = parser.parse_args(arguments)

    def train() -> None:
        import torch

        from gradkeep.compat.metastore._data import DataSource
        from gradkeep.compat.metastore.model_trainers._trainer import Trainer

        refuse_appended(given.hidden_size)
        places = here()
        Trainer(
            "resnet50",
            lambda net: torch.optim.SGD(net.parameters(), lr=given.lr, momentum=given.momentum),
            epochs=given.n_epochs,
            batch_size=given.batch_size,
            seed=1,
            sizes=given.sizes,
            augment=moved_and_turned,
            begin_from=given.weights,
        ).train(*DataSource("imagenet", {}, places, places.current, "resnet50_trainer").load())

    return ended(train)


def moved_and_turned(pictures: torch.Tensor) -> torch.Tensor:
    """Each picture moved by up to four pixels, its edge repeated, and every other one mirrored."""
    import torch
    from torch.nn import functional as F

    side = pictures.shape[-1]
    wide = F.pad(pictures, (_BORDER,) * 4, mode="replicate")
    found = []
    for picture in wide:
        top, left = torch.randint(0, 2 * _BORDER + 1, (2,)).tolist()
        moved = picture[:, top : top + side, left : left + side]
        found.append(moved.flip(-1) if torch.rand(()) < 0.5 else moved)
    return torch.stack(found)


if __name__ == "__main__":
    sys.exit(main())
