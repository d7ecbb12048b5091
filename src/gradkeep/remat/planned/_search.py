"""Search for the values to drop: the least recomputation that fits the budget.

Greedy by seconds per byte of excess, from evenly spaced segments as in checkpointing, then annealing;
small problems are searched exhaustively. Everything is seeded and limited by evaluations, not by
seconds, so the same trace gives the same plan.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gradkeep.remat.planned._evaluate import PlanEvaluation, PlanEvaluator, Treatment

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from gradkeep.remat.planned._evaluate import PlanningProblem


States = tuple[int, ...]
Score = tuple[float, float, float]

_STARTS = 4
"""Number of initial plans to improve; one less is annealed."""


@dataclass(frozen=True, slots=True)
class FoundPlan:
    """The best plan: the cheapest that fits, or the one with the smallest peak."""

    states: States
    evaluation: PlanEvaluation
    fits: bool
    evaluations: int


def search_plan(
    problem: PlanningProblem,
    budget: int,
    *,
    start: States | None = None,
    seed: int = 0,
    effort: float = 1.0,
) -> FoundPlan:
    """Find the cheapest plan with a peak of at most `budget` bytes, or the one with the smallest peak.

    With `start`, the search only improves that plan.
    """
    return _PlanSearch(problem, budget, seed, effort).run(start)


def build_groups(problem: PlanningProblem) -> list[tuple[int, ...]]:
    """Return every candidate, and groups of candidates that share an operator, which then runs once for all."""
    sharing: dict[int, list[int]] = {}
    for index, candidate in enumerate(problem.candidates):
        for number in candidate.recipe:
            sharing.setdefault(number, []).append(index)
    # Larger groups are seldom dropped together.
    shared = {tuple(group) for group in sharing.values() if 1 < len(group) <= 12}
    return [*((index,) for index in range(len(problem.candidates))), *sorted(shared)]


class _PlanSearch:
    def __init__(self, problem: PlanningProblem, budget: int, seed: int, effort: float) -> None:
        self._effort = effort
        self._problem = problem
        self._candidates = problem.candidates
        self._evaluate = PlanEvaluator(problem)
        self._budget = budget
        self._random = random.Random(seed)
        self._evaluated: dict[States, tuple[Score, PlanEvaluation]] = {}
        self._peak = max(problem.peak, 1)
        self._costs = problem.costs
        self._groups = build_groups(problem)
        self._together = [group for group in self._groups if len(group) > 1]
        by_operator: dict[int, list[int]] = {}
        for index, candidate in enumerate(problem.candidates):
            by_operator.setdefault(max(candidate.recipe, key=problem.costs.__getitem__), []).append(
                index
            )
        self._units = [tuple(unit) for unit in by_operator.values()]
        """Candidates that are recomputed through the same most expensive operator."""
        self._unit = max(problem.trace.seconds, 1e-9)
        self._best: tuple[Score, States] = ((math.inf, math.inf, math.inf), ())

    def run(self, start: States | None) -> FoundPlan:
        count = len(self._candidates)
        nothing: States = (0,) * count
        if start is not None:
            self._improve(start)
        elif self._score(nothing)[0] > 0:
            # Up to 4096 plans are searched exhaustively.
            if len(Treatment) ** count <= 4096:
                for chosen in itertools.product(Treatment, repeat=count):
                    self._score(tuple(map(int, chosen)))
            else:
                self._search()
        states = self._best[1]
        _, evaluation = self._evaluated[states]
        return FoundPlan(states, evaluation, evaluation.peak <= self._budget, len(self._evaluated))

    def _search(self) -> None:
        nothing: States = (0,) * len(self._candidates)
        starts = {nothing, *self._segments(), *self._spaced()}
        # Mostly by energy: plans that fit are seldom the best start, except near the floor.
        count = max(1, round(_STARTS * min(self._effort, 1.0)))
        promising = sorted(starts, key=lambda start: (self._energy(start), start))[:count]
        fitting = sorted(starts, key=lambda start: (self._score(start), start))[: count // 2]
        ready = {self._regroup(self._greedy(start)) for start in (nothing, *promising, *fitting)}
        polished = sorted(
            {self._polish(start) for start in sorted(ready)},
            key=lambda start: (self._score(start), start),
        )
        for start in polished[: _STARTS - 1]:
            self._anneal(start, int(self._effort * 9000) // (_STARTS - 1))
        self._polish(self._regroup(self._best[1]))

    def _improve(self, start: States) -> None:
        self._anneal(self._polish(self._regroup(start)), int(self._effort * 9000))
        self._polish(self._best[1])

    def _score(self, states: States) -> Score:
        """Score a plan: bytes over the budget at the peak, then over all events, then seconds."""
        entry = self._evaluated.get(states)
        if entry is not None:
            return entry[0]
        evaluation = self._evaluate(states)
        over = max(0, evaluation.peak - self._budget)
        score = (over, evaluation.excess(self._budget) if over else 0, evaluation.seconds)
        self._evaluated[states] = (score, evaluation)
        if score < self._best[0]:
            self._best = (score, states)
        return score

    def _energy(self, states: States) -> float:
        """Return the objective of annealing: recomputation plus bytes over the budget as a share of the peak."""
        over, excess, seconds = self._score(states)
        if not over:
            return seconds / self._unit
        spread = excess / (self._peak * len(self._problem.levels))
        return seconds / self._unit + 0.02 + 4 * over / self._peak + spread

    def _greedy(self, start: States) -> States:
        """Apply the move that frees the most excess per second; rates are updated lazily."""
        states = list(start)
        _, *before = self._score(start)
        groups = [group for group in self._groups if not all(states[index] for index in group)]
        heap = [(self._rate(group), group) for group in groups]
        heapq.heapify(heap)
        while heap and before[0] > 0:
            _, group = heapq.heappop(heap)
            own = [states[index] for index in group]
            best = None
            for choice in (Treatment.JOINT, Treatment.REPEAT):
                for index in group:
                    states[index] = int(choice)
                _, *after = self._score(tuple(states))
                gain = before[0] - after[0]
                rate = (after[1] - before[1]) / gain if gain > 0 else math.inf
                if best is None or rate < best[0]:
                    best = (rate, int(choice), after)
            assert best is not None
            rate, state, after = best
            taken = math.isfinite(rate) and (not heap or rate * 0.8 <= heap[0][0])
            for index, old in zip(group, own, strict=True):
                states[index] = state if taken else old
            if taken:
                before = after
            elif math.isfinite(rate):
                heapq.heappush(heap, (rate, group))
        return tuple(states)

    def _rate(self, group: tuple[int, ...]) -> float:
        """Return seconds per byte of recomputing a group together."""
        operations = frozenset().union(*(self._candidates[index].recipe for index in group))
        seconds = sum(self._costs[number] for number in operations)
        return seconds / sum(self._candidates[index].size for index in group)

    def _segments(self) -> Iterator[States]:
        """Yield plans that keep only values crossing a few cuts, as checkpointing in segments does.

        Values that cost much for their bytes may also be kept inside segments.
        """
        crossing = find_cuts(self._problem)
        index = {candidate.value: at for at, candidate in enumerate(self._candidates)}
        rates = sorted(c.cost / c.size for c in self._candidates)
        limits = [math.inf, *sorted({rates[len(rates) * part // 10] for part in range(2, 10)})]
        counts = sorted({*range(1, 9), 11, 15, 20, 28})
        cuts = [choose_even_cuts(crossing, count) for count in counts if count <= len(crossing)]
        for places, limit in itertools.product(cuts, limits):
            crossing_values = {value for place in places for value in crossing[place].values}
            states = [
                int(Treatment.KEEP) if c.cost / c.size > limit else int(Treatment.JOINT)
                for c in self._candidates
            ]
            for value in crossing_values:
                if value in index:
                    states[index[value]] = int(Treatment.KEEP)
            yield tuple(states)

    def _spaced(self) -> Iterator[States]:
        """Yield plans that keep every k-th expensive value; cheap ones are dropped, or recomputed at every request."""
        order = sorted(range(len(self._candidates)), key=lambda i: self._candidates[i].first_pack)
        rates = sorted(c.cost / c.size for c in self._candidates)
        limits = sorted({rates[int(len(rates) * part)] for part in (0.0, 0.25, 0.5, 0.75)})
        lengths = sorted({1, 2, 3, *(round(len(order) ** power) for power in (0.4, 0.5, 0.6))})
        for limit, length, cheap in itertools.product(
            (-1.0, *limits), lengths, (Treatment.DROP, Treatment.REPEAT)
        ):
            states = [int(Treatment.DROP)] * len(order)
            place = 0
            for index in order:
                candidate = self._candidates[index]
                if candidate.cost / candidate.size <= limit:
                    states[index] = int(cheap)
                    continue
                if place % length == 0:
                    states[index] = int(Treatment.KEEP)
                place += 1
            yield tuple(states)

    def _polish(self, states: States) -> States:
        """Undo every drop that is not needed, most expensive first; then try other states."""
        current = self._score(states)
        expensive = sorted(range(len(states)), key=lambda i: self._candidates[i].cost, reverse=True)
        for _ in range(2):
            changed = False
            for index in expensive:
                for state in Treatment:
                    if states[index] == state or self._is_exhausted():
                        continue
                    trial = (*states[:index], int(state), *states[index + 1 :])
                    score = self._score(trial)
                    if score < current:
                        states, current, changed = trial, score, True
            if not changed:
                break
        return states

    def _anneal(self, states: States, steps: int) -> None:
        """Change a few states at a time; accept worse plans with decreasing probability."""
        draw = self._random
        energy = self._energy(states)
        hot, cold = 0.01, 0.0003
        for step in range(steps):
            if self._is_exhausted():
                break
            trial = self._mutate(states)
            after = self._energy(trial)
            heat = hot * (cold / hot) ** (step / max(steps, 1))
            if after <= energy or draw.random() < math.exp((energy - after) / heat):
                states, energy = trial, after

    def _mutate(self, states: States) -> States:
        """Change one state and possibly others: a unit, a group, a random one or a neighbor in time."""
        draw, trial = self._random, list(states)
        if draw.random() < 0.4:
            # Whole units: the expensive operator then runs for all or for none.
            for _ in range(draw.choice((1, 1, 2, 3))):
                state = int(draw.choice((*Treatment, Treatment.JOINT)))
                for index in draw.choice(self._units):
                    trial[index] = state
            return tuple(trial)
        index = draw.randrange(len(trial))
        trial[index] = self._other_state(trial[index])
        kind = draw.random()
        if self._together and kind < 0.25:
            for member in draw.choice(self._together):
                trial[member] = trial[index]
        elif kind < 0.5:
            # The opposite change elsewhere: a plan near its budget has no room for single changes.
            other = draw.randrange(len(trial))
            trial[other] = int(Treatment.KEEP) if trial[other] else int(Treatment.JOINT)
        elif kind < 0.75:
            # Swap with a neighbor in time, which moves segments.
            near = min(max(index + draw.choice((-2, -1, 1, 2)), 0), len(trial) - 1)
            trial[index], trial[near] = trial[near], states[index]
        return tuple(trial)

    def _regroup(self, states: States) -> States:
        """Try to change the states of groups together."""
        current = self._score(states)
        for group in sorted(self._together, key=self._rate, reverse=True):
            for state in (Treatment.KEEP, Treatment.JOINT):
                if self._is_exhausted():
                    return states
                trial = list(states)
                for index in group:
                    trial[index] = int(state)
                score = self._score(tuple(trial))
                if score < current:
                    states, current = tuple(trial), score
        return states

    def _is_exhausted(self) -> bool:
        # The number of operators in rebuilds bounds the time to a few seconds.
        return self._evaluate.work > self._effort * 300_000

    def _other_state(self, state: int) -> int:
        return self._random.choice([int(s) for s in Treatment if s != state])


@dataclass(frozen=True, slots=True)
class ForwardCut:
    """A position between two operators, and the saved values that cross it."""

    values: frozenset[int]
    size: int
    """Bytes of crossing values that could be dropped."""
    before: int
    """Bytes of candidates made before it."""


def find_cuts(problem: PlanningProblem) -> list[ForwardCut]:
    """Return a cut before every forward operator that makes a candidate.

    A value that autograd does not save cannot be kept; the values that it is recomputed from are.
    """
    trace = problem.trace
    sizes = {candidate.value: candidate.size for candidate in problem.candidates}
    last: dict[int, int] = {}
    for number, operation in enumerate(trace.operations):
        for value in operation.reads:
            last[value] = number
    starts: dict[int, frozenset[int]] = {}
    alive: set[int] = set()
    cuts = []
    before = 0
    for number, operation in enumerate(trace.operations):
        results = [item.value for item in operation.makes]
        if any(value in sizes for value in results):
            saved = frozenset().union(*(starts[value] for value in alive))
            cuts.append(ForwardCut(saved, sum(sizes.get(value, 0) for value in saved), before))
        below: frozenset[int] = frozenset().union(
            *(starts.get(value, frozenset()) for value in operation.reads)
        )
        for value in results:
            starts[value] = frozenset({value}) if value in problem.saved else below
            before += sizes.get(value, 0)
        alive = {value for value in (*alive, *results) if last.get(value, -1) > number}
    return cuts


def choose_even_cuts(cuts: Sequence[ForwardCut], count: int) -> list[int]:
    """Choose cuts that divide the bytes evenly, each the smallest near its position."""
    total = cuts[-1].before if cuts else 0
    reach = total / (count + 1) / 3
    chosen = []
    for part in range(1, count + 1):
        place = total * part / (count + 1)
        near = [at for at, cut in enumerate(cuts) if abs(cut.before - place) <= reach]
        if near:
            chosen.append(min(near, key=lambda at: (cuts[at].size, abs(cuts[at].before - place))))
    return sorted(set(chosen))
