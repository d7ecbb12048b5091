"""The experiments of DTR by configuration: train, record, simulate; tables and pictures.

What each part does is done by `gradkeep.remat`; the trials run on `gradkeep.farm`.
"""

from gradkeep.compat.dtr.experiments._config import (
    DtrExperiment,
    pareto_experiment,
    parse_experiment,
    read_experiment,
)
from gradkeep.compat.dtr.experiments._run import ExperimentReport, run_experiment
from gradkeep.compat.dtr.experiments._trial import FAILED, PLACEMENTS, Trial, TrialWork

__all__ = [
    "FAILED",
    "PLACEMENTS",
    "DtrExperiment",
    "ExperimentReport",
    "Trial",
    "TrialWork",
    "pareto_experiment",
    "parse_experiment",
    "read_experiment",
    "run_experiment",
]
