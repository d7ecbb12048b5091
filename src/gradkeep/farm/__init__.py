"""Run a job for each of many rows, with leases, retries, timeouts and resume; here or on a cluster.

What a job computes is not known here: it gets row numbers and returns arrays.
"""

from gradkeep._public import lazy_names
from gradkeep.farm._clusters import RayCluster, Slurm
from gradkeep.farm._job import Job, JobSpec, packed
from gradkeep.farm._local import LocalProcesses
from gradkeep.farm._process import worker_number
from gradkeep.farm._progress import Progress, format_seconds, progress_of, recent_rate
from gradkeep.farm._run import Engine, Failure, Outcome, check_place, engine, run
from gradkeep.farm._sharing import blocks_of, share_out, size_of
from gradkeep.farm._worker import work

__all__ = [
    "Engine",
    "Failure",
    "Job",
    "JobSpec",
    "LocalProcesses",
    "Outcome",
    "Progress",
    "RayCluster",
    "Slurm",
    "blocks_of",
    "check_place",
    "engine",
    "format_seconds",
    "packed",
    "progress_of",
    "recent_rate",
    "run",
    "share_out",
    "size_of",
    "work",
    "worker_number",
]

__getattr__ = lazy_names("gradkeep.farm", renamed={"Order": "gradkeep.farm.JobSpec"})
