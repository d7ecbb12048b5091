"""Run a job for each of many rows, with leases, retries, timeouts and resume; here or on a cluster.

A job gets row numbers and returns arrays; what it computes is not known here.
"""

from gradkeep.farm._clusters import RayCluster, Slurm
from gradkeep.farm._local import LocalProcesses
from gradkeep.farm._run import engine, run
from gradkeep.farm._worker import work

__all__ = ["LocalProcesses", "RayCluster", "Slurm", "engine", "run", "work"]
