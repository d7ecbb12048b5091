"""`kfac` and `ekfac`: influence by the Fisher matrix as Kronecker products."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch

from gradkeep import query
from gradkeep._budgets import parse_bytes
from gradkeep.attribution._question import Method, Scorer
from gradkeep.attribution.scorers._gradient_products import cosines, products
from gradkeep.curvature._eigen_influence import single_position_influence, stored_coordinates
from gradkeep.curvature._fisher import DECADES, Damping, FisherFit, coordinate_bytes, fisher
from gradkeep.curvature._row_parts import dense_rows, only_layer
from gradkeep.errors import AttributionError
from gradkeep.factors import is_whitened
from gradkeep.query._engine import DEFAULT_BUDGET
from gradkeep.query._sums import Directions
from gradkeep.store import CaptureKey

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from gradkeep.attribution._question import CheckpointView
    from gradkeep.capturing._weights import AdamState
    from gradkeep.factors._form import AnyForm
    from gradkeep.query import Gradients

    Solve = Callable[[str, Tensor], Tensor]
    LayerScores = Callable[[str, list[int]], Tensor]


def influence(at: CheckpointView, fit: FisherFit, damping: Damping) -> Scorer:
    """Score by g_q^T (F + damping)^-1 g_n, choosing the cheapest of three algorithms per layer.

    Layers whose training rows are held as coordinates, and linear layers with one position per row, are
    multiplied in eigencoordinates; for others the queries are solved. The matrix of a layer is computed when
    its scores are first needed.
    """
    sides = (at.queries(), at.train())

    def layer_scores(name: str, positions: list[int]) -> Tensor:
        fisher = fit.layer(name)
        budget = _remaining_budget(at, fit.nbytes + coordinate_bytes(fisher.rows))
        coordinates = stored_coordinates(name, fisher, damping)
        if coordinates is not None:
            score_rows = coordinates.scores
            return in_steps(
                budget, fisher.size, positions, lambda chunk: score_rows(sides[0], chunk)
            )
        direct = single_position_influence(name, fisher, damping, *sides)
        if direct is not None:
            score_pairs = direct.scores
            return in_steps(
                budget,
                direct.leading_size // 2,
                positions,
                lambda chunk: score_pairs(*sides, chunk, budget),
            )
        solved = SolvedQueries(at, lambda _, dense: fisher.solved(dense, damping), budget)
        return solved.scores(name, positions)

    def in_steps(
        budget: int | None, size: int, positions: list[int], scores: Callable[[list[int]], Tensor]
    ) -> Tensor:
        """Score as many queries at a time as fit into the budget."""
        out = torch.empty(len(positions), len(sides[1]))
        step = _queries_at_once(budget, size, len(sides[1]))
        for start in range(0, len(positions), step):
            out[start : start + step] = scores(positions[start : start + step])
        return out

    return layer_by_layer(at, layer_scores, fit.approximate, check=fit.check)


class SolvedQueries:
    """Restore and solve queries layer by layer, and stream the training rows past them."""

    def __init__(self, at: CheckpointView, solve: Solve, memory_budget: int | None) -> None:
        self.queries, self.train = at.queries(), at.train()
        self.solve, self.budget = solve, memory_budget

    def scores(self, name: str, positions: list[int]) -> Tensor:
        """Compute the products `[b, N]` of one layer."""
        form, rows = self.train.forms[name], only_layer(self.train, name)
        out = torch.empty(len(positions), len(rows))
        step = _queries_at_once(self.budget, rows.size, len(rows))
        for start in range(0, len(positions), step):
            some = positions[start : start + step]
            solved = self.solve(name, dense_rows(self.queries, name, some))
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
    """Build a scorer that sums the scores `[b, N]` of all layers, or stacks them per layer.

    After all layers, `check` may still raise.
    """
    question, layers = at.question, list(at.train().forms)

    def score(start: int, stop: int) -> Tensor:
        positions = question.positions[start:stop].tolist()
        parts = [scores(layers[0], positions)]
        for name in layers[1:]:
            layer_scores = scores(name, positions)
            if question.per_layer:
                parts.append(layer_scores)
            else:
                parts[0] += layer_scores
        check()
        return torch.stack(parts) if question.per_layer else parts[0]

    return Scorer(score, approximate=approximate)


def _remaining_budget(at: CheckpointView, used: int) -> int | None:
    """Return the rest of the memory budget in bytes, if there is one."""
    budget = at.question.memory_budget
    return None if budget is None else max(1, parse_bytes(budget) - used)


def _queries_at_once(budget: int | None, size: int, rows: int) -> int:
    """Return how many queries' restored gradients, four times, and products take a quarter of the budget."""
    limit = DEFAULT_BUDGET if budget is None else budget
    return max(1, limit // 4 // (16 * size + 4 * rows))


APPROXIMATE = "layers are independent, and each one's Fisher matrix is a Kronecker product"


@dataclass(frozen=True, slots=True)
class KfacOptions:
    """Options of `kfac` and `ekfac`."""

    damping: float | Literal["auto"] | None = None
    """Damping relative to the mean eigenvalue of the layer: 0.3, or for coordinates the one they were whitened
    with; "auto": chosen by subset outcomes.
    """
    absolute_damping: float | None = None
    """Absolute damping, instead of the relative one."""
    fisher: Literal["empirical", "sampled"] = "empirical"
    """Fisher matrix of the actual labels (`empirical`), or of labels drawn from the model (`sampled`)."""
    fisher_capture: str = "sampled"
    """Name of the capture with drawn labels."""
    unit_norm: bool = False
    """For coordinates: normalize every row to length one."""

    def parsed_damping(self) -> Damping:
        """Return the damping for captures that are not whitened."""
        return Damping.parse(0.3 if self.damping is None else self.damping, self.absolute_damping)


def _prepare_kfac(at: CheckpointView, options: KfacOptions, *, corrected: bool) -> Scorer:
    if all(is_whitened(form) for form in at.train().forms.values()):
        return _of_coordinates(at, options)
    if options.unit_norm:
        raise AttributionError(
            "unit_norm needs whitened coordinates",
            code="attribute.unit_norm",
            fix="Capture with keep='16KiB', or omit unit_norm.",
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
    """Return the function that multiplies a layer's gradients `[B, P]` with (Fisher + damping)^-1.

    None for whitened coordinates, whose products contain it already.
    """
    if options.unit_norm:
        raise AttributionError(
            "scores with unit_norm are not sums over tokens",
            code="attribute.not_per_token",
            fix="Omit unit_norm.",
        )
    if all(is_whitened(form) for form in at.train().forms.values()):
        _check_whitened(options)
        return None
    damping, rows = options.parsed_damping(), _fisher_gradients(at, options)
    budget = at.question.memory_budget
    solver = fisher(rows, corrected=method == EKFAC.name, memory_budget=budget)
    # In double precision: dividing by small eigenvalues amplifies rounding.
    return lambda layer, dense: solver[layer].solved(dense.double(), damping).to(dense.dtype)


def _of_coordinates(at: CheckpointView, options: KfacOptions) -> Scorer:
    """Build a scorer of products of whitened coordinates, which contain the inverse Fisher matrix."""
    _check_whitened(options)
    scorer = cosines(at) if options.unit_norm else products(at, "loss")
    return dataclasses.replace(scorer, approximate=APPROXIMATE)


def _check_whitened(options: KfacOptions) -> None:
    passed = (options.damping, options.absolute_damping, options.fisher)
    if passed != (None, None, "empirical"):
        raise AttributionError(
            "the damping and Fisher matrix of whitened rows are fixed when they are captured",
            code="attribute.already_whitened",
            found=f"damping={options.damping!r}, fisher={options.fisher!r}",
            fix="Capture with gk.Keep('4KiB', damping=...) under another name=.",
        )


def _fisher_gradients(at: CheckpointView, options: KfacOptions) -> Gradients:
    """Return the training gradients, or those of the capture with drawn labels."""
    train, name = at.train(), options.fisher_capture
    if options.fisher == "empirical":
        return train
    question, place = at.question, at.place
    key = CaptureKey(place.checkpoint, question.train, place.run, name)
    if key not in question.store.captures():
        run = "" if place.run == "main" else f", run={place.run!r}"
        raise AttributionError(
            f"there is no capture {name!r} of {question.train} with labels drawn from the model at "
            f"{str(place)!r}",
            code="attribute.no_sampled_capture",
            path=question.store.location,
            fix="Run gk.capture(store, model, loader, task=gk.Classification(labels='sampled'), "
            f"split={question.train!r}, checkpoint={place.checkpoint!r}{run}, name={name!r}).",
        )
    drawn = at.train(name=name)
    for layer, form in train.forms.items():
        if layer not in drawn.forms or drawn.forms[layer].parameters != form.parameters:
            raise AttributionError(
                f"the capture {name!r} does not hold layer {layer} as {question.train} does",
                code="attribute.different_layers",
                found=", ".join(drawn.forms),
                fix="Capture both with the same layers=, or pass layers= here.",
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


@dataclass(frozen=True, slots=True)
class AdamOptions:
    """Options of `adam`."""

    state: Any = None
    """`gk.capturing.AdamState` of the checkpoint, from `gk.read_adam`."""


def _prepare_adam(at: CheckpointView, options: AdamOptions) -> Scorer:
    from gradkeep.capturing._weights import AdamState

    budget = at.question.memory_budget
    limit = None if budget is None else parse_bytes(budget)
    if not isinstance(options.state, AdamState):
        raise AttributionError(
            "adam needs the optimizer's second moments",
            code="attribute.no_adam_state",
            found=type(options.state).__name__,
            fix="Pass state=gk.read_adam(optimizer.state_dict() or a Trainer's folder, model).",
        )
    state: AdamState = options.state
    roots = {layer: _roots(state, form) for layer, form in at.train().forms.items()}

    def solve(layer: str, dense: Tensor) -> Tensor:
        return dense / roots[layer].to(dense)

    return layer_by_layer(at, SolvedQueries(at, solve, limit).scores, None)


def _roots(state: AdamState, form: AnyForm) -> Tensor:
    """Return the denominator of Adam for a layer's gradient `[P]`."""
    parts = []
    for parameter in form.parameters:
        second = state.second.get(parameter.name)
        if second is None or tuple(second.shape) != parameter.shape:
            raise AttributionError(
                f"the optimizer's state has no second moments for {parameter.name}",
                code="attribute.missing_moments",
                found="no such parameter" if second is None else f"shape {tuple(second.shape)}",
                expected=f"shape {parameter.shape}",
                fix="Read the state with the captured model, or pass layers= that were trained.",
            )
        parts.append(state.corrected(parameter.name).double().sqrt().flatten() + state.eps)
    return torch.cat(parts).float()


ADAM = Method(
    "adam",
    "query gradient x training gradient / (root of Adam's second moments + eps)",
    "gradients of both splits at one checkpoint, and the optimizer's state there",
    "Q restored gradients, then Q x N products",
    exact=True,
    reference="Xia et al., LESS, 2024 (the second moments alone)",
    prepare=_prepare_adam,
    over="one",
    options=AdamOptions,
    layered=True,
)
