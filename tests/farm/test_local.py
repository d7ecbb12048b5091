"""Local workers: every row once, failures recorded, hung jobs ended, stops obeyed."""

import functools
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from raises import raises

import gradkeep as gk
from gradkeep import farm
from gradkeep.errors import FarmError

HERE = Path(__file__).parent


def check_complete(store, count, name="models"):
    import farm_jobs

    rows = store.rows(name)
    assert rows.done().tolist() == list(range(count))
    stored = rows.read(range(count))
    assert stored["number"].tolist() == list(range(count))
    np.testing.assert_array_equal(stored["value"], [farm_jobs.value(n) for n in range(count)])


@pytest.mark.parametrize(("workers", "batch"), [(0, 1), (0, 5), (1, 1), (2, 3)])
def test_the_rows_are_the_same_whoever_computes_them(rows_of, workers, batch):
    import farm_jobs

    store = rows_of(17)
    outcome = farm.run(store, "models", farm_jobs.trivial, workers=workers, batch=batch)
    assert outcome.complete
    assert outcome.failures == ()
    check_complete(store, 17)


def test_this_process_works_while_others_start_and_one_of_them_is_killed(rows_of, tmp_path):
    import farm_jobs

    store, job = rows_of(40), farm_jobs.Signed(0.15, tmp_path)

    def others():
        return [name for name in os.listdir(tmp_path) if name.isdecimal() and int(name) != own]

    def kill_one():
        while not others():
            time.sleep(0.02)
        os.kill(int(others()[0]), signal.SIGKILL)

    own = os.getpid()
    killer = threading.Thread(target=kill_one)
    killer.start()
    outcome = farm.run(store, "models", job, workers=2, here=job, lease_seconds=30, max_attempts=5)
    killer.join()
    assert outcome.complete
    assert (tmp_path / str(own)).exists()
    check_complete(store, 40)


def test_when_all_is_done_nobody_waits_for_workers_that_start(rows_of):
    import farm_jobs

    store, job = rows_of(3), farm_jobs.trivial
    assert farm.run(store, "models", job, workers=8, here=job).complete
    assert not multiprocessing.active_children()
    check_complete(store, 3)


def test_nor_for_those_that_have_not_read_what_they_are_to_do(rows_of, monkeypatch):
    import farm_jobs

    monkeypatch.setattr("gradkeep.farm._local.work_in_process", farm_jobs.never_reads)
    store, job = rows_of(3), functools.partial(farm_jobs.with_data, np.zeros(1 << 20))
    started = time.monotonic()
    assert farm.run(store, "models", job, workers=3, here=job).complete
    assert time.monotonic() - started < farm_jobs.LONG / 2
    assert not multiprocessing.active_children()
    check_complete(store, 3)


def test_what_ends_this_process_ends_the_others(rows_of):
    import farm_jobs

    def interrupted(numbers):
        raise KeyboardInterrupt

    store = rows_of(4)
    with pytest.raises(KeyboardInterrupt):
        farm.run(store, "models", farm_jobs.Slow(60), workers=2, here=interrupted, grace=0.1)
    assert not multiprocessing.active_children()
    assert not any(state.state == "leased" for state in store.rows("models").states())


def test_workers_that_cannot_begin_are_told_though_this_process_could(rows_of):
    import farm_jobs

    job = farm_jobs.Slow(0.3)
    with pytest.raises(FarmError, match="the training data is not on this machine"):
        farm.run(rows_of(1000), "models", farm_jobs.Unloadable(), workers=2, here=job)
    for odd in ({"engine": farm.LocalProcesses(2)}, {"workers": 2, "timeout": 3.0}):
        with raises(FarmError, "farm.here_with_limits", fix="here="):
            farm.run(rows_of(2, "more"), "more", job, here=job, **odd)


def test_rows_that_are_done_are_not_computed_again(rows_of, tmp_path):
    import farm_jobs

    notes = tmp_path / "notes"
    notes.mkdir()
    store = rows_of(6)
    store.rows("models").put(2, farm_jobs.trivial([2])[0])
    job = farm_jobs.Failing(range(9), notes, times=0)
    farm.run(store, "models", job, workers=1)
    assert sorted(p.name for p in notes.iterdir()) == ["0", "1", "3", "4", "5"]
    store.rows("models").grow(9)
    farm.run(store, "models", job, workers=2)
    assert {p.name: p.stat().st_size for p in notes.iterdir()} == {
        str(n): 1 for n in (0, 1, *range(3, 9))
    }
    check_complete(store, 9)


