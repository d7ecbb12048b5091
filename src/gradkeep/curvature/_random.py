"""Random numbers by name: the same for the same words, whatever was drawn before.

Only the raw 64-bit words of Philox are used, which numpy keeps stable between versions.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
import xxhash

Words = np.ndarray[Any, np.dtype[np.uint64]]


def raw(count: int, *words: object) -> Words:
    """Return 64-bit words `[count]` of the generator that the words name."""
    # A separator that repr escapes: ("a", "b") differs from ("ab",).
    name = "\0".join(repr(word) for word in words).encode()
    key = np.frombuffer(xxhash.xxh3_128_digest(name), np.uint64)
    words_drawn: Words = np.random.Philox(key=key).random_raw(count)
    return words_drawn


def signs(count: int, *words: object) -> torch.Tensor:
    """Draw -1 or 1, int8 `[count]`."""
    # Little endian on every machine.
    octets = raw(-(-count // 64), "sign", *words).astype("<u8").view(np.uint8)
    bits = np.unpackbits(octets, count=count).view(np.int8)
    return torch.from_numpy((bits << 1) - 1)


def places(count: int, below: int, *words: object) -> torch.Tensor:
    """Draw integers from 0 to `below - 1`, int64 `[count]`."""
    high = raw(count, "place", *words) >> np.uint64(32)
    return torch.from_numpy(((high * np.uint64(below)) >> np.uint64(32)).astype(np.int64))


def normals(count: int, *words: object) -> torch.Tensor:
    """Draw independent normal values, float32 `[count]`, by the Box-Muller method."""
    pairs = -(-count // 2)
    drawn = raw(pairs, "normal", *words).astype("<u8", copy=False)
    halves = drawn.view("<u4").reshape(pairs, 2)
    # Half a step above zero, so that the logarithm is finite.
    radius = torch.from_numpy(halves[:, 0].astype(np.float32)).add_(0.5).mul_(2**-32)
    radius = radius.log_().mul_(-2).sqrt_()
    angle = torch.from_numpy(halves[:, 1].astype(np.float32)).mul_(2 * math.pi * 2**-32)
    out = torch.empty(pairs, 2)
    torch.mul(radius, angle.cos(), out=out[:, 0])
    torch.mul(radius, angle.sin(), out=out[:, 1])
    return out.view(-1)[:count]
