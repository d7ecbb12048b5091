"""Columns: further entries of every row that are stored beside its gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from gradkeep._arguments import instance, text, texts, writable
from gradkeep._preview import COPIED_IMAGE, COPIED_TABLE, COPIED_TEXT
from gradkeep.errors import CaptureError
from gradkeep.store import Ragged

if TYPE_CHECKING:
    from gradkeep._preview import Preview

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
