"""Callbacks that keep gradients while another library trains, and writers for others' boards.

Each is loaded when it is first used, for its library takes seconds to import.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gradkeep.integrations._lightning import GradkeepLightningCallback
    from gradkeep.integrations._links_out import write_tensorboard, write_wandb
    from gradkeep.integrations._recorder import GradkeepTrainerRecorder
    from gradkeep.integrations._transformers import GradkeepTrainerCallback

__all__ = [
    "GradkeepLightningCallback",
    "GradkeepTrainerCallback",
    "GradkeepTrainerRecorder",
    "write_tensorboard",
    "write_wandb",
]

_HOMES = {
    "GradkeepLightningCallback": "_lightning",
    "GradkeepTrainerCallback": "_transformers",
    "GradkeepTrainerRecorder": "_recorder",
    "write_tensorboard": "_links_out",
    "write_wandb": "_links_out",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
