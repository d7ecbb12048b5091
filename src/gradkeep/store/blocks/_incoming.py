"""Validate row ids and incoming rows against the schema, and look up ids."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from gradkeep.errors import InvalidRowsError, MissingRowsError
from gradkeep.store.blocks._columns import Ragged

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from gradkeep.store.blocks._columns import AnyArray
    from gradkeep.store.blocks._schema import Array, Schema

_PAGE_BITS = 16
_WITHIN = (1 << _PAGE_BITS) - 1


def as_ids(ids: Any, *, num_examples: int | None, path: str) -> AnyArray:
    """Return ids as int64 `[B]`; raise `InvalidRowsError` unless they are integers, in range and unique."""
    if hasattr(ids, "detach"):
        ids = ids.detach().cpu().numpy()
    values = _as_integers(ids, path=path)
    if values.ndim != 1:
        raise _not_ids(values, path=path)
    nonnegative(values, path=path)
    if num_examples is not None and len(values) and (top := int(values.max())) >= num_examples:
        raise InvalidRowsError(
            f"the block has {num_examples} examples, but an id is {top}",
            code="store.id_out_of_range",
            path=path,
            fix="Pass the size of the data set as num_examples.",
        )
    unique, counts = np.unique(values, return_counts=True)
    if len(unique) != len(values):
        raise InvalidRowsError(
            "an id occurs twice in one batch",
            code="store.repeated_in_batch",
            path=path,
            found=_few(unique[counts > 1]),
        )
    return values


def nonnegative(ids: AnyArray, *, path: str) -> AnyArray:
    """Return the ids; raise `InvalidRowsError` if one is below 0."""
    if len(ids) and (lowest := int(ids.min())) < 0:
        raise InvalidRowsError(
            "an id is negative",
            code="store.negative_id",
            path=path,
            found=lowest,
            expected="0 or more",
        )
    return ids


def whole_numbers(values: Any, *, path: str) -> AnyArray:
    """Return ids or row numbers as int64 `[N]`; raise `InvalidRowsError` for anything but integers.

    Floats are refused even if they are integral: where 3.0 comes from, 3.7 may come too, and a wrong row
    must never be read or dropped.
    """
    if hasattr(values, "detach"):
        values = values.detach().cpu().numpy()
    return _as_integers(values, path=path).reshape(-1)


def _as_integers(numbers: Any, *, path: str) -> AnyArray:
    try:
        values = np.asarray(numbers)
    except (ValueError, OverflowError):  # nested lists of different lengths
        values = np.empty((), object)
    if values.size == 0:
        return values.astype(np.int64)
    if values.dtype == np.uint64 and int(values.max()) > np.iinfo(np.int64).max:
        raise InvalidRowsError(
            "ids must be below 2**63",
            code="store.id_out_of_range",
            path=path,
            found=int(values.max()),
        )
    # numpy converts True in a list of numbers to 1.
    has_bools = isinstance(numbers, list | tuple) and any(
        isinstance(item, bool) for item in numbers
    )
    if values.dtype.kind not in "iu" or has_bools:
        raise _not_ids(values, path=path, bools=has_bools)
    return values.astype(np.int64)


def _not_ids(values: AnyArray, *, path: str, bools: bool = False) -> InvalidRowsError:
    kind = "bool" if bools else values.dtype
    return InvalidRowsError(
        "ids must be a list of integers",
        code="store.invalid_ids",
        path=path,
        found=f"{kind} of shape {values.shape}",
    )


class IdSet:
    """Set of ids as bitmap pages allocated on demand; adding B ids costs O(B log B).

    >>> seen = IdSet()
    >>> seen.add(np.array([3, 70000]))
    >>> seen.among(np.array([5, 3]))
    array([3])
    """

    def __init__(self) -> None:
        self._pages: dict[int, AnyArray] = {}

    def add(self, ids: AnyArray) -> None:
        """Add ids."""
        for number, members in _by_page(ids):
            page = self._pages.setdefault(number, np.zeros(1 << _PAGE_BITS, np.bool_))
            page[members & _WITHIN] = True

    def among(self, ids: AnyArray) -> AnyArray:
        """Return the ids that are in the set."""
        members_of_set = [ids[:0]]
        for number, members in _by_page(ids):
            if number in self._pages:
                members_of_set.append(members[self._pages[number][members & _WITHIN]])
        return np.concatenate(members_of_set)


def _by_page(ids: AnyArray) -> Iterator[tuple[int, AnyArray]]:
    pages = ids >> _PAGE_BITS
    for number in np.unique(pages):
        yield int(number), ids[pages == number]


class IdIndex:
    """Index from id to row; O(log N) per id, O(1) if ids are 0, 1, 2, ..."""

    def __init__(self, ids: AnyArray) -> None:
        self.ids = ids
        self._counting = bool(np.array_equal(ids, np.arange(len(ids))))
        self._order = None if self._counting else np.argsort(ids, kind="stable")

    def rows(self, row_ids: AnyArray, *, path: str) -> AnyArray:
        """Return the row of each id; raise `MissingRowsError` for unknown ids."""
        rows = self.find(row_ids)
        missing = row_ids[rows < 0]
        if len(missing):
            raise MissingRowsError(
                f"{len(missing)} of {len(row_ids)} rows are not in this block",
                code="store.unknown_ids",
                path=path,
                found=f"no row with id {_few(missing)}",
                fix="Use other ids, capture the missing ones, or pass fill=nan to get NaN for them.",
            )
        return rows

    def find(self, row_ids: AnyArray) -> AnyArray:
        """Return the row of each id, -1 for unknown ids."""
        if self._order is None:
            return np.where((row_ids >= 0) & (row_ids < len(self.ids)), row_ids, -1)
        if not len(self.ids):
            return np.full(len(row_ids), -1)
        at = np.searchsorted(self.ids, row_ids, sorter=self._order)
        rows = self._order[np.minimum(at, len(self.ids) - 1)]
        return np.where(self.ids[rows] == row_ids, rows, -1)


def _few(ids: AnyArray) -> str:
    shown = ", ".join(str(int(number)) for number in ids[:5])
    return shown if len(ids) <= 5 else f"{shown} and {len(ids) - 5} more"


def validate_rows(
    schema: Schema, ids: AnyArray, arrays: Mapping[str, Any], *, path: str
) -> dict[str, AnyArray | Ragged]:
    """Return every array of the schema `[B, *shape]` (or `Ragged`) with valid dtype, shape and values."""
    names = {array.name for array in schema.arrays}
    missing, unknown = sorted(names - set(arrays)), sorted(set(arrays) - names)
    if missing or unknown:
        raise InvalidRowsError(
            "a batch must hold exactly the arrays of the schema",
            code="store.wrong_arrays",
            path=path,
            found=f"missing {missing}, unknown {unknown}",
            expected=", ".join(array.name for array in schema.arrays),
        )
    return {
        array.name: _validate_array(array, arrays[array.name], ids, path=path)
        for array in schema.arrays
    }


def _validate_array(array: Array, rows: Any, ids: AnyArray, *, path: str) -> AnyArray | Ragged:
    if array.ragged:
        return _validate_ragged(array, rows, ids, path=path)
    values = _as_array(array, rows, path=path)
    expected = (len(ids), *array.shape)
    if values.shape != expected:
        raise _mismatch(array, f"shape {values.shape}", f"shape {expected}", path=path)
    _check_finite(array, values, ids, path=path)
    return values


def _validate_ragged(array: Array, ragged: Any, ids: AnyArray, *, path: str) -> Ragged:
    if not isinstance(ragged, Ragged):
        rows = [_as_array(array, row, path=path) for row in ragged]
        empty = np.empty((0, *array.shape), array.dtype)
        wrong = [row.shape for row in rows if row.shape[1:] != array.shape or row.ndim == 0]
        if wrong:
            raise _mismatch(array, f"a row of shape {wrong[0]}", f"[T, {array.shape}]", path=path)
        ragged = Ragged.of([empty, *rows])
        ragged = Ragged(ragged.values, ragged.offsets[1:])
    values = _as_array(array, ragged.values, path=path)
    offsets = np.asarray(ragged.offsets, np.int64)
    expected = f"{len(ids)} rows of shape [T, {', '.join(map(str, array.shape))}]"
    if values.shape[1:] != array.shape or offsets.shape != (len(ids) + 1,):
        raise _mismatch(
            array, f"{len(offsets) - 1} rows of {values.shape[1:]}", expected, path=path
        )
    if offsets[0] != 0 or offsets[-1] != len(values) or (np.diff(offsets) < 0).any():
        raise _mismatch(
            array, f"offsets {offsets[:5]} ...", f"0 to {len(values)}, rising", path=path
        )
    _check_finite(array, values, ids, path=path, offsets=offsets)
    return Ragged(values, offsets)


def _as_array(array: Array, values: Any, *, path: str) -> AnyArray:
    if hasattr(values, "detach"):
        values = values.detach().cpu()
        # numpy has no bfloat16; float32 holds it exactly.
        values = values.float().numpy() if str(values.dtype) == "torch.bfloat16" else values.numpy()
    if not isinstance(values, np.ndarray | np.generic):
        return _from_list(array, values, path=path)
    if not np.can_cast(values.dtype, array.dtype, "safe"):
        raise _mismatch(array, f"dtype {values.dtype}", f"dtype {array.dtype}", path=path)
    return np.asarray(values).astype(array.dtype, copy=False)


def _from_list(array: Array, numbers: Any, *, path: str) -> AnyArray:
    """Convert a list of numbers to the array's dtype; raise if a value would be truncated or wrap."""
    try:
        natural = np.asarray(numbers)
    except ValueError:
        raise _mismatch(
            array, "rows of different shapes", f"shape {array.shape}", path=path
        ) from None
    dtype = np.dtype(array.dtype)
    # A float array accepts every number, an integer one only integers, a bool one only bools; an
    # empty list has no kind.
    takes = {"f": "fiub", "i": "iub", "u": "iub", "b": "b"}[dtype.kind]
    if dtype == np.uint64 and natural.dtype.kind == "f" and _all_whole(numbers):
        natural = np.asarray(
            numbers, np.uint64
        )  # numpy converts a mix of small and large integers to float
    if natural.size and natural.dtype.kind not in takes:
        kind = "numbers that do not fit any dtype" if natural.dtype.kind == "O" else natural.dtype
        raise _mismatch(array, f"a list of {kind}", f"dtype {array.dtype}", path=path)
    if natural.size and dtype.kind in "iu" and natural.dtype.kind in "iu":
        low, high = int(natural.min()), int(natural.max())
        limits = np.iinfo(dtype)
        if low < limits.min or high > limits.max:
            actual = f"numbers from {low} to {high}"
            expected = f"{array.dtype}: {limits.min} to {limits.max}"
            raise _mismatch(array, actual, expected, path=path)
    return natural.astype(dtype)


def _all_whole(values: Any) -> bool:
    return isinstance(values, list | tuple) and all(type(x) is int and x >= 0 for x in values)


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
    # Fast pass: the sum is finite unless some value is not (or the sum overflows, which the slow
    # pass resolves).
    with np.errstate(all="ignore"):
        if np.isfinite(values.sum()):
            return
    bad = ~np.isfinite(values).reshape(len(values), -1).all(axis=1)
    if bad.any():
        row = int(np.flatnonzero(bad)[0])
        if offsets is not None:
            row = int(np.searchsorted(offsets, row, side="right")) - 1
        raise InvalidRowsError(
            f"array {array.name!r} holds NaN or infinity",
            code="store.not_finite",
            path=path,
            found=f"{int(bad.sum())} rows of this batch, the first with id {int(ids[row])}",
            fix="Check that example and its loss, or declare the array with nan='keep'.",
        )


def _mismatch(array: Array, actual: str, expected: str, *, path: str) -> InvalidRowsError:
    return InvalidRowsError(
        f"array {array.name!r} does not match the schema",
        code="store.wrong_values",
        path=path,
        found=actual,
        expected=expected,
    )
