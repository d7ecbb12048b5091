"""A heuristic from outside: registered once, it can be named wherever ours can."""

import sys

import pytest
import torch
from raises import raises

import gradkeep as gk
from gradkeep.compat.dtr.experiments._config import parse_experiment
from gradkeep.compat.dtr.experiments._run import run_experiment
from gradkeep.errors import RematError
from gradkeep.remat.simulator import _heuristics
from gradkeep.remat.simulator._sweep import sweep, sweep_cases

OLDEST = '''
from gradkeep.remat import Heuristic

class OldestFirst(Heuristic):
    """The storage that was made first goes first."""

    def score(self, storage, clock):
        return storage.number
'''


@pytest.fixture(autouse=True)
def _registry(monkeypatch):
    """What a test registers is gone after it."""
    monkeypatch.setattr(_heuristics, "_registry", {**_heuristics._registry})
    monkeypatch.setattr(_heuristics, "_own", set())


@pytest.fixture
def oldest(tmp_path, monkeypatch):
    """A module of somebody else's."""
    (tmp_path / "their_heuristics.py").write_text(OLDEST)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "their_heuristics", raising=False)
    import their_heuristics

    gk.remat.register("oldest", their_heuristics.OldestFirst)
    return their_heuristics.OldestFirst


@pytest.fixture
def log(tmp_path):
    torch.manual_seed(0)
    net = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(6)))
    with gk.remat.record(tmp_path / "step.log"):
        net(torch.ones(64, 8)).square().sum().backward()
    return tmp_path / "step.log"


def test_it_is_listed_made_fresh_and_knows_its_name(oldest):
    assert "oldest" in gk.remat.heuristics()
    one, two = gk.remat.heuristic("oldest"), gk.remat.heuristic("oldest")
    assert isinstance(one, oldest)
    assert one is not two
    assert one.name == "oldest"


def test_it_decides_in_a_simulation(oldest, log):
    program = gk.remat.read_log(log)
    budget = 0.7 * gk.remat.unlimited_peak(program)
    result = gk.remat.simulate(program, heuristic="oldest", budget=budget)
    assert (result.status, result.heuristic) == ("ok", "oldest")
    assert result.heuristic_evaluations > 0
    handed_over = gk.remat.simulate(program, heuristic=oldest(), budget=budget)
    assert (result.compute, result.peak) == (handed_over.compute, handed_over.peak)
    sampled = gk.remat.simulate(program, heuristic="oldest", budget=budget, sample=True)
    assert sampled.heuristic == "oldest"


def test_it_takes_part_in_a_sweep_beside_ours(oldest, log, tmp_path):
    cases = sweep_cases([log], heuristics=("lru", "oldest"), ratios=(0.9, 0.7))
    rows = sweep(cases, tmp_path / "sweep.csv", workers=1)
    assert [row.heuristic for row in rows] == ["lru", "lru", "oldest", "oldest"]
    program = gk.remat.read_log(log)
    for row in rows:
        alone = gk.remat.simulate(program, heuristic=row.heuristic, budget=row.budget, limit=2.0)
        assert (row.status, row.overhead) == (alone.status, alone.overhead)


def test_it_decides_in_an_experiment_whose_trials_run_elsewhere(oldest, tmp_path):
    sizes = {"length": 6, "in_dim": 4, "mem_dim": 8}
    command = {"type": "simrd", "memory_budget": -1, "heuristic": "oldest", "extra_params": sizes}
    report = run_experiment(parse_experiment({"models": {"lstm": [command]}}), tmp_path / "out")
    assert [result["status"] for result in report.results] == ["ok"], report.results


def test_it_decides_while_a_model_trains(oldest):
    calls = []

    class Counting(oldest):
        def score(self, storage, clock):
            calls.append(storage)
            return super().score(storage, clock)

    gk.remat.register("counting", Counting)
    torch.manual_seed(0)
    net = torch.nn.Sequential(*(torch.nn.Linear(32, 32) for _ in range(8)))
    budget = gk.memory_budget(0.8, mode="online", heuristic="counting")
    with budget:
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            net(torch.ones(128, 32)).square().sum().backward()
            optimizer.step()
    assert budget.report().online == 3
    assert calls, "the heuristic was never asked"


@pytest.mark.parametrize("name", ["dtr-eq", "lru", "LRU", "DTREqClass", "ab-eq-size"])
def test_a_name_that_is_taken_is_refused(oldest, name):
    before = gk.remat.heuristics()
    for taken in (name, "oldest"):
        with raises(RematError, "remat.heuristic_exists", fix="another name") as caught:
            gk.remat.register(taken, oldest)
        assert repr(taken) in caught.value.message
    assert gk.remat.heuristics() == before


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        ("lru", "factory"),
        (dict, "factory"),
        (gk.remat.Heuristic(), "factory"),
        (lambda: None, "factory"),
        (gk.remat.Heuristic, "incomplete"),
    ],
)
def test_unusable_heuristics_are_refused_when_they_are_registered(make, reason):
    with raises(RematError, f"remat.heuristic_{reason}"):
        gk.remat.register("mine", make)
    assert "mine" not in gk.remat.heuristics()


@pytest.mark.parametrize("name", ["", "  ", 3, None])
def test_a_heuristic_needs_a_name(oldest, name):
    with raises(RematError, "remat.heuristic_name"):
        gk.remat.register(name, oldest)


def test_a_choice_outside_of_the_pool_and_scores_of_nan_are_refused():
    class Wanderer(gk.remat.Heuristic):
        def choose(self, pool, clock):
            return None

    class Nothing(gk.remat.Heuristic):
        def score(self, storage, clock):
            return float("nan")

    gk.remat.register("wanderer", Wanderer)
    gk.remat.register("nothing", Nothing)
    program = gk.remat.chain(10)
    with raises(RematError, "remat.heuristic_choice") as caught:
        gk.remat.simulate(program, heuristic="wanderer", budget=5)
    assert "'wanderer'" in caught.value.message
    with raises(RematError, "remat.heuristic_score") as caught:
        gk.remat.simulate(program, heuristic="nothing", budget=5)
    assert "'nothing'" in caught.value.message
