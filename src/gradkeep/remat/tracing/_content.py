"""A hash of every byte of a storage, to see whether it came back as it was."""

from __future__ import annotations

import ctypes
import math
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import xxhash

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from gradkeep.remat.tracing._tensors import Geometry

_PRIME = 0x9E3779B1
_PART = 1 << 20


def hash_bytes(storage: torch.UntypedStorage, start: int, length: int) -> int:
    """A hash of 64 bits of some bytes; about 1 us and 0.1 ns a byte."""
    if length == 0:
        return 0
    if storage.device.type == "cpu":
        memory = (ctypes.c_char * length).from_address(storage.data_ptr() + start)
        return xxhash.xxh3_64_intdigest(memory)
    return hash_on_device(storage, start, length)


def hash_on_device(storage: torch.UntypedStorage, start: int, length: int) -> int:
    """The same purpose where bytes cannot be read directly: sums with weights, part by part.

    h = sum_p (p + 1) c_p, c_p = sum_i b_i ((2 i + 1) k mod 2^31 - 1), in integers modulo 2^64.
    """
    flat = torch.empty(0, dtype=torch.uint8, device=storage.device)
    flat = flat.set_(storage, start, (length,), (1,))
    weights = torch.arange(min(_PART, length), dtype=torch.int64, device=storage.device)
    weights = (2 * weights + 1) * _PRIME % 2147483647
    total = torch.zeros((), dtype=torch.int64, device=storage.device)
    for number, part in enumerate(torch.split(flat, _PART)):
        total += (number + 1) * (part.to(torch.int64) * weights[: len(part)]).sum()
    return int(total)


_COUNT = 32
"""How many places of a tensor are looked at."""


class TensorSample(NamedTuple):
    """A few places: a coarse lattice in the tensor."""

    lattice: Geometry

    def of(self, base: Tensor) -> Any:
        """The numbers there, given any tensor on the storage; about 3 us."""
        return self.lattice.on_storage_of(base).tolist()


class ContentHash(NamedTuple):
    """Every byte that anybody will read: one run of bytes, or several tensors."""

    start: int
    length: int
    """Bytes; 0 if the content is not one run."""
    parts: tuple[Geometry, ...] = ()

    def of(self, base: Tensor) -> Any:
        """A hash of 64 bits, given any tensor on the storage; about 1 us and 0.1 ns a byte."""
        if self.length:
            return hash_bytes(base.untyped_storage(), self.start, self.length)
        found = []
        for part in self.parts:
            whole = part.on_storage_of(base).resolve_conj().resolve_neg().contiguous()
            start = int(whole.storage_offset()) * whole.itemsize
            found.append(hash_bytes(whole.untyped_storage(), start, whole.nbytes))
        return tuple(found)


Fingerprint = TensorSample | ContentHash


def content_of(made: Geometry, slots: Sequence[Geometry], *, whole: bool) -> ContentHash:
    """What to hash of a value: all that its operator made if that is one run, else what is saved of it.

    `whole` says that the operator wrote every element.
    """
    if whole and _is_dense(made):
        return ContentHash(made.offset * made.dtype.itemsize, _nbytes(made))
    if len(set(slots)) == 1 and _is_dense(slots[0]):
        return ContentHash(slots[0].offset * slots[0].dtype.itemsize, _nbytes(slots[0]))
    return ContentHash(0, 0, tuple(dict.fromkeys(slots)))


def _nbytes(geometry: Geometry) -> int:
    return math.prod(geometry.size) * geometry.dtype.itemsize


def _is_dense(geometry: Geometry) -> bool:
    """Whether the elements lie side by side, in whatever order."""
    expected = 1
    for step, n in sorted(zip(geometry.stride, geometry.size, strict=True)):
        if n == 1:
            continue
        if step != expected:
            return False
        expected *= n
    return True


def sample_of(geometry: Geometry, count: int = _COUNT) -> TensorSample:
    """A lattice of about `count` places over the whole of a tensor."""
    numel = math.prod(geometry.size)
    if numel and _is_dense(geometry):
        # Any stride through memory stays inside. An odd one meets every channel.
        step = max(1, numel // count)
        step += 1 - step % 2 if step > 1 else 0
        size: Sequence[int] = (1 + (numel - 1) // step,)
        return TensorSample(geometry._replace(size=tuple(size), stride=(step,)))
    left, size, stride = max(1, count), [], []
    for n, step in zip(geometry.size, geometry.stride, strict=True):
        some = max(1, min(n, left)) if n else 0
        left = max(1, left // max(some, 1))
        size.append(some)
        stride.append(step * max(1, n // max(some, 1)))
    return TensorSample(geometry._replace(size=tuple(size), stride=tuple(stride)))


def same_content(left: object, right: object) -> bool:
    """Whether two fingerprints are equal; not-a-number equals itself."""
    return left == right or repr(left) == repr(right)


def mask_numbers(tensor: Tensor) -> frozenset[float]:
    """The numbers of a mask; empty for tensors with more than a few different numbers."""
    if tensor.requires_grad or tensor.numel() < _COUNT or tensor.dtype.is_complex:
        return frozenset()
    with torch._C._DisableTorchDispatch():
        flat = tensor.detach().reshape(-1)
        some = torch.unique(flat[:: max(1, flat.numel() // 4096)])
        if len(some) > 3:
            return frozenset()
        return frozenset(some.tolist())
