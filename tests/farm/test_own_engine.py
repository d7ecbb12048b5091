"""An engine of one's own, written with nothing but what `gradkeep.farm` offers."""

import pickle
import subprocess
import sys
import threading

import numpy as np
import pytest
from raises import raises

from gradkeep import farm
from gradkeep.errors import FarmError
from gradkeep.farm._worker import JobSpec


class Threads:
    """Workers as threads of this process."""

    threads = 1

    def __init__(self, workers):
        self.workers = workers
        self.seen = None

    def run(self, spec, report):
        self.seen = spec
        pool = [threading.Thread(target=farm.work, args=(spec,)) for _ in range(self.workers)]
        for thread in pool:
            thread.start()
        for thread in pool:
            while thread.is_alive():
                report()
                thread.join(0.05)


class Elsewhere:
    """Workers as programs of their own, as a queue of jobs would start them."""

    threads = 2

    def __init__(self, folder):
        self.folder = folder

    def run(self, spec, report):
        (self.folder / "spec").write_bytes(pickle.dumps(spec))
        code = (
            "import pickle; from gradkeep import farm; farm.work(pickle.load(open('spec', 'rb')))"
        )
        started = [subprocess.Popen([sys.executable, "-c", code], cwd=self.folder) for _ in "ab"]
        assert [one.wait() for one in started] == [0, 0]


class Lazy:
    """Does nothing at all."""

    threads = 1

    def run(self, spec, report):
        report()


@pytest.fixture
def jobs():
    import farm_jobs

    return farm_jobs


def check_rows(store, jobs, count):
    stored = store.rows("models").read(range(count))["value"]
    np.testing.assert_array_equal(stored, [jobs.value(n) for n in range(count)])


def test_rows_are_computed_where_the_engine_says(jobs, rows_of):
    store, mine, seen = rows_of(12), Threads(2), []
    outcome = farm.run(store, "models", jobs.trivial, engine=mine, progress=seen.append, batch=2)
    assert outcome.complete
    assert not outcome.failures
    check_rows(store, jobs, 12)
    assert isinstance(mine.seen, JobSpec)
    assert (mine.seen.rows, mine.seen.batch, mine.seen.threads) == ("models", 2, 1)
    assert seen[-1].complete


def test_a_spec_travels_to_another_program(jobs, rows_of, tmp_path, monkeypatch):
    store = rows_of(6)
    monkeypatch.setenv("PYTHONPATH", ":".join(sys.path))
    outcome = farm.run(
        str(tmp_path / "store"), "models", jobs.Threads(), engine=Elsewhere(tmp_path)
    )
    assert outcome.complete
    stored = store.rows("models").read(range(6))["value"]
    np.testing.assert_array_equal(stored, 2)  # the threads that the engine gives each worker


def test_failures_are_recorded_whoever_runs_the_rows(jobs, rows_of, tmp_path):
    store = rows_of(5)
    job = jobs.Failing({3}, tmp_path, times=9)
    outcome = farm.run(store, "models", job, engine=Threads(1), max_attempts=2)
    assert not outcome.complete
    assert [(item.row, item.attempts) for item in outcome.failures] == [(3, 2)]
    assert "row 3 has no luck" in outcome.failures[0].error


def test_what_an_engine_leaves_undone_stays_to_be_done(jobs, rows_of):
    store = rows_of(4)
    outcome = farm.run(store, "models", jobs.trivial, engine=Lazy())
    assert (outcome.complete, outcome.progress.done) == (False, 0)
    assert farm.run(store, "models", jobs.trivial, engine=Threads(1)).complete
    check_rows(store, jobs, 4)


def test_a_worker_that_is_asked_to_stop_takes_nothing_new(jobs, rows_of):
    class Impatient:
        threads = 1

        def run(self, spec, report):
            begun = []
            farm.work(spec, stopped=lambda: len(begun) > 0, beat=begun.append)

    outcome = farm.run(rows_of(6), "models", jobs.trivial, engine=Impatient())
    assert outcome.progress.done == 1


def test_an_engine_and_a_number_of_workers_exclude_each_other(jobs, rows_of):
    with raises(FarmError, "farm.workers_and_engine", fix="engine="):
        farm.run(rows_of(2), "models", jobs.trivial, workers=2, engine=Lazy())
