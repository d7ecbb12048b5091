"""Utility functions of the released package that scripts call."""

from __future__ import annotations

import os
import tempfile
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from torch import Tensor, nn


def test_install(use_fast_jl: bool = True) -> None:  # noqa: PT028 - its name, not a test
    """Featurize a small model to check the installation.

    Args:
        use_fast_jl: Use the first CUDA device if there is one.
    """
    from gradkeep.compat.trak.traker import TRAKer

    device = "cuda" if use_fast_jl and torch.cuda.is_available() else "cpu"
    model = torch.nn.Linear(256, 2, bias=False).to(device)
    batch = [torch.randn(20, 256, device=device), torch.randint(2, (20,), device=device)]
    with tempfile.TemporaryDirectory() as folder:
        traker = TRAKer(
            model=model,
            task="image_classification",
            train_set_size=20,
            proj_dim=512,
            save_dir=folder,
            device=device,
            logging_level=100,
        )
        traker.load_checkpoint(model.state_dict(), model_id=0)
        traker.featurize(batch, num_samples=20)
    print(f"TRAK works on {device}; nothing had to be compiled.")


test_install.__test__ = False  # type: ignore[attr-defined] # its name, not a test


def parameters_to_vector(parameters: Iterable[Tensor]) -> Tensor:
    """Concatenate all values to one vector."""
    return torch.cat([parameter.reshape(-1) for parameter in parameters])


def get_num_params(model: nn.Module) -> int:
    """Return p, the number of values of all parameters."""
    return sum(parameter.numel() for parameter in model.parameters())


def is_not_buffer(ind: Any, params_dict: Mapping[Any, str]) -> bool:
    """Return True if the name at `ind` is not a statistic of a batch norm."""
    statistics = ("running_mean", "running_var", "num_batches_tracked")
    return not any(name in params_dict[ind] for name in statistics)


def vectorize(g: Mapping[str, Tensor], arr: Tensor | None = None, device: Any = None) -> Tensor:
    """Concatenate gradients `{name: [B, *shape]}` to a matrix `[B, P]`, in their order."""
    flat = torch.cat([value.detach().reshape(len(value), -1) for value in g.values()], 1)
    if device is not None:
        flat = flat.to(device)
    return flat if arr is None else arr.copy_(flat)


def get_output_memory(features: Tensor, target_grads: Tensor, target_dtype: torch.dtype) -> int:
    """Return the bytes of all products of features `[n, k]` and targets `[m, k]`."""
    return len(features) * len(target_grads) * target_dtype.itemsize


def get_free_memory(device: str | torch.device) -> int:
    """Return the bytes reserved but not in use on a CUDA device; on the CPU, the available memory."""
    if torch.device(device).type != "cuda":
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    return torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def get_matrix_mult_standard(
    features: Tensor, target_grads: Tensor, target_dtype: torch.dtype
) -> Tensor:
    """Return features @ target_grads^T in one product, computed in at least 32 bits."""
    wide = torch.promote_types(features.dtype, torch.float32)
    return (features.to(wide) @ target_grads.to(wide).T).to(target_dtype)


def get_matrix_mult_blockwise(
    features: Tensor, target_grads: Tensor, target_dtype: torch.dtype, bs: int
) -> Tensor:
    """Return features @ target_grads^T by blocks of `bs` rows and columns, on a CUDA device if there is one."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    out = torch.empty(len(features), len(target_grads), dtype=target_dtype)
    for row in range(0, len(features), bs):
        feature_rows = features[row : row + bs].to(device)
        for column in range(0, len(target_grads), bs):
            target_rows = target_grads[column : column + bs].to(device)
            product = get_matrix_mult_standard(feature_rows, target_rows, target_dtype)
            out[row : row + bs, column : column + bs] = product.cpu()
    return out


def get_matrix_mult(
    features: Tensor,
    target_grads: Tensor,
    target_dtype: torch.dtype | None = None,
    batch_size: int = 8096,
    use_blockwise: bool = False,
) -> Tensor:
    """Return features @ target_grads^T, by blocks on request or if the result does not fit the CUDA device."""
    dtype = features.dtype if target_dtype is None else target_dtype
    large = features.is_cuda and get_output_memory(
        features, target_grads, dtype
    ) >= get_free_memory(features.device)
    if use_blockwise or large:
        return get_matrix_mult_blockwise(features, target_grads, dtype, batch_size)
    return get_matrix_mult_standard(features, target_grads, dtype)


def get_parameter_chunk_sizes(model: nn.Module, batch_size: int) -> tuple[int, list[int]]:
    """Return the number of values that fit 32 bits with a batch, and the sizes of chunks of parameters below it."""
    most = (2**32 - 1) // batch_size
    chunks: list[int] = []
    for parameter in model.parameters():
        if not chunks or chunks[-1] + parameter.numel() >= most:
            chunks.append(0)
        chunks[-1] += parameter.numel()
    return most, chunks
