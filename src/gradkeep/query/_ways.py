"""The ways in which products of gradients can be computed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from gradkeep.query._forms import Form

How = Literal["factored", "gram", "half", "restore", "dense"]

_WAYS: dict[str, tuple[How, ...]] = {
    "outer": ("factored", "half", "restore"),
    "conv": ("factored", "gram", "half", "restore"),
    "lookup": ("factored", "half", "restore"),
    "dense": ("dense",),
    "tied": ("factored", "half", "restore"),
}


def hows(form: Form) -> tuple[How, ...]:
    """The ways that exist for gradients of this form.

    >>> from gradkeep.query._forms import Dense, Parameter
    >>> hows(Dense((Parameter("w", (2, 3)),), "w.gradient", 6))
    ('dense',)
    """
    return _WAYS[form.kind]
