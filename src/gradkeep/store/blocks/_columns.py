"""Rows as they come out of a block: encoded until they are asked for, NaN where one is missing."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from gradkeep import _arguments
from gradkeep.errors import InvalidRowsError, MissingRowsError
from gradkeep.store.blocks._encoding import LARGEST, AnyArray, FloatArray, decode, may_overflow

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import torch

    from gradkeep.store.blocks._schema import Array


@dataclass(frozen=True, slots=True, eq=False)
class Ragged:
    """Rows of different lengths: row i is `values[offsets[i]:offsets[i + 1]]`.

    >>> rows = Ragged.of([np.zeros((2, 3)), np.ones((1, 3))])
    >>> len(rows), rows[1].shape, rows.offsets.tolist()
    (2, (1, 3), [0, 2, 3])
    """

    values: AnyArray
    """`[sum T_i, *shape]`"""
    offsets: AnyArray
    """`[B + 1]` int64"""

    @classmethod
    def of(cls, rows: list[AnyArray]) -> Ragged:
        """From a list of arrays `[T_i, *shape]`."""
        lengths = [len(row) for row in rows]
        return cls(np.concatenate(rows), np.cumsum([0, *lengths], dtype=np.int64))

    @classmethod
    def of_texts(cls, texts: Sequence[str]) -> Ragged:
        """Texts as the bytes of their UTF-8, for an array of kind `text`.

        >>> Ragged.of_texts(["one", "zwölf"]).texts()
        ['one', 'zwölf']
        """
        parts = [text.encode() for text in texts]
        offsets = np.cumsum([0, *(len(part) for part in parts)], dtype=np.int64)
        return cls(np.frombuffer(b"".join(parts), np.uint8), offsets)

    def texts(self) -> list[str]:
        """The rows of an array of kind `text`, as they were given."""
        whole = np.ascontiguousarray(self.values).tobytes()
        bounds = itertools.pairwise(self.offsets.tolist())
        return [whole[start:stop].decode(errors="replace") for start, stop in bounds]

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, row: int) -> AnyArray:
        if not 0 <= row < len(self):
            raise IndexError(row)
        return self.values[self.offsets[row] : self.offsets[row + 1]]


@dataclass(frozen=True, slots=True, eq=False)
class Column:
    """Some rows of one array, as stored."""

    array: Array
    values: AnyArray
    scale: FloatArray | None = None
    offsets: AnyArray | None = None

    def take(self, order: AnyArray) -> Column:
        """The rows in another order, some left out or repeated."""
        if np.array_equal(order, np.arange(len(self))):
            return self
        if self.offsets is None:
            scale = None if self.scale is None else self.scale[order]
            return Column(self.array, self.values[order], scale)
        bounds = self.offsets
        none = np.empty(0, np.int64)
        ranges = (np.arange(bounds[row], bounds[row + 1]) for row in order)
        pick = np.concatenate([none, *ranges])
        lengths = np.diff(bounds)[order]
        offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
        scale = None if self.scale is None else self.scale[pick]
        return Column(self.array, self.values[pick], scale, offsets)

    @classmethod
    def join(cls, array: Array, parts: Sequence[Column]) -> Column:
        """The rows of all parts, one part after the other."""
        if len(parts) == 1:
            return parts[0]
        empty = np.empty((0, *array.stored_shape), array.stored_dtype)
        values = np.concatenate([empty, *(part.values for part in parts)])
        scale = offsets = None
        if array.scaled:
            scales = (part.scale for part in parts if part.scale is not None)
            scale = np.concatenate([np.empty(0, np.float32), *scales])
        if array.ragged:
            lengths = (np.diff(part.offsets) for part in parts if part.offsets is not None)
            offsets = np.cumsum(np.concatenate([np.zeros(1, np.int64), *lengths]))
        return cls(array, values, scale, offsets)

    def __len__(self) -> int:
        return len(self.values) if self.offsets is None else len(self.offsets) - 1

    def decode(self) -> AnyArray | Ragged:
        """The values in the array's dtype; plain values are not copied and not to be written to."""
        values = decode(self.array, self.values, self.scale)
        if values is self.values and values.flags.writeable:
            values = values.view()
            values.flags.writeable = False
        return values if self.offsets is None else Ragged(values, self.offsets)

    def tensor(self) -> torch.Tensor:
        """The values `[R, *shape]` as a torch tensor; of ragged rows, all tokens in order."""
        import torch

        # The values of a map are private and writable, which torch wants; a copy is made only
        # where they are not.
        values = self.values if self.values.flags.writeable else self.values.copy()
        if self.array.encoding == "bfloat16":
            return torch.from_numpy(values.view(np.int16)).view(torch.bfloat16).float()
        if self.array.encoding in ("plain", "bits"):
            return torch.from_numpy(decode(self.array, values, None))
        wide = torch.from_numpy(values).float()
        if self.scale is not None:
            wide *= torch.from_numpy(self.scale.copy()).view(-1, *(1,) * (wide.dim() - 1))
            if may_overflow(self.scale):
                wide.clamp_(-LARGEST, LARGEST)
        return wide


