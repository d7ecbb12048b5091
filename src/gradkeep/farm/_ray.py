"""Workers as actors of a Ray cluster, whose nodes may come and go."""

from __future__ import annotations

import os
import threading
import traceback
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gradkeep.errors import FarmError, MissingExtra
from gradkeep.farm._pull import Puller
from gradkeep.farm._signals import stop_on_signals
from gradkeep.farm._threads import pin
from gradkeep.farm._watch import Watch
from gradkeep.farm._worker import STOPPED, TIMED_OUT

if TYPE_CHECKING:
    from collections.abc import Callable

    from gradkeep.farm._order import Order

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

    @property
    def num_workers(self) -> int:
        """How many workers there will be."""
        ray = _ray()
        self._connect(ray)
        if self.workers is not None:
            return self.workers
        return max(1, int(ray.cluster_resources().get("CPU", 1) // self.cpus))

    @property
    def threads(self) -> int:
        """The threads of each: what Ray reserves for it."""
        return max(1, int(self.cpus))

    def run(self, order: Order, look: Callable[[], None]) -> None:
        """Run actors until no row is left; Ray starts them again on other nodes when one dies."""
        ray = _ray()
        self._connect(ray)
        actor = ray.remote(
            num_cpus=self.cpus,
            num_gpus=self.gpus,
            max_restarts=-1,
            max_task_retries=-1,
            concurrency_groups={"control": 1},
        )(_actor_class(ray))
        actors = [actor.remote(order) for _ in range(self.num_workers)]
        with stop_on_signals() as stop:
            try:
                waiting = [one.pull.remote() for one in actors]
                asked = False
                while waiting and not stop.at_once:
                    ready, waiting = ray.wait(waiting, num_returns=1, timeout=_TICK)
                    for reference in ready:
                        _check(ray.get(reference))
                    if ready and not stop.asked:
                        # One found nothing left, so there is nothing left for any. Some may never
                        # return: their node is gone and there is no room on the others.
                        break
                    look()
                    if stop.asked and not asked:
                        asked = True
                        for one in actors:
                            one.stop.remote()
            finally:
                for one in actors:
                    ray.kill(one)
            stop.raise_if_asked()

    def _connect(self, ray: Any) -> None:
        if not ray.is_initialized():
            # Its log of every worker's output would drown the progress.
            ray.init(address=self.address, log_to_driver=False, include_dashboard=False)


def _actor_class(ray: Any) -> type:
    class FarmWorker:
        """One puller in an actor; anything that ends its process has Ray start it again."""

        def __init__(self, order: Order) -> None:
            self._order = order
            self._asked = threading.Event()

        def pull(self) -> str | None:
            """Work until nothing is left; the traceback of what made going on impossible."""
            pin(self._order.threads)
            try:
                rows, job = self._order.open_rows(), self._order.load_job()
                pin(self._order.threads)
                puller = Puller(self._order, rows, job, stopped=self._asked.is_set)
                with Watch(self._order, rows, end=_end, stopped=self._asked.is_set) as watch:
                    puller.run(watch)
            except Exception:
                return traceback.format_exc()
            return None

        @ray.method(concurrency_group="control")  # type: ignore[untyped-decorator]
        def stop(self) -> None:
            """Finish what was begun, take nothing new."""
            self._asked.set()

    return FarmWorker


def _end(reason: str) -> None:
    os._exit(TIMED_OUT if reason == "timeout" else STOPPED)


def _check(broken: str | None) -> None:
    if broken is not None:
        raise FarmError(
            "a worker could not go on",
            found="\n" + broken.rstrip(),
            fix="repair what it says and run again: what is done stays done",
        )


def _ray() -> Any:
    try:
        import ray
    except ImportError as error:
        raise MissingExtra("the engine ray needs Ray", fix='pip install "gradkeep[ray]"') from error
    return ray
