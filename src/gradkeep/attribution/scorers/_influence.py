"""`influence` and `arnoldi`: inverse curvature by conjugate gradients, or by the top eigenvectors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from gradkeep import query
from gradkeep._arguments import Limits, PositiveInt
from gradkeep._budgets import format_bytes, parse_bytes
from gradkeep.attribution._question import Method, Scorer
from gradkeep.attribution.scorers._kernel import solved_scores
from gradkeep.capturing._batches import to_device
from gradkeep.capturing._readiness import in_mode
from gradkeep.capturing._resume import fingerprint_weights
from gradkeep.curvature import _random
from gradkeep.curvature._cholesky import WeightedKernel
from gradkeep.curvature._conjugate import conjugate_gradients, lanczos
from gradkeep.curvature._fisher import Damping
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
    """Options of all methods with a curvature matrix."""

    curvature: CurvatureKind = "ggn"
    """Hessian or Gauss-Newton matrix of the mean loss, or the empirical Fisher matrix, which needs the store
    only.
    """
    model: nn.Module | None = None
    """Model with the weights of the checkpoint; not for the Fisher matrix."""
    data: Iterable[Any] | None = None
    """Training batches; not for the Fisher matrix."""
    task: Task | None = None
    """Loss; by default `gk.Classification()`."""
    damping: float = 0.3
    """Damping relative to the mean eigenvalue of the empirical Fisher matrix."""
    absolute_damping: float | None = None
    """Absolute damping, instead of the relative one."""


@dataclass(frozen=True, slots=True, eq=False)
class CurvatureProblem:
    """A curvature matrix A and its damping."""

    space: GradientSpace
    product: Callable[[Tensor], Tensor]
    """Function that computes A v for vectors `[K, P]`, float64."""
    damping: float

    def damped(self, vectors: Tensor) -> Tensor:
        """Compute (A + damping) v."""
        return self.product(vectors) + self.damping * vectors


def curvature(at: CheckpointView, options: CurvatureOptions) -> CurvatureProblem:
    """Build the curvature of the mean loss in the parameters of the chosen layers.

    A relative damping is relative to the mean eigenvalue of the empirical Fisher matrix, which follows from
    the captured norms.
    """
    kind, model, data = options.curvature, options.model, options.data
    train = at.train()
    space = GradientSpace.of(train)
    damping = Damping(options.damping, options.absolute_damping)
    added = damping.of(float(train.norms().double().square().mean()) / max(1, space.size))
    if not added > 0:
        raise at.all_zero()
    if kind == "fisher":
        budget = at.question.memory_budget

        def product(vectors: Tensor) -> Tensor:
            return fisher_product(space, train, vectors, memory_budget=budget)

        return CurvatureProblem(space, product, added)
    if model is None or data is None:
        raise AttributionError(
            f"curvature={kind!r} needs the model and the training data",
            code="attribute.no_model",
            found="no model" if model is None else "no data",
            fix="Pass model= with the checkpoint's weights and data= with the training batches, "
            "or curvature='fisher'.",
        )
    from gradkeep.capturing.tasks._tasks import Classification

    mode: Mode = "train" if at.train_block.schema.fingerprints.get("mode") == "train" else "eval"
    replayed = ReplayedCurvature(space, model, data, options.task or Classification(), mode)
    step = replayed.add_hessian if kind == "hessian" else replayed.add_gauss_newton
    return CurvatureProblem(space, lambda vectors: replayed.mean(vectors, step), added)


def fisher_product(
    space: GradientSpace, train: Gradients, vectors: Tensor, *, memory_budget: float | str | None
) -> Tensor:
    """Compute F v = mean over rows of g (g . v) for vectors `[K, P]`; two passes over the rows."""
    directions = space.directions(vectors)
    shares = query.along(train, directions, memory_budget=memory_budget) / len(train)
    parts = [weighted(train, name, shares, memory_budget) for name in train.forms]
    return torch.cat(parts, 1)


@dataclass(frozen=True, slots=True, eq=False)
class GradientSpace:
    """Vectors `[P]`: the layers in order, each layer's parameters in order."""

    forms: Mapping[str, AnyForm]
    weights: str
    """Fingerprint of the model's weights."""

    @classmethod
    def of(cls, gradients: Gradients) -> GradientSpace:
        """Build the space of a capture's gradients, which must not be projected."""
        for name, form in gradients.forms.items():
            if form.restored_parameters != form.parameters:
                raise AttributionError(
                    f"layer {name} was captured as a projection, which has no curvature",
                    code="attribute.projected_layer",
                    fix="Capture it dense or as factors.",
                )
        return cls(gradients.forms, gradients.weights)

    @property
    def size(self) -> int:
        """Number P of parameters."""
        return sum(form.gradient_size for form in self.forms.values())

    @property
    def parameters(self) -> list[Parameter]:
        """Parameters of all layers in order."""
        return [parameter for form in self.forms.values() for parameter in form.parameters]

    def rows(self, gradients: Gradients, positions: list[int]) -> Tensor:
        """Return the gradients `[B, P]` of some rows, float64."""
        return torch.cat([dense_rows(gradients, n, positions).double() for n in self.forms], 1)

    def directions(self, vectors: Tensor) -> Directions:
        """Split vectors `[K, P]` by layer, float32."""
        sizes = [form.gradient_size for form in self.forms.values()]
        parts = [part.float() for part in torch.split(vectors, sizes, 1)]
        named = dict(zip(self.forms, parts, strict=True))
        return Directions(tuple(range(len(vectors))), named, self.forms, self.weights)

    def split(self, vector: Tensor) -> list[Tensor]:
        """Split a vector `[P]` into the parameters' shapes."""
        parts = torch.split(vector, [parameter.size for parameter in self.parameters])
        shapes = [parameter.shape for parameter in self.parameters]
        return [part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)]


