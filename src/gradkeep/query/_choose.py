"""Which way of multiplying gradients is the fastest here."""

from __future__ import annotations

import difflib
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from gradkeep.errors import QueryError
from gradkeep.query._cost import cost
from gradkeep.query._ways import hows

if TYPE_CHECKING:
    from collections.abc import Mapping

    from gradkeep.query._cost import Cost, Load
    from gradkeep.query._forms import Form
    from gradkeep.query._machine import Machine
    from gradkeep.query._ways import How

_NAMES: dict[str, tuple[How, ...]] = {
    "factored": ("factored", "dense"),
    "gram": ("gram", "factored", "dense"),
    "half": ("half", "dense"),
    "restore": ("restore", "dense"),
    "dense": ("dense", "restore"),
    "naive": ("dense", "restore"),
    "recon": ("restore", "dense"),
    "ted": ("gram", "factored", "dense"),
}
"""What may be asked for, and the ways it stands for: the first that the form has."""


@dataclass(frozen=True, slots=True)
class Choice:
    """The way that was chosen, and what every way would cost."""

    how: How
    cost: Cost
    alternatives: Mapping[How, Cost]


def choose(
    form: Form,
    load: Load,
    machine: Machine,
    *,
    force: str | None = None,
    scratch: int | None = None,
) -> Choice:
    """The way with the least predicted time among those whose temporaries fit into `scratch`.

    `force` names a way for every form; where a form does not have it, its nearest is taken. If no
    way fits, the one with the smallest temporaries is.

    >>> from gradkeep.query._cost import Load
    >>> from gradkeep.query._forms import Outer, Parameter
    >>> from gradkeep.query._machine import Machine
    >>> form = Outer((Parameter("w", (256, 64)),), "x", "g", d_in=64, d_out=256)
    >>> choose(form, Load(1500, 297), Machine()).how
    'factored'
    >>> choose(form, Load(1500, 297), Machine(), force="naive").how
    'restore'
    """
    if scratch is not None:
        load = replace(load, scratch=scratch)
    costs = {how: cost(form, load, how, machine) for how in hows(form)}
    if force is not None:
        how = forced(form, force)
    else:
        fitting = [how for how in costs if costs[how].scratch <= load.scratch]
        if fitting:
            how = min(fitting, key=lambda way: costs[way].seconds)
        else:
            how = min(costs, key=lambda way: costs[way].scratch)
    return Choice(how, costs[how], costs)


def forced(form: Form, name: str) -> How:
    """The way of this form that a name stands for."""
    if name not in _NAMES:
        near = difflib.get_close_matches(name, _NAMES, n=1)
        raise QueryError(
            "there is no such way to multiply gradients",
            found=name,
            expected=f"one of {', '.join(_NAMES)}",
            fix=f"did you mean {near[0]!r}?" if near else "leave it out to let the planner choose",
        )
    return next(how for how in _NAMES[name] if how in hows(form))
