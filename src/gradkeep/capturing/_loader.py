"""Loaders: their batches, ids and columns, and whether these belong together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from gradkeep._arguments import count, instance, text, texts, whole_numbers, writable
from gradkeep._preview import COPIED_IMAGE, COPIED_TABLE, COPIED_TEXT
from gradkeep.capturing._batches import (
    LoaderOrder,
    batch_size,
    batches_within,
    find_order,
    iter_batches,
)
from gradkeep.capturing._sequences import documents_of, may_pack, sequence_checks, unpacking_for
from gradkeep.errors import CaptureError
from gradkeep.store import Ragged

if TYPE_CHECKING:
    from torch import nn

    from gradkeep._preview import Preview
    from gradkeep.capturing._readiness import Mode
    from gradkeep.capturing._sequences import SequenceChecks, Unpacking
    from gradkeep.capturing.tasks._tasks import Task

    IdArray = np.ndarray[Any, np.dtype[np.int64]]


Columns = Sequence[str] | Mapping[str, Any]
"""Keys of the batch; or names, each with its key, or with the values of all rows in order."""
_RESERVED = (
    *(COPIED_IMAGE, COPIED_TABLE, COPIED_TEXT),
    *("id", "ids", "run", "checkpoint", "split", "capture", "example", "loss", "norm", "norms"),
    *("output", "slope", "label", "predicted", "token_loss", "probabilities"),
)
_MODEL_INPUTS = (
    *("input_ids", "attention_mask", "position_ids", "token_type_ids", "inputs_embeds"),
    *("labels", "label", "targets", "target", "y"),
)
"""Entries that models and tasks read; they stay in the batch."""


@dataclass(frozen=True, slots=True, eq=False)
class WithColumns:
    """A batch, and the columns of its rows."""

    batch: Any
    columns: dict[str, Any]
    """A list or tensor with a value for each row, by name."""


def without_columns(batch: Any) -> Any:
    """Return the part of a batch that a model reads."""
    return batch.batch if isinstance(batch, WithColumns) else batch


@dataclass(frozen=True, slots=True, eq=False)
class ColumnChoice:
    """Names of columns, and the sources of their values."""

    keys: dict[str, str]
    """Key in the batch, by name."""
    whole: dict[str, Sequence[Any]]
    """Values of all rows in the loader's order, by name."""
    preview: Preview | None = None
    """Images and texts of rows, in the loader's order."""

    @property
    def by_order(self) -> tuple[str, ...]:
        """Columns that belong to rows by their order alone."""
        return (*self.whole, *(() if self.preview is None else ("preview",)))

    def split(self, batch: Any, *, at: int, rows: int) -> Any:
        """Take the columns out of a batch whose first row is row `at` of the loader."""
        if not self.keys and not self.by_order:
            return batch
        columns: dict[str, Any] = {}
        for name, key in self.keys.items():
            if not isinstance(batch, Mapping) or key not in batch:
                raise CaptureError(
                    f"the batch has no column {key!r}; it must be a dict with lists or tensors",
                    code="capture.missing_column",
                    fix=f"Let the collate function pass it on, or pass columns={{{name!r}: dataset[{key!r}]}}.",
                )
            columns[name] = batch[key]
        if isinstance(batch, Mapping):
            removed = set(self.keys.values()) - set(_MODEL_INPUTS)
            batch = {key: value for key, value in batch.items() if key not in removed}
        columns |= {name: values[at : at + rows] for name, values in self.whole.items()}
        if self.preview is not None:
            columns |= self.preview.copied(range(at, at + rows))
        for name, values in columns.items():
            _check_length(name, values, rows)
            if not isinstance(values, torch.Tensor):
                columns[name] = list(values)
            column_array(name, columns[name])  # raises before a model runs
        return WithColumns(batch, columns)

    def check_all_used(self, rows: int) -> None:
        """Raise if a column has values for more rows than there were."""
        for name, values in self.whole.items():
            _check_length(name, values, rows)


def parse_columns(columns: Columns | None, preview: Preview | None = None) -> ColumnChoice:
    """Parse the `columns` argument of a capture."""
    choice = ColumnChoice({}, {}, preview)
    if columns is not None and not isinstance(columns, Mapping):
        columns = {name: name for name in texts("columns", columns, error=CaptureError)}
    for name, source in (columns or {}).items():
        text("columns", name, error=CaptureError)
        if name in _RESERVED:
            raise CaptureError(
                f"a column cannot be called {name!r}, which every capture has",
                code="capture.reserved_column",
                fix=f"Store it under another name: columns={{'document': {name!r}}}.",
            )
        if isinstance(source, str):
            choice.keys[name] = source
            continue
        if not hasattr(source, "__len__") or not hasattr(source, "__getitem__"):
            expected = "the key of a column in the batch, or the values of all rows"
            instance("columns", source, Sequence, error=CaptureError, expected=expected)
        choice.whole[name] = source
    return choice


