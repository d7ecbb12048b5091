"""A hash of every byte of a storage, to see whether it came back as it was."""

from __future__ import annotations

import ctypes

import torch
import xxhash

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
