"""A sample of `bench/damage.py`: random damages are found or do no harm, and nothing is ugly."""

import sys
from pathlib import Path

import pytest

pytest.importorskip("duckdb")


@pytest.fixture
def damage(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[2])
    import bench.damage

    yield bench.damage
    for name in ("bench.damage", "bench"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize("part", range(2))
def test_damages_are_found_or_harmless(damage, part):
    reported = []
    cases = len(damage.KINDS)
    counts = damage.run(cases, seed=100 + part, show=reported.append)
    assert counts["wrong"] == counts["ugly"] == 0, reported
    assert sum(counts.values()) == cases
    assert counts["found"] > cases // 2


def test_there_are_as_many_kinds_as_promised(damage):
    assert len(damage.KINDS) >= 20
