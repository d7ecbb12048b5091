"""Columns of a data set that are kept beside the gradients: where a row is from, what it says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from gradkeep._arguments import instance, text, texts, writable
from gradkeep._preview import COPIED_IMAGE, COPIED_TABLE, COPIED_TEXT
from gradkeep.capturing._row_making import MadeRows
from gradkeep.capturing._row_values import plain
from gradkeep.errors import CaptureError
from gradkeep.store import Ragged

if TYPE_CHECKING:
    from gradkeep._preview import Preview
    from gradkeep.capturing._audit import RowAudit
    from gradkeep.capturing._keeping import LayerKeeping
    from gradkeep.capturing._row_making import RowMaker

Columns = Sequence[str] | Mapping[str, Any]
"""Keys of the batch; or names, each with its key, or with the values of all rows in order."""
_TAKEN = (
    *(COPIED_IMAGE, COPIED_TABLE, COPIED_TEXT),
    *("id", "ids", "run", "checkpoint", "split", "capture", "example", "loss", "norm", "norms"),
    *("output", "slope", "label", "predicted", "token_loss", "probabilities"),
)
_READ = (
    *("input_ids", "attention_mask", "position_ids", "token_type_ids", "inputs_embeds"),
    *("labels", "label", "targets", "target", "y"),
)
"""What models and tasks read: it stays in the batch."""


@dataclass(frozen=True, slots=True, eq=False)
class WithColumns:
    """A batch, and what is kept of its rows beside what the model is given."""

    batch: Any
    columns: dict[str, Any]
    """A list or tensor with a value for each row, by name."""


@dataclass(frozen=True, slots=True, eq=False)
class ColumnChoice:
    """Which columns are kept, and where they come from."""

    keys: dict[str, str]
    """The key of each in a batch."""
    whole: dict[str, Sequence[Any]]
    """The values of all rows, in the loader's order."""
    preview: Preview | None = None
    """What rows look like, which is asked for in the loader's order."""

    @property
    def by_order(self) -> tuple[str, ...]:
        """What is told apart by the order of rows alone."""
        return (*self.whole, *(() if self.preview is None else ("preview",)))

    def taken(self, batch: Any, *, at: int, rows: int) -> Any:
        """The batch, whose first row is row `at` of the loader, with its columns beside it."""
        if not self.keys and not self.by_order:
            return batch
        found: dict[str, Any] = {}
        for name, key in self.keys.items():
            if not isinstance(batch, Mapping) or key not in batch:
                raise CaptureError(
                    f"no column {key!r} in the batch",
                    found=", ".join(map(str, batch))
                    if isinstance(batch, Mapping)
                    else type(batch).__name__,
                    expected="batches that are dicts, with the column as a list or tensor",
                    fix="let the collate function pass it on, or give all values in the loader's "
                    f"order: columns={{{name!r}: dataset[{key!r}]}}",
                )
            found[name] = batch[key]
        if isinstance(batch, Mapping):
            gone = [key for key in self.keys.values() if key not in _READ]
            batch = {key: value for key, value in batch.items() if key not in gone}
        found |= {name: values[at : at + rows] for name, values in self.whole.items()}
        if self.preview is not None:
            found |= self.preview.copied(range(at, at + rows))
        for name, values in found.items():
            if not hasattr(values, "__len__") or len(values) != rows:
                raise _wrong_length(name, values, rows)
            if not isinstance(values, torch.Tensor):
                found[name] = list(values)
            _as_kept(name, found[name])  # before a model runs
        return WithColumns(batch, found)

    def check_all_used(self, rows: int) -> None:
        """Raise if a column has values for more rows than there were."""
        for name, values in self.whole.items():
            if len(values) != rows:
                raise _wrong_length(name, values, rows)