def test_a_failed_row_is_tried_again_and_its_traceback_kept(rows_of, tmp_path):
    import farm_jobs

    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    store = rows_of(5)
    job = farm_jobs.Failing({1, 3}, tmp_path / "a", times=2)
    assert farm.run(store, "models", job, workers=0, batch=2).complete
    store.rows("other", store.rows("models").schema, num_rows=5)
    job = farm_jobs.Failing({1, 3}, tmp_path / "b", times=9)
    outcome = farm.run(store, "other", job, workers=0, max_attempts=2)
    assert [(f.row, f.attempts) for f in outcome.failures] == [(1, 2), (3, 2)]
    assert "ValueError: row 3 has no luck" in outcome.failures[1].error
    assert "farm_jobs.py" in outcome.failures[1].error
    assert (outcome.progress.done, outcome.progress.failed, outcome.complete) == (3, 2, False)


def test_one_bad_row_of_a_batch_does_not_spoil_the_others(rows_of, tmp_path):
    import farm_jobs

    store = rows_of(8)
    job = farm_jobs.Failing({5}, tmp_path, times=99)
    outcome = farm.run(store, "models", job, workers=0, batch=8, max_attempts=1)
    assert [f.row for f in outcome.failures] == [5]
    assert store.rows("models").done().tolist() == [0, 1, 2, 3, 4, 6, 7]


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ({"value": np.array([1, np.nan, 1], "f4")}, "NaN"),
        ({"value": np.zeros(4, "f4")}, "shape"),
        ({"value": np.zeros(3)}, "float64"),
        ({"more": 1}, "unknown"),
    ],
)
def test_what_the_schema_does_not_allow_is_a_failure_not_a_row(rows_of, answer, words):
    import farm_jobs

    store = rows_of(3)
    job = farm_jobs.Wrong({1: answer})
    outcome = farm.run(store, "models", job, workers=0, max_attempts=1)
    assert [f.row for f in outcome.failures] == [1]
    assert words in outcome.failures[0].error
    assert store.rows("models").done().tolist() == [0, 2]


def test_a_hung_row_is_ended_recorded_with_where_it_hung_and_tried_again(rows_of, tmp_path):
    import farm_jobs

    store = rows_of(4)
    job = farm_jobs.Hanging({2}, tmp_path)
    outcome = farm.run(store, "models", job, workers=1, timeout=1.0)
    assert outcome.complete
    state = store.rows("models").states()[2]
    assert state.attempts == 1
    assert "TimeoutError: row 2 took longer than 1 s" in state.error
    assert "wait_for_ever" in state.error


@pytest.mark.slow
def test_a_worker_stuck_in_native_code_is_killed_from_outside(rows_of, tmp_path):
    import farm_jobs

    store = rows_of(3)
    outcome = farm.run(store, "models", farm_jobs.Stuck(tmp_path), workers=1, lease_seconds=1.0)
    assert outcome.complete
    state = store.rows("models").states()[1]
    assert state.attempts == 1
    assert "SIGKILL" in state.error


@pytest.mark.slow
def test_a_worker_that_waits_for_others_is_left_alone(rows_of, tmp_path):
    """Its last row is done and it has nothing to say, for longer than a silent worker may."""
    import farm_jobs

    store = rows_of(3)
    assert store.rows("models").claim(owner="another machine", count=1, seconds=12.0)
    job = farm_jobs.Counted(tmp_path)
    assert farm.run(store, "models", job, workers=1, lease_seconds=0.5).complete
    assert (tmp_path / "loads").read_text() == "x", "one process did it all"


def test_a_row_that_kills_its_worker_fails_and_the_others_are_done(rows_of):
    import farm_jobs

    store = rows_of(6)
    outcome = farm.run(store, "models", farm_jobs.Dying({4}), workers=1, max_attempts=2)
    assert [(f.row, f.attempts) for f in outcome.failures] == [(4, 2)]
    assert "SIGSEGV" in outcome.failures[0].error
    assert store.rows("models").done().tolist() == [0, 1, 2, 3, 5]


