"""Projectors under their released names, and the default sketch.

All have the scale of the released ones, E<Px, Py> = k <x, y>, so a ridge means the same.
Matrices are drawn by (seed, model id, tile): no two ids share a part, and the result does
not depend on how a matrix is cut into blocks.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import torch

from gradkeep.compat.trak.utils import vectorize
from gradkeep.curvature._project import (
    dense_matrix,
    project_dense,
    project_parameters,
)
from gradkeep.curvature._sketches import Projection

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

Gradients = Any
"""`[B, P]`, or by parameter `{name: [B, *shape]}`."""


class ProjectionType(StrEnum):
    """Distribution of a dense matrix, or a sketch."""

    normal = "normal"
    rademacher = "rademacher"
    tensor_sketch = "tensor-sketch"
    sjlt = "sjlt"


class AbstractProjector(ABC):
    """Base class of projectors from gradients to k numbers."""

    def __init__(
        self,
        grad_dim: int,
        proj_dim: int,
        seed: int,
        proj_type: str | ProjectionType,
        device: str | torch.device,
    ) -> None:
        self.grad_dim, self.proj_dim, self.seed = int(grad_dim), int(proj_dim), int(seed)
        self.proj_type = _plain(proj_type)
        self.device = device

    @abstractmethod
    def project(self, grads: Gradients, model_id: int) -> Tensor:
        """Return the projections `[B, k]` of gradients `[B, P]`, or of those of each parameter."""

    def free_memory(self) -> None:  # noqa: B027 - most have nothing to free
        """Free cached memory."""


SKETCHES = ("tensor-sketch", "sjlt")
"""Projections of `SketchProjector` without a dense matrix."""


def sketch_type(grad_dim: int, proj_dim: int, rows: int) -> ProjectionType:
    """Choose the cheapest sketch that has full rank for this number of rows.

    >>> [sketch_type(size, 512, 800).value for size in (20_000, 1_210)]
    ['tensor-sketch', 'sjlt']
    """
    # From 16 values per dimension on a TensorSketch has the rank of a dense matrix; on digits it
    # falls behind below 10, because of empty and shared buckets.
    if proj_dim > rows or grad_dim >= 16 * proj_dim:
        return ProjectionType.tensor_sketch
    return ProjectionType.sjlt if proj_dim >= 4 else ProjectionType.rademacher


class SketchProjector(AbstractProjector):
    """A TensorSketch of factors, or the same numbers from dense gradients.

    Gradients without parameter names are folded instead. `proj_type` selects another sketch.
    """

    def __init__(
        self,
        grad_dim: int,
        proj_dim: int,
        seed: int = 0,
        proj_type: str | ProjectionType = ProjectionType.tensor_sketch,
        device: str | torch.device = "cpu",
        **kwargs: Any,
    ) -> None:
        super().__init__(grad_dim, proj_dim, seed, proj_type, device)
        kind: Any = "auto" if self.proj_type == "tensor-sketch" else self.proj_type
        self.projection = Projection(kind, self.proj_dim, self.seed)

    def project(self, grads: Gradients, model_id: int) -> Tensor:
        """Return the projections `[B, k]`."""
        make = project_parameters if isinstance(grads, Mapping) else project_dense
        return make(grads, self.projection, model=model_id) * math.sqrt(self.proj_dim)


class NoOpProjector(AbstractProjector):
    """Return gradients unchanged; `proj_dim` 0 means their size."""

    def __init__(
        self,
        grad_dim: int = 0,
        proj_dim: int = 0,
        seed: int = 0,
        proj_type: str | ProjectionType = "na",
        device: str | torch.device = "cpu",
        *args: Any,
        **kwargs: Any,
    ) -> None:
        super().__init__(grad_dim, proj_dim, seed, proj_type, device)

    def project(self, grads: Gradients, model_id: int) -> Tensor:
        """Return the gradients `[B, P]`."""
        return _flat(grads)


class _Matrix(AbstractProjector):
    """Project with a dense matrix of a type."""

    def __init__(
        self,
        grad_dim: int,
        proj_dim: int,
        seed: int,
        proj_type: str | ProjectionType,
        device: str | torch.device = "cpu",
        model_id: int = 0,
    ) -> None:
        super().__init__(grad_dim, proj_dim, seed, proj_type, device)
        if self.proj_type not in ("normal", "rademacher"):
            raise ValueError(f"no projection {proj_type!r}: choose normal or rademacher")
        self._projection = Projection(
            "normal" if self.proj_type == "normal" else "rademacher", self.proj_dim, self.seed
        )
        self.model_id = model_id
        self._cached: tuple[object, Tensor] | None = None

    def project(self, grads: Gradients, model_id: int) -> Tensor:
        """Return the products `[B, k]` with the matrix of this model id."""
        flat = _flat(grads).float()
        self.model_id = model_id
        if 4 * self.grad_dim * self.proj_dim > _MAX_CACHED_BYTES or flat.shape[1] != self.grad_dim:
            return project_dense(flat, self._projection, model=model_id) * math.sqrt(self.proj_dim)
        return flat @ self._matrix().to(flat.device)

    def free_memory(self) -> None:
        """Free the matrix; it is drawn again on demand."""
        self._cached = None

    def _matrix(self) -> Tensor:
        """Return the matrix `[P, k]` of the current model id."""
        if self._cached is None or self._cached[0] != self.model_id:
            self._cached = None
            matrix = dense_matrix(self.grad_dim, self._projection, model=self.model_id)
            self._cached = (self.model_id, matrix.to(self.device))
        return self._cached[1]


_MAX_CACHED_BYTES = 1 << 30
"""Largest matrix in bytes that is cached between batches."""


class BasicSingleBlockProjector(_Matrix):
    """A dense matrix."""

    def __init__(
        self,
        grad_dim: int,
        proj_dim: int,
        seed: int,
        proj_type: str | ProjectionType,
        device: str | torch.device = "cpu",
        dtype: torch.dtype = torch.float32,
        model_id: int = 0,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        super().__init__(grad_dim, proj_dim, seed, proj_type, device, model_id)
        self.dtype = dtype

    @property
    def proj_matrix(self) -> Tensor:
        """Matrix `[P, k]` of the current model id, drawn on demand."""
        return self._matrix().to(self.dtype)

    def generate_sketch_matrix(self) -> None:
        """Draw `proj_matrix` now."""
        self._matrix()


class BasicProjector(_Matrix):
    """Project with a dense matrix, independent of `block_size`."""

    def __init__(
        self,
        grad_dim: int,
        proj_dim: int,
        seed: int,
        proj_type: str | ProjectionType,
        device: str | torch.device = "cpu",
        block_size: int = 100,
        dtype: torch.dtype = torch.float32,
        model_id: int = 0,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        super().__init__(grad_dim, proj_dim, seed, proj_type, device, model_id)
        self.block_size = min(self.proj_dim, block_size)
        self.num_blocks = math.ceil(self.proj_dim / max(1, self.block_size))
        self.dtype = dtype
        self._block = 0
        self.get_generator_states()

    @property
    def proj_matrix(self) -> Tensor:
        """Block `[P, block_size]` that was generated last, of the current model id."""
        start = self._block * self.block_size
        return self._matrix()[:, start : start + self.block_size].to(self.dtype)

    def get_generator_states(self) -> None:
        """List the blocks in `generator_states`, for `generate_sketch_matrix`."""
        self.generator_states = list(range(self.num_blocks))

    def generate_sketch_matrix(self, generator_state: int) -> None:
        """Select the block of `proj_matrix`; the last may be narrower."""
        if generator_state not in self.generator_states:
            raise ValueError(
                f"{generator_state!r} names no block: take one of generator_states, 0 to "
                f"{self.num_blocks - 1}"
            )
        self._block = int(generator_state)


class CudaProjector(_Matrix):
    """Project with a dense matrix on any device, without compiled extensions and with any `proj_dim`."""

    def __init__(
        self,
        grad_dim: int,
        proj_dim: int,
        seed: int,
        proj_type: str | ProjectionType,
        device: str | torch.device = "cuda",
        max_batch_size: int = 32,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        super().__init__(grad_dim, proj_dim, seed, proj_type, device)
        self.max_batch_size = max_batch_size


class ChunkedCudaProjector:
    """Sum the projections of consecutive chunks of parameters."""

    def __init__(
        self,
        projector_per_chunk: Sequence[AbstractProjector],
        max_chunk_size: int,
        params_per_chunk: Sequence[int],
        feat_bs: int,
        device: str | torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.projector_per_chunk = list(projector_per_chunk)
        self.proj_dim = self.projector_per_chunk[0].proj_dim
        self.proj_type = self.projector_per_chunk[0].proj_type
        self.seed = self.projector_per_chunk[0].seed
        self.params_per_chunk = [int(size) for size in params_per_chunk]
        self.max_chunk_size, self.feat_bs = max_chunk_size, feat_bs
        self.device, self.dtype = device, dtype

    def project(self, grads: Gradients, model_id: int) -> Tensor:
        """Return the projections `[B, k]`."""
        flat = _flat(grads)
        out = flat.new_zeros(len(flat), self.proj_dim)
        parts = torch.split(flat, self.params_per_chunk, 1)
        for number, (projector, part) in enumerate(
            zip(self.projector_per_chunk, parts, strict=True)
        ):
            # Otherwise chunks of one seed and size would share a matrix.
            out += projector.project(part, model_id=(model_id, number))  # type: ignore[arg-type]
        return out

    def allocate_input(self) -> None:
        """Do nothing: chunks are projected in place."""

    def free_memory(self) -> None:
        """Free cached memory."""
        for projector in self.projector_per_chunk:
            projector.free_memory()


def _plain(proj_type: str | ProjectionType) -> str:
    return proj_type.value if isinstance(proj_type, ProjectionType) else str(proj_type)


def _flat(grads: Gradients) -> Tensor:
    return vectorize(grads) if isinstance(grads, Mapping) else grads
