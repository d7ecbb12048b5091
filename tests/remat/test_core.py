"""The fast core against the plain one, over random programs."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_remat import plain_simulate

from gradkeep.remat import Program, chain, heuristics, simulate, unlimited_peak
from gradkeep.remat.simulator._program import Op, ProgramStep, StepKind
from gradkeep.remat.simulator._simulate import Timeline

PLAIN = ("dtr", "dtr-eq", "dtr-local", "msps", "largest", "lru")


@st.composite
def programs(draw):
    """Operators with several results, aliases, repeated arguments, references that come and go."""
    ops, steps, names = [], [], []
    roots, references = [], {}

    def run(name, cost, args, sizes, aliases):
        results = tuple(range(len(names), len(names) + len(sizes)))
        for number, alias in zip(results, aliases, strict=True):
            names.append(f"t{number}")
            roots.append(number if alias < 0 else roots[args[alias]])
            references[roots[number]] = references.get(roots[number], 0) + 1
        steps.append(ProgramStep(StepKind.RUN, len(ops)))
        ops.append(Op(name, cost, args, results, sizes, aliases))
        return results

    for size in draw(st.lists(st.integers(0, 4), min_size=1, max_size=2)):
        (number,) = run("constant", 0, (), (size,), (-1,))
        steps.append(ProgramStep(StepKind.PIN, number))
    held = list(range(len(names)))
    for _ in range(draw(st.integers(1, 14))):
        usable = sorted(set(held))
        if not usable:
            break
        args = tuple(draw(st.lists(st.sampled_from(usable), min_size=1, max_size=3)))
        aliases = tuple(
            draw(st.sampled_from([-1, -1, -1, *range(len(args))]))
            for _ in range(draw(st.integers(1, 3)))
        )
        sizes = tuple(0 if alias >= 0 else draw(st.integers(0, 6)) for alias in aliases)
        held.extend(run("op", draw(st.integers(0, 5)), args, sizes, aliases))
        if draw(st.booleans()):
            number = draw(st.sampled_from(held))
            steps.append(ProgramStep(StepKind.GET, number))
            held.append(number)
        for _ in range(draw(st.integers(0, 2))):
            if len(held) > 1:
                number = held.pop(draw(st.integers(0, len(held) - 1)))
                steps.append(ProgramStep(StepKind.RELEASE, number))
    steps.extend(ProgramStep(StepKind.PIN, number) for number in sorted(set(held)))
    return Program(tuple(ops), tuple(steps), tuple(names))


@settings(max_examples=400)
@given(
    programs(),
    st.sampled_from(PLAIN),
    st.sampled_from(["eager", "ignore"]),
    st.floats(0.3, 1.2),
    st.sampled_from([1.0, 1.5, 3.0, math.inf]),
)
def test_the_fast_core_does_what_the_plain_one_does(program, name, policy, ratio, limit):
    budget = int(ratio * unlimited_peak(program)) + 1
    fast = simulate(program, heuristic=name, budget=budget, policy=policy, limit=limit)
    plain = plain_simulate(program, heuristic=name, budget=budget, policy=policy, limit=limit)
    assert (fast.status, fast.compute, fast.peak, fast.evictions, fast.ops_run) == (
        plain.status,
        plain.compute,
        plain.peak,
        plain.evictions,
        plain.ops_run,
    )


@settings(max_examples=100)
@given(programs(), st.sampled_from(heuristics()), st.sampled_from(["eager", "ignore", "banish"]))
def test_the_budget_is_a_budget(program, name, policy):
    budget = max(program.bottleneck_bytes, unlimited_peak(program) // 2)
    outcome = simulate(program, heuristic=name, budget=budget, policy=policy, limit=50)
    assert outcome.peak <= budget
    if outcome.status == "ok":
        assert outcome.compute == 1 + program.compute + outcome.remat_compute


def test_enough_memory_means_no_recomputation():
    program = chain(50)
    for name in heuristics():
        outcome = simulate(program, heuristic=name, budget=10_000)
        assert (outcome.status, outcome.rematerializations) == ("ok", 0)


def test_a_chain_far_longer_than_pythons_stack():
    outcome = simulate(chain(5_000), heuristic="dtr-local", budget=800, limit=50)
    assert outcome.status == "ok"
    assert outcome.rematerializations > 1_000


@pytest.mark.parametrize("name", ["dtr", "dtr-eq"])
def test_a_chain_in_the_square_root_of_its_memory(name):
    """The theory of the paper: N operators in about 2 sqrt(N) memory cost O(N)."""
    length = 400
    outcome = simulate(chain(length), heuristic=name, budget=4 * math.isqrt(length), limit=10)
    assert outcome.status == "ok"
    assert outcome.overhead < 3


def test_too_small_a_budget_is_out_of_memory():
    assert simulate(chain(5), budget=1).status == "oom"


def test_thrashing_stops_at_the_limit():
    outcome = simulate(chain(60), heuristic="lru", budget=8, limit=1.5)
    assert outcome.status == "thrash"
    assert outcome.remat_compute <= 0.5 * outcome.base_compute + 1


def test_looking_at_fewer_storages_still_keeps_the_budget():
    program = chain(200)
    whole = simulate(program, heuristic="dtr-eq", budget=60, limit=20)
    for options in ({"sample": True}, {"skip_small": True}, {"sample": True, "skip_small": True}):
        outcome = simulate(program, heuristic="dtr-eq", budget=60, limit=20, **options)
        assert outcome.status == "ok"
        assert outcome.peak <= 60
        second = simulate(program, heuristic="dtr-eq", budget=60, limit=20, **options)
        assert second == outcome
        if options.get("sample"):
            assert outcome.heuristic_evaluations < whole.heuristic_evaluations


def test_small_storages_are_left_alone_while_there_are_larger_ones():
    ops = [Op("constant", 0, (), (0,), (1,), (-1,))]
    sizes = [1000, 1, 1000, 1, 1000]
    ops += [Op("op", 1, (0,), (at + 1,), (size,), (-1,)) for at, size in enumerate(sizes)]
    steps = [
        ProgramStep(StepKind.RUN, 0),
        ProgramStep(StepKind.PIN, 0),
        *(ProgramStep(StepKind.RUN, at) for at in range(1, 6)),
    ]
    program = Program(tuple(ops), tuple(steps), tuple("abcdef"))
    events = Timeline()
    simulate(program, heuristic="lru", budget=2100, skip_small=True, timeline=events)
    gone = [event.memory for event in events.events if event.what == "evict"]
    assert len(gone) == 1  # one large storage made the room, not two small ones before it


def test_a_timeline_ends_where_memory_does(tmp_path):
    events = Timeline()
    outcome = simulate(chain(20), budget=12, timeline=events)
    assert max(event.memory for event in events.events) == outcome.peak
    counts = [sum(event.what == what for event in events.events) for what in ("recompute", "evict")]
    assert counts == [outcome.rematerializations, outcome.evictions]
    events.write(tmp_path / "events.csv")
    assert len((tmp_path / "events.csv").read_text().splitlines()) == len(events.events) + 1