def column_array(name: str, column: Any) -> np.ndarray[Any, Any] | Ragged:
    """Convert a column to numbers `[B]`, or texts to their UTF-8 bytes."""
    if isinstance(column, torch.Tensor):
        if column.ndim == 1:
            return plain(column)
    elif {type(value) for value in column} == {str}:
        if all(writable(value) for value in column):
            return Ragged.of_texts(column)
    else:
        values = np.asarray(column)
        if values.ndim == 1 and values.dtype.kind in "biuf":
            return values
    raise CaptureError(
        f"column {name!r} must hold a text in UTF-8 or a number for each row",
        code="capture.bad_column",
        fix="Fill missing values, and turn lists and dicts into texts with json.dumps.",
    )


def _check_length(name: str, values: Any, rows: int) -> None:
    if not hasattr(values, "__len__") or len(values) != rows:
        raise CaptureError(
            f"column {name!r} must have a value for each of {rows} rows",
            code="capture.column_length",
            fix="Give them in the loader's order; for packed batches, one per document.",
        )


def plain(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """Convert a tensor to numpy; 16-bit floats become float32."""
    values = tensor.detach().cpu()
    low = values.dtype in (torch.bfloat16, torch.float16)
    return (values.float() if low else values).numpy()


Ids = Sequence[int] | np.ndarray[Any, Any] | torch.Tensor | str | int | Callable[[Any], Any]
"""Ids of all samples in order, the key or index of the ids in a batch, or a function of it."""


@dataclass(frozen=True, slots=True, eq=False)
class Batches:
    """All batches of a loader with their ids; can be iterated again and again."""

    loader: Iterable[Any]
    ids: str | int | Callable[[Any], Any] | None
    """Key, index or function of the ids in a batch; None if they are not in it."""
    listed: IdArray | None
    """Ids of all samples in order, if the user passed them."""
    num_rows: int | None
    """Number of samples, if the loader knows it."""
    first: Any
    """First batch, without its ids."""
    order: LoaderOrder | None
    """Reference that every pass is compared with; None if ids come with the batches."""
    unpacking: Unpacking | None
    """Splits packed batches into documents; None if a pack is one sample."""
    checks: SequenceChecks
    """Rejects rows that the model cannot read."""
    columns: ColumnChoice

    def __iter__(self) -> Iterator[tuple[IdArray, Any]]:
        """Iterate over ids and batches, comparing each pass with the first one."""
        at = 0
        delivered = iter_batches(self.loader) if self.order is None else self.order.iter_checked()
        for at, own, part in self._rows(delivered, 0):
            yield own, part
            at += len(own)
        self.columns.check_all_used(at)

    def between(self, start: int, stop: int) -> Iterator[tuple[int, IdArray, Any]]:
        """Yield the place, ids and contents of every batch with a row from `start` to `stop`.

        The batches are those of a whole pass. Earlier ones are not read if the loader allows it.
        """
        at, delivered = 0, iter_batches(self.loader)
        if self.unpacking is None:
            at, delivered = batches_within(self.loader, start, stop)
        for place, own, part in self._rows(delivered, at):
            if place >= stop:
                return
            if place + len(own) > start:
                yield place, own, part

    def _rows(self, delivered: Iterable[Any], at: int) -> Iterator[tuple[int, IdArray, Any]]:
        """Yield place, ids and contents of batches whose first sample is `at`."""
        for item in delivered:
            batch, ids = _split_ids(item, self.ids)
            parts = [batch] if self.unpacking is None else self.unpacking.parts(batch)
            sizes = [batch_size(part) for part in parts]
            count = sum(sizes)
            if ids is not None:
                own = parse_ids(ids)
            elif self.listed is not None:
                own = self.listed[at : at + count]
            else:
                own = np.arange(at, at + count)
            _check_id_count(len(own), count)
            start = 0
            for part, size in zip(parts, sizes, strict=True):
                self.checks.check(own[start : start + size], part)
                part = self.columns.split(part, at=at + start, rows=size)
                yield at + start, own[start : start + size], part
                start += size
            at += count


def _check_id_count(ids: int, rows: int) -> None:
    if ids != rows:
        raise CaptureError(
            f"{ids} ids for {rows} samples",
            code="capture.id_count",
            fix="Pass ids=, one for each sample in order; for packed batches, one per document.",
        )


def parse_ids(ids: Any) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Convert ids to int64 `[B]`; raise for numbers that are not whole."""
    values = ids.detach().cpu().numpy() if isinstance(ids, torch.Tensor) else ids
    if isinstance(values, np.ndarray):
        values = values.reshape(-1)
    return whole_numbers("ids", values, error=CaptureError)


def task_batches(
    loader: Iterable[Any],
    model: nn.Module,
    task: Task,
    mode: Mode | None,
    *,
    ids: Ids | None = None,
    columns: Columns | None = None,
    preview: Preview | None = None,
) -> Batches:
    """Build the batches of a loader as a task takes them, after checking that ids and contents belong together.

    Ids by position, or from a list, need the same order in every pass: see `find_order`. Packed batches
    are unpacked, so that rows and ids are those of documents.
    """
    unpacking, checks = unpacking_for(model, task, mode), sequence_checks(model, task)
    choice = parse_columns(columns, preview)
    others = (str, bytes, Mapping, torch.Tensor, Iterator)
    if not isinstance(loader, Iterable) or isinstance(loader, others):
        raise CaptureError(
            f"loader must be an iterable of batches, not {type(loader).__name__}",
            code="capture.not_a_loader",
            fix="Pass the DataLoader itself, or a list: an iterator can be read only once.",
        )
    is_inside = ids is None or isinstance(ids, str) or type(ids) is int or callable(ids)
    inside: Any = ids if is_inside else None
    listed = None if is_inside else parse_ids(ids)
    order = find_order(loader, by_position=ids is None) if inside is None else None
    rows = order.rows if order is not None else _length(loader)
    _check_nothing_dropped(loader)
    first = order.first if order is not None else next(iter_batches(loader), None)
    if unpacking is not None and isinstance(loader, list | tuple):
        rows = sum(len(documents_of(batch) or ()) or batch_size(batch) for batch in loader)
    elif unpacking is not None and may_pack(first):
        rows = None  # unknown without reading the data set
    if listed is not None:
        _check_id_count(len(listed), len(listed) if rows is None else rows)
        rows = len(listed)
    if first is None:
        raise CaptureError(
            "the loader has no batch with a sample",
            code="capture.empty_loader",
            fix="Check the data set.",
        )
    whole, own = _split_ids(first, inside)
    first = whole if unpacking is None else unpacking.parts(whole)[0]
    size = batch_size(first)
    row_ids = listed if own is None else parse_ids(own)
    checks.check(np.arange(size) if row_ids is None else row_ids[:size], first)
    if unpacking is not None:
        unpacking = unpacking.settled(whole)
        first = unpacking.parts(whole)[0]
    if choice.by_order and inside is not None:
        raise CaptureError(
            f"{', '.join(choice.by_order)} in the loader's order, but ids from the batches",
            code="capture.columns_by_order",
            fix="Have the collate function pass them on, and name them: columns=['text'].",
        )
    first = choice.split(first, at=0, rows=batch_size(first))
    return Batches(loader, inside, listed, rows, first, order, unpacking, checks, choice)


def _length(loader: Iterable[Any]) -> int | None:
    """Return the number of samples of a loader whose order does not matter, if known."""
    if isinstance(loader, list | tuple):
        return sum(batch_size(batch) for batch in loader)
    if not isinstance(loader, DataLoader) or loader.batch_size is None:
        return None  # batches of unknown sizes
    try:
        return len(loader.sampler)  # type: ignore[arg-type]
    except TypeError:
        return None


def _check_nothing_dropped(loader: Iterable[Any]) -> None:
    if not isinstance(loader, DataLoader):
        return
    sampler = loader.batch_sampler if loader.batch_sampler is not None else loader
    size = getattr(sampler, "batch_size", None)
    try:
        rows = len(sampler.sampler)  # type: ignore[arg-type, union-attr]
    except (AttributeError, TypeError):
        return
    if getattr(sampler, "drop_last", False) and rows % (size or 1):
        raise CaptureError(
            "the loader drops its last samples",
            code="capture.drops_samples",
            found=f"drop_last=True with {rows} samples in batches of {size}",
            fix="Use drop_last=False.",
        )


def _split_ids(batch: Any, ids: Any) -> tuple[Any, Any]:
    """Split a batch into the batch without its ids, and the ids if they are in it."""
    if callable(ids):
        return batch, ids(batch)
    if ids is None:
        return batch, None
    try:
        values = batch[ids]
    except (KeyError, IndexError, TypeError) as error:
        raise CaptureError(
            f"the batch has no ids at {ids!r}",
            code="capture.no_ids",
            fix="Pass ids= as their key or index.",
        ) from error
    if isinstance(batch, Mapping):
        return {key: value for key, value in batch.items() if key != ids}, values
    at = range(len(batch))[int(ids)]
    return tuple(item for place, item in enumerate(batch) if place != at), values


def as_loader(loader: Any, batch_size: int | None) -> Any:
    """Return the loader; wrap a map-style data set in a `DataLoader` of `batch_size`."""
    is_dataset = isinstance(loader, Dataset) and not isinstance(loader, IterableDataset)
    if batch_size is None and not is_dataset:
        return loader
    size = 64 if batch_size is None else batch_size
    count("batch_size", size, error=CaptureError, least=1)
    indexed = hasattr(loader, "__getitem__") and hasattr(loader, "__len__")
    if not indexed or isinstance(loader, DataLoader):
        raise CaptureError(
            f"batch_size is for data sets, not for {type(loader).__name__}",
            code="capture.batch_size_of_loader",
            fix="Leave out batch_size=, or pass a map-style data set instead of a loader.",
        )
    return DataLoader(loader, batch_size=size)
