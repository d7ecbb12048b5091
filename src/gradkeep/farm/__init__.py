"""Run a job for each of many rows, with leases, retries, timeouts and resume; locally or on a cluster.

A job gets row numbers and returns arrays; the farm does not know what it computes.
"""

from gradkeep.farm._clusters import RayCluster, Slurm
from gradkeep.farm._local import LocalProcesses
from gradkeep.farm._run import engine, run
from gradkeep.farm._worker import work

__all__ = ["LocalProcesses", "RayCluster", "Slurm", "engine", "run", "work"]
