"""Jobs that end in ways nobody planned: each is a failure of its row, bounded, and never of the run."""

import os
import threading

import pytest
from raises import raises

import gradkeep as gk
from gradkeep import farm
from gradkeep.errors import FarmError, GradkeepError

BOUND = 70_000
"""Bytes of a failure's record: 64 KiB of text, and a line of its own."""


@pytest.mark.parametrize("code", [0, 1, 75, 76, 77])
def test_a_process_that_ends_itself_in_a_row_is_a_failed_attempt(rows_of, code):
    import farm_jobs

    store = rows_of(4)
    job = farm_jobs.Vanishing({2}, code)
    outcome = farm.run(store, "models", job, workers=1, max_attempts=2, lease_seconds=5)
    assert [(f.row, f.attempts) for f in outcome.failures] == [(2, 2)]
    assert f"exit code {code}" in outcome.failures[0].error
    assert outcome.progress.done == 3
    assert not outcome.complete


def test_a_process_that_ended_itself_once_is_replaced(rows_of, tmp_path):
    import farm_jobs

    (tmp_path / "notes").mkdir()
    store = rows_of(5)
    job = farm_jobs.Vanishing({1, 3}, 0, tmp_path / "notes")
    assert farm.run(store, "models", job, workers=1).complete
    assert [s.attempts for s in store.rows("models").states()] == [0, 1, 0, 1, 0]


def test_processes_that_always_end_themselves_do_not_go_on_for_ever(rows_of):
    import farm_jobs

    store = rows_of(40)
    job = farm_jobs.Vanishing(set(range(40)), 0)
    with raises(FarmError, "farm.workers_die", fix="__main__"):
        farm.run(store, "models", job, workers=1, give_up_after=3)


TEXTS = {
    "surrogate": "\ud800 half of a pair",
    "long": "begin" + "x" * 3_000_000 + "end",
    "wide": "begin" + "漢" * 500_000 + "end",
    "lines": "begin\n" + "\n" * 500_000 + "end",
    "nul": "a\0b",
    "empty": "",
}


@pytest.mark.parametrize("workers", [0, 1])
def test_any_text_of_an_error_is_kept_within_bounds(rows_of, workers):
    import farm_jobs

    store = rows_of(8)
    job = farm_jobs.Complaining(dict(enumerate(TEXTS.values())))
    outcome = farm.run(store, "models", job, workers=workers, max_attempts=1)
    assert [f.row for f in outcome.failures] == list(range(len(TEXTS)))
    assert outcome.progress.done == 2
    for name, failure in zip(TEXTS, outcome.failures, strict=True):
        assert len(failure.error.encode()) < BOUND, name
        assert "Traceback" in failure.error
        assert "farm_jobs.py" in failure.error
        assert "after " in failure.error.splitlines()[-1]
    for name in ("long", "wide", "lines"):
        assert "end\nafter" in outcome.failures[list(TEXTS).index(name)].error
    folder = gk.open(store.location).rows("models").path
    sizes = [
        os.path.getsize(os.path.join(at, file))
        for at, _, files in os.walk(folder)
        for file in files
    ]
    assert max(sizes) < BOUND + 1000


@pytest.mark.parametrize("workers", [0, 1])
def test_whatever_a_job_returns_or_raises_is_a_failure_of_its_row(rows_of, workers):
    import farm_jobs

    answers = {0: None, 1: "x", 2: 7, 3: {"a": 1}, 4: [None], 5: ["x"], 6: "unspeakable", 7: []}
    store = rows_of(10)
    job = farm_jobs.Returning(answers)
    outcome = farm.run(store, "models", job, workers=workers, max_attempts=1)
    assert [f.row for f in outcome.failures] == sorted(answers)
    assert outcome.progress.done == 2


def test_what_makes_going_on_impossible_is_told_within_bounds(rows_of):
    import farm_jobs

    job = farm_jobs.UnloadableLoudly(3_000_000)
    with raises(FarmError, "farm.broken_worker") as caught:
        farm.run(rows_of(3), "models", job, workers=1)
    assert len(str(caught.value).encode()) < BOUND


