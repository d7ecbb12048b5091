"""Progress: what is left, and for how long at this pace."""

import os
import time
from pathlib import Path

import pytest

from gradkeep import farm
from gradkeep.farm._run import Progress, recent_rate


def test_the_time_left_follows_from_the_pace():
    seen = Progress(total=100, done=40, failed=10, leased=2, rate=2.0)
    assert seen.eta == 25.0
    assert seen.pending == 48
    assert str(seen) == "40 of 100 done, 10 failed, 2 running, 25 s left"
    assert Progress(total=100, done=0).eta is None
    assert Progress(total=4, done=3, failed=1, rate=None).eta == 0.0


def test_the_pace_is_found_from_the_rows_themselves(rows_of):
    import farm_jobs

    store = rows_of(100)
    rows = store.rows("models")
    assert recent_rate(store, rows) is None
    for number in range(5):
        rows.put(number, farm_jobs.trivial([number])[0])
    now = time.time()
    for file in Path(rows.path).rglob("*.safetensors"):
        at = now - 8 + 2 * int(file.stem)
        os.utime(file, (at, at))
    assert recent_rate(store, rows) == pytest.approx(0.5, rel=0.01)


def test_status_tells_how_long_it_will_take_while_somebody_works(rows_of):
    import farm_jobs

    from gradkeep.datamodels._contract import status

    store = rows_of(10)
    rows = store.rows("models")
    for number in range(2):
        rows.put(number, farm_jobs.trivial([number])[0])
    for number, file in enumerate(sorted(Path(rows.path).rglob("*.safetensors"))):
        os.utime(file, (time.time() - 4 + 4 * number,) * 2)
    assert status(store).progress.eta is None, "nobody works"
    rows.claim(count=1)
    progress = status(store).progress
    assert (progress.done, progress.leased, progress.pending) == (2, 1, 7)
    assert progress.eta == pytest.approx(32, rel=0.05)


def test_a_run_reports_its_progress_to_the_end(rows_of):
    import farm_jobs

    seen = []
    farm.run(rows_of(4), "models", farm_jobs.trivial, workers=0, progress=seen.append)
    assert seen[0].done == 0
    assert seen[-1].complete
    assert all(item.total == 4 for item in seen)
