"""The header of a segment: which tensors it holds, where they lie, and what is noted of them.

A right checksum does not make a header ours: every type in it is looked at, every size compared
with its shape. Segments of one schema differ in their metadata alone, so the rest of the header is
understood once and remembered.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from gradkeep.store.blocks._packing import DTYPES

COUNT = re.compile(r"\d{1,18}")
_ABSURD = 1 << 62
_METADATA = b'{"__metadata__":'
_BETWEEN = b'"},"'  # what ends the metadata and begins the first tensor; no name holds a quote


@dataclass(frozen=True, slots=True)
class Extent:
    """Where a tensor lies in the file."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Header:
    """What a header says; every value has its type."""

    metadata: dict[str, str]
    extents: dict[str, Extent]
    end: int
    """Where the last tensor ends, and the file with it."""


def read_header(text: bytes, base: int) -> Header:
    """The header from its JSON; ValueError if gradkeep did not write it. Data begins at `base`."""
    cut = text.find(_BETWEEN)
    if cut < 0 or not text.startswith(_METADATA):
        raise ValueError("it names no tensors")
    metadata = _parsed(text[len(_METADATA) : cut + 2])
    if set(map(type, metadata.values())) != {str}:
        raise ValueError("its metadata is not text")
    for name in ("rows", "first_row"):
        if not COUNT.fullmatch(metadata.get(name, "")):
            raise ValueError(f"it has no number {name!r}")
    if "schema" not in metadata:
        raise ValueError("it names no schema")
    extents, end = _extents(b"{" + text[cut + 3 :], base)
    if extents["ids"].shape != (int(metadata["rows"]),):
        raise ValueError("its ids do not name every row")
    return Header(metadata, extents, end)


@lru_cache(maxsize=64)
def _extents(text: bytes, base: int) -> tuple[dict[str, Extent], int]:
    found = {name: _extent(name, item, base) for name, item in _parsed(text).items()}
    ids = found.get("ids")
    if ids is None or ids.dtype != np.int64 or len(ids.shape) != 1:
        raise ValueError("it has no ids")
    return found, max(extent.stop for extent in found.values())


def _extent(name: str, item: Any, base: int) -> Extent:
    if not isinstance(item, dict) or str(item.get("dtype")) not in DTYPES:
        raise ValueError(f"tensor {name!r} has no dtype")
    shape, offsets = _wholes(item.get("shape")), _wholes(item.get("data_offsets"))
    if not shape or len(offsets) != 2:
        raise ValueError(f"tensor {name!r} has no shape or place")
    dtype = DTYPES[item["dtype"]]
    if math.prod(shape) * dtype.itemsize != offsets[1] - offsets[0]:
        raise ValueError(f"tensor {name!r} has another size than its shape says")
    return Extent(dtype, tuple(shape), base + offsets[0], base + offsets[1])


def _wholes(values: Any) -> list[int]:
    """The values if they are a list of sensible whole numbers, else none."""
    if not isinstance(values, list):
        return []
    return values if all(type(x) is int and 0 <= x < _ABSURD for x in values) else []


def _parsed(text: bytes) -> dict[str, Any]:
    try:
        # Decoded here: the parser would first look for what encoding it could be.
        found: dict[str, Any] = dict(json.loads(text.decode()))
    except (RecursionError, TypeError):
        raise ValueError("it is not an object") from None
    return found