def test_a_job_that_exits_python_is_a_failure(rows_of):
    import farm_jobs

    outcome = farm.run(rows_of(3), "models", farm_jobs.Exiting(), workers=0, max_attempts=1)
    assert [f.row for f in outcome.failures] == [1]
    assert "SystemExit: 2" in outcome.failures[0].error


def test_when_every_row_fails_the_farm_stops_early(rows_of, tmp_path):
    import farm_jobs

    store = rows_of(500)
    job = farm_jobs.Failing(range(500), tmp_path, times=99)
    with raises(FarmError, "farm.broken_worker") as caught:
        farm.run(store, "models", job, workers=1, give_up_after=4)
    assert "has no luck" in caught.value.found
    assert sum(state.attempts for state in store.rows("models").states()) == 4


def test_a_job_that_cannot_be_loaded_is_told_at_once(rows_of):
    import farm_jobs

    with pytest.raises(FarmError, match="the training data is not on this machine"):
        farm.run(rows_of(3), "models", farm_jobs.Unloadable(), workers=2)


def test_a_job_that_cannot_be_sent_is_refused_before_anything_starts(rows_of):
    lock = threading.Lock()
    with raises(FarmError, "farm.not_picklable", fix="workers=0"):
        farm.run(rows_of(1), "models", lambda numbers: [lock], workers=1)


def test_workers_use_the_threads_they_are_given(rows_of):
    import farm_jobs

    store = rows_of(2)
    before = os.environ.get("OMP_NUM_THREADS")
    farm.run(store, "models", farm_jobs.Threads(), workers=1, threads=3)
    assert set(store.rows("models").read([0, 1])["value"].ravel()) == {3.0}
    assert os.environ.get("OMP_NUM_THREADS") == before


def test_a_full_disk_stops_the_farm_and_leaves_the_row_open(rows_of, monkeypatch):
    import errno

    import farm_jobs

    from gradkeep.errors import WriteFailedError
    from gradkeep.store import Rows

    store = rows_of(5)
    real = Rows.put

    def full(self, row, arrays, **options):
        if row == 3:
            raise WriteFailedError(os.strerror(errno.ENOSPC), path=self.path)
        return real(self, row, arrays, **options)

    with monkeypatch.context() as patched:
        patched.setattr(Rows, "put", full)
        with pytest.raises(WriteFailedError, match="No space left"):
            farm.run(store, "models", farm_jobs.trivial, workers=0)
    states = store.rows("models").states()
    assert (states[3].state, states[3].attempts) == ("pending", 0)
    assert farm.run(store, "models", farm_jobs.trivial, workers=0).complete


@pytest.mark.parametrize("field", ["batch", "max_attempts", "threads", "timeout", "lease_seconds"])
def test_limits_that_make_no_sense_are_refused(rows_of, field):
    with pytest.raises(FarmError, match=field):
        farm.run(rows_of(1), "models", len, workers=0, **{field: -1})


def test_a_timeout_needs_a_process_of_its_own(rows_of):
    with raises(FarmError, "farm.timeout_without_workers", fix="workers=1"):
        farm.run(rows_of(1), "models", len, workers=0, timeout=1.0)


def test_an_unknown_engine_or_option_is_named():
    with raises(FarmError, "farm.unknown_engine") as caught:
        farm.engine("kubernetes")
    assert "'local', 'ray' or 'slurm'" in caught.value.message
    with raises(FarmError, "farm.unknown_option") as caught:
        farm.engine("ray", adress="auto")
    assert "adress" in caught.value.message


SCRIPT = """
import sys
import gradkeep as gk
from gradkeep import farm
import farm_jobs

if __name__ == "__main__":
    store = gk.open(sys.argv[1], durability="process")
    job = farm_jobs.Slow(float(sys.argv[2])) if sys.argv[2] != "0" else farm_jobs.trivial
    here = job if sys.argv[6:] else None
    farm.run(store, "models", job, workers=int(sys.argv[3]), lease_seconds=float(sys.argv[4]),
             grace=float(sys.argv[5]), max_attempts=20, here=here,
             progress=lambda p: print(p, flush=True))
"""


