"""Many models on subsets of one dataset: studies, trainings, and models by a spec and a `main`."""

from gradkeep.datamodels.study._contract import (
    MODELS,
    MainJob,
    Status,
    initialize,
    load_main,
    logdir_of,
    models_of,
    status,
    work,
)
from gradkeep.datamodels.study._outputs import (
    Output,
    confidences,
    correct,
    losses,
    margins,
    output,
)
from gradkeep.datamodels.study._spec import COMPLETED, Field, Spec, check_returned
from gradkeep.datamodels.study._study import Study
from gradkeep.datamodels.study._training import Training

__all__ = [
    "COMPLETED",
    "MODELS",
    "Field",
    "MainJob",
    "Output",
    "Spec",
    "Status",
    "Study",
    "Training",
    "check_returned",
    "confidences",
    "correct",
    "initialize",
    "load_main",
    "logdir_of",
    "losses",
    "margins",
    "models_of",
    "output",
    "status",
    "work",
]
