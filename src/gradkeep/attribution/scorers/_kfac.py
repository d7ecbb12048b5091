"""`kfac` and `ekfac`: influence by the Fisher matrix as Kronecker products."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch

from gradkeep import query
from gradkeep._budgets import parse_bytes
from gradkeep.attribution._question import Method, Scorer
from gradkeep.attribution.scorers._gradient_products import cosines, products
from gradkeep.curvature._eigen_influence import single_position_influence, stored_coordinates
from gradkeep.curvature._fisher import DECADES, Damping, FisherFit, coordinate_bytes, fisher
from gradkeep.curvature._row_parts import dense_rows, only_layer
from gradkeep.errors import AttributionError
from gradkeep.query._engine import DEFAULT_BUDGET
from gradkeep.query._sums import Directions
from gradkeep.store import CaptureKey

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from gradkeep.attribution._question import CheckpointView
    from gradkeep.query import Gradients

    Solve = Callable[[str, Tensor], Tensor]
    LayerScores = Callable[[str, list[int]], Tensor]


def influence(at: CheckpointView, fit: FisherFit, damping: Damping) -> Scorer:
    """g_q^T (F + damping)^-1 g_n for all pairs, layer by layer the cheapest of three ways.

    Layers whose training rows are held as coordinates, and linear layers with one position a row,
    are multiplied in eigencoordinates; of others the queries are solved. The matrix of a layer is
    made when its scores are first asked for.
    """
    sides = (at.queries(), at.train())

    def layer_scores(name: str, positions: list[int]) -> Tensor:
        fisher = fit.layer(name)
        left = _left(at, fit.nbytes + coordinate_bytes(fisher.rows))
        kept = stored_coordinates(name, fisher, damping)
        if kept is not None:
            held = kept
            return in_steps(left, fisher.size, positions, lambda some: held.scores(sides[0], some))
        direct = single_position_influence(name, fisher, damping, *sides)
        if direct is not None:
            one = direct
            return in_steps(
                left, one.leading_size // 2, positions, lambda some: one.scores(*sides, some, left)
            )
        solved = SolvedQueries(at, lambda _, dense: fisher.solved(dense, damping), left)
        return solved.scores(name, positions)

    def in_steps(
        left: int | None, size: int, positions: list[int], scores: Callable[[list[int]], Tensor]
    ) -> Tensor:
        """Those of so many queries at a time that what is made of them fits."""
        out = torch.empty(len(positions), len(sides[1]))
        step = _queries_at_once(left, size, len(sides[1]))
        for start in range(0, len(positions), step):
            out[start : start + step] = scores(positions[start : start + step])
        return out

    return layer_by_layer(at, layer_scores, fit.approximate, check=fit.check)


class SolvedQueries:
    """Layer after layer some queries are restored and solved, and the training rows pass by."""

    def __init__(self, at: CheckpointView, solve: Solve, memory_budget: int | None) -> None:
        self.asked, self.train = at.queries(), at.train()
        self.solve, self.budget = solve, memory_budget

    def scores(self, name: str, positions: list[int]) -> Tensor:
        """Products `[b, N]` of one layer."""
        form, rows = self.train.forms[name], only_layer(self.train, name)
        out = torch.empty(len(positions), len(rows))
        step = _queries_at_once(self.budget, rows.size, len(rows))
        for start in range(0, len(positions), step):
            some = positions[start : start + step]
            solved = self.solve(name, dense_rows(self.asked, name, some))
            directions = Directions(tuple(some), {name: solved}, {name: form}, rows.weights)
            out[start : start + step] = query.along(rows, directions, memory_budget=self.budget)
        return out


def layer_by_layer(
    at: CheckpointView,
    scores: LayerScores,
    approximate: str | None,
    *,
    check: Callable[[], None] = lambda: None,
) -> Scorer:
    """A scorer that adds the scores `[b, N]` of all layers up, or keeps them apart if asked to.

    Once all layers were asked, `check` may still refuse.
    """
    question, layers = at.question, list(at.train().forms)

    def score(start: int, stop: int) -> Tensor:
        positions = question.positions[start:stop].tolist()
        found = [scores(layers[0], positions)]
        for name in layers[1:]:
            one = scores(name, positions)
            if question.per_layer:
                found.append(one)
            else:
                found[0] += one
        check()
        return torch.stack(found) if question.per_layer else found[0]

    return Scorer(score, approximate=approximate)


def _left(at: CheckpointView, stored_coordinates: int) -> int | None:
    """What is left of the byte budget, if there is one."""
    budget = at.question.memory_budget
    return None if budget is None else max(1, parse_bytes(budget) - stored_coordinates)


def _queries_at_once(budget: int | None, size: int, rows: int) -> int:
    """Queries whose restored gradients, four times, and products take a quarter of the budget."""
    limit = DEFAULT_BUDGET if budget is None else budget
    return max(1, limit // 4 // (16 * size + 4 * rows))


APPROXIMATE = "layers are independent, and each one's Fisher matrix is a Kronecker product"


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

    def parsed_damping(self) -> Damping:
        """The damping of captures that are not whitened."""
        return Damping.parse(0.3 if self.damping is None else self.damping, self.absolute_damping)


def _prepare_kfac(at: CheckpointView, options: KfacOptions, *, corrected: bool) -> Scorer:
    if all(form.whitened for form in at.train().forms.values()):
        return _of_coordinates(at, options)
    if options.unit_norm:
        raise AttributionError(
            "rows of one length are known of whitened coordinates only",
            fix="capture with keep='16KiB', or leave unit_norm out",
        )
    damping, rows = options.parsed_damping(), _fisher_gradients(at, options)
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
    damping, rows = options.parsed_damping(), _fisher_gradients(at, options)
    budget = at.question.memory_budget
    found = fisher(rows, corrected=method == EKFAC.name, memory_budget=budget)
    # In double precision: to divide by small eigenvalues makes rounding large.
    return lambda layer, dense: found.layers[layer].solved(dense.double(), damping).to(dense.dtype)


def _of_coordinates(at: CheckpointView, options: KfacOptions) -> Scorer:
    """Products of whitened coordinates: the inverse of the Fisher matrix is in them already."""
    _check_whitened(options)
    found = cosines(at) if options.unit_norm else products(at, "loss")
    return dataclasses.replace(found, approximate=APPROXIMATE)


def _check_whitened(options: KfacOptions) -> None:
    told = (options.damping, options.absolute_damping, options.fisher)
    if told != (None, None, "empirical"):
        raise AttributionError(
            "these rows were whitened when they were captured",
            found=f"damping={options.damping!r}, fisher={options.fisher!r}",
            fix="capture with gk.Keep('4KiB', damping=...) under another name=",
        )


def _fisher_gradients(at: CheckpointView, options: KfacOptions) -> Gradients:
    """The training rows' own gradients, or those of the capture with drawn labels."""
    train, name = at.train(), options.fisher_capture
    if options.fisher == "empirical":
        return train
    question, place = at.question, at.place
    key = CaptureKey(place.checkpoint, question.train, place.run, name)
    if key not in question.store.captures():
        run = "" if place.run == "main" else f", run={place.run!r}"
        raise AttributionError(
            f"no capture {name!r} of {question.train} with labels drawn from the model at "
            f"{str(place)!r}",
            path=question.store.location,
            fix="gk.capture(store, model, loader, task=gk.Classification(labels='sampled'), "
            f"split={question.train!r}, checkpoint={place.checkpoint!r}{run}, name={name!r})",
        )
    drawn = at.train(name=name)
    for layer, form in train.forms.items():
        if layer not in drawn.forms or drawn.forms[layer].parameters != form.parameters:
            raise AttributionError(
                f"the capture {name!r} does not hold layer {layer} as {question.train} does",
                found=", ".join(drawn.forms),
                fix="capture both with the same layers=, or pass layers= here",
            )
    return drawn


KFAC = Method(
    "kfac",
    "query gradient x (Fisher + damping)^-1 x training gradient, the Fisher matrix of each layer a "
    "Kronecker product",
    "gradients of both splits, kept as factors; of drawn labels for fisher='sampled'",
    "an eigendecomposition of both sides of every layer, then Q x N products",
    exact=False,
    reference="Martens and Grosse, 2015; Grosse et al., Studying LLM Generalization, 2023",
    prepare=functools.partial(_prepare_kfac, corrected=False),
    options=KfacOptions,
    layered=True,
    tuned="damping",
    candidates=DECADES,
    whitened=True,
)
EKFAC = dataclasses.replace(
    KFAC,
    name="ekfac",
    summary=f"{KFAC.summary} with corrected eigenvalues",
    cost="kfac and a second pass over the training rows",
    reference="George et al., 2018; Grosse et al., Studying LLM Generalization, 2023",
    prepare=functools.partial(_prepare_kfac, corrected=True),
)
