"""Workers on many machines: actors of a Ray cluster, or jobs of SLURM through submitit."""

from __future__ import annotations

import shutil
import threading
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from gradkeep import _arguments
from gradkeep._environment import import_extra
from gradkeep.errors import FarmError
from gradkeep.farm._job import check_workers
from gradkeep.farm._local import LocalProcesses
from gradkeep.farm._worker import broken_worker, stop_on_signals, work

if TYPE_CHECKING:
    from collections.abc import Callable

    from gradkeep.farm._job import JobSpec

_TICK = 0.5


@dataclass(frozen=True, slots=True)
class RayCluster:
    """Actors of a Ray cluster, each a puller; the store must be reachable from every node.

    `address` is that of a running cluster (`"auto"` for the one this machine belongs to); without
    it Ray starts on this machine alone. `workers` is by default one per `cpus` of the cluster.
    """

    address: str | None = None
    workers: int | None = None
    cpus: float = 1.0
    """Cores per worker."""
    gpus: float = 0.0

    def __post_init__(self) -> None:
        if self.address is not None:
            _arguments.text("address", self.address, error=FarmError)
        check_workers(self.workers)
        _arguments.number("cpus", self.cpus, error=FarmError, above=0)
        _arguments.number("gpus", self.gpus, error=FarmError, least=0)

    @property
    def num_workers(self) -> int:
        """How many workers there will be."""
        ray = import_extra("ray", extra="ray", what="the engine ray")
        self._connect(ray)
        if self.workers is not None:
            return self.workers
        return max(1, int(ray.cluster_resources().get("CPU", 1) // self.cpus))

    @property
    def threads(self) -> int:
        """The threads of each: what Ray reserves for it."""
        return max(1, int(self.cpus))

    def run(self, spec: JobSpec, report: Callable[[], None]) -> None:
        """Run actors until no row is left; Ray starts them again on other nodes when one dies."""
        ray = import_extra("ray", extra="ray", what="the engine ray")
        self._connect(ray)
        actor = ray.remote(
            num_cpus=self.cpus,
            num_gpus=self.gpus,
            max_restarts=-1,
            max_task_retries=-1,
            concurrency_groups={"control": 1},
        )(_actor_class(ray))
        # Held here as long as actors may be started again: a spec can be large, and what lies in
        # another node's memory goes with that node.
        told = ray.put(spec)
        actors = [actor.remote([told]) for _ in range(self.num_workers)]
        with stop_on_signals() as stop:
            try:
                waiting = [one.pull.remote() for one in actors]
                asked = False
                room_seen = time.monotonic()
                while waiting and not stop.at_once:
                    ready, waiting = ray.wait(waiting, num_returns=1, timeout=_TICK)
                    for reference in ready:
                        if (broken := ray.get(reference)) is not None:
                            raise broken_worker("a worker", broken)
                    if ready and not stop.asked:
                        # One found nothing left, so there is nothing left for any. Some may never
                        # return: their node is gone and there is no room on the others.
                        break
                    report()
                    if self._has_room(ray):
                        room_seen = time.monotonic()
                    elif time.monotonic() - room_seen > spec.lease_seconds:
                        raise FarmError(
                            "the Ray cluster has no node left that could hold a worker",
                            expected=f"a node with {self.cpus:g} cores and {self.gpus:g} GPUs",
                            fix="start nodes and run the same again: what is done stays done",
                        )
                    if stop.asked and not asked:
                        asked = True
                        for one in actors:
                            one.stop.remote()
            finally:
                for one in actors:
                    ray.kill(one)
            stop.raise_if_asked()

    def _has_room(self, ray: Any) -> bool:
        """Whether the nodes that are left could hold a worker at all."""
        there = ray.cluster_resources()
        return bool(there.get("CPU", 0) >= self.cpus and there.get("GPU", 0) >= self.gpus)

    def _connect(self, ray: Any) -> None:
        if not ray.is_initialized():
            # Its log of every worker's output would drown the progress.
            ray.init(address=self.address, log_to_driver=False, include_dashboard=False)


def _actor_class(ray: Any) -> type:
    class FarmWorker:
        """One puller in an actor; anything that ends its process has Ray start it again."""

        def __init__(self, told: list[Any]) -> None:
            self._spec: JobSpec = ray.get(told[0])
            self._asked = threading.Event()

        def pull(self) -> str | None:
            """Work until nothing is left; the traceback of what made going on impossible."""
            try:
                work(self._spec, stopped=self._asked.is_set)
            except Exception:
                return traceback.format_exc()
            return None

        @ray.method(concurrency_group="control")  # type: ignore[untyped-decorator]
        def stop(self) -> None:
            """Finish what was begun, take nothing new."""
            self._asked.set()

    return FarmWorker


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

    def __post_init__(self) -> None:
        check_workers(self.workers, least=1)
        _arguments.text("folder", self.folder, error=FarmError)
        _arguments.text("cluster", self.cluster, error=FarmError)
        if not isinstance(self.parameters, Mapping):
            raise _arguments.argument_error(
                "parameters", self.parameters, error=FarmError, expected="a mapping from names"
            )

    @property
    def num_workers(self) -> int:
        """How many workers there will be."""
        return self.workers

    @property
    def threads(self) -> int:
        """The threads of each: what SLURM is asked to reserve for it."""
        return int(self.parameters.get("cpus_per_task", 1))

    def run(self, spec: JobSpec, report: Callable[[], None]) -> None:
        """Submit the pullers and wait for them; leaving early cancels them."""
        submitit = import_extra("submitit", extra="slurm", what="the engine slurm")
        if self.cluster == "slurm" and shutil.which("srun") is None:
            raise FarmError(
                "this machine does not belong to a SLURM cluster",
                found="no program srun on PATH",
                fix='run it where srun is, or use cluster="local" for the same jobs on this machine',
            )
        executor = submitit.AutoExecutor(folder=self.folder, cluster=self.cluster)
        executor.update_parameters(name="gradkeep", **self.parameters)
        with executor.batch():
            jobs = [executor.submit(_SlurmPuller(spec)) for _ in range(self.workers)]
        with stop_on_signals() as stop:
            try:
                while not stop.asked and not all(job.done() for job in jobs):
                    report()
                    time.sleep(_TICK)
            finally:
                for job in jobs:
                    if not job.done():
                        # SLURM sends SIGTERM first: pullers finish or give back what they hold.
                        job.cancel(check=False)
            stop.raise_if_asked()
        for job in jobs:
            if (problem := job.exception()) is not None:
                raise broken_worker(f"job {job.job_id}", str(problem))


@dataclass(frozen=True, slots=True)
class _SlurmPuller:
    """The job: a supervisor with one worker below it, so that a hung row can be ended."""

    spec: JobSpec

    def __call__(self) -> None:
        """Pull rows until none is left."""
        LocalProcesses(workers=1).run(self.spec, lambda: None)

    def checkpoint(self) -> Any:
        """Preempted or out of time: the same again, as the rows know what is left."""
        submitit = import_extra("submitit", extra="slurm", what="the engine slurm")
        return submitit.helpers.DelayedSubmission(self)
