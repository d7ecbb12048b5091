"""The methods by name: what each computes, needs and costs."""

from __future__ import annotations

import difflib
from dataclasses import dataclass

from gradkeep._errors import AttributionError


@dataclass(frozen=True, slots=True)
class Method:
    """One way to score training rows."""

    name: str
    summary: str
    """The formula, in words."""
    needs: str
    cost: str
    exact: bool
    reference: str


METHODS = (
    Method(
        "dot",
        "inner product of the loss gradients",
        "gradients of both splits at one checkpoint",
        "Q x N products",
        exact=True,
        reference="Charpiat et al., Input Similarity from the Neural Network Perspective, 2019",
    ),
    Method(
        "cos",
        "cosine of the angle between the loss gradients",
        "gradients of both splits at one checkpoint",
        "Q x N products",
        exact=True,
        reference="Barshan et al., RelatIF, 2020",
    ),
    Method(
        "tracin",
        "sum over checkpoints of learning rate x inner product of the loss gradients",
        "gradients of both splits at several checkpoints, with learning rates",
        "C x Q x N products",
        exact=True,
        reference="Pruthi et al., Estimating Training Data Influence by Tracing Gradient Descent, 2020",
    ),
    Method(
        "self",
        "squared length of a row's own loss gradient, summed over checkpoints",
        "gradients of the training split",
        "reads the kept norms",
        exact=True,
        reference="Pruthi et al., 2020 (self-influence)",
    ),
)


def methods() -> tuple[Method, ...]:
    """All methods that `gk.attribute` knows.

    >>> [method.name for method in methods()]
    ['dot', 'cos', 'tracin', 'self']
    """
    return METHODS


def method_named(name: str) -> Method:
    """The method of that name; the nearest ones are offered if there is none."""
    for method in METHODS:
        if method.name == name:
            return method
    names = [method.name for method in METHODS]
    near = difflib.get_close_matches(name, names, n=2, cutoff=0.3)
    raise AttributionError(
        f"no method {name!r}",
        expected=", ".join(names),
        fix=f"did you mean {' or '.join(near)}?" if near else "gk.methods() lists them",
    )
