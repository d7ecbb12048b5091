"""`kfac` and `ekfac`: influence by the Fisher matrix as Kronecker products."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from gradkeep.attribution._method import Method, Scorer
from gradkeep.attribution.kronecker._fisher import DECADES, Damping
from gradkeep.attribution.kronecker._fit import FisherFit, fisher
from gradkeep.attribution.kronecker._influence import influence
from gradkeep.attribution.kronecker._row_parts import fisher_gradients
from gradkeep.attribution.scorers._gradient_products import cosines, products
from gradkeep.errors import AttributionError

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from gradkeep.attribution._question import CheckpointView

_DAMPING = 0.3
_APPROXIMATE = "layers are independent, and each one's Fisher matrix is a Kronecker product"


@dataclass(frozen=True, slots=True)
class KfacOptions:
    """What `kfac` and `ekfac` can be told."""

    damping: float | Literal["auto"] | None = None
    """Added to all eigenvalues, times the mean one of the layer: 0.3, or of coordinates what they
    were whitened with; "auto": chosen by subset outcomes."""
    absolute_damping: float | None = None
    """Added to all eigenvalues as it is, in place of the relative damping."""
    fisher: Literal["empirical", "sampled"] = "empirical"
    """Of the gradients of the given labels, or of labels that were drawn from the model."""
    fisher_capture: str = "sampled"
    """The name of the capture with drawn labels."""
    unit_norm: bool = False
    """Of coordinates: whether every row counts alike, whatever the length of its gradient."""


def _kfac(at: CheckpointView, options: KfacOptions) -> Scorer:
    return _prepare_kfac(at, options, corrected=False)


def _ekfac(at: CheckpointView, options: KfacOptions) -> Scorer:
    return _prepare_kfac(at, options, corrected=True)


def _prepare_kfac(at: CheckpointView, options: KfacOptions, *, corrected: bool) -> Scorer:
    if all(form.whitened for form in at.train().forms.values()):
        return _of_coordinates(at, options)
    if options.unit_norm:
        raise AttributionError(
            "rows of one length are known of whitened coordinates only",
            fix="capture with keep='16KiB', or leave unit_norm out",
        )
    relative = _DAMPING if options.damping is None else options.damping
    damping = Damping.told(relative, options.absolute_damping)
    rows = fisher_gradients(at, kind=options.fisher, name=options.fisher_capture)
    fit = FisherFit(
        rows,
        corrected=corrected,
        memory_budget=at.question.memory_budget,
        keep_rows=options.fisher == "empirical",
        row_space=options.fisher == "empirical",
    )
    return influence(at, fit, damping)


def fisher_solver(
    at: CheckpointView, options: KfacOptions, method: str
) -> Callable[[str, Tensor], Tensor] | None:
    """What multiplies a layer's dense gradients `[B, P]` with (Fisher + damping)^-1.

    None for whitened coordinates, in whose products it is already.
    """
    if options.unit_norm:
        raise AttributionError(
            "scores of rows of one length are no sums over tokens", fix="leave unit_norm out"
        )
    if all(form.whitened for form in at.train().forms.values()):
        _check_whitened(options)
        return None
    relative = _DAMPING if options.damping is None else options.damping
    damping = Damping.told(relative, options.absolute_damping)
    rows = fisher_gradients(at, kind=options.fisher, name=options.fisher_capture)
    budget = at.question.memory_budget
    found = fisher(rows, corrected=method == EKFAC.name, memory_budget=budget)
    # In double precision: to divide by small eigenvalues makes rounding large.
    return lambda layer, dense: found.layers[layer].solved(dense.double(), damping).to(dense.dtype)


def _of_coordinates(at: CheckpointView, options: KfacOptions) -> Scorer:
    """Products of whitened coordinates: the inverse of the Fisher matrix is in them already."""
    _check_whitened(options)
    found = cosines(at) if options.unit_norm else products(at, "loss")
    return dataclasses.replace(found, approximate=_APPROXIMATE)


def _check_whitened(options: KfacOptions) -> None:
    told = (options.damping, options.absolute_damping, options.fisher)
    if told != (None, None, "empirical"):
        raise AttributionError(
            "these rows were whitened when they were captured",
            found=f"damping={options.damping!r}, fisher={options.fisher!r}",
            fix="capture with gk.Keep('4KiB', damping=...) under another name=",
        )


KFAC = Method(
    "kfac",
    "query gradient x (Fisher + damping)^-1 x training gradient, the Fisher matrix of each layer a "
    "Kronecker product",
    "gradients of both splits, kept as factors; of drawn labels for fisher='sampled'",
    "an eigendecomposition of both sides of every layer, then Q x N products",
    exact=False,
    reference="Martens and Grosse, 2015; Grosse et al., Studying LLM Generalization, 2023",
    prepare=_kfac,
    options=KfacOptions,
    layered=True,
    tuned="damping",
    candidates=DECADES,
    whitened=True,
)
EKFAC = Method(
    "ekfac",
    "query gradient x (Fisher + damping)^-1 x training gradient, the Fisher matrix of each layer a "
    "Kronecker product with corrected eigenvalues",
    "gradients of both splits, kept as factors; of drawn labels for fisher='sampled'",
    "kfac and a second pass over the training rows",
    exact=False,
    reference="George et al., 2018; Grosse et al., Studying LLM Generalization, 2023",
    prepare=_ekfac,
    options=KfacOptions,
    layered=True,
    tuned="damping",
    candidates=DECADES,
    whitened=True,
)