def column_choice(columns: Columns | None, preview: Preview | None = None) -> ColumnChoice:
    """What was asked for, once it makes sense."""
    error = CaptureError
    if columns is None:
        return ColumnChoice({}, {}, preview)
    if not isinstance(columns, Mapping):
        columns = {name: name for name in texts("columns", columns, error=error)}
    keys: dict[str, str] = {}
    whole: dict[str, Sequence[Any]] = {}
    for name, given in columns.items():
        text("columns", name, error=error)
        if name in _TAKEN:
            raise CaptureError(
                f"a column cannot be called {name!r}: every capture has one",
                expected=f"another name than {', '.join(_TAKEN)}",
                fix=f"columns={{'document': {name!r}}} keeps it under another name",
            )
        if isinstance(given, str):
            keys[name] = given
        else:
            expected = "the key of a column in the batch, or the values of all rows"
            if not hasattr(given, "__len__") or not hasattr(given, "__getitem__"):
                instance("columns", given, Sequence, error=error, expected=expected)
            whole[name] = given
    return ColumnChoice(keys, whole, preview)


def without_columns(batch: Any) -> Any:
    """What a model is given of a batch."""
    return batch.batch if isinstance(batch, WithColumns) else batch


def keeping_columns(maker: RowMaker, batch: Any) -> RowMaker:
    """What makes rows of batches like this one, with their columns if they have any."""
    return ColumnMaker(maker) if isinstance(batch, WithColumns) else maker


def maker_within(maker: RowMaker) -> RowMaker:
    """What makes the rows to which columns are added."""
    return maker.maker if isinstance(maker, ColumnMaker) else maker


@dataclass(frozen=True, slots=True, eq=False)
class ColumnMaker:
    """Makes the rows of a capture as another maker does, and adds their columns."""

    maker: RowMaker

    @property
    def joined(self) -> int:
        """Rows that are handed to a writer at once, at least."""
        return self.maker.joined

    @property
    def kept(self) -> tuple[LayerKeeping, ...]:
        """How each layer is kept."""
        return self.maker.kept

    @property
    def row_bytes(self) -> float:
        """Bytes of one row's gradients, or of what is most of a row."""
        return self.maker.row_bytes

    def fingerprints(self, values: Mapping[str, Any]) -> dict[str, str]:
        """What is compared when a capture is gone on with."""
        return self.maker.fingerprints(values)

    def notes(self) -> list[str]:
        """What a user should know."""
        return self.maker.notes()

    def facts(self) -> list[str]:
        """What stands in the report, beside the notes."""
        return self.maker.facts()

    @property
    def audit(self) -> RowAudit | None:
        """What checks some of the rows."""
        return self.maker.audit

    def make(self, batch: Any, *, alone: bool = False, ids: Any = None) -> MadeRows:
        """The rows of a batch, with their columns."""
        made = self.maker.make(without_columns(batch), alone=alone, ids=ids)
        columns = batch.columns if isinstance(batch, WithColumns) else {}
        added = {name: _as_kept(name, values) for name, values in columns.items()}
        return MadeRows(made.values | added, made.gradients, made.layers)


def _as_kept(name: str, given: Any) -> np.ndarray[Any, Any] | Ragged:
    """Numbers `[B]`, or texts as the bytes of their UTF-8."""
    if isinstance(given, torch.Tensor):
        values = plain(given)
        if values.ndim == 1:
            return values
        raise _unkept(name, f"a tensor of shape {tuple(given.shape)}")
    kinds = {type(value) for value in given}
    if kinds == {str}:
        broken = [value for value in given if not writable(value)]
        if broken:
            raise _unkept(name, f"a text that cannot be written as UTF-8: {broken[0][:40]!r}")
        return Ragged.of_texts(given)
    values = np.asarray(given)
    if values.ndim != 1 or values.dtype.kind not in "biuf":
        raise _unkept(name, ", ".join(sorted(kind.__name__ for kind in kinds)))
    return values


def _unkept(name: str, found: str) -> CaptureError:
    return CaptureError(
        f"column {name!r} holds what cannot be kept",
        found=found,
        expected="a text for each row, or a number for each row",
        fix="fill what is missing, and turn lists and dicts into texts, for instance with json.dumps",
    )


def _wrong_length(name: str, values: Any, rows: int) -> CaptureError:
    found = f"{len(values)} values" if hasattr(values, "__len__") else type(values).__name__
    return CaptureError(
        f"column {name!r} must have a value for each row",
        found=found,
        expected=f"{rows} values",
        fix="give them in the loader's order; of packed batches, one for each document",
    )
