"""What a study remembers of its data and training, to notice when they change."""

from __future__ import annotations

from typing import Any

import numpy as np
import xxhash

from gradkeep.datamodels._training import Training


def count_of(data: Any) -> int:
    """How many examples there are, in a dataset or a pair of inputs and labels."""
    return len(data[1]) if is_pair(data) else len(data)


def is_pair(data: Any) -> bool:
    """Whether these are inputs and labels rather than a dataset of examples."""
    return isinstance(data, tuple | list) and len(data) == 2 and hasattr(data[0], "shape")


def fingerprint_of(data: Any) -> str:
    """A digest of the examples in memory; of anything else, their number."""
    digest = xxhash.xxh3_128()
    kept = [getattr(data, name, None) for name in ("inputs", "labels")]
    parts = kept if all(hasattr(part, "shape") for part in kept) else data
    if not isinstance(parts, tuple | list) or not all(hasattr(part, "shape") for part in parts):
        return f"{len(data)} examples"
    for part in parts:
        digest.update(np.ascontiguousarray(np.asarray(part)).tobytes())
    return digest.hexdigest()


def describe(train_fn: Any) -> str:
    """The training in words; of a function, its name."""
    if isinstance(train_fn, Training):
        return train_fn.describe()
    return str(getattr(train_fn, "__qualname__", type(train_fn).__qualname__))
