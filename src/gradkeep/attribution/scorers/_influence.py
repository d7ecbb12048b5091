"""`influence` and `arnoldi`: inverse curvature by conjugate gradients, or by leading eigenvectors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from gradkeep import query
from gradkeep._budgets import format_bytes, parse_bytes
from gradkeep.attribution._question import Method, Scorer
from gradkeep.attribution.scorers._kernel import solved_scores
from gradkeep.capturing._batches import to_device
from gradkeep.capturing._readiness import in_mode
from gradkeep.capturing._weights import fingerprint_weights
from gradkeep.curvature import _random
from gradkeep.curvature._cholesky import WeightedKernel
from gradkeep.curvature._fisher import Damping
from gradkeep.curvature._iterative import conjugate_gradients, lanczos
from gradkeep.curvature._row_parts import dense_rows, only_layer, weighted
from gradkeep.errors import AttributionError, BudgetError
from gradkeep.query._engine import DEFAULT_BUDGET
from gradkeep.query._sums import Directions

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from torch import Tensor

    from gradkeep.attribution._question import CheckpointView
    from gradkeep.capturing._readiness import Mode
    from gradkeep.capturing.tasks._tasks import Task
    from gradkeep.factors._form import AnyForm, Parameter
    from gradkeep.query import Gradients


CurvatureKind = Literal["hessian", "ggn", "fisher"]


@dataclass(frozen=True, slots=True)
class CurvatureOptions:
    """Which curvature, of what, and what is added to it: what its methods can all be told."""

    curvature: CurvatureKind = "ggn"
    """Of the mean loss: its Hessian, its Gauss-Newton matrix, or, from the store alone, the
    empirical Fisher matrix."""
    model: nn.Module | None = None
    """With the weights of the checkpoint; not for the Fisher matrix."""
    data: Iterable[Any] | None = None
    """The training batches; not for the Fisher matrix."""
    task: Task | None = None
    """By default `gk.Classification()`."""
    damping: float = 0.3
    """Times the mean eigenvalue of the empirical Fisher matrix."""
    absolute_damping: float | None = None
    """As it is, in place of the relative damping."""


@dataclass(frozen=True, slots=True, eq=False)
class CurvatureProblem:
    """A curvature and what is added to it."""

    space: GradientSpace
    product: Callable[[Tensor], Tensor]
    """A v for vectors `[K, P]`, float64."""
    damping: float

    def damped(self, vectors: Tensor) -> Tensor:
        """(A + damping) v"""
        return self.product(vectors) + self.damping * vectors


def curvature(at: CheckpointView, told: CurvatureOptions) -> CurvatureProblem:
    """That of the mean loss in the parameters of the chosen layers, at one checkpoint.

    A relative damping is times the mean eigenvalue of the empirical Fisher matrix, which the kept
    norms tell.
    """
    kind, model, data = told.curvature, told.model, told.data
    train = at.train()
    space = GradientSpace.of(train)
    damping = Damping(told.damping, told.absolute_damping)
    added = damping.of(float(train.norms().double().square().mean()) / max(1, space.size))
    if not added > 0:
        raise at.all_zero()
    if kind == "fisher":
        budget = at.question.memory_budget

        def product(vectors: Tensor) -> Tensor:
            return fisher_product(space, train, vectors, memory_budget=budget)

        return CurvatureProblem(space, product, added)
    if kind not in ("hessian", "ggn"):
        raise AttributionError(f"no curvature {kind!r}", expected="'hessian', 'ggn' or 'fisher'")
    if model is None or data is None:
        raise AttributionError(
            f"curvature={kind!r} runs the model again",
            found="no model" if model is None else "no data",
            fix="pass model= with the checkpoint's weights and data= with the training batches, "
            "or curvature='fisher'",
        )
    from gradkeep.capturing.tasks._tasks import Classification

    mode: Mode = "train" if at.train_block.schema.fingerprints.get("mode") == "train" else "eval"
    replayed = ReplayedGaussNewton(space, model, data, told.task or Classification(), mode)
    return CurvatureProblem(
        space, replayed.hessian if kind == "hessian" else replayed.gauss_newton, added
    )


def fisher_product(
    space: GradientSpace, train: Gradients, vectors: Tensor, *, memory_budget: float | str | None
) -> Tensor:
    """F v = mean over rows of g (g . v), for vectors `[K, P]`; two passes over the rows."""
    directions = space.directions(vectors)
    shares = query.along(train, directions, memory_budget=memory_budget) / len(train)
    found = [weighted(train, name, shares, memory_budget) for name in train.forms]
    return torch.cat(found, 1)


@dataclass(frozen=True, slots=True, eq=False)
class GradientSpace:
    """Vectors `[P]`: the layers one after the other, each layer's parameters in order."""

    forms: Mapping[str, AnyForm]
    weights: str
    """The fingerprint of the model's weights."""

    @classmethod
    def of(cls, gradients: Gradients) -> GradientSpace:
        """That of a capture's gradients, if they are kept unprojected."""
        for name, form in gradients.forms.items():
            if form.restored_parameters != form.parameters:
                raise AttributionError(
                    f"layer {name} is kept as a sketch, which has no curvature of its own",
                    fix="capture it dense or as factors",
                )
        return cls(gradients.forms, gradients.weights)

    @property
    def size(self) -> int:
        """P"""
        return sum(form.gradient_size for form in self.forms.values())

    @property
    def parameters(self) -> list[Parameter]:
        """Those of all layers, in order."""
        return [parameter for form in self.forms.values() for parameter in form.parameters]

    def rows(self, gradients: Gradients, positions: list[int]) -> Tensor:
        """The gradients `[B, P]` of some rows, float64."""
        return torch.cat([dense_rows(gradients, n, positions).double() for n in self.forms], 1)

    def directions(self, vectors: Tensor) -> Directions:
        """Vectors `[K, P]` layer by layer, float32."""
        sizes = [form.gradient_size for form in self.forms.values()]
        parts = [part.float() for part in torch.split(vectors, sizes, 1)]
        named = dict(zip(self.forms, parts, strict=True))
        return Directions(tuple(range(len(vectors))), named, self.forms, self.weights)

    def split(self, vector: Tensor) -> list[Tensor]:
        """A vector `[P]` as the parameters' shapes."""
        parts = torch.split(vector, [parameter.size for parameter in self.parameters])
        shapes = [parameter.shape for parameter in self.parameters]
        return [part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)]


