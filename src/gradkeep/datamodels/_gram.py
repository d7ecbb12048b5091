"""In how many subsets two training examples occur together: exact, without a matrix product.

On a CPU the Method of Four Russians: models are taken six at a time, the sums of all 64 subsets of
the six are tabulated for a strip of columns, and each column's six bits choose one table row to
add. The adding is an embedding bag, whose kernel is vectorised on every CPU, and two columns share
one float (12 bits each, for float32 is exact to 2^24). One float addition so stands for twelve
multiply-adds, and only one triangle is computed.

int8 products (`torch._int_mm`) are as fast where the CPU has VNNI, but on an AVX2 machine they
took thirty times as long as float32; popcounts through numpy spend their time on the intermediate
arrays. Elsewhere than on a CPU, float32 products of 0 and 1 are exact, and fast.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import torch

    from gradkeep.datamodels._masks import AnyArray, Masks

_SIX = 6
_GROUPS = 28
"""Groups of six that share a table: 28 x 64 x 96 floats are 672 KiB, which a core's cache holds."""
_STRIP = 96
"""Floats, and so pairs of columns, in a strip."""
_CHUNK = _SIX * _GROUPS * 24  # 4032 models: no field overflows its 12 bits
_FIELD = 4096
_MIRROR = 256


def pair_dtype(models: int) -> np.dtype[Any]:
    """The smallest dtype that can count this many models."""
    return np.dtype(np.uint16 if models < 1 << 16 else np.int32)


def add_pairs(masks: Masks, out: AnyArray, *, device: str = "cpu") -> None:
    """Add X'X of the masks to the symmetric counts `out [n, n]`, an array or a memory map.

    Costs m n^2 / 24 float additions and 5 bytes per mask bit of 4,032 models.

    >>> from gradkeep.datamodels import Masks
    >>> out = np.zeros((3, 3), np.int32)
    >>> add_pairs(Masks.of([[1, 1, 0], [1, 0, 1], [1, 1, 0]]), out)
    >>> out.tolist()
    [[3, 2, 1], [2, 2, 0], [1, 0, 1]]
    """
    import torch

    strips = _four_russians if torch.device(device).type == "cpu" else _products
    with torch.inference_mode():
        for _, rows in masks.blocks(_CHUNK):
            strips(rows, out, device)
    _mirror(out)


def _four_russians(rows: AnyArray, out: AnyArray, device: str) -> None:
    """Add the upper triangle, in strips of rows of `out`."""
    import torch
    from torch.nn.functional import embedding_bag

    models, n = rows.shape
    per_table = _SIX * _GROUPS
    tables = -(-models // per_table)
    wide = -(-n // (2 * _STRIP)) * 2 * _STRIP
    padded = torch.zeros(tables * per_table, wide, dtype=torch.uint8)
    padded[:models, :n] = torch.from_numpy(rows)
    chosen = _patterns(padded[:, :n], tables)
    table = torch.zeros(_GROUPS, 1 << _SIX, _STRIP)
    for start in range(0, n, 2 * _STRIP):
        first = padded[:, start : start + _STRIP].float()
        both = first.add_(padded[:, start + _STRIP : start + 2 * _STRIP], alpha=_FIELD)
        six = both.view(tables, _GROUPS, _SIX, _STRIP)
        total = torch.zeros(n - start, _STRIP)
        for index in range(tables):
            for bit in range(_SIX):
                low, high = 1 << bit, 2 << bit
                torch.add(table[:, :low], six[index, :, bit : bit + 1], out=table[:, low:high])
            total += embedding_bag(chosen[index, start:], table.view(-1, _STRIP), mode="sum")
        _add_fields(total, out[start : start + 2 * _STRIP, start:])


def _patterns(padded: torch.Tensor, tables: int) -> torch.Tensor:
    """Which row of its table each column chooses, int32 `[tables, n, groups]`."""
    import torch

    bits = padded.view(tables, _GROUPS, _SIX, -1)
    pattern = bits[:, :, 0].clone()
    for bit in range(1, _SIX):
        pattern += bits[:, :, bit] << bit
    chosen = pattern.transpose(1, 2).to(torch.int32, memory_format=torch.contiguous_format)
    chosen += torch.arange(_GROUPS, dtype=torch.int32) << _SIX
    return chosen


def _add_fields(total: torch.Tensor, out: AnyArray) -> None:
    """Split floats `[columns, strip]` into their two counts; add them to `out [<= 2 strip, columns]`."""
    import torch

    counts = total.T.to(torch.int32).numpy()
    out[:_STRIP] += (counts & (_FIELD - 1))[: len(out)].astype(out.dtype)
    out[_STRIP:] += (counts >> 12)[: max(0, len(out) - _STRIP)].astype(out.dtype)


def _products(rows: AnyArray, out: AnyArray, device: str) -> None:
    """The same by float32 products, exact below 2^24 models; TF32 does no harm to 0 and 1."""
    import torch

    x = torch.from_numpy(rows).to(device).float()
    step = 16 * _STRIP
    for start in range(0, len(out), step):
        part = x[:, start : start + step].T @ x[:, start:]
        out[start : start + step, start:] += part.cpu().numpy().astype(out.dtype)


def _mirror(out: AnyArray) -> None:
    for start in range(0, len(out), _MIRROR):
        stop = start + _MIRROR
        for below in range(start, len(out), _MIRROR):
            tile = out[start:stop, below : below + _MIRROR]
            if below == start:
                tile = np.triu(tile) + np.triu(tile, 1).T
                out[start:stop, start:stop] = tile
            else:
                out[below : below + _MIRROR, start:stop] = tile.T
