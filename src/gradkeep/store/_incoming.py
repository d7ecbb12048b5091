"""Rows on their way in: taken from numpy, torch or lists, and checked against the schema."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from gradkeep.errors import InvalidRows
from gradkeep.store._batch import Ragged

if TYPE_CHECKING:
    from collections.abc import Mapping

    from gradkeep.store._encoding import AnyArray
    from gradkeep.store._schema import Array, Schema


def checked_rows(
    schema: Schema, ids: AnyArray, arrays: Mapping[str, Any], *, path: str
) -> dict[str, AnyArray | Ragged]:
    """Every array of the schema `[B, *shape]` (or `Ragged`), right in dtype, shape and values."""
    names = {array.name for array in schema.arrays}
    missing, unknown = sorted(names - set(arrays)), sorted(set(arrays) - names)
    if missing or unknown:
        raise InvalidRows(
            "a batch must hold exactly the arrays of the schema",
            path=path,
            found=f"missing {missing}, unknown {unknown}",
            expected=", ".join(array.name for array in schema.arrays),
        )
    return {
        array.name: _checked(array, arrays[array.name], ids, path=path) for array in schema.arrays
    }


def _checked(array: Array, given: Any, ids: AnyArray, *, path: str) -> AnyArray | Ragged:
    if array.ragged:
        return _checked_ragged(array, given, ids, path=path)
    values = _as_array(array, given, path=path)
    expected = (len(ids), *array.shape)
    if values.shape != expected:
        raise _wrong(array, f"shape {values.shape}", f"shape {expected}", path=path)
    _check_finite(array, values, ids, path=path)
    return values


def _checked_ragged(array: Array, given: Any, ids: AnyArray, *, path: str) -> Ragged:
    if not isinstance(given, Ragged):
        rows = [_as_array(array, row, path=path) for row in given]
        empty = np.empty((0, *array.shape), array.dtype)
        wrong = [row.shape for row in rows if row.shape[1:] != array.shape or row.ndim == 0]
        if wrong:
            raise _wrong(array, f"a row of shape {wrong[0]}", f"[T, {array.shape}]", path=path)
        given = Ragged.of([empty, *rows])
        given = Ragged(given.values, given.offsets[1:])
    values = _as_array(array, given.values, path=path)
    offsets = np.asarray(given.offsets, np.int64)
    expected = f"{len(ids)} rows of shape [T, {', '.join(map(str, array.shape))}]"
    if values.shape[1:] != array.shape or offsets.shape != (len(ids) + 1,):
        raise _wrong(array, f"{len(offsets) - 1} rows of {values.shape[1:]}", expected, path=path)
    if offsets[0] != 0 or offsets[-1] != len(values) or (np.diff(offsets) < 0).any():
        raise _wrong(array, f"offsets {offsets[:5]} ...", f"0 to {len(values)}, rising", path=path)
    _check_finite(array, values, ids, path=path, offsets=offsets)
    return Ragged(values, offsets)


def _as_array(array: Array, given: Any, *, path: str) -> AnyArray:
    if hasattr(given, "detach"):
        given = given.detach().cpu()
        # numpy has no bfloat16; float32 holds it exactly.
        given = given.float().numpy() if str(given.dtype) == "torch.bfloat16" else given.numpy()
    if not isinstance(given, np.ndarray | np.generic):
        return np.asarray(given, array.dtype)
    if not np.can_cast(given.dtype, array.dtype, "safe"):
        raise _wrong(array, f"dtype {given.dtype}", f"dtype {array.dtype}", path=path)
    return np.asarray(given).astype(array.dtype, copy=False)


def _check_finite(
    array: Array,
    values: AnyArray,
    ids: AnyArray,
    *,
    path: str,
    offsets: AnyArray | None = None,
) -> None:
    if array.nan == "keep" or values.dtype.kind != "f":
        return
    # One fast pass: the sum is finite unless some value is not (or the sum overflows, which the
    # slow pass then clears).
    with np.errstate(all="ignore"):
        if np.isfinite(values.sum()):
            return
    bad = ~np.isfinite(values).reshape(len(values), -1).all(axis=1)
    if bad.any():
        row = int(np.flatnonzero(bad)[0])
        if offsets is not None:
            row = int(np.searchsorted(offsets, row, side="right")) - 1
        raise InvalidRows(
            f"array {array.name!r} holds NaN or infinity",
            path=path,
            found=f"{int(bad.sum())} rows of this batch, the first with id {int(ids[row])}",
            expected="finite values",
            fix="look at that example and its loss, or declare the array with nan='keep'",
        )


def _wrong(array: Array, found: str, expected: str, *, path: str) -> InvalidRows:
    return InvalidRows(f"array {array.name!r}", path=path, found=found, expected=expected)
