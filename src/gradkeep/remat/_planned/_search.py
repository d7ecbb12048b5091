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

from gradkeep.remat._planned._evaluate import Evaluation, Evaluator, State

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gradkeep.remat._planned._problem import Problem

States = tuple[int, ...]

_EXHAUSTIVE = 10
"""So many candidates are searched through instead of guessed at."""
_WORK = 1_500_000
"""Evaluations times their size, which bounds the time to a few seconds."""


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
        self._candidates = problem.candidates
        self._evaluate = Evaluator(problem)
        self._budget = budget
        self._random = random.Random(seed)
        self._known: dict[States, Evaluation] = {}
        self._unit = max(problem.trace.seconds, 1e-9)
        size = len(problem.candidates) + len(problem.trace.order)
        self._most = max(300, min(5000, _WORK // (size + 1)))
        self._best: tuple[tuple[float, float], States] = ((math.inf, math.inf), ())

    def run(self) -> Found:
        count = len(self._candidates)
        nothing: States = (0,) * count
        if self._score(nothing)[0] > 0:
            if 3**count <= 3**_EXHAUSTIVE // 27:
                for chosen in itertools.product(State, repeat=count):
                    self._score(tuple(map(int, chosen)))
            else:
                self._look()
        states = self._best[1]
        evaluation = self._known[states]
        return Found(states, evaluation, evaluation.peak <= self._budget, len(self._known))

    def _look(self) -> None:
        starts = [self._greedy(), *self._segments()]
        starts = sorted(set(starts), key=self._score)[:4]
        polished = sorted({self._polished(start) for start in starts}, key=self._score)
        used = len(self._known)
        left = max(self._most - used, self._most // 2)
        for start in polished[:2]:
            self._anneal(start, left // 2)
        self._polished(self._best[1])

    def _score(self, states: States) -> tuple[float, float]:
        """Bytes over the budget first, then seconds."""
        found = self._known.get(states)
        if found is None:
            found = self._known[states] = self._evaluate(states)
            score = (float(max(0, found.peak - self._budget)), found.seconds)
            if score < self._best[0]:
                self._best = (score, states)
            return score
        return (float(max(0, found.peak - self._budget)), found.seconds)

    def _energy(self, states: States) -> float:
        over, seconds = self._score(states)
        return seconds / self._unit + 4.0 * over / self._budget + (0.02 if over else 0.0)

    def _greedy(self) -> States:
        """Always the move that frees the most excess per second; scores are renewed when on top."""
        states = [int(State.KEEP)] * len(self._candidates)
        before = self._energy_parts(tuple(states))
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
                after = self._energy_parts(tuple(states))
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

    def _energy_parts(self, states: States) -> tuple[float, float]:
        self._score(states)
        found = self._known[states]
        return found.excess(self._budget), found.seconds

    def _segments(self) -> Iterator[States]:
        """Keep every k-th of the dear values, drop the rest: what a checkpoint per segment does."""
        order = sorted(range(len(self._candidates)), key=lambda i: self._candidates[i].first_pack)
        rates = sorted(c.cost / c.size for c in self._candidates)
        cuts = sorted({rates[int(len(rates) * part)] for part in (0.0, 0.25, 0.5, 0.75)})
        lengths = sorted({max(1, round(len(order) ** power)) for power in (0.25, 0.4, 0.5, 0.6)})
        for cut, length, spared in itertools.product(
            (-1.0, *cuts), (1, 2, 3, *lengths), (False, True)
        ):
            states = [int(State.DROP)] * len(order)
            place = 0
            for index in order:
                candidate = self._candidates[index]
                dear = candidate.cost / candidate.size > cut
                if dear:
                    if place % length == 0:
                        states[index] = int(State.KEEP)
                    place += 1
                elif spared:
                    states[index] = int(State.AGAIN)
            yield tuple(states)

    def _polished(self, states: States) -> States:
        """Take back every drop that is not needed, the dearest first; then try other states."""
        current = self._score(states)
        dear = sorted(range(len(states)), key=lambda i: self._candidates[i].cost, reverse=True)
        for _ in range(2):
            changed = False
            for index in dear:
                for state in State:
                    if states[index] == state:
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

    def _other(self, state: int) -> int:
        return self._random.choice([int(s) for s in State if s != state])
