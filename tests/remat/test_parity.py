"""The same outcomes as the original simulator.

`data/outcomes.json` holds what the original gave for two small logs of our own recorder, for every
heuristic, three policies and six budgets. The authors' own logs are checked too where they are.
"""

import json
import os
from functools import lru_cache
from pathlib import Path

import pytest

from gradkeep.remat import read_log, simulate, unlimited_peak

HERE = Path(__file__).parent / "data"
SHARED = Path(os.environ.get("GRADKEEP_DATA", Path(__file__).parents[3] / "shared" / "data"))
LOGS = SHARED / "dtr_logs"


@lru_cache
def loaded(path):
    program = read_log(path)
    return program, unlimited_peak(program)


def small_rows():
    table = json.loads((HERE / "outcomes.json").read_text())
    return [dict(zip(table["columns"], row, strict=True)) for row in table["rows"]]


@pytest.mark.parametrize("log", ["cnn-alias.log", "cnn-mutate.log"])
@pytest.mark.parametrize("policy", ["eager", "ignore", "banish"])
def test_small_logs_give_the_same_outcomes(log, policy):
    rows = [row for row in small_rows() if (row["log"], row["policy"]) == (log, policy)]
    assert len(rows) >= 24
    program, peak = loaded(HERE / log)
    for row in rows:
        outcome = simulate(
            program,
            heuristic=row["heuristic"],
            budget=int(peak * row["ratio"]),
            policy=policy,
            limit=3.0,
        )
        found = (outcome.status, outcome.compute, outcome.peak)
        assert found == (row["status"], row["compute"], row["peak"]), row


def published_rows():
    if not (LOGS / "baseline.json").exists():
        return []
    table = json.loads((LOGS / "baseline.json").read_text())
    return [
        pytest.param(run, id=f"{run['baseline']['model']}-{run['batch']}-{run['runtime']}")
        for run in table["runs"]
    ]


@pytest.mark.skipif(not published_rows(), reason="the authors' logs are not on this machine")
@pytest.mark.parametrize("run", published_rows())
def test_published_logs_give_the_same_outcomes(run):
    program, peak = loaded(LOGS / run["baseline"]["log"])
    assert peak == run["baseline"]["max_memory"]
    assert program.compute == run["baseline"]["model_compute"]
    assert program.constant_bytes == run["baseline"]["model_const_memory"]
    assert program.bottleneck_bytes == run["baseline"]["bottleneck_memory"]
    if run["no_dealloc"]:
        program = program.without_releases()
    policy = "banish" if run["runtime"] == "RuntimeV1" else "eager"
    for row in run["results"]:
        outcome = simulate(
            program,
            heuristic=row["heuristic"],
            budget=row["budget"],
            policy=policy,
            limit=run["overhead_limit"],
        )
        assert outcome.status == row["status"].lower(), row
        assert outcome.overhead == pytest.approx(row["overhead"], rel=1e-9), row
        assert (outcome.peak, outcome.evictions) == (row["max_memory"], row["evictions"]), row
