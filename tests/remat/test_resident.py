"""Budgets in resident memory: the limit alone, and whole trainings read from the kernel's counters."""

import ctypes.util
import json
import os
import subprocess
import sys
import warnings

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import gradkeep as gk
from gradkeep.remat.planned import _resident
from gradkeep.remat.planned._resident import ResidentLimit, can_limit_resident_memory

needs_glibc = pytest.mark.skipif(
    not can_limit_resident_memory(), reason="only glibc and jemalloc can return freed memory"
)
JEMALLOC = ctypes.util.find_library("jemalloc")
needs_jemalloc = pytest.mark.skipif(
    JEMALLOC is None or sys.platform != "linux", reason="jemalloc is not installed"
)

TRAINING = """
import gc, json, sys
import torch
import gradkeep as gk
from gradkeep.remat.planned._resident import return_freed_memory

torch.set_num_threads(1)
torch.manual_seed(0)

def status(field):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith(field)) * 1024

budget = json.loads(sys.argv[1])
scale = torch.nn.Parameter(torch.ones(2**22))  # 16 MiB, as are all activations
batch = torch.randn(2**22)
results = []

def step():
    scale.grad = None
    x = batch
    for _ in range(16):
        x = x * scale
    x.mean().backward()
    results.append(scale.grad.double().sum().item())

around = None if budget is None else gk.memory_budget(budget)
def run():
    if around is None:
        step()
    else:
        with around.step():
            step()

for _ in range(6):
    run()
gc.collect()
return_freed_memory()
with open("/proc/self/clear_refs", "w") as file:
    file.write("5")
start = status("VmRSS")
for _ in range(3):
    run()
rise = status("VmHWM") - start
report = None if around is None else around.report()
print(json.dumps({
    "rise": rise,
    "results": results,
    "limit": report and report.resident_budget,
    "seen": report and report.resident_peak,
    "tensors": report and report.budget,
    "planned": report and report.planned,
}))
"""


def run_python(script, *arguments, preload=None):
    """Run a script in a process of its own; return the JSON in its last line."""
    environment = os.environ | ({} if preload is None else {"LD_PRELOAD": preload})
    command = [sys.executable, "-c", script, *arguments]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.parametrize(
    "preload",
    [pytest.param(None, marks=needs_glibc), pytest.param(JEMALLOC, marks=needs_jemalloc)],
    ids=["glibc", "jemalloc"],
)
def test_budgets_hold_in_resident_memory(preload):
    def train(budget):
        return run_python(TRAINING, json.dumps(budget), preload=preload)

    plain = train(None)
    assert plain["rise"] > 200e6, "large enough to tell"
    for budget in (0.6, "230MB"):
        within = train(budget)
        assert within["planned"] >= 6
        assert within["results"] == plain["results"]
        assert within["rise"] <= 1.10 * within["limit"]
        # The report covers the first planned step too, which learns what each operator takes.
        assert 0.95 * within["rise"] <= within["seen"] <= 1.10 * within["limit"] + 2**24
        allowed = 0.6 * plain["rise"] if budget == 0.6 else 230e6
        assert within["rise"] <= 1.10 * allowed


DECAY = """
import ctypes, json
from gradkeep.remat.planned._resident import hold_freed_memory, release_hold

library = ctypes.CDLL(None)

def decay():
    value, size = ctypes.c_ssize_t(), ctypes.c_size_t(8)
    name = b"arena.0.dirty_decay_ms"
    code = library.mallctl(name, ctypes.byref(value), ctypes.byref(size), None, ctypes.c_size_t(0))
    assert code == 0
    return value.value

before = decay()
hold_freed_memory()
held = decay()
release_hold()
print(json.dumps([before, held, decay()]))
"""


@needs_jemalloc
def test_settings_of_jemalloc_are_restored():
    before, held, after = run_python(DECAY, preload=JEMALLOC)
    assert held == -1, "nothing is returned without being asked"
    assert after == before != -1


@needs_glibc
def test_small_steps_are_not_limited():
    net = torch.nn.Sequential(*[torch.nn.Linear(32, 32) for _ in range(4)])
    budget = gk.memory_budget(0.9)
    with budget:
        for _ in range(5):
            net.zero_grad()
            net(torch.ones(64, 32)).tanh().sum().backward()
    report = budget.report()
    assert report.planned == 2
    assert (report.resident_budget, report.resident_peak) == (None, None)


