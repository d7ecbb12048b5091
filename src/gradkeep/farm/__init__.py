"""Run a job for each of many rows, with leases, retries, timeouts and resume; here or on a cluster.

What a job computes is not known here: it gets row numbers and returns arrays.
"""

from gradkeep.farm._local import LocalProcesses
from gradkeep.farm._order import Job, Order
from gradkeep.farm._progress import Progress, format_seconds, progress_of, recent_rate
from gradkeep.farm._ray import RayCluster
from gradkeep.farm._run import Engine, Failure, Outcome, engine, run
from gradkeep.farm._slurm import Slurm

__all__ = [
    "Engine",
    "Failure",
    "Job",
    "LocalProcesses",
    "Order",
    "Outcome",
    "Progress",
    "RayCluster",
    "Slurm",
    "engine",
    "format_seconds",
    "progress_of",
    "recent_rate",
    "run",
]
