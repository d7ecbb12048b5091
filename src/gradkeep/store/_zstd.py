"""Rows in zstd frames, each of some rows, so that a few rows need not unpack all."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from gradkeep.errors import MissingExtra

if TYPE_CHECKING:
    from gradkeep.store._encoding import AnyArray


def compress(values: AnyArray, rows: int) -> list[bytes]:
    """One frame for every `rows` rows; level 1, since speed is what limits us."""
    compressor = _zstandard().ZstdCompressor(level=1)
    contiguous = np.ascontiguousarray(values)
    starts = range(0, len(contiguous), rows)
    return [compressor.compress(contiguous[at : at + rows].tobytes()) for at in starts]


def decompress(frame: bytes, out: AnyArray) -> None:
    """Unpack a frame into `out`, which has its dtype and shape."""
    raw = _zstandard().ZstdDecompressor().decompress(frame, max_output_size=out.nbytes)
    out[...] = np.frombuffer(raw, out.dtype).reshape(out.shape)


def _zstandard() -> Any:
    try:
        import zstandard
    except ImportError as error:
        raise MissingExtra(
            "zstd compression needs the package zstandard", fix='pip install "gradkeep[zstd]"'
        ) from error
    return zstandard
