"""Loaders: their batches, ids and columns, and whether these belong together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from gradkeep._arguments import instance, text, texts, whole_numbers, writable
from gradkeep._preview import COPIED_IMAGE, COPIED_TABLE, COPIED_TEXT
from gradkeep.capturing._batches import batch_size
from gradkeep.capturing._order import LoaderOrder, batches_within, filled_batches, order_of
from gradkeep.capturing._sequences import documents_of, may_pack, sequence_checks, unpacking_for
from gradkeep.errors import CaptureError
from gradkeep.store import Ragged

if TYPE_CHECKING:
    from torch import nn

    from gradkeep._preview import Preview
    from gradkeep.capturing._readiness import Mode
    from gradkeep.capturing._sequences import SequenceChecks, Unpacking
    from gradkeep.capturing.tasks._tasks import Task


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
"""Entries that models and tasks read: they stay in the batch."""


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
    """Names of columns, and where their values come from."""

    keys: dict[str, str]
    """The key of each in a batch."""
    whole: dict[str, Sequence[Any]]
    """The values of all rows, in the loader's order."""
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
                    f"no column {key!r} in the batch, which must be a dict with lists or tensors",
                    fix="let the collate function pass it on, or give all values in the loader's "
                    f"order: columns={{{name!r}: dataset[{key!r}]}}",
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
                f"a column cannot be called {name!r}: every capture has one",
                fix=f"columns={{'document': {name!r}}} keeps it under another name",
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
    """Convert a column to numbers `[B]`, or texts to the bytes of their UTF-8."""
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
        fix="fill what is missing, and turn lists and dicts into texts, for instance with json.dumps",
    )


def _check_length(name: str, values: Any, rows: int) -> None:
    if not hasattr(values, "__len__") or len(values) != rows:
        raise CaptureError(
            f"column {name!r} must have a value for each of {rows} rows",
            found=f"{len(values)} values" if hasattr(values, "__len__") else type(values).__name__,
            fix="give them in the loader's order; of packed batches, one for each document",
        )


