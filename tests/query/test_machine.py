"""The machine is measured once, quickly, and what is kept of it is never trusted blindly."""

import dataclasses
import json
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradkeep.errors import QueryError
from gradkeep.factors._cost import MachineSpeeds
from gradkeep.query import _machine
from gradkeep.query._machine import machine_speeds


@pytest.fixture
def measured(monkeypatch, tmp_path):
    """A cache folder of its own, and the list of measurements made."""
    made = []

    def calibrate():
        made.append(MachineSpeeds(flops=2e10 + len(made)))
        return made[-1]

    monkeypatch.setattr(_machine, "calibrate", calibrate)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv(_machine.VARIABLE, raising=False)
    _machine._known.cache_clear()
    yield made
    _machine._known.cache_clear()


def test_a_machine_is_measured_once(measured, tmp_path):
    first = machine_speeds()
    _machine._known.cache_clear()
    assert machine_speeds() == first
    assert len(measured) == 1
    [kept] = (tmp_path / "gradkeep").iterdir()
    assert json.loads(kept.read_text())["speeds"]["flops"] == first.flops


@pytest.mark.parametrize("text", ["", "{}", '{"speeds": {"flops": 1}}', "[]"])
def test_a_broken_file_is_measured_anew_but_a_chosen_one_refused(
    measured, tmp_path, monkeypatch, text
):
    machine_speeds()
    [kept] = (tmp_path / "gradkeep").iterdir()
    kept.write_text(text)
    _machine._known.cache_clear()
    assert machine_speeds() == measured[1]
    kept.write_text(text)
    monkeypatch.setenv(_machine.VARIABLE, str(kept))
    with pytest.raises(QueryError, match="does not hold the speeds"):
        machine_speeds()


def test_impossible_speeds_are_refused(measured, tmp_path, monkeypatch):
    path = tmp_path / "fast.json"
    _machine.write(MachineSpeeds(flops=-1.0), path, ())
    monkeypatch.setenv(_machine.VARIABLE, str(path))
    with pytest.raises(QueryError, match="impossible"):
        machine_speeds()


def test_a_chosen_file_overrides_the_measurement(measured, tmp_path, monkeypatch):
    path = tmp_path / "theirs.json"
    _machine.write(MachineSpeeds(call=7.0), path, ())
    monkeypatch.setenv(_machine.VARIABLE, str(path))
    assert machine_speeds().call == 7.0
    assert measured == []


def test_a_folder_that_cannot_be_written_is_no_error(measured, tmp_path, monkeypatch):
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))
    assert machine_speeds() == measured[0]


def test_the_measurement_is_finite_and_its_speeds_are_those_of_the_clock(monkeypatch):
    """Each work takes as long as a clock of ours says: the speeds follow from that alone."""
    found = _machine.calibrate()
    assert all(0 < value < float("inf") for value in dataclasses.astuple(found))

    class Clock:
        now, ticks = 0.0, 0

        def __call__(self):
            self.ticks += 1
            self.now += 1e-3
            return self.now

    clock = Clock()
    monkeypatch.setattr(_machine.time, "perf_counter", clock)
    monkeypatch.setattr(_machine, "_EACH", 20e-3)
    found = _machine.calibrate()
    assert found.call == pytest.approx(1e-3)
    assert found.flops == pytest.approx(2 * 512**3 / 1e-3)
    assert found.touch == pytest.approx(1e-3 / (1 << 18))
    measurements = 12
    # Besides the first call each runs until its share of time is over: never for long.
    assert clock.ticks <= measurements * (3 * 20 + 4)


BUSY = dataclasses.replace(MachineSpeeds(), touch=3e-8, turn=3e-8, flops=2e10)
"""As seen of two threads on two busy cores."""


def kept_file(tmp_path):
    [kept] = (tmp_path / "gradkeep").iterdir()
    return kept


def test_what_was_measured_beside_other_work_is_not_believed_for_long(
    measured, tmp_path, monkeypatch
):
    monkeypatch.setattr(_machine, "calibrate", lambda: BUSY)
    first = machine_speeds()
    typical = MachineSpeeds()
    assert first.touch <= 8 * typical.touch
    assert first.flops == BUSY.flops  # slow, and yet it may be so
    monkeypatch.setattr(_machine, "calibrate", lambda: typical)
    _machine._known.cache_clear()
    assert machine_speeds() == first  # not a second every time
    kept = kept_file(tmp_path)
    os.utime(kept, (kept.stat().st_mtime - 7200,) * 2)
    _machine._known.cache_clear()
    assert machine_speeds() == typical
    os.utime(kept, (kept.stat().st_mtime - 7200,) * 2)
    monkeypatch.setattr(_machine, "calibrate", lambda: BUSY)
    _machine._known.cache_clear()
    assert machine_speeds() == typical  # what can be believed stays


@given(st.floats(0.01, 1000))
def test_a_slow_or_fast_machine_is_believed(times):
    typical = dataclasses.asdict(MachineSpeeds())
    rates = ("flops", "batched", "convolution")
    made = MachineSpeeds(**{n: v / times if n in rates else v * times for n, v in typical.items()})
    assert _machine.unhindered(made) == made


def test_many_cores_multiply_faster_than_they_are_called():
    typical = MachineSpeeds()
    made = dataclasses.replace(typical, flops=100 * typical.flops, batched=50 * typical.batched)
    assert _machine.unhindered(made) == made


def test_a_file_that_was_chosen_is_taken_as_it_is(measured, tmp_path, monkeypatch):
    path = tmp_path / "own.json"
    _machine.write(BUSY, path, ())
    monkeypatch.setenv(_machine.VARIABLE, str(path))
    assert machine_speeds() == BUSY