@dataclass(frozen=True, slots=True, eq=False)
class Batch(Mapping[str, "AnyArray | Ragged"]):
    """Some rows of a block: `batch["loss"]` decodes, `batch.column("loss")` is as stored."""

    ids: AnyArray
    """`[B]` int64"""
    columns: tuple[Column, ...]
    first_row: int = 0
    """The position of the first row in the block; of a gather, 0."""

    def column(self, name: str) -> Column:
        """The stored rows of one array."""
        for column in self.columns:
            if column.array.name == name:
                return column
        raise KeyError(name)

    def tensor(self, name: str) -> torch.Tensor:
        """The values of one array as a torch tensor."""
        return self.column(name).tensor()

    def __getitem__(self, name: str) -> Any:
        return self.column(name).decode()

    def __iter__(self) -> Iterator[str]:
        return (column.array.name for column in self.columns)

    def __len__(self) -> int:
        return len(self.columns)


def check_fill(fill: float, arrays: Sequence[Array], *, path: str) -> None:
    """Refuse to fill with a number, and to fill arrays that cannot hold NaN."""
    whole = [array.name for array in arrays if array.dtype[:5] != "float" or array.ragged]
    is_number = isinstance(fill, float | np.floating)
    if not is_number or not math.isnan(fill) or whole:
        raise InvalidRowsError(
            "only NaN may stand for a missing row, and only in float arrays of fixed shape",
            path=path,
            found=f"fill={_arguments.short_repr(fill)}"
            + (f" for {', '.join(whole)}" if whole else ""),
            fix="pass fill=float('nan') and name only float arrays",
        )


def filled(found: Column, there: AnyArray) -> Column:
    """The found rows where `there [B]` is true, NaN elsewhere."""
    array = found.array
    values = np.full((len(there), *array.shape), np.nan, array.dtype)
    values[there] = found.decode()
    return Column(array.as_plain(), values)


_PAGE_BITS = 16
_WITHIN = (1 << _PAGE_BITS) - 1


def as_ids(ids: Any, *, num_examples: int | None, path: str) -> AnyArray:
    """Ids as int64 `[B]`; raises `InvalidRowsError` unless they are whole, in range and different."""
    if hasattr(ids, "detach"):
        ids = ids.detach().cpu().numpy()
    values = _wholes(ids, path=path)
    if values.ndim != 1:
        raise _not_ids(values, path=path)
    if len(values) and (lowest := int(values.min())) < 0:
        raise InvalidRowsError("an id is negative", path=path, found=lowest, expected="0 or more")
    if num_examples is not None and len(values) and (top := int(values.max())) >= num_examples:
        raise InvalidRowsError(
            f"the store has {num_examples} examples, but the ids reach {top}",
            path=path,
            fix="pass the data set's real size as num_examples",
        )
    unique, counts = np.unique(values, return_counts=True)
    if len(unique) != len(values):
        twice = _few(unique[counts > 1])
        raise InvalidRowsError("an id occurs twice in one batch", path=path, found=twice)
    return values


def whole_numbers(values: Any, *, path: str) -> AnyArray:
    """Ids or row numbers as int64 `[N]`; `InvalidRowsError` for all but whole numbers.

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
        raise InvalidRowsError("ids must be below 2**63", path=path, found=int(values.max()))
    # numpy takes True among numbers for 1.
    listed = isinstance(given, list | tuple) and any(isinstance(item, bool) for item in given)
    if values.dtype.kind not in "iu" or listed:
        raise _not_ids(values, path=path, bools=listed)
    return values.astype(np.int64)


def _not_ids(values: AnyArray, *, path: str, bools: bool = False) -> InvalidRowsError:
    kind = "bool" if bools else values.dtype
    return InvalidRowsError(
        "ids must be a list of whole numbers", path=path, found=f"{kind} of shape {values.shape}"
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
        """The row of each id; raises `MissingRowsError` naming those that are not there."""
        rows = self.find(wanted)
        missing = wanted[rows < 0]
        if len(missing):
            raise MissingRowsError(
                f"{len(missing)} of {len(wanted)} rows are not in this block",
                path=path,
                found=f"no row with id {_few(missing)}",
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