class ReplayedGaussNewton:
    """A model, its data and its task: the mean loss whose second derivatives are asked for."""

    def __init__(
        self, space: GradientSpace, model: nn.Module, data: Iterable[Any], task: Task, mode: Mode
    ) -> None:
        self.space, self.model, self.data, self.task, self.mode = space, model, data, task, mode
        with in_mode(model, mode):
            given = fingerprint_weights(model)
        if given != space.weights:
            raise AttributionError(
                "the model has other weights than the checkpoint that was captured",
                found=f"weights {given[:12]}",
                expected=f"weights {space.weights[:12]}",
                fix="load that checkpoint into the model first",
            )
        if iter(data) is iter(data):
            raise AttributionError(
                "the data can be gone through only once, and is needed for every product",
                found=type(data).__name__,
                fix="pass a list of batches or a DataLoader that does not shuffle or augment",
            )
        named = dict(model.named_parameters(remove_duplicate=False))
        self.weights = [named[parameter.name] for parameter in space.parameters]

    def hessian(self, vectors: Tensor) -> Tensor:
        """H v of the mean loss, for vectors `[K, P]`: K + 1 backward passes over the data."""
        return self._mean(vectors, self._hessian)

    def gauss_newton(self, vectors: Tensor) -> Tensor:
        """J^T H_z J v, with H_z the Hessian of the loss in the model's answer z, for `[K, P]`."""
        return self._mean(vectors, self._gauss_newton)

    def _mean(self, vectors: Tensor, product: Any) -> Tensor:
        total, rows = torch.zeros_like(vectors, dtype=torch.float64), 0
        device = self.weights[0].device
        with in_mode(self.model, self.mode), torch.enable_grad():
            for batch in self.data:
                rows += product(to_device(batch, device), vectors, total)
        if not rows:
            raise AttributionError("the data holds no batch", fix="pass data= with batches")
        return total / rows

    def _hessian(self, batch: Any, vectors: Tensor, total: Tensor) -> int:
        losses = self.task.losses(self.model, batch)
        slopes = torch.autograd.grad(
            losses.sum(), self.weights, create_graph=True, materialize_grads=True
        )
        for vector, into in zip(vectors, total, strict=True):
            along = self._like_weights(vector)
            product = sum((s * v).sum() for s, v in zip(slopes, along, strict=True))
            into += self._flat(_gradients(product, self.weights))
        return len(losses)

    def _gauss_newton(self, batch: Any, vectors: Tensor, total: Tensor) -> int:
        watched = _WatchedModel(self.model)
        self.task.losses(watched, batch)
        leaves, shape = tree_flatten(watched.answer)
        answers = [t for t in leaves if isinstance(t, torch.Tensor) and t.requires_grad]
        ends = {id(t): t.detach().requires_grad_() for t in answers}
        stand_in = _Answers(tree_unflatten([ends.get(id(t), t) for t in leaves], shape))
        losses = self.task.losses(stand_in, batch)
        outputs = list(ends.values())
        slopes = torch.autograd.grad(
            losses.sum(), outputs, create_graph=True, materialize_grads=True
        )
        # The product with the transposed Jacobian is linear in `pulls`: its derivative along them
        # is the product with the Jacobian.
        pulls = [torch.zeros_like(t, requires_grad=True) for t in answers]
        pulled = torch.autograd.grad(
            answers, self.weights, pulls, create_graph=True, materialize_grads=True
        )
        for vector, into in zip(vectors, total, strict=True):
            pushed = torch.autograd.grad(
                pulled,
                pulls,
                self._like_weights(vector),
                retain_graph=True,
                materialize_grads=True,
            )
            curved = torch.autograd.grad(
                slopes, outputs, pushed, retain_graph=True, materialize_grads=True
            )
            back = torch.autograd.grad(
                answers, self.weights, curved, retain_graph=True, materialize_grads=True
            )
            into += self._flat(back)
        return len(losses)

    def _like_weights(self, vector: Tensor) -> list[Tensor]:
        parts = zip(self.space.split(vector), self.weights, strict=True)
        return [part.to(weight) for part, weight in parts]

    def _flat(self, parts: Iterable[Tensor]) -> Tensor:
        return torch.cat([part.detach().double().cpu().flatten() for part in parts])