class Process:
    """Resident memory of a made-up process: live bytes, and freed ones that are still resident."""

    def __init__(self, start: int) -> None:
        self.live, self.freed, self.trims = start, 0, 0

    def read(self) -> int:
        return self.live + self.freed

    def trim(self) -> int:
        self.freed, self.trims = 0, self.trims + 1
        return self.live


@pytest.fixture
def process(monkeypatch):
    made = Process(1000)
    monkeypatch.setattr(_resident, "read_resident_bytes", lambda: made.read())
    monkeypatch.setattr(_resident, "return_freed_memory", lambda: made.trim())
    return made


def test_freed_memory_is_returned_only_before_the_limit_would_be_exceeded(process):
    limit = ResidentLimit(rise=500, growth=[100] * 4)
    limit.begin(start=1000)
    process.live += 300
    limit.check()
    assert process.trims == 0
    process.live, process.freed = 1100, 350  # 450 of 500, and 100 more are coming
    limit.check()
    assert (process.trims, process.freed, limit.latest) == (1, 0, 450)


def test_growth_that_was_seen_once_is_expected_in_later_steps(process):
    limit = ResidentLimit(rise=500)
    for number in range(2):
        limit.begin(start=1000)
        process.live, process.freed = 1200, 100
        before = process.trims
        limit.check()
        assert process.trims - before == number, "in the second step the growth is known"
        process.live += 250
        limit.check()
        process.live, process.freed = 1000, 0


def test_live_memory_over_the_limit_is_not_trimmed_at_every_check(process):
    limit = ResidentLimit(rise=3200, growth=[10] * 400)
    limit.begin(start=1000)
    process.live = 5000
    for _ in range(400):
        process.live += 10
        limit.check()
    assert process.trims <= 6
    assert limit.is_exceeded


def test_freed_memory_is_returned_after_trims_that_gained_little(process):
    limit = ResidentLimit(rise=3200, growth=[1000] * 400)
    limit.begin(start=1000)
    process.live = 3000
    for _ in range(11):  # up to 4100 of 4200: trims are tried and gain nothing
        process.live += 100
        limit.check()
    assert process.trims > 2
    for _ in range(40):  # live memory falls, and the process does not
        process.live, process.freed = process.live - 50, process.freed + 150
        limit.check()
        assert process.read() <= 4200 + 3200 / 16 + 100


@given(
    sizes=st.lists(st.tuples(st.integers(0, 100), st.booleans()), min_size=1, max_size=60),
    rise=st.integers(400, 2000),
)
def test_resident_memory_stays_within_the_limit_where_live_memory_does(sizes, rise):
    """Any order of allocations and frees: if live memory is within the limit, all is but for 1/16."""
    process = Process(1000)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_resident, "read_resident_bytes", process.read)
        patch.setattr(_resident, "return_freed_memory", process.trim)
        limit = ResidentLimit(rise=rise, growth=[size for size, _ in sizes])
        limit.begin(start=1000)
        highest_live = highest = 0
        for size, freed in sizes:
            highest = max(highest, process.read() - 1000)
            limit.check()
            assert limit.peak == highest  # freed bytes count for as long as they are resident
            process.live += size
            highest_live = max(highest_live, process.live - 1000)
            if highest_live <= rise:
                assert process.read() - 1000 <= rise + rise / 16 + size
            if freed:
                process.live, process.freed = process.live - size, process.freed + size


@needs_glibc
def test_a_budget_that_real_memory_cannot_meet_warns(monkeypatch):
    """Workspaces that no plan avoids: the step is planned again, then the user is told."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        scale = torch.nn.Parameter(torch.ones(2**21))
        budget = gk.memory_budget(0.75)
        monkeypatch.setattr(ResidentLimit, "is_exceeded", property(over_by_half))
        with budget:
            for _ in range(7):
                scale.grad = None
                x = scale * 2
                for _ in range(12):
                    x = x.sin()
                x.sum().backward()
    texts = [str(item.message) for item in caught if item.category.__name__ == "BudgetWarning"]
    assert any("resident memory" in text and "raise the budget" in text for text in texts)
    assert budget.report().planned >= 3


def over_by_half(limit):
    limit.latest = int(1.5 * limit.rise)
    return not limit.excess_is_known
