"""Products with the Hessian or the Gauss-Newton matrix, by running the model again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from gradkeep.capturing._batches import to_device
from gradkeep.capturing._mode import in_mode
from gradkeep.capturing._weights import fingerprint_weights
from gradkeep.errors import AttributionError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import Tensor

    from gradkeep.attribution.curvature._operator import GradientSpace
    from gradkeep.capturing._mode import Mode
    from gradkeep.capturing.tasks._task import Task


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
