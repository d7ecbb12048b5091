"""What a method is: a name, what it needs and costs, and how it scores at one checkpoint."""

from __future__ import annotations

import dataclasses
import difflib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from gradkeep._arguments import check_fields
from gradkeep.errors import AttributionError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor

    from gradkeep.attribution._question import AttributionQuestion, CheckpointView
    from gradkeep.curvature._cholesky import Solution
    from gradkeep.query._planner import QueryPlan

OverCheckpoints = Literal["one", "sum", "mean"]


@dataclass(frozen=True, slots=True, eq=False)
class Scorer:
    """A method made ready at one checkpoint."""

    score: Callable[[int, int], Tensor]
    """Scores `[stop - start, N]` of queries start to stop; per layer `[L, stop - start, N]`."""
    plan: Callable[[], QueryPlan | None] = lambda: None
    """How gradients were multiplied last, where they are."""
    approximate: str | None = None
    """What was approximated, if anything was."""
    solution: Callable[[], Solution | None] = lambda: None
    """How linear systems were solved so far, where there are any."""


@dataclass(frozen=True, slots=True)
class NoOptions:
    """A method that cannot be told anything."""


@dataclass(frozen=True, slots=True)
class Method:
    """One way to score training rows."""

    name: str
    summary: str
    """The formula, in words."""
    needs: str
    cost: str
    exact: bool
    """Whether the formula is computed without approximation."""
    reference: str
    prepare: Callable[[CheckpointView, Any], Scorer] = field(repr=False)
    """What is done once per checkpoint; gives what scores some queries."""
    pool: Callable[[AttributionQuestion, Any], Any] | None = field(default=None, repr=False)
    """What is done once for all checkpoints together; `prepare` finds it in `at.pooled`."""
    over: OverCheckpoints = field(default="mean", repr=False)
    """What becomes of several checkpoints."""
    options: type = field(default=NoOptions, repr=False)
    """A frozen dataclass: what the method can be told, with defaults."""
    tuned: str | None = field(default=None, repr=False)
    """The option that may be "auto"."""
    candidates: tuple[float, ...] = field(default=(), repr=False)
    """What "auto" chooses from."""
    about_queries: bool = field(default=True, repr=False)
    """False: the score of a training row is the same for every query."""
    layered: bool = field(default=False, repr=False)
    """Whether its scores are sums over layers, which can be told apart."""
    whitened: bool = field(default=False, repr=False)
    """Whether it can be asked of whitened coordinates, whose products are influence already."""


_OF_FEW_ROWS = ("refine", "candidates")
"""Options of `gk.query.top`."""


def options_for(method: Method, given: Mapping[str, Any]) -> Any:
    """The method's options as its dataclass; an unknown one is an error with the nearest names."""
    known = [part.name for part in dataclasses.fields(method.options)]
    for name in given:
        if name not in known:
            if name in _OF_FEW_ROWS:
                raise AttributionError(
                    "only the best rows are refined: among all scores, those of another capture would "
                    "be on another scale",
                    found=f"{name}=",
                    fix="gk.query.top(queries, train, k, refine=...) gives the best by another capture",
                )
            near = difflib.get_close_matches(name, known, n=2, cutoff=0.4)
            raise AttributionError(
                f"{method.name} has no option {name!r}",
                expected=", ".join(known) or "no options",
                fix=f"did you mean {' or '.join(near)}?" if near else None,
            )
    told = method.options(**given)
    check_fields(told, AttributionError)
    return told
