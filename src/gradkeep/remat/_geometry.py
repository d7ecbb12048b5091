"""Which part of its storage a tensor shows, and how."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Geometry(NamedTuple):
    """Dtype, size, strides and offset: a tensor is these and a storage."""

    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Geometry:
        """The geometry of a tensor."""
        offset = int(tensor.storage_offset())
        return cls(tensor.dtype, tuple(tensor.size()), tuple(tensor.stride()), offset)

    def on(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """A tensor of this geometry that shows a storage."""
        empty = torch.empty(0, dtype=self.dtype, device=storage.device)
        return empty.set_(storage, self.offset, self.size, self.stride)