class ReplayedCurvature:
    """Second derivatives of the mean loss of a model on its data."""

    def __init__(
        self, space: GradientSpace, model: nn.Module, data: Iterable[Any], task: Task, mode: Mode
    ) -> None:
        self.space, self.model, self.data, self.task, self.mode = space, model, data, task, mode
        with in_mode(model, mode):
            weights_fingerprint = fingerprint_weights(model)
        if weights_fingerprint != space.weights:
            raise AttributionError(
                "the model has other weights than the captured checkpoint",
                code="attribute.other_weights",
                found=f"weights {weights_fingerprint[:12]}",
                expected=f"weights {space.weights[:12]}",
                fix="Load that checkpoint into the model first.",
            )
        if iter(data) is iter(data):
            raise AttributionError(
                "the data can be iterated only once, but every product needs it",
                code="attribute.iterator",
                found=type(data).__name__,
                fix="Pass a list of batches or a DataLoader that does not shuffle or augment.",
            )
        named = dict(model.named_parameters(remove_duplicate=False))
        self.weights = [named[parameter.name] for parameter in space.parameters]

    def mean(self, vectors: Tensor, product: Callable[[Any, Tensor, Tensor], int]) -> Tensor:
        """Compute the mean over the data of products with vectors `[K, P]`, float64."""
        total, rows = torch.zeros_like(vectors, dtype=torch.float64), 0
        device = self.weights[0].device
        with in_mode(self.model, self.mode), torch.enable_grad():
            for batch in self.data:
                rows += product(to_device(batch, device), vectors, total)
        if not rows:
            raise AttributionError(
                "the data holds no batch", code="attribute.no_data", fix="Pass data= with batches."
            )
        return total / rows

    def add_hessian(self, batch: Any, vectors: Tensor, total: Tensor) -> int:
        """Add H v of a batch's summed loss: K + 1 backward passes; return the number of rows."""
        losses = self.task.losses(self.model, batch)
        slopes = torch.autograd.grad(
            losses.sum(), self.weights, create_graph=True, materialize_grads=True
        )
        for vector, into in zip(vectors, total, strict=True):
            along = self._like_weights(vector)
            product = sum((s * v).sum() for s, v in zip(slopes, along, strict=True))
            into += self._flat(_gradients(product, self.weights))
        return len(losses)

    def add_gauss_newton(self, batch: Any, vectors: Tensor, total: Tensor) -> int:
        """Add J^T H_z J v, with H_z the Hessian of the summed loss in the model's output z."""
        outputs_of_model: list[Any] = []
        hook = self.model.register_forward_hook(lambda *call: outputs_of_model.append(call[2]))
        try:
            self.task.losses(self.model, batch)
        finally:
            hook.remove()
        leaves, shape = tree_flatten(outputs_of_model[-1])
        answers = [t for t in leaves if isinstance(t, torch.Tensor) and t.requires_grad]
        ends = {id(t): t.detach().requires_grad_() for t in answers}
        constant = _ConstantModel(tree_unflatten([ends.get(id(t), t) for t in leaves], shape))
        losses = self.task.losses(constant, batch)
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


