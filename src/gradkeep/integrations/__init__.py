"""Callbacks that capture gradients while other libraries train, and writers for experiment trackers.

Each is loaded on first use, because its library takes seconds to import.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gradkeep._public import lazy_names

if TYPE_CHECKING:
    from gradkeep.integrations._lightning import GradkeepLightningCallback
    from gradkeep.integrations._loggers import write_tensorboard, write_wandb
    from gradkeep.integrations._transformers import (
        GradkeepTrainerCallback,
        GradkeepTrainerRecorder,
    )

__all__ = [
    "GradkeepLightningCallback",
    "GradkeepTrainerCallback",
    "GradkeepTrainerRecorder",
    "write_tensorboard",
    "write_wandb",
]

__getattr__ = lazy_names(
    __name__,
    {
        "GradkeepLightningCallback": f"{__name__}._lightning",
        "GradkeepTrainerCallback": f"{__name__}._transformers",
        "GradkeepTrainerRecorder": f"{__name__}._transformers",
        "write_tensorboard": f"{__name__}._loggers",
        "write_wandb": f"{__name__}._loggers",
    },
)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
