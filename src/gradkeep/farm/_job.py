"""What every worker is told: which rows, which job, and how long things may take."""

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


MOST_WORKERS = 100_000
"""Of all machines together."""
_LARGEST = 2**31 - 1
_LONGEST = 10 * 365 * 86400.0
_DURABILITIES = ("full", "process")

Job = Callable[[Sequence[int]], Sequence[Mapping[str, Any]]]
"""Computes rows: gets their numbers, returns the arrays of each, in the same order."""


@dataclass(frozen=True, slots=True)
class JobSpec:
    """All that a worker needs to know, small enough to be sent to any machine."""

    store: str
    """The store's path or address, which must mean the same place to every worker."""
    rows: str
    """The name of the set of rows in the store."""
    job: bytes
    """A `Job`, pickled."""
    batch: int = 1
    """How many rows a worker takes at a time."""
    timeout: float | None = None
    """Seconds that one row may take; a batch may take as many times that as it has rows."""
    max_attempts: int = 3
    lease_seconds: float = 60.0
    """How long after a worker's last sign of life another may take its rows."""
    grace: float = 20.0
    """Seconds to finish what was begun when asked to stop; then it is given back."""
    threads: int = 1
    """Threads per worker, for torch and for the libraries below numpy."""
    give_up_after: int = 10
    """A worker whose first so many rows all fail stops: the next thousand would fail as well."""
    durability: Durability = "full"
    retry_errors: bool = True
    """Whether an error that gradkeep raises on purpose is tried again; else it ends the run."""

    def __post_init__(self) -> None:
        for name in ("store", "rows"):
            _arguments.text(name, getattr(self, name), error=FarmError)
        _arguments.instance("job", self.job, bytes, error=FarmError)
        for name in ("batch", "max_attempts", "threads", "give_up_after"):
            value = getattr(self, name)
            _arguments.count(name, value, error=FarmError, least=1, most=_LARGEST)
        for name in ("timeout", "lease_seconds", "grace"):
            if (value := getattr(self, name)) is not None or name != "timeout":
                _arguments.number(name, value, error=FarmError, least=0, most=_LONGEST)
        _arguments.one_of("durability", self.durability, _DURABILITIES, error=FarmError)

    def open_rows(self) -> Rows:
        """The rows, opened in this process."""
        store = stores.open(self.store, create=False, durability=self.durability)
        return store.rows(self.rows)

    def load_job(self) -> Job:
        """The job, made anew in this process."""
        job: Job = pickle.loads(self.job)
        return job


def packed(job: object) -> bytes:
    """A job, or what it needs, as bytes that another process can read.

    With cloudpickle installed, functions of scripts and notebooks travel as well.
    """
    found = importlib.util.find_spec("cloudpickle") is not None
    pickler = importlib.import_module("cloudpickle" if found else "pickle")
    try:
        made: bytes = pickler.dumps(job)
    except Exception as error:
        raise FarmError(
            "the job cannot be sent to another process",
            found=f"{type(error).__name__}: {error}",
            expected="functions defined at the top of a module, and data that can be pickled",
            fix="move it into a module, pip install cloudpickle, or use workers=0 to stay here",
        ) from error
    return made


def check_workers(workers: object, *, least: int = 0, most: int = MOST_WORKERS) -> None:
    """Refuse a number of workers that is none, or that no cluster has."""
    if workers is not None or least:
        _arguments.count("workers", workers, error=FarmError, least=least, most=most)
