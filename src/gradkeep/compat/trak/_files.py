"""Score matrices as .npy files that are replaced as a whole, or not at all."""

from __future__ import annotations

import contextlib
import os
import secrets
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash
from numpy.lib.format import open_memmap

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@contextlib.contextmanager
def replaced(path: Path, shape: tuple[int, int]) -> Iterator[Any]:
    """A map `[n, m]` of zeros to fill; the file has its name when the block ends well."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temp = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        values = open_memmap(temp, "w+", np.float32, shape)
        yield values
        values.flush()
        del values
        _sync(temp)
        os.replace(temp, path)
        _sync(path.parent)
    finally:
        temp.unlink(missing_ok=True)


def opened(path: Path) -> Any:
    """The matrix, mapped; changes to it stay in this process."""
    return np.load(path, mmap_mode="c", allow_pickle=False)


def digest_of(path: Path) -> str:
    """The xxh3-128 of a file."""
    found = xxhash.xxh3_128()
    with path.open("rb") as file:
        while part := file.read(1 << 24):
            found.update(part)
    return found.hexdigest()


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
