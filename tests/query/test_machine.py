"""The machine is measured once, quickly, and what is kept of it is never trusted blindly."""

import dataclasses
import json
import time

import pytest

from gradkeep.errors import QueryError
from gradkeep.query import _calibrate, _machine
from gradkeep.query._machine import Machine, machine


@pytest.fixture
def measured(monkeypatch, tmp_path):
    """A cache folder of its own, and the list of measurements made."""
    made = []

    def calibrate():
        made.append(Machine(flops=1e9 + len(made)))
        return made[-1]

    monkeypatch.setattr(_calibrate, "calibrate", calibrate)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv(_machine.VARIABLE, raising=False)
    _machine._known.cache_clear()
    yield made
    _machine._known.cache_clear()


def test_a_machine_is_measured_once(measured, tmp_path):
    first = machine()
    _machine._known.cache_clear()
    assert machine() == first
    assert len(measured) == 1
    [kept] = (tmp_path / "gradkeep").iterdir()
    assert json.loads(kept.read_text())["speeds"]["flops"] == first.flops


@pytest.mark.parametrize("text", ["", "{}", '{"speeds": {"flops": 1}}', "[]"])
def test_a_broken_file_is_measured_anew_but_a_chosen_one_refused(
    measured, tmp_path, monkeypatch, text
):
    machine()
    [kept] = (tmp_path / "gradkeep").iterdir()
    kept.write_text(text)
    _machine._known.cache_clear()
    assert machine() == measured[1]
    kept.write_text(text)
    monkeypatch.setenv(_machine.VARIABLE, str(kept))
    with pytest.raises(QueryError, match="does not hold the speeds"):
        machine()


def test_impossible_speeds_are_refused(measured, tmp_path, monkeypatch):
    path = tmp_path / "fast.json"
    _machine.write(Machine(flops=-1.0), path, ())
    monkeypatch.setenv(_machine.VARIABLE, str(path))
    with pytest.raises(QueryError, match="impossible"):
        machine()


def test_a_chosen_file_overrides_the_measurement(measured, tmp_path, monkeypatch):
    path = tmp_path / "theirs.json"
    _machine.write(Machine(call=7.0), path, ())
    monkeypatch.setenv(_machine.VARIABLE, str(path))
    assert machine().call == 7.0
    assert measured == []


def test_a_folder_that_cannot_be_written_is_no_error(measured, tmp_path, monkeypatch):
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))
    assert machine() == measured[0]


def test_the_measurement_is_quick_and_finite():
    start = time.process_time()
    found = _calibrate.calibrate()
    assert time.process_time() - start < 4
    assert all(0 < value < float("inf") for value in dataclasses.astuple(found))
