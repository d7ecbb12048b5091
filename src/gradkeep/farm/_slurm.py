"""Workers as jobs of a SLURM cluster, through submitit: N pullers, however many rows there are."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from gradkeep.errors import FarmError, MissingExtra
from gradkeep.farm._local import LocalProcesses
from gradkeep.farm._signals import stop_on_signals

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from gradkeep.farm._order import Order

_TICK = 0.5


@dataclass(frozen=True, slots=True)
class Slurm:
    """One array of `workers` jobs, each of which pulls rows until none is left.

    `parameters` go to submitit as they are: `slurm_partition`, `timeout_min`, `mem_gb`,
    `cpus_per_task`, `gpus_per_node` and so on. `cluster="local"` runs the same jobs on this machine.
    The store and `folder`, where submitit keeps its logs, must be on a file system that all nodes see.
    """

    workers: int = 8
    folder: str = "submitit"
    cluster: str = "slurm"
    parameters: Mapping[str, Any] = field(default_factory=dict)

    @property
    def num_workers(self) -> int:
        """How many workers there will be."""
        return self.workers

    @property
    def threads(self) -> int:
        """The threads of each: what SLURM is asked to reserve for it."""
        return int(self.parameters.get("cpus_per_task", 1))

    def run(self, order: Order, look: Callable[[], None]) -> None:
        """Submit the pullers and wait for them; leaving early cancels them."""
        submitit = _submitit()
        executor = submitit.AutoExecutor(folder=self.folder, cluster=self.cluster)
        executor.update_parameters(name="gradkeep", **self.parameters)
        with executor.batch():
            jobs = [executor.submit(_SlurmPuller(order)) for _ in range(self.workers)]
        with stop_on_signals() as stop:
            try:
                while not stop.asked and not all(job.done() for job in jobs):
                    look()
                    time.sleep(_TICK)
            finally:
                for job in jobs:
                    if not job.done():
                        # SLURM sends SIGTERM first: pullers finish or give back what they hold.
                        job.cancel(check=False)
            stop.raise_if_asked()
        _check(jobs)


@dataclass(frozen=True, slots=True)
class _SlurmPuller:
    """The job: a supervisor with one worker below it, so that a hung row can be ended."""

    order: Order

    def __call__(self) -> None:
        """Pull rows until none is left."""
        LocalProcesses(workers=1).run(self.order, lambda: None)

    def checkpoint(self) -> Any:
        """Preempted or out of time: the same again, as the rows know what is left."""
        return _submitit().helpers.DelayedSubmission(self)


def _check(jobs: list[Any]) -> None:
    problems = [(job.job_id, job.exception()) for job in jobs]
    for name, problem in problems:
        if problem is not None:
            raise FarmError(
                f"job {name} could not go on",
                found=f"\n{problem}",
                fix="repair what it says and run again: what is done stays done",
            )


def _submitit() -> Any:
    try:
        import submitit
    except ImportError as error:
        raise MissingExtra(
            "the engine slurm needs submitit", fix='pip install "gradkeep[slurm]"'
        ) from error
    return submitit
