"""Per-sample gradients of outputs by parameter: vectorized, or one sample at a time."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import Tensor, nn

    from gradkeep.compat.trak.modelout_functions import AbstractModelOutput


class AbstractGradientComputer(ABC):
    """Compute per-sample gradients, and the weights of outputs in the loss."""

    def __init__(
        self,
        model: nn.Module,
        task: AbstractModelOutput,
        grad_dim: int | None = None,
        dtype: torch.dtype = torch.float16,
        device: str | torch.device = "cuda",
    ) -> None:
        self.model = model
        self.modelout_fn = task
        self.grad_dim, self.dtype, self.device = grad_dim, dtype, device

    @abstractmethod
    def load_model_params(self, model: nn.Module) -> None:
        """Use the current parameters of the model."""

    @abstractmethod
    def compute_per_sample_grad(self, batch: Sequence[Tensor]) -> Any:
        """Return gradients `[B, P]`, or by parameter `{name: [B, *shape]}`."""

    @abstractmethod
    def compute_loss_grad(self, batch: Sequence[Tensor], batch_size: int | None = None) -> Tensor:
        """Return the weights `[B, 1]` of outputs in the loss; `batch_size` is ignored."""


class FunctionalGradientComputer(AbstractGradientComputer):
    """Use `torch.func`, for any task whose `get_output` it can differentiate.

    Only the parameters in `grad_wrt` are differentiated.
    """

    def __init__(
        self,
        model: nn.Module,
        task: AbstractModelOutput,
        grad_dim: int,
        dtype: torch.dtype,
        device: str | torch.device,
        grad_wrt: Iterable[str] | None = None,
    ) -> None:
        super().__init__(model, task, grad_dim, dtype, device)
        self.grad_wrt = None if grad_wrt is None else list(grad_wrt)
        self.logger = logging.getLogger("GradientComputer")
        self.load_model_params(model)

    def load_model_params(self, model: nn.Module) -> None:
        """Use the current parameters of the model."""
        self.func_weights = dict(model.named_parameters())
        self.func_buffers = dict(model.named_buffers())

    def compute_per_sample_grad(self, batch: Sequence[Tensor]) -> dict[str, Tensor]:
        """Return gradients `{name: [B, *shape]}` of the selected parameters."""
        names = list(self.func_weights) if self.grad_wrt is None else self.grad_wrt
        fixed = {name: value.detach() for name, value in self.func_weights.items()}
        chosen = {name: fixed.pop(name) for name in self.func_weights if name in set(names)}

        def output(weights: dict[str, Tensor], *sample: Tensor) -> Tensor:
            both = {**fixed, **weights}
            return self.modelout_fn.get_output(self.model, both, self.func_buffers, *sample)

        each = torch.func.vmap(
            torch.func.grad(output),
            in_dims=(None, *(0 for _ in batch)),
            randomness="different",
        )
        grads: dict[str, Tensor] = each(chosen, *batch)
        return grads

    def compute_loss_grad(self, batch: Sequence[Tensor], batch_size: int | None = None) -> Tensor:
        """Return the weights `[B, 1]`."""
        return self.modelout_fn.get_out_to_loss_grad(
            self.model, self.func_weights, self.func_buffers, batch
        )


class IterativeGradientComputer(FunctionalGradientComputer):
    """Run one backward pass per sample, for tasks whose `get_output` maps a batch to `[B]`."""

    def load_model_params(self, model: nn.Module) -> None:
        """Use the current parameters of the model."""
        self.model = model
        chosen = None if self.grad_wrt is None else set(self.grad_wrt)
        self.model_params = {
            name: parameter
            for name, parameter in model.named_parameters()
            if chosen is None or name in chosen
        }

    def compute_per_sample_grad(self, batch: Sequence[Tensor]) -> dict[str, Tensor]:
        """Return gradients `{name: [B, *shape]}` of the selected parameters."""
        weights = list(self.model_params.values())
        before = [weight.requires_grad for weight in weights]
        for weight in weights:
            weight.requires_grad_(True)
        try:
            outputs = self.modelout_fn.get_output(self.model, None, None, *batch)
            rows = [
                torch.autograd.grad(output, weights, retain_graph=True, allow_unused=True)
                for output in outputs
            ]
        finally:
            for weight, flag in zip(weights, before, strict=True):
                weight.requires_grad_(flag)
        return {
            name: torch.stack([_or_zeros(row[place], weight) for row in rows])
            for place, (name, weight) in enumerate(self.model_params.items())
        }

    def compute_loss_grad(self, batch: Sequence[Tensor], batch_size: int | None = None) -> Tensor:
        """Return the weights `[B, 1]`."""
        return self.modelout_fn.get_out_to_loss_grad(self.model, None, None, batch)


def _or_zeros(gradient: Tensor | None, weight: Tensor) -> Tensor:
    return torch.zeros_like(weight) if gradient is None else gradient
