"""Where a forward pass can be cut: the few values that all later ones are made from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gradkeep.remat._planned._problem import Problem


@dataclass(frozen=True, slots=True)
class Cut:
    """A place between two operators, and the saved values that cross it."""

    values: frozenset[int]
    size: int
    """Bytes of those that could be dropped."""
    before: int
    """Bytes of candidates that are made before it."""


def crossings(problem: Problem) -> list[Cut]:
    """A cut before every operator of the forward pass that makes a candidate.

    A value that autograd does not save cannot be kept; those from which it is made are, instead.
    """
    trace = problem.trace
    sizes = {candidate.value: candidate.size for candidate in problem.candidates}
    last: dict[int, int] = {}
    for number, operation in enumerate(trace.operations):
        for value in operation.reads:
            last[value] = number
    starts: dict[int, frozenset[int]] = {}
    alive: set[int] = set()
    found = []
    before = 0
    for number, operation in enumerate(trace.operations):
        made = [item.value for item in operation.makes]
        if any(value in sizes for value in made):
            saved = frozenset().union(*(starts[value] for value in alive))
            found.append(Cut(saved, sum(sizes.get(value, 0) for value in saved), before))
        below: frozenset[int] = frozenset().union(
            *(starts.get(value, frozenset()) for value in operation.reads)
        )
        for value in made:
            starts[value] = frozenset({value}) if value in problem.saved else below
            before += sizes.get(value, 0)
        alive = {value for value in (*alive, *made) if last.get(value, -1) > number}
    return found


def evenly(cuts: Sequence[Cut], count: int) -> list[int]:
    """Numbers of cuts that part the bytes evenly; each the thinnest near its place."""
    total = cuts[-1].before if cuts else 0
    reach = total / (count + 1) / 3
    found = []
    for part in range(1, count + 1):
        place = total * part / (count + 1)
        near = [at for at, cut in enumerate(cuts) if abs(cut.before - place) <= reach]
        if near:
            found.append(min(near, key=lambda at: (cuts[at].size, abs(cuts[at].before - place))))
    return sorted(set(found))