@pytest.mark.parametrize("workers", [1, 2])
def test_a_job_that_never_succeeds_is_told_without_a_traceback(rows_of, workers):
    import farm_jobs

    job = farm_jobs.Returning(dict.fromkeys(range(20), "unspeakable"))
    with raises(FarmError, "farm.broken_worker") as caught:
        farm.run(rows_of(20), "models", job, workers=workers)
    assert "attempts all failed" in caught.value.found
    assert "Traceback" not in str(caught.value)


def in_threads(*calls):
    """Run all at once, each in a thread of its own; what they return, or the error."""
    results = [None] * len(calls)

    def run(place, call):
        try:
            results[place] = call()
        except BaseException as error:
            results[place] = error

    threads = [threading.Thread(target=run, args=item) for item in enumerate(calls)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(100)
    return results


@pytest.mark.parametrize("workers", [0, 1])
def test_runs_at_once_in_threads_of_one_process(rows_of, tmp_path, workers):
    import farm_jobs

    before = dict(os.environ)
    stores = [rows_of(5, folder=tmp_path / name) for name in ("a", "b")]
    outcomes = in_threads(
        *(
            lambda store=store: farm.run(store, "models", farm_jobs.trivial, workers=workers)
            for store in stores
        )
    )
    assert [getattr(outcome, "complete", outcome) for outcome in outcomes] == [True, True]
    assert dict(os.environ) == before


def test_two_runs_at_once_of_the_same_rows(rows_of):
    import farm_jobs

    store = rows_of(12)
    job = farm_jobs.Slow(0.02)
    outcomes = in_threads(*[lambda: farm.run(store, "models", job, workers=0)] * 2)
    assert [getattr(outcome, "complete", outcome) for outcome in outcomes] == [True, True]


WRONG = {
    "workers": [-1, 1.5, "2", True, float("nan"), 10**9],
    "threads": [0, -1, 1.5, "2", True],
    "batch": [0, -1, 1.5, "2", True, None],
    "timeout": [-1, float("nan"), float("inf"), "2", True],
    "max_attempts": [0, -1, 1.5, "2", None],
    "lease_seconds": [-1, float("nan"), float("inf"), "2", None],
    "grace": [-1, float("nan"), "2", None],
    "give_up_after": [0, -1, "2", None],
    "engine": ["local", 3, object()],
    "progress": [3, "yes"],
    "durability": ["zzz"],
    "no_such_limit": [1],
}


@pytest.mark.parametrize("name", WRONG)
def test_limits_that_are_none_are_refused_before_anything_runs(rows_of, name):
    import farm_jobs

    store = rows_of(2)
    for value in WRONG[name]:
        with pytest.raises(GradkeepError):
            farm.run(store, "models", farm_jobs.trivial, **{"workers": None, name: value})
    assert len(store.rows("models").done()) == 0


@pytest.mark.parametrize("job", [None, 3, "job"])
@pytest.mark.parametrize("workers", [0, 1])
def test_a_job_that_cannot_be_called_is_refused(rows_of, job, workers):
    with pytest.raises(FarmError, match=r"^job must be"):
        farm.run(rows_of(2), "models", job, workers=workers)


def test_engines_are_checked_where_they_are_made():
    for options in ({"workers": -1}, {"workers": "2"}, {"workers": 1.5}):
        for name in ("local", "ray", "slurm"):
            with pytest.raises(FarmError):
                farm.engine(name, **options)
    for options in ({"cpus": -1.0}, {"cpus": float("nan")}, {"gpus": "x"}, {"address": 3}):
        with pytest.raises(FarmError):
            farm.engine("ray", **options)
    for options in ({"folder": ""}, {"cluster": 3}, {"parameters": [1]}, {"workers": None}):
        with pytest.raises(FarmError):
            farm.engine("slurm", **options)
    for name in (None, 3, "k8s", ["local"]):
        with pytest.raises(FarmError):
            farm.engine(name)
