"""VGG16 on CIFAR-10: `python -m gradkeep.compat.metastore.model_trainers.vgg16_trainer`."""

from __future__ import annotations

import sys

from gradkeep.compat.metastore.model_trainers._trainer import run_trainer, trainer_flags


def main(arguments: list[str] | None = None) -> int:
    """Train with SGD and momentum on CIFAR-10 in `./data`; weights go to `./models/vgg16_models`."""
    parser = trainer_flags(
        "vgg16_trainer", n_epochs=20, batch_size=100, lr=1e-3, unread=["hidden_size"]
    )
    options = parser.parse_args(arguments)
    return run_trainer("vgg16", "cifar10", options, files={"data_dir": "data/cifar10"})


if __name__ == "__main__":
    sys.exit(main())