class _ConstantModel(nn.Module):
    """Model that returns a fixed output."""

    def __init__(self, output: Any) -> None:
        super().__init__()
        self.output = output

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.output


def _gradients(value: Any, weights: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return the gradients of a value, zero if it does not depend on the weights."""
    if not value.requires_grad:
        return tuple(torch.zeros_like(weight) for weight in weights)
    return torch.autograd.grad(value, weights, retain_graph=True, materialize_grads=True)


@dataclass(frozen=True, slots=True)
class InfluenceOptions(CurvatureOptions):
    """Options of `influence`."""

    tolerance: Annotated[float, Limits(above=0, below=1)] = 1e-4
    """Relative residual of the solution of each query."""
    max_steps: PositiveInt = 1000
    """Most steps of conjugate gradients; more are an error."""


def _prepare_influence(at: CheckpointView, options: InfluenceOptions) -> Scorer:
    curved = curvature(at, options)
    question, queries, train = at.question, at.queries(), at.train()
    budget = question.memory_budget
    limit = DEFAULT_BUDGET if budget is None else parse_bytes(budget)
    if options.curvature == "fisher" and not question.per_layer:
        return _by_kernel(at, curved.damping, options.tolerance)
    # Each query needs 10 float64 vectors while it is solved.
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
            curved.space.rows(queries, positions),
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
    """Solve in row space: with F = G^T G / N, g_q (F + damping)^-1 G^T = g_q G^T (G G^T / N + damping)^-1."""
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
    """Options of `arnoldi`."""

    rank: int = 50
    """Number of eigenvectors, those with the largest eigenvalues."""
    iterations: int = 100
    """Number of products with the curvature from which the eigenvectors are computed."""
    seed: int = 0
    """Seed of the first vector."""


def _prepare_arnoldi(at: CheckpointView, options: ArnoldiOptions) -> Scorer:
    if not 1 <= options.rank <= options.iterations:
        raise AttributionError(
            "rank must be at least 1 and at most iterations",
            code="argument.invalid",
            found=f"rank={options.rank}, iterations={options.iterations}",
            fix="Pass about twice as many iterations as the rank.",
        )
    curved = curvature(at, options)
    question, size = at.question, curved.space.size
    need = 8 * size * (min(options.iterations, size) + options.rank)
    if question.memory_budget is not None and need > parse_bytes(question.memory_budget):
        raise BudgetError(
            f"{options.iterations} vectors of {size} numbers do not fit in the memory budget",
            code="budget.vectors",
            found=str(question.memory_budget),
            expected=f"at least {format_bytes(need)}",
            fix="Pass fewer iterations=, fewer layers=, or a larger memory_budget=.",
        )
    start = _random.normals(size, "arnoldi", options.seed).double()
    eigen = lanczos(
        lambda v: curved.product(v.unsqueeze(0))[0],
        start,
        iterations=options.iterations,
        rank=options.rank,
    )
    directions = curved.space.directions(eigen.vectors)
    train, queries = (
        query.along(side, directions, memory_budget=question.memory_budget).double()
        for side in (at.train(), at.queries())
    )
    weighed = train / (eigen.values + curved.damping).unsqueeze(1)
    chosen = queries[:, question.positions]

    def score(begin: int, stop: int) -> Tensor:
        return (chosen[:, begin:stop].t() @ weighed).float()

    return Scorer(score, approximate=f"the {len(eigen.values)} directions of most curvature")


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
