"""The cost of captures by many workers, against sums that can be done by hand."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import gradkeep as gk
from gradkeep.capturing._plan import (
    PlaceCosts,
    WorkerCosts,
    measure_folder,
    scale_plan,
)
from gradkeep.errors import CaptureError

FREE = PlaceCosts("free", 0.0, 0.0, math.inf)


def test_twice_as_many_workers_take_half_of_the_time_until_one_process_seals():
    costs = WorkerCosts(0.0, 0.0, 0.01, 10.0, 100, 0.0001)
    result = [
        scale_plan(costs, rows=6400, workers=workers, place=FREE, memory=0)
        for workers in (1, 2, 4, 64, 1000)
    ]
    assert [one.worker_seconds for one in result] == pytest.approx([64, 32, 16, 1, 1])
    assert result[-2].seconds == pytest.approx(1 + 0.64)


@given(
    rows=st.integers(1, 10**7),
    workers=st.integers(1, 500),
    start=st.floats(0, 20),
    put=st.floats(0, 0.5),
    here=st.booleans(),
)
def test_it_is_never_sooner_than_the_work_shared_evenly(rows, workers, start, put, here):
    place = PlaceCosts("place", put, 0.01, 1e8, measured=here)
    costs = WorkerCosts(start, 0.5, 0.01, 100.0, 64, 1e-4)
    one, many = (
        scale_plan(costs, rows=rows, workers=count, place=place, memory=0) for count in (1, workers)
    )
    assert many.worker_seconds >= 0.5 + 0.01 * rows / workers - 1e-6
    assert many.worker_seconds <= one.worker_seconds * (1 + 1e-9) + put * 4 * workers
    assert many.seconds >= many.worker_seconds + 1e-4 * rows


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
    assert far.requests > 3 * far.segments
    one = plan.at_scale(rows=10**6, workers=1, place="local", folder=tmp_path)
    spread = (plan.capture_seconds - plan.fixed_seconds) / (plan.rows + plan.queries)
    assert one.seconds > 10**6 * spread
    assert list(tmp_path.iterdir()) == []
    few = plan.at_scale(rows=10, workers=8, folder=tmp_path)  # which no worker is started for
    assert few.seconds < plan.fixed_seconds + 2.0
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
    result = measure_folder(str(tmp_path))
    assert result.measured
    assert 0 < result.put_seconds < 10
    assert 1e5 < result.bytes_per_second < 1e13
