"""Many models on subsets of one dataset: studies and trainings, and models by a spec and a `main`.

What users call is in `gradkeep.datamodels`; here is what commands and other layouts need.
"""

from gradkeep.datamodels.study._contract import (
    MODELS,
    MainJob,
    Status,
    initialize,
    load_main,
    logdir_of,
    models_of,
    offer_aliases,
    status,
    work,
)
from gradkeep.datamodels.study._spec import COMPLETED, Field, Spec, check_returned

__all__ = [
    "COMPLETED",
    "MODELS",
    "Field",
    "MainJob",
    "Spec",
    "Status",
    "check_returned",
    "initialize",
    "load_main",
    "logdir_of",
    "models_of",
    "offer_aliases",
    "status",
    "work",
]
