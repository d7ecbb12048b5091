"""The optimum against brute force, and everything else against the optimum."""

import heapq
import math
import random

import pytest
from plain_remat import training_program
from raises import raises

from gradkeep.errors import RematError
from gradkeep.remat import (
    Graph,
    Program,
    chain,
    chen,
    keep_all,
    optimal,
    read_log,
    revolve,
    simplify,
    simulate,
    unlimited_peak,
)
from gradkeep.remat.simulator._program import Op, ProgramStep, StepKind
from gradkeep.remat.simulator._schedule import Action, checkpoint_nodes, validate_schedule

HEURISTICS = ("dtr", "dtr-eq", "dtr-local", "msps", "lru", "largest")


def brute_force(graph, budget):
    """The cheapest way over all states (nodes run so far, nodes in memory)."""
    needs = [sum(1 << parent for parent in parents) for parents in graph.parents]
    target = sum(1 << node for node in graph.outputs)

    def size(mask):
        return sum(graph.sizes[node] for node in range(len(graph)) if mask >> node & 1)

    best = {(0, 0): 0}
    queue = [(0, 0, 0)]
    while queue:
        cost, frontier, mask = heapq.heappop(queue)
        if best[frontier, mask] < cost:
            continue
        if frontier == len(graph) and mask & target == target:
            return cost
        for node in range(len(graph)):
            if mask >> node & 1:
                after = (cost, frontier, mask & ~(1 << node))
            elif (
                node <= frontier
                and not needs[node] & ~mask
                and size(mask) + graph.sizes[node] <= budget
            ):
                after = (cost + graph.costs[node], max(frontier, node + 1), mask | 1 << node)
            else:
                continue
            if after[0] < best.get(after[1:], math.inf):
                best[after[1:]] = after[0]
                heapq.heappush(queue, after)
    return None


def random_graph(rng, nodes):
    parents = tuple(
        tuple(sorted(rng.sample(range(node), min(node, rng.randint(0, 2)))))
        for node in range(nodes)
    )
    used = {parent for several in parents for parent in several}
    loose = [node for node in range(nodes - 1) if node not in used and rng.random() < 0.3]
    return Graph(
        costs=tuple(rng.randint(1, 5) for _ in range(nodes)),
        sizes=tuple(rng.randint(1, 4) for _ in range(nodes)),
        parents=parents,
        outputs=frozenset([nodes - 1, *loose]),
        backward=(False,) * nodes,
    )


@pytest.mark.parametrize("seed", range(40))
def test_the_optimum_is_that_of_brute_force(seed):
    rng = random.Random(seed)
    graph = random_graph(rng, rng.randint(2, 7))
    for budget in range(graph.bottleneck, keep_all(graph).peak + 1):
        optimum = optimal(graph, budget=budget)
        exact = brute_force(graph, budget)
        assert optimum.status == ("infeasible" if exact is None else "optimal")
        if exact is not None:
            assert (optimum.schedule.compute, optimum.bound, optimum.gap) == (exact, exact, 0.0)
            assert optimum.schedule.peak <= budget


@pytest.mark.parametrize("seed", range(6))
def test_no_heuristic_is_below_the_optimum(seed):
    rng = random.Random(seed)
    program = training_program(rng, rng.randint(4, 7))
    graph = Graph.of(program)
    for ratio in (0.8, 0.6):
        budget = max(graph.bottleneck, int(ratio * unlimited_peak(program)))
        best = optimal(graph, budget=budget, time_limit=60)
        if best.status != "optimal":
            continue
        for name in HEURISTICS:
            outcome = simulate(program, heuristic=name, budget=budget, limit=20)
            if outcome.status == "ok":
                assert outcome.compute - 1 >= best.schedule.compute


def test_a_time_limit_gives_a_proven_gap():
    optimum = optimal(Graph.of(chain(14)), budget=6, time_limit=0.5)
    assert optimum.status in ("optimal", "time limit")
    assert 0 <= optimum.gap <= 1
    assert optimum.bound > 0


def test_too_small_a_budget_says_the_least():
    graph = Graph.of(chain(4))
    with raises(RematError, "remat.budget_too_small") as caught:
        optimal(graph, budget=graph.bottleneck - 1)
    assert f"at least {graph.bottleneck} bytes" in caught.value.expected


def test_too_large_a_graph_is_refused():
    with raises(RematError, "remat.graph_too_large"):
        optimal(Graph.of(chain(150)), budget=10)


@pytest.mark.parametrize("length", [1, 2, 5, 16, 40])
def test_known_schedules_are_valid_and_trade_time_for_memory(length):
    graph = Graph.of(chain(length))
    everything = keep_all(graph)
    assert everything.compute == graph.compute
    square_root = chen(graph)
    assert square_root.peak <= everything.peak
    assert square_root.compute <= 2 * graph.compute
    for slots in (1, 2, 4):
        few = revolve(graph, slots)
        assert few.peak <= max(slots + 4, 3)
        assert few.compute >= graph.compute


def test_chens_rule_takes_the_square_root_of_the_memory():
    graph = Graph.of(chain(100))
    assert keep_all(graph).peak == 101
    assert chen(graph).peak <= 2 * 10 + 3


def test_more_slots_cost_less_time():
    graph = Graph.of(chain(30))
    costs = [revolve(graph, slots).compute for slots in range(1, 8)]
    assert costs == sorted(costs, reverse=True)
    assert costs[0] > costs[-1]


def test_revolve_is_for_chains_only():
    with raises(RematError, "remat.not_a_chain", fix="chen"):
        revolve(random_graph(random.Random(1), 6), 2)


def test_keeping_recomputes_the_rest():
    graph = Graph.of(chain(9))
    some = checkpoint_nodes(graph, [2, 5])
    assert some.compute > graph.compute
    assert some.peak < keep_all(graph).peak


def test_an_impossible_schedule_is_refused():
    graph = Graph.of(chain(2))
    for action, reason in (
        (Action("run", 1), "run"),
        (Action("drop", 0), "drop"),
        (Action("run", 0), "unfinished"),
    ):
        with raises(RematError, f"remat.schedule_{reason}"):
            validate_schedule(graph, [action])


def test_rewrites_keep_the_cost_and_lose_aliases_tuples_and_constants(tmp_path):
    ops = (
        Op("constant", 0, (), (0,), (8,), (-1,)),
        Op("split", 3, (0,), (1, 2), (4, 4), (-1, -1)),
        Op("view", 0, (1,), (3,), (0,), (0,)),
        Op("add", 5, (3, 2), (4,), (4,), (-1,)),
    )
    steps = [
        ProgramStep(StepKind.RUN, 0),
        ProgramStep(StepKind.PIN, 0),
        *(ProgramStep(StepKind.RUN, at) for at in (1, 2, 3)),
    ]
    steps += [ProgramStep(StepKind.RELEASE, at) for at in (1, 3, 2)]
    steps.append(ProgramStep(StepKind.PIN, 4))
    simple = simplify(Program(ops, tuple(steps), ("w", "a", "b", "v", "y")))
    assert [(op.name, op.args, op.sizes) for op in simple.ops] == [
        ("split", (), (8,)),
        ("add", (0, 0), (4,)),
    ]
    assert simulate(simple, budget=12).status == "ok"
    assert simple.compute == 8


def test_a_recorded_log_becomes_a_graph():
    from pathlib import Path

    log = Path(__file__).parent / "data" / "cnn-alias.log"
    graph = Graph.of(read_log(log))
    assert graph.constant_bytes > 0
    assert keep_all(graph).compute == graph.compute
