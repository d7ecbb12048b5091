"""Specification of a job: rows, function and limits."""

from __future__ import annotations

import importlib.util
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import gradkeep.store as stores
from gradkeep import _arguments
from gradkeep.errors import FarmError

if TYPE_CHECKING:
    from gradkeep.store import Durability, Rows


MAX_WORKERS = 100_000
"""Upper limit for all machines together."""
_MAX_COUNT = 2**31 - 1
_MAX_SECONDS = 10 * 365 * 86400.0
_DURABILITIES = ("full", "process")

Job = Callable[[Sequence[int]], Sequence[Mapping[str, Any]]]
"""Computes rows: gets their numbers, returns the arrays of each, in the same order."""


@dataclass(frozen=True, slots=True)
class JobSpec:
    """Everything that a worker needs, small enough to be sent to any machine."""

    store: str
    """Path or address of the store, valid for every worker."""
    rows: str
    """Name of the set of rows in the store."""
    job: bytes
    """A `Job`, pickled."""
    batch: int = 1
    """Rows per claim."""
    timeout: float | None = None
    """Seconds per row; a batch may take this times its number of rows."""
    max_attempts: int = 3
    lease_seconds: float = 60.0
    """Lease timeout: seconds after the last heartbeat until other workers may take the rows."""
    grace: float = 20.0
    """Seconds to finish current rows after a stop; then they are released."""
    threads: int = 1
    """Threads per worker, for torch and numpy's libraries."""
    give_up_after: int = 10
    """A worker whose first attempts, this many, all fail stops."""
    durability: Durability = "full"
    retry_errors: bool = True
    """Retry errors of gradkeep; otherwise they end the run."""

    def __post_init__(self) -> None:
        for name in ("store", "rows"):
            _arguments.text(name, getattr(self, name), error=FarmError)
        _arguments.instance("job", self.job, bytes, error=FarmError)
        for name in ("batch", "max_attempts", "threads", "give_up_after"):
            value = getattr(self, name)
            _arguments.count(name, value, error=FarmError, least=1, most=_MAX_COUNT)
        for name in ("timeout", "lease_seconds", "grace"):
            if (value := getattr(self, name)) is not None or name != "timeout":
                _arguments.number(name, value, error=FarmError, least=0, most=_MAX_SECONDS)
        _arguments.one_of("durability", self.durability, _DURABILITIES, error=FarmError)

    def open_rows(self) -> Rows:
        """Open the rows in this process."""
        store = stores.open(self.store, create=False, durability=self.durability)
        return store.rows(self.rows)

    def load_job(self) -> Job:
        """Unpickle the job."""
        job: Job = pickle.loads(self.job)
        return job


def pickle_job(job: object) -> bytes:
    """Pickle a job, or its arguments, for another process.

    With cloudpickle installed, functions of scripts and notebooks work as well.
    """
    has_cloudpickle = importlib.util.find_spec("cloudpickle") is not None
    pickler = importlib.import_module("cloudpickle" if has_cloudpickle else "pickle")
    try:
        pickled: bytes = pickler.dumps(job)
    except Exception as error:
        raise FarmError(
            "the job cannot be sent to another process",
            code="farm.not_picklable",
            found=f"{type(error).__name__}: {error}",
            expected="functions defined at the top of a module, and data that can be pickled",
            fix="Move it into a module, install cloudpickle, or use workers=0.",
        ) from error
    return pickled


def check_workers(workers: object, *, least: int = 0, most: int = MAX_WORKERS) -> None:
    """Raise if the number of workers is invalid."""
    if workers is not None or least:
        _arguments.count("workers", workers, error=FarmError, least=least, most=most)