def plain(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """Convert a tensor to numpy; 16 bits become float32."""
    values = tensor.detach().cpu()
    low = values.dtype in (torch.bfloat16, torch.float16)
    return (values.float() if low else values).numpy()


Ids = Sequence[int] | np.ndarray[Any, Any] | torch.Tensor | str | int | Callable[[Any], Any]
"""Ids of all samples in order, the key or place of the ids in a batch, or a function of it."""


@dataclass(frozen=True, slots=True, eq=False)
class Batches:
    """All batches of a loader with their ids; can be gone through again and again."""

    loader: Iterable[Any]
    ids: str | int | Callable[[Any], Any] | None
    """Where the ids are in a batch, if they are."""
    listed: np.ndarray[Any, np.dtype[np.int64]] | None
    """The ids of all samples in order, if they were given."""
    num_rows: int | None
    """The number of samples, if the loader knows it."""
    first: Any
    """The first batch, without its ids."""
    order: LoaderOrder | None
    """What every pass is held against; None where ids come with the batches."""
    unpacking: Unpacking | None
    """How packed batches are taken apart; None: a pack is one sample."""
    checks: SequenceChecks
    """Refuses rows that the model cannot read."""
    columns: ColumnChoice

    def __iter__(self) -> Iterator[tuple[np.ndarray[Any, np.dtype[np.int64]], Any]]:
        """Ids and batches; the first ones are compared with earlier looks before any is given."""
        at = 0
        delivered = filled_batches(self.loader) if self.order is None else self.order.proved()
        for at, own, part in self._rows(delivered, 0):
            yield own, part
            at += len(own)
        self.columns.check_all_used(at)

    def between(
        self, start: int, stop: int
    ) -> Iterator[tuple[int, np.ndarray[Any, np.dtype[np.int64]], Any]]:
        """The place, ids and contents of every batch with a row from `start` to `stop`.

        The batches are those of a whole pass. What comes before is not read, where the loader allows.
        """
        at, delivered = (
            batches_within(self.loader, start, stop)
            if self.unpacking is None
            else (0, filled_batches(self.loader))
        )
        for place, own, part in self._rows(delivered, at):
            if place >= stop:
                return
            if place + len(own) > start:
                yield place, own, part

    def _rows(
        self, delivered: Iterable[Any], at: int
    ) -> Iterator[tuple[int, np.ndarray[Any, np.dtype[np.int64]], Any]]:
        """Place, ids and contents of what is delivered from the sample `at` on."""
        for given in delivered:
            batch, ids = _taken_apart(given, self.ids)
            parts = [batch] if self.unpacking is None else self.unpacking.parts(batch)
            sizes = [batch_size(part) for part in parts]
            count = sum(sizes)
            if ids is not None:
                own = checked_ids(ids)
            elif self.listed is not None:
                own = self.listed[at : at + count]
            else:
                own = np.arange(at, at + count)
            if len(own) != count:
                raise CaptureError(
                    "every sample needs an id",
                    found=f"{len(own)} ids for {count} samples",
                    fix="give ids=, one for each sample of the loader, in its order; of packed "
                    "batches, one for each document",
                )
            start = 0
            for part, size in zip(parts, sizes, strict=True):
                self.checks.check(own[start : start + size], part)
                part = self.columns.split(part, at=at + start, rows=size)
                yield at + start, own[start : start + size], part
                start += size
            at += count


def checked_ids(ids: Any) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Ids as int64 `[B]`; an error for what is not whole, which would be cut to another row's id."""
    given = ids.detach().cpu().numpy() if isinstance(ids, torch.Tensor) else ids
    if isinstance(given, np.ndarray):
        given = given.reshape(-1)
    return whole_numbers("ids", given, error=CaptureError)


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
    """The batches of a loader as a task takes them, once ids and contents belong together.

    Ids by position, or from a list, need the same order in every pass: see `order_of`. Packed
    batches are taken apart, so that rows and ids are those of documents.
    """
    unpacking, checks = unpacking_for(model, task, mode), sequence_checks(model, task)
    choice = parse_columns(columns, preview)
    is_loader = isinstance(loader, Iterable) and not isinstance(
        loader, str | bytes | Mapping | torch.Tensor
    )
    if not is_loader or isinstance(loader, Iterator):
        once = ", which can be gone through only once" if is_loader else ""
        raise CaptureError(
            f"loader must be an iterable of batches, got {type(loader).__name__}{once}",
            fix="pass the DataLoader itself, or a list of batches",
        )
    is_inside = ids is None or isinstance(ids, str) or type(ids) is int or callable(ids)
    inside: Any = ids if is_inside else None
    listed = None if is_inside else checked_ids(ids)
    order = order_of(loader, by_position=ids is None) if inside is None else None
    rows = order.rows if order is not None else _length(loader)
    _check_nothing_dropped(loader)
    first = order.first if order is not None else next(filled_batches(loader), None)
    if unpacking is not None and isinstance(loader, list | tuple):
        rows = sum(len(documents_of(batch) or ()) or batch_size(batch) for batch in loader)
    elif unpacking is not None and may_pack(first):
        rows = None  # it is not known without reading the data set
    if listed is not None:
        if rows is not None and len(listed) != rows:
            raise CaptureError(
                "every sample needs one id", found=f"{len(listed)} ids for {rows} samples"
            )
        rows = len(listed)
    if first is None:
        raise CaptureError(
            "the loader gave no batch with a sample", fix="check that the data set is not empty"
        )
    whole, own = _taken_apart(first, inside)
    first = whole if unpacking is None else unpacking.parts(whole)[0]
    size = batch_size(first)
    given = listed if own is None else checked_ids(own)
    checks.check(np.arange(size) if given is None else given[:size], first)
    if unpacking is not None:
        unpacking = unpacking.settled(whole)
        first = unpacking.parts(whole)[0]
    if choice.by_order and inside is not None:
        raise CaptureError(
            "columns by order, but rows by the ids that batches bring",
            found=", ".join(choice.by_order),
            fix="have the collate function pass them on, and name them: columns=['text']",
        )
    first = choice.split(first, at=0, rows=batch_size(first))
    return Batches(loader, inside, listed, rows, first, order, unpacking, checks, choice)


def _length(loader: Iterable[Any]) -> int | None:
    """The number of samples of a loader whose order does not matter."""
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
    made = loader.batch_sampler if loader.batch_sampler is not None else loader
    size = getattr(made, "batch_size", None)
    try:
        rows = len(made.sampler)  # type: ignore[arg-type, union-attr]
    except (AttributeError, TypeError):
        return
    if getattr(made, "drop_last", False) and rows % (size or 1):
        raise CaptureError(
            "the loader drops its last samples",
            found=f"drop_last=True with {rows} samples in batches of {size}",
            fix="use drop_last=False",
        )


def _taken_apart(given: Any, ids: Any) -> tuple[Any, Any]:
    """The batch without its ids, and the ids if they are in it."""
    if callable(ids):
        return given, ids(given)
    if ids is None:
        return given, None
    try:
        found = given[ids]
    except (KeyError, IndexError, TypeError) as error:
        raise CaptureError(f"no ids at {ids!r} in the batch", found=type(given).__name__) from error
    if isinstance(given, Mapping):
        return {key: value for key, value in given.items() if key != ids}, found
    at = range(len(given))[int(ids)]
    return tuple(item for place, item in enumerate(given) if place != at), found