class _WatchedModel(nn.Module):
    """A model that keeps what it answers."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.answer: Any = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.answer = self.model(*args, **kwargs)
        return self.answer


class _Answers(nn.Module):
    """Stands in for a model: gives the same answer to everything."""

    def __init__(self, answer: Any) -> None:
        super().__init__()
        self.answer = answer

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.answer


def _gradients(value: Any, weights: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Those of a value that may not depend on the weights at all: then zero."""
    if not value.requires_grad:
        return tuple(torch.zeros_like(weight) for weight in weights)
    return torch.autograd.grad(value, weights, retain_graph=True, materialize_grads=True)


@dataclass(frozen=True, slots=True)
class InfluenceOptions(CurvatureOptions):
    """What `influence` can be told."""

    tolerance: float = 1e-4
    """The relative residual that each query is solved to."""
    max_steps: int = 1000
    """Of conjugate gradients; an error if they are not enough."""


def _prepare_influence(at: CheckpointView, options: InfluenceOptions) -> Scorer:
    if not 0 < options.tolerance < 1 or options.max_steps < 1:
        raise AttributionError(
            "conjugate gradients need a tolerance between 0 and 1, and some steps",
            found=f"tolerance={options.tolerance}, max_steps={options.max_steps}",
        )
    curved = curvature(at, options)
    question, asked, train = at.question, at.queries(), at.train()
    budget = question.memory_budget
    limit = DEFAULT_BUDGET if budget is None else parse_bytes(budget)
    if options.curvature == "fisher" and not question.per_layer:
        return _by_kernel(at, curved.damping, options.tolerance)
    # Vectors of float64 that a query has while it is solved.
    step = max(1, limit // 4 // (8 * 10 * curved.space.size + 4 * len(train)))

    def layer(name: str, directions: Directions) -> Tensor:
        one = Directions(
            directions.groups,
            {name: directions.layers[name]},
            {name: train.forms[name]},
            directions.weights,
        )
        return query.along(only_layer(train, name), one, memory_budget=budget)

    def some(positions: list[int]) -> Tensor:
        solved = conjugate_gradients(
            curved.damped,
            curved.space.rows(asked, positions),
            tolerance=options.tolerance,
            max_steps=options.max_steps,
        )
        directions = curved.space.directions(solved)
        if question.per_layer:
            return torch.stack([layer(name, directions) for name in train.forms])
        return query.along(train, directions, memory_budget=budget)

    def score(start: int, stop: int) -> Tensor:
        positions = question.positions[start:stop].tolist()
        tiles = [positions[at : at + step] for at in range(0, len(positions), step)]
        return torch.cat([some(tile) for tile in tiles], -2)

    return Scorer(score)


def _by_kernel(at: CheckpointView, damping: float, tolerance: float) -> Scorer:
    """With F = G^T G / N, g_q (F + damping)^-1 G^T = g_q G^T (G G^T / N + damping)^-1: a kernel."""
    train, question = at.train(), at.question
    kernel = WeightedKernel(
        train,
        torch.full((len(train),), 1 / len(train)),
        damping,
        compute=question.compute,
        memory_budget=question.memory_budget,
        report=question.report,
    )
    return solved_scores(at, kernel, torch.ones(len(train)), of="loss", tolerance=tolerance)


INFLUENCE = Method(
    "influence",
    "query gradient x (curvature + damping)^-1 x training gradient",
    "gradients of both splits; model= and data= for the Hessian or the Gauss-Newton matrix",
    "tens of passes over the training data for each query, small models only; for the Fisher "
    "matrix what kernel costs",
    exact=True,
    reference="Koh and Liang, Understanding Black-box Predictions via Influence Functions, 2017",
    prepare=_prepare_influence,
    options=InfluenceOptions,
    layered=True,
)


@dataclass(frozen=True, slots=True)
class ArnoldiOptions(CurvatureOptions):
    """What `arnoldi` can be told."""

    rank: int = 50
    """How many eigenvectors are kept, those with the largest eigenvalues."""
    iterations: int = 100
    """Products with the curvature, from which the eigenvectors are found."""
    seed: int = 0
    """Of the first vector."""


def _prepare_arnoldi(at: CheckpointView, options: ArnoldiOptions) -> Scorer:
    if not 1 <= options.rank <= options.iterations:
        raise AttributionError(
            "arnoldi needs a rank of at least 1 and no fewer iterations",
            found=f"rank={options.rank}, iterations={options.iterations}",
            fix="twice as many iterations as eigenvectors are usual",
        )
    curved = curvature(at, options)
    question, size = at.question, curved.space.size
    need = 8 * size * (min(options.iterations, size) + options.rank)
    if question.memory_budget is not None and need > parse_bytes(question.memory_budget):
        raise BudgetError(
            f"{options.iterations} vectors of {size} numbers do not fit in the memory budget",
            found=str(question.memory_budget),
            expected=f"at least {format_bytes(need)}",
            fix="pass fewer iterations=, fewer layers=, or a larger memory_budget=",
        )
    start = _random.normals(size, "arnoldi", options.seed).double()
    found = lanczos(
        lambda v: curved.product(v.unsqueeze(0))[0],
        start,
        iterations=options.iterations,
        rank=options.rank,
    )
    directions = curved.space.directions(found.vectors)
    train, asked = (
        query.along(side, directions, memory_budget=question.memory_budget).double()
        for side in (at.train(), at.queries())
    )
    weighed = train / (found.values + curved.damping).unsqueeze(1)
    chosen = asked[:, question.positions]

    def score(begin: int, stop: int) -> Tensor:
        return (chosen[:, begin:stop].t() @ weighed).float()

    return Scorer(score, approximate=f"the {len(found.values)} directions of most curvature")


ARNOLDI = Method(
    "arnoldi",
    "query gradient x (curvature + damping)^-1 x training gradient, along the top eigenvectors of "
    "the curvature",
    "gradients of both splits; model= and data= for the Hessian or the Gauss-Newton matrix",
    "a pass over the training data for each iteration, then rank products a pair",
    exact=False,
    reference="Schioppa et al., Scaling Up Influence Functions, 2022",
    prepare=_prepare_arnoldi,
    options=ArnoldiOptions,
)
