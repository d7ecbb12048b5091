"""Captures played through: against sums that can be done by hand, and a plain simulation."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import gradkeep as gk
from gradkeep.capturing._scale import PlaceCosts, WorkerCosts, measure_folder, play_capture
from gradkeep.errors import CaptureError

FREE = PlaceCosts("free", 0.0, 0.0, math.inf)


def second_by_second(ranges, workers, costs, place, here):
    """The same by a list of workers, each doing one segment after the other, with its own clock."""
    made = costs.row_seconds * costs.rows_per_segment
    put = place.put(costs.row_bytes * costs.rows_per_segment)
    asking = 2 * place.get_seconds + 2 * place.put_seconds
    clocks = [costs.start_seconds] * workers
    if here:
        clocks = [costs.first_seconds + costs.start_seconds] * workers
        clocks[0] = costs.first_seconds
    busy = [0]
    for count in ranges:
        worker = min(range(workers), key=lambda one: clocks[one])
        making = clocks[worker]
        ends = [making, making]  # of the puts so far
        for _ in range(count):
            making = max(making, ends[-2]) + made  # one that is made may wait for the one under way
            ends.append(max(making, ends[-1]) + put)
        clocks[worker] = ends[-1] + asking
        busy.append(worker)
    return max(clocks[worker] for worker in set(busy))


costs_drawn = st.builds(
    WorkerCosts,
    start_seconds=st.floats(0, 20),
    first_seconds=st.floats(0, 1),
    row_seconds=st.floats(1e-5, 0.1),
    row_bytes=st.floats(1, 1e6),
    rows_per_segment=st.integers(1, 4096),
    check_seconds=st.floats(0, 1e-3),
)
places = st.builds(
    PlaceCosts,
    name=st.just("place"),
    put_seconds=st.floats(0, 0.5),
    get_seconds=st.floats(0, 0.5),
    bytes_per_second=st.floats(1e6, 1e9),
)


@given(
    *(st.lists(st.integers(1, 6), min_size=1, max_size=30), st.integers(1, 9)),
    *(costs_drawn, places, st.booleans()),
)
def test_it_is_what_a_plain_simulation_says(ranges, workers, costs, place, here):
    rows = sum(ranges) * costs.rows_per_segment
    found = play_capture(ranges, workers, costs, place, rows=rows, here=here)
    expected = second_by_second(ranges, min(workers, len(ranges)), costs, place, here)
    assert found.workers_done == pytest.approx(expected, rel=1e-9)
    assert 0 < found.busy <= 1 + 1e-9
    assert found.seconds >= found.workers_done


def test_twice_as_many_workers_take_half_of_the_time_until_one_process_seals():
    costs = WorkerCosts(0.0, 0.0, 0.01, 10.0, 100, 0.0001)
    times = [
        play_capture([1] * 64, workers, costs, FREE, rows=6400).workers_done
        for workers in (1, 2, 4, 64, 1000)
    ]
    assert times == pytest.approx([64, 32, 16, 1, 1])
    whole = play_capture([1] * 64, 64, costs, FREE, rows=6400)
    assert whole.seconds == pytest.approx(1 + 0.64)


def small():
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))
    batch = torch.randn(16, 8), torch.arange(16) % 2
    return gk.plan(model, batch, task=gk.Classification(), rows=1000)


def test_a_plan_is_taken_to_a_billion_rows(monkeypatch, tmp_path):
    monkeypatch.setattr("gradkeep.capturing._plan.measure_start", lambda workers: 2.0)
    plan = small()
    far = plan.at_scale(rows=10**9, workers=256, place="s3", load_seconds=1e-5)
    assert far.bytes == pytest.approx(plan.row_bytes * 10**9)
    assert far.segments == math.ceil(10**9 / plan.rows_per_segment)
    assert far.played.requests > 3 * far.segments
    one = plan.at_scale(rows=10**6, workers=1, place="local", folder=tmp_path)
    spread = (plan.capture_seconds - plan.fixed_seconds) / (plan.rows + plan.queries)
    assert one.played.seconds > 10**6 * spread
    assert list(tmp_path.iterdir()) == []
    few = plan.at_scale(rows=10, workers=8, folder=tmp_path)  # which no worker is started for
    assert few.played.seconds < plan.fixed_seconds + 2.0
    assert "256 workers" in str(far)
    assert "assumed" in str(far)
    for wrong in (
        {"rows": 0},
        {"rows": 2.5},
        {"rows": 10, "workers": 0},
        {"rows": 10, "place": "moon"},
        {"rows": 10, "load_seconds": -1.0},
        {"rows": 10, "load_seconds": math.nan},
    ):
        with pytest.raises(CaptureError):
            plan.at_scale(**wrong)


def test_a_disk_is_measured(tmp_path):
    found = measure_folder(str(tmp_path))
    assert found.measured
    assert 0 < found.put_seconds < 10
    assert 1e5 < found.bytes_per_second < 1e13
