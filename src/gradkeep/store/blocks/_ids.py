"""The ids of rows: checked one batch at a time, remembered in little memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from gradkeep.errors import InvalidRows, MissingRows

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gradkeep.store.blocks._encoding import AnyArray

_PAGE_BITS = 16
_WITHIN = (1 << _PAGE_BITS) - 1


def as_ids(ids: Any, *, num_examples: int | None, path: str) -> AnyArray:
    """Ids as int64 `[B]`; raises `InvalidRows` unless they are whole, in range and different."""
    if hasattr(ids, "detach"):
        ids = ids.detach().cpu().numpy()
    values = _wholes(ids, path=path)
    if values.ndim != 1:
        raise _not_ids(values, path=path)
    if len(values) and (lowest := int(values.min())) < 0:
        raise InvalidRows("an id is negative", path=path, found=lowest, expected="0 or more")
    if num_examples is not None and len(values) and (top := int(values.max())) >= num_examples:
        raise InvalidRows(
            f"the store has {num_examples} examples, but the ids reach {top}",
            path=path,
            expected=f"ids below {num_examples}",
            fix="pass the data set's real size as num_examples",
        )
    unique, counts = np.unique(values, return_counts=True)
    if len(unique) != len(values):
        raise InvalidRows(
            "an id occurs twice in one batch",
            path=path,
            found=_few(unique[counts > 1]),
            expected="each id once",
        )
    return values


def whole_numbers(values: Any, *, path: str) -> AnyArray:
    """Ids or row numbers as int64 `[N]`; `InvalidRows` for all but whole numbers.

    A float is refused even if nothing stands after its point: where 3.0 comes from, 3.7 may come
    too, and a row that is not the one that was meant must never be read or dropped.
    """
    if hasattr(values, "detach"):
        values = values.detach().cpu().numpy()
    return _wholes(values, path=path).reshape(-1)


def _wholes(given: Any, *, path: str) -> AnyArray:
    try:
        values = np.asarray(given)
    except (ValueError, OverflowError):  # lists of different lengths
        values = np.empty((), object)
    if values.size == 0:
        return values.astype(np.int64)
    if values.dtype == np.uint64 and int(values.max()) > np.iinfo(np.int64).max:
        raise InvalidRows(
            "an id is too large", path=path, found=int(values.max()), expected="below 2**63"
        )
    # numpy takes True among numbers for 1.
    listed = isinstance(given, list | tuple) and any(isinstance(item, bool) for item in given)
    if values.dtype.kind not in "iu" or listed:
        raise _not_ids(values, path=path, bools=listed)
    return values.astype(np.int64)


def _not_ids(values: AnyArray, *, path: str, bools: bool = False) -> InvalidRows:
    kind = "bool" if bools else values.dtype
    return InvalidRows(
        "ids must be a list of whole numbers",
        path=path,
        found=f"{kind} of shape {values.shape}",
        expected="integers of shape [B]",
        fix="convert them yourself, after a look at where they come from",
    )


class IdSet:
    """A set of ids in pages of bits set on demand; adding B ids costs O(B log B).

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
        """Those of the ids that are in the set."""
        found = [ids[:0]]
        for number, members in _by_page(ids):
            if number in self._pages:
                found.append(members[self._pages[number][members & _WITHIN]])
        return np.concatenate(found)


def _by_page(ids: AnyArray) -> Iterator[tuple[int, AnyArray]]:
    pages = ids >> _PAGE_BITS
    for number in np.unique(pages):
        yield int(number), ids[pages == number]


class IdIndex:
    """Where each id's row is; O(log N) per id, O(1) when ids are 0, 1, 2, ..."""

    def __init__(self, ids: AnyArray) -> None:
        self.ids = ids
        self._counting = bool(np.array_equal(ids, np.arange(len(ids))))
        self._order = None if self._counting else np.argsort(ids, kind="stable")

    def rows(self, wanted: AnyArray, *, path: str) -> AnyArray:
        """The row of each id; raises `MissingRows` naming those that are not there."""
        rows = self.find(wanted)
        missing = wanted[rows < 0]
        if len(missing):
            raise MissingRows(
                f"{len(missing)} of {len(wanted)} rows are not in this block",
                path=path,
                found=f"no row with id {_few(missing)}",
                expected=f"ids among the {len(self.ids)} that were written",
                fix="ask for other ids, capture the missing ones, or pass fill=nan to get NaN there",
            )
        return rows

    def find(self, wanted: AnyArray) -> AnyArray:
        """The row of each id, -1 where there is none."""
        if self._order is None:
            return np.where((wanted >= 0) & (wanted < len(self.ids)), wanted, -1)
        if not len(self.ids):
            return np.full(len(wanted), -1)
        at = np.searchsorted(self.ids, wanted, sorter=self._order)
        rows = self._order[np.minimum(at, len(self.ids) - 1)]
        return np.where(self.ids[rows] == wanted, rows, -1)


def _few(ids: AnyArray) -> str:
    shown = ", ".join(str(int(number)) for number in ids[:5])
    return shown if len(ids) <= 5 else f"{shown} and {len(ids) - 5} more"
