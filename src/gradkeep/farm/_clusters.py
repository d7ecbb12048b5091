"""Workers on many machines: actors of a Ray cluster, or SLURM jobs through submitit."""

from __future__ import annotations

import shutil
import threading
import time
import traceback
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

from gradkeep import _arguments
from gradkeep._arguments import Limits
from gradkeep._environment import import_extra
from gradkeep.errors import FarmError
from gradkeep.farm._local import LocalProcesses
from gradkeep.farm._worker import broken_worker, stop_on_signals, work

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from gradkeep.farm._worker import JobSpec

_TICK = 0.5


@dataclass(frozen=True, slots=True)
class RayCluster:
    """Workers as actors of a Ray cluster; every node must be able to reach the store.

    Attributes:
        address: Address of a running cluster (`"auto"` for the one of this machine); without it Ray
            starts on this machine alone.
        workers: Number of workers; one per `cpus` of the cluster by default.
        cpus: Cores per worker.
        gpus: GPUs per worker.
    """

    address: str | None = None
    workers: Annotated[int, Limits(0, most=100_000)] | None = None
    cpus: Annotated[float, Limits(above=0)] = 1.0
    gpus: Annotated[float, Limits(0)] = 0.0

    def __post_init__(self) -> None:
        _arguments.check_fields(self, FarmError)

    @property
    def num_workers(self) -> int:
        """Number of workers."""
        ray = import_extra("ray", extra="ray", what="the engine ray")
        self._connect(ray)
        if self.workers is not None:
            return self.workers
        return max(1, int(ray.cluster_resources().get("CPU", 1) // self.cpus))

    @property
    def threads(self) -> int:
        """Threads per worker: the cores that Ray reserves for it."""
        return max(1, int(self.cpus))

    def run(self, spec: JobSpec, report: Callable[[], None]) -> None:
        """Run actors until no row is pending; Ray restarts dead ones on other nodes.

        Args:
            spec: The job and its limits.
            report: Called regularly to report progress.

        Raises:
            FarmError: If a worker fails, or no node has the required resources.
        """
        ray = import_extra("ray", extra="ray", what="the engine ray")
        self._connect(ray)
        actor = ray.remote(
            num_cpus=self.cpus,
            num_gpus=self.gpus,
            max_restarts=-1,
            max_task_retries=-1,
            concurrency_groups={"control": 1},
        )(_actor_class(ray))
        # Owned by this process, because actors may restart: a spec can be large, and an object in
        # another node's memory is lost with that node.
        spec_ref = ray.put(spec)
        actors = [actor.remote([spec_ref]) for _ in range(self.num_workers)]
        with stop_on_signals() as stop:
            try:
                waiting = [one.pull.remote() for one in actors]
                stop_sent = False
                room_seen = time.monotonic()
                while waiting and not stop.is_immediate:
                    ready, waiting = ray.wait(waiting, num_returns=1, timeout=_TICK)
                    for reference in ready:
                        if (broken := ray.get(reference)) is not None:
                            raise broken_worker("a worker", broken)
                    if ready and not stop.is_requested:
                        # One worker found no pending row, so there is none for the others. Some may
                        # never return, because their node is gone and the others are full.
                        break
                    report()
                    if self._has_room(ray):
                        room_seen = time.monotonic()
                    elif time.monotonic() - room_seen > spec.lease_seconds:
                        raise FarmError(
                            "no node of the Ray cluster has the resources of a worker",
                            code="farm.no_node",
                            expected=f"a node with {self.cpus:g} cores and {self.gpus:g} GPUs",
                            fix="Start nodes and run the same again: finished rows are kept.",
                        )
                    if stop.is_requested and not stop_sent:
                        stop_sent = True
                        for one in actors:
                            one.stop.remote()
            finally:
                for one in actors:
                    ray.kill(one)
            stop.raise_if_requested()

    def _has_room(self, ray: Any) -> bool:
        """Return True if some node has the resources of a worker."""
        there = ray.cluster_resources()
        return bool(there.get("CPU", 0) >= self.cpus and there.get("GPU", 0) >= self.gpus)

    def _connect(self, ray: Any) -> None:
        if not ray.is_initialized():
            # Workers' output would hide the progress.
            ray.init(address=self.address, log_to_driver=False, include_dashboard=False)


def _actor_class(ray: Any) -> type:
    class FarmWorker:
        """A worker in an actor; Ray restarts it if its process ends."""

        def __init__(self, spec_ref: list[Any]) -> None:
            self._spec: JobSpec = ray.get(spec_ref[0])
            self._stop = threading.Event()

        def pull(self) -> str | None:
            """Work until no row is pending; return the traceback of a fatal error."""
            try:
                work(self._spec, stopped=self._stop.is_set)
            except Exception:
                return traceback.format_exc()
            return None

        @ray.method(concurrency_group="control")  # type: ignore[untyped-decorator]
        def stop(self) -> None:
            """Finish the current rows, and take no new ones."""
            self._stop.set()

    return FarmWorker


@dataclass(frozen=True, slots=True)
class Slurm:
    """Workers as one array of SLURM jobs, each of which pulls rows until none is pending.

    The store and `folder` must be on a file system that all nodes share.

    Attributes:
        workers: Number of jobs.
        folder: Folder of submitit's logs.
        cluster: `"slurm"`, or `"local"` to run the same jobs on this machine.
        parameters: Passed to submitit: `slurm_partition`, `timeout_min`, `mem_gb`, `cpus_per_task`,
            `gpus_per_node` and so on.
    """

    workers: Annotated[int, Limits(1, most=100_000)] = 8
    folder: str = "submitit"
    cluster: str = "slurm"
    parameters: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _arguments.check_fields(self, FarmError)
        _arguments.text("folder", self.folder, error=FarmError)

    @property
    def num_workers(self) -> int:
        """Number of workers."""
        return self.workers

    @property
    def threads(self) -> int:
        """Threads per worker: the cores that SLURM reserves for it."""
        return int(self.parameters.get("cpus_per_task", 1))

    def run(self, spec: JobSpec, report: Callable[[], None]) -> None:
        """Submit the jobs and wait for them; cancel them on an early exit.

        Args:
            spec: The job and its limits.
            report: Called regularly to report progress.

        Raises:
            FarmError: If a job fails, or this machine does not belong to a SLURM cluster.
        """
        submitit = import_extra("submitit", extra="slurm", what="the engine slurm")
        if self.cluster == "slurm" and shutil.which("srun") is None:
            raise FarmError(
                "this machine does not belong to a SLURM cluster",
                code="farm.no_slurm",
                found="no program srun on PATH",
                fix='Run it on a SLURM node, or use cluster="local" to run the jobs on this machine.',
            )
        executor = submitit.AutoExecutor(folder=self.folder, cluster=self.cluster)
        executor.update_parameters(name="gradkeep", **self.parameters)
        with executor.batch():
            jobs = [executor.submit(_SlurmPuller(spec)) for _ in range(self.workers)]
        with stop_on_signals() as stop:
            try:
                while not stop.is_requested and not all(job.done() for job in jobs):
                    report()
                    time.sleep(_TICK)
            finally:
                for job in jobs:
                    if not job.done():
                        # SLURM sends SIGTERM first: workers finish or release their rows.
                        job.cancel(check=False)
            stop.raise_if_requested()
        for job in jobs:
            if (problem := job.exception()) is not None:
                raise broken_worker(f"job {job.job_id}", str(problem))


@dataclass(frozen=True, slots=True)
class _SlurmPuller:
    """The SLURM job: a supervisor with one worker below it, so that a hung row can be ended."""

    spec: JobSpec

    def __call__(self) -> None:
        """Pull rows until none is pending."""
        LocalProcesses(workers=1).run(self.spec, lambda: None)

    def checkpoint(self) -> Any:
        """Submit the same job again after preemption or a timeout; pending rows are in the store."""
        submitit = import_extra("submitit", extra="slurm", what="the engine slurm")
        return submitit.helpers.DelayedSubmission(self)
