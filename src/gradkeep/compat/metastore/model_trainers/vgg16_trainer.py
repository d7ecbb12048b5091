"""VGG16 on CIFAR-10: `python -m gradkeep.compat.metastore.model_trainers.vgg16_trainer`."""

from __future__ import annotations

import sys

from gradkeep.compat.metastore.model_trainers._trainer import (
    current_folder,
    run_trainer,
    trainer_flags,
)


def main(arguments: list[str] | None = None) -> int:
    """Train with SGD and momentum on CIFAR-10 in `./data`; weights go to `./models/vgg16_models`."""
    parser = trainer_flags(
        "vgg16_trainer", n_epochs=20, batch_size=100, lr=1e-3, unread=["hidden_size"]
    )
    options = parser.parse_args(arguments)

    def train() -> None:
        import torch

        from gradkeep.compat.metastore._data import DataSource
        from gradkeep.compat.metastore.model_trainers._trainer import Trainer

        places = current_folder()
        source = DataSource(
            "cifar10", {"data_dir": "data/cifar10"}, places, places.current, "vgg16_trainer"
        )
        Trainer(
            "vgg16",
            lambda net: torch.optim.SGD(net.parameters(), lr=options.lr, momentum=options.momentum),
            epochs=options.n_epochs,
            batch_size=options.batch_size,
            seed=1,
            sizes=options.sizes,
        ).train(*source.load())

    return run_trainer(train)


if __name__ == "__main__":
    sys.exit(main())