def start(tmp_path, *arguments):
    script = tmp_path / "farm_script.py"
    script.write_text(textwrap.dedent(SCRIPT))
    return subprocess.Popen(
        [sys.executable, str(script), str(tmp_path / "store"), *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(HERE), "OMP_NUM_THREADS": "1"},
        # Whoever runs the tests in the background has them ignore interrupts.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )


def children(pid):
    """The worker processes below a process (its resource tracker is not one)."""
    results = []
    for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        try:
            if b"spawn_main" in Path(f"/proc/{word}/cmdline").read_bytes():
                results.append(int(word))
        except OSError:
            continue
    return results


def wait_until(condition, seconds=60):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.05)


@pytest.mark.parametrize("here", [(), ("here",)], ids=["beside", "along"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stop_finishes_what_was_begun_and_leaves_nothing_leased(rows_of, tmp_path, number, here):
    store = rows_of(1000)
    rows = store.rows("models")
    process = start(tmp_path, 0.3, 2, 60, 20, *here)
    try:
        wait_until(lambda: len(rows.done()) >= 2)
        process.send_signal(number)
        _, error_output = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode != 0
    assert ("KeyboardInterrupt" in error_output) is (number == signal.SIGINT)
    states = [state.state for state in rows.states()]
    assert "leased" not in states
    assert 2 <= states.count("done") < 100
    assert states.count("done") + states.count("pending") == 1000


def test_a_row_that_does_not_finish_in_time_is_given_back(rows_of, tmp_path):
    rows = rows_of(4).rows("models")
    process = start(tmp_path, 1000, 2, 60, 0.5)
    try:
        wait_until(lambda: sum(s.state == "leased" for s in rows.states()) == 2)
        time.sleep(0.5)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=30)
    finally:
        process.kill()
    assert [(s.state, s.attempts) for s in rows.states()] == [("pending", 0)] * 4


def test_workers_whose_parent_is_killed_end_by_themselves(rows_of, tmp_path):
    rows = rows_of(1000).rows("models")
    process = start(tmp_path, 0.2, 2, 60, 20)
    wait_until(lambda: len(rows.done()) >= 1)
    workers = children(process.pid)
    assert len(workers) == 2
    process.kill()
    process.communicate()
    wait_until(lambda: not any(is_running(worker) for worker in workers), 30)
    assert not any(state.state == "leased" for state in rows.states())


def is_running(pid):
    """Whether it exists and is not merely waiting to be buried."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.slow
def test_two_thousand_rows_survive_fifty_kills_each_computed_once(rows_of, tmp_path):
    """Workers are killed at random moments; in the end every row is there, right, and once."""
    count, max_kills = 2000, 60
    store = rows_of(count)
    rows = store.rows("models")
    rng = random.Random(1)
    process = start(tmp_path, 0.004, 2, 2, 20)  # slow enough to be killed often on a busy machine
    kills = 0
    try:
        next_kill = 1
        while process.poll() is None:
            time.sleep(0.02)
            done, alive = len(rows.done()), children(process.pid)
            # By what is done, not by the clock: no machine is too slow to get on, none too fast.
            if kills < max_kills and done >= next_kill and alive:
                time.sleep(rng.uniform(0, 0.05))
                try:
                    os.kill(rng.choice(alive), signal.SIGKILL)
                except ProcessLookupError:
                    continue  # the one killed before was still listed
                kills += 1
                next_kill = done + rng.randint(1, 20)
        out, error_output = process.communicate(timeout=100)
    finally:
        process.kill()
    assert process.returncode == 0, error_output
    assert kills >= 50, f"only {kills} kills before the end"
    check_complete(store, count)
    assert out.splitlines()[-1] == f"{count} of {count} done"
    files = [
        f.name for f in Path(rows.path).rglob("*.safetensors") if f.parent.parent.name == "rows"
    ]
    assert len(files) == len(set(files))
    assert len(files) + len(rows.packed_rows) == count
    assert gk.store.verify(store.backend).damage == ()
