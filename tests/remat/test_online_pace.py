"""Steps of tiny operators are told to use a plan, after a few operators and not after the step."""

import logging
import threading

import pytest
import torch
from torch import nn

from gradkeep.compat.dtr.zoo import build
from gradkeep.remat.online._runtime import OnlineRuntime, Pace


@pytest.mark.parametrize("name", ["lstm", "treelstm"])
def test_small_operators_are_told_of_plans_before_the_first_step_is_slow(name, caplog):
    step = build(name).step
    online = OnlineRuntime(10**9)
    with caplog.at_level(logging.WARNING, "gradkeep.remat"), online:
        before = None
        for count in range(200):
            torch.ones(4) + count
            if caplog.records and before is None:
                before = count
        assert before is not None
        assert before < 60
        step()
    (record,) = caplog.records
    assert "mode='planned'" in record.getMessage()
    assert online.slow == record.getMessage()
    # It is told once.
    with online:
        step()
    assert len(caplog.records) == 1


def test_a_busy_thread_beside_it_changes_nothing_of_the_pace():
    ended = threading.Event()

    def spin():
        while not ended.is_set():
            sum(range(1000))

    beside = threading.Thread(target=spin)
    beside.start()
    try:
        # Every operator lets other threads run, and waits until one of them lets go again.
        with OnlineRuntime(10**9) as online:
            for count in range(60):
                torch.ones(400) + count
    finally:
        ended.set()
        beside.join()
    assert online.slow is not None


def test_large_operators_are_left_in_peace(caplog):
    net = nn.Sequential(*[nn.Linear(700, 700) for _ in range(12)])
    x = torch.ones(700, 700)
    with caplog.at_level(logging.WARNING, "gradkeep.remat"), OnlineRuntime() as online:
        net(x).sum().backward()
        net(x).sum().backward()
    assert online._pace is None
    assert online.slow is None
    assert not caplog.records


def test_views_and_first_operators_say_nothing():
    pace = Pace()
    assert not any(pace.add_sample(10**6, 0) for _ in range(100))
    assert not any(pace.add_sample(10**9, 10**3) for _ in range(16))
    assert [pace.add_sample(2000, 1000) for _ in range(32)] == [*[False] * 31, True]
    assert pace.warning() is None
