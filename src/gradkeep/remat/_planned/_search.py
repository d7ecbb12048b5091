"""Which values to drop: the least recomputation that fits the budget.

Greedy by seconds per byte of excess, starts from evenly spaced segments as checkpointing has them,
then annealing; small problems are searched through. Everything is seeded and counted in evaluations,
not in seconds, so the same trace gives the same plan.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gradkeep.remat._planned._cuts import crossings, evenly
from gradkeep.remat._planned._evaluate import Evaluation, Evaluator, State

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gradkeep.remat._planned._problem import Problem

States = tuple[int, ...]
Score = tuple[float, float, float]

_EXHAUSTIVE = 7
"""So many candidates are searched through instead of guessed at."""
_EVALUATIONS = 4000
_WORK = 600_000
"""Operators in rebuilds that were worked out: with `_EVALUATIONS`, a few seconds."""


@dataclass(frozen=True, slots=True)
class Found:
    """The best plan, and the least peak that any plan reached on the way."""

    states: States
    evaluation: Evaluation
    fits: bool
    evaluations: int


def search(problem: Problem, budget: int, *, seed: int = 0) -> Found:
    """The cheapest plan with a peak of at most `budget` bytes, or the one with the least peak."""
    return _Search(problem, budget, seed).run()


class _Search:
    def __init__(self, problem: Problem, budget: int, seed: int) -> None:
        self._problem = problem
        self._candidates = problem.candidates
        self._evaluate = Evaluator(problem)
        self._budget = budget
        self._random = random.Random(seed)
        self._known: dict[States, tuple[Score, Evaluation]] = {}
        self._peak = max(problem.peak, 1)
        self._unit = max(problem.trace.seconds, 1e-9)
        self._best: tuple[Score, States] = ((math.inf, math.inf, math.inf), ())

    def run(self) -> Found:
        count = len(self._candidates)
        nothing: States = (0,) * count
        if self._score(nothing)[0] > 0:
            if count <= _EXHAUSTIVE:
                for chosen in itertools.product(State, repeat=count):
                    self._score(tuple(map(int, chosen)))
            else:
                self._look()
        states = self._best[1]
        _, evaluation = self._known[states]
        return Found(states, evaluation, evaluation.peak <= self._budget, len(self._known))

    def _look(self) -> None:
        starts = [self._greedy(), *self._segments(), *self._spaced()]
        starts = sorted(set(starts), key=self._score)[:4]
        polished = sorted({self._polished(start) for start in starts}, key=self._score)
        for start in polished[:2]:
            self._anneal(start, max(_EVALUATIONS - len(self._known), _EVALUATIONS // 2) // 2)
        self._polished(self._best[1])

    def _score(self, states: States) -> Score:
        """Bytes over the budget first, at the peak and then at all events; then seconds."""
        found = self._known.get(states)
        if found is not None:
            return found[0]
        evaluation = self._evaluate(states)
        over = max(0, evaluation.peak - self._budget)
        score = (over, evaluation.excess(self._budget) if over else 0, evaluation.seconds)
        self._known[states] = (score, evaluation)
        if score < self._best[0]:
            self._best = (score, states)
        return score

    def _energy(self, states: States) -> float:
        """What annealing lowers: recomputation, and bytes over the budget as a share of the peak."""
        over, excess, seconds = self._score(states)
        if not over:
            return seconds / self._unit
        spread = excess / (self._peak * len(self._problem.levels))
        return seconds / self._unit + 0.02 + 4 * over / self._peak + spread

    def _greedy(self) -> States:
        """Always the move that frees the most excess per second; scores are renewed when on top."""
        states = [int(State.KEEP)] * len(self._candidates)
        _, *before = self._score(tuple(states))
        heap = [
            (candidate.cost / candidate.size, index)
            for index, candidate in enumerate(self._candidates)
        ]
        heapq.heapify(heap)
        while heap and before[0] > 0:
            _, index = heapq.heappop(heap)
            best = None
            for choice in (State.DROP, State.AGAIN):
                states[index] = int(choice)
                _, *after = self._score(tuple(states))
                gain = before[0] - after[0]
                rate = (after[1] - before[1]) / gain if gain > 0 else math.inf
                if best is None or rate < best[0]:
                    best = (rate, int(choice), after)
            assert best is not None
            rate, state, after = best
            if math.isfinite(rate) and (not heap or rate * 0.8 <= heap[0][0]):
                states[index], before = state, after
                continue
            states[index] = int(State.KEEP)
            if math.isfinite(rate):
                heapq.heappush(heap, (rate, index))
        return tuple(states)

    def _segments(self) -> Iterator[States]:
        """Keep what crosses a few cuts, drop the rest: what a checkpoint per segment does.

        Values that cost much for their bytes may be kept inside of segments too.
        """
        crossing = crossings(self._problem)
        index = {candidate.value: at for at, candidate in enumerate(self._candidates)}
        rates = sorted(c.cost / c.size for c in self._candidates)
        dear = [math.inf, *sorted({rates[int(len(rates) * part)] for part in (0.5, 0.75, 0.9)})]
        counts = sorted({*range(1, 9), 11, 15, 20, 28})
        cuts = [evenly(crossing, count) for count in counts if count <= len(crossing)]
        for places, limit in itertools.product(cuts, dear):
            kept = {value for place in places for value in crossing[place].values}
            states = [
                int(State.KEEP) if c.cost / c.size > limit else int(State.DROP)
                for c in self._candidates
            ]
            for value in kept:
                if value in index:
                    states[index[value]] = int(State.KEEP)
            yield tuple(states)

    def _spaced(self) -> Iterator[States]:
        """Keep every k-th of the dear values; the cheap ones are dropped, or made at every request."""
        order = sorted(range(len(self._candidates)), key=lambda i: self._candidates[i].first_pack)
        rates = sorted(c.cost / c.size for c in self._candidates)
        limits = sorted({rates[int(len(rates) * part)] for part in (0.0, 0.25, 0.5, 0.75)})
        lengths = sorted({1, 2, 3, *(round(len(order) ** power) for power in (0.4, 0.5, 0.6))})
        for limit, length, cheap in itertools.product(
            (-1.0, *limits), lengths, (State.DROP, State.AGAIN)
        ):
            states = [int(State.DROP)] * len(order)
            place = 0
            for index in order:
                candidate = self._candidates[index]
                if candidate.cost / candidate.size <= limit:
                    states[index] = int(cheap)
                    continue
                if place % length == 0:
                    states[index] = int(State.KEEP)
                place += 1
            yield tuple(states)

    def _polished(self, states: States) -> States:
        """Take back every drop that is not needed, the dearest first; then try other states."""
        current = self._score(states)
        dear = sorted(range(len(states)), key=lambda i: self._candidates[i].cost, reverse=True)
        for _ in range(2):
            changed = False
            for index in dear:
                for state in State:
                    if states[index] == state or self._tired():
                        continue
                    trial = (*states[:index], int(state), *states[index + 1 :])
                    score = self._score(trial)
                    if score < current:
                        states, current, changed = trial, score, True
            if not changed:
                break
        return states

    def _anneal(self, states: States, steps: int) -> None:
        """Change one or two states at a time; worse plans are taken ever more seldom."""
        draw = self._random
        energy = self._energy(states)
        hot, cold = 0.01, 0.0003
        for step in range(steps):
            if self._tired():
                break
            trial = list(states)
            index = draw.randrange(len(trial))
            trial[index] = self._other(trial[index])
            if draw.random() < 0.5:
                # A neighbour in time the other way: segments move by that.
                near = min(max(index + draw.choice((-2, -1, 1, 2)), 0), len(trial) - 1)
                trial[near] = self._other(trial[near])
            after = self._energy(tuple(trial))
            heat = hot * (cold / hot) ** (step / max(steps, 1))
            if after <= energy or draw.random() < math.exp((energy - after) / heat):
                states, energy = tuple(trial), after

    def _tired(self) -> bool:
        return self._evaluate.work > _WORK

    def _other(self, state: int) -> int:
        return self._random.choice([int(s) for s in State if s != state])
