"""Rows read from a block, decoded on access, and lookup of row ids."""

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

    Args:
        values: All rows joined, `[sum T_i, *shape]`.
        offsets: Bounds of the rows, `[B + 1]` int64.

    Example:
        >>> rows = Ragged.of([np.zeros((2, 3)), np.ones((1, 3))])
        >>> len(rows), rows[1].shape, rows.offsets.tolist()
        (2, (1, 3), [0, 2, 3])
    """

    values: AnyArray
    offsets: AnyArray

    @classmethod
    def of(cls, rows: list[AnyArray]) -> Ragged:
        """Join a list of arrays.

        Args:
            rows: Arrays `[T_i, *shape]`.

        Returns:
            The joined rows.
        """
        lengths = [len(row) for row in rows]
        return cls(np.concatenate(rows), np.cumsum([0, *lengths], dtype=np.int64))

    @classmethod
    def of_texts(cls, texts: Sequence[str]) -> Ragged:
        """Encode texts as UTF-8, for an array of kind `text`.

        Args:
            texts: The texts.

        Returns:
            Their bytes, one row per text.

        Example:
            >>> Ragged.of_texts(["one", "zwölf"]).texts()
            ['one', 'zwölf']
        """
        parts = [text.encode() for text in texts]
        offsets = np.cumsum([0, *(len(part) for part in parts)], dtype=np.int64)
        return cls(np.frombuffer(b"".join(parts), np.uint8), offsets)

    def texts(self) -> list[str]:
        """Decode the rows of an array of kind `text`."""
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
        """Return the rows in another order; rows may be left out or repeated."""
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
        """Concatenate the rows of all parts."""
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
        """Return the values in the array's dtype; plain values are read-only and not copied."""
        values = decode(self.array, self.values, self.scale)
        if values is self.values and values.flags.writeable:
            values = values.view()
            values.flags.writeable = False
        return values if self.offsets is None else Ragged(values, self.offsets)

    def tensor(self) -> torch.Tensor:
        """Return the values `[R, *shape]` as a torch tensor; for ragged rows, all tokens in order."""
        import torch

        # Mapped values are private and writable, as torch requires; others are copied.
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
    """Some rows of a block: `batch["loss"]` decodes, `batch.column("loss")` is as stored.

    Args:
        ids: Ids of the rows, `[B]` int64.
        columns: Stored rows of each array.
        first_row: Position of the first row in the block; 0 for rows read by id.
    """

    ids: AnyArray
    columns: tuple[Column, ...]
    first_row: int = 0

    def column(self, name: str) -> Column:
        """Return the stored rows of one array.

        Args:
            name: Name of the array.

        Raises:
            KeyError: The batch does not hold this array.
        """
        for column in self.columns:
            if column.array.name == name:
                return column
        raise KeyError(name)

    def tensor(self, name: str) -> torch.Tensor:
        """Return the values of one array as a torch tensor `[B, *shape]`.

        Args:
            name: Name of the array.

        Raises:
            KeyError: The batch does not hold this array.
        """
        return self.column(name).tensor()

    def __getitem__(self, name: str) -> Any:
        return self.column(name).decode()

    def __iter__(self) -> Iterator[str]:
        return (column.array.name for column in self.columns)

    def __len__(self) -> int:
        return len(self.columns)


def check_fill(fill: float, arrays: Sequence[Array], *, path: str) -> None:
    """Raise unless `fill` is NaN and all arrays can hold it."""
    unfillable = [array.name for array in arrays if array.dtype[:5] != "float" or array.ragged]
    is_number = isinstance(fill, float | np.floating)
    if not is_number or not math.isnan(fill) or unfillable:
        raise InvalidRowsError(
            "missing rows can only be filled with NaN, and only in float arrays of fixed shape",
            code="store.invalid_fill",
            path=path,
            found=f"fill={_arguments.short_repr(fill)}"
            + (f" for {', '.join(unfillable)}" if unfillable else ""),
            fix="Pass fill=float('nan') and the names of float arrays only.",
        )


def fill_missing(column: Column, present: AnyArray) -> Column:
    """Return the rows of the column where `present [B]` is true, and NaN elsewhere."""
    array = column.array
    values = np.full((len(present), *array.shape), np.nan, array.dtype)
    values[present] = column.decode()
    return Column(array.as_plain(), values)


_PAGE_BITS = 16
_WITHIN = (1 << _PAGE_BITS) - 1


def as_ids(ids: Any, *, num_examples: int | None, path: str) -> AnyArray:
    """Return ids as int64 `[B]`; raise `InvalidRowsError` unless they are integers, in range and unique."""
    if hasattr(ids, "detach"):
        ids = ids.detach().cpu().numpy()
    values = _as_integers(ids, path=path)
    if values.ndim != 1:
        raise _not_ids(values, path=path)
    if len(values) and (lowest := int(values.min())) < 0:
        raise InvalidRowsError(
            "an id is negative",
            code="store.negative_id",
            path=path,
            found=lowest,
            expected="0 or more",
        )
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
