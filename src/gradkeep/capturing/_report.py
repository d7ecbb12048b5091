"""Reports of captures, layer by layer, as tables."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from gradkeep import _arguments
from gradkeep._budgets import format_bytes
from gradkeep._display import ResultTable, TableDisplay, TextDisplay, text_table
from gradkeep.capturing._batches import batch_size, rows_of, to_device
from gradkeep.capturing._first_batch import CaptureSettings, prepare_capture
from gradkeep.capturing._readiness import device_of, in_mode, ready, uncompiled
from gradkeep.capturing.rules._rules import HINT, units_of
from gradkeep.capturing.tasks._tasks import Task, call, find_logits
from gradkeep.errors import CaptureError
from gradkeep.query._gradients import select_layers

if TYPE_CHECKING:
    import torch
    from torch import nn

    from gradkeep.capturing._first_batch import KeepChoice
    from gradkeep.capturing._readiness import Mode
    from gradkeep.capturing._storage import LayerStorage
    from gradkeep.factors._form import Storage
    from gradkeep.query._gradients import LayerChoice
    from gradkeep.store import CaptureKey, Encoding, Store


class CaptureWarning(UserWarning):
    """A capture succeeded, but something about it may be wrong."""


@dataclass(frozen=True, slots=True)
class LayerReport:
    """Storage of one layer; of a layer that was not run, only its name, type and size.

    Attributes:
        name: Path of the module.
        type: Class of the module.
        parameters: Number of parameter values.
        positions: T, the mean number of positions of a sample.
        factor_bytes: Bytes of a sample's factors in float32.
        dense_bytes: Bytes of a sample's dense gradient in float32.
        storage: How gradients are stored: `"factors"`, `"dense"`, `"low rank"` or `"coordinates"`.
        row_bytes: Bytes on disk of a sample.
    """

    name: str
    type: str
    parameters: int
    positions: float = 0.0
    factor_bytes: float = 0.0
    dense_bytes: int = 0
    storage: Storage | Literal[""] = ""
    row_bytes: float = 0.0


def report_layer(layer: LayerStorage) -> LayerReport:
    """Return the report of a layer's storage."""
    unit = layer.unit
    sizes = layer.positions, layer.factor_bytes, layer.dense_bytes
    return LayerReport(unit.name, unit.type, unit.size, *sizes, layer.storage, layer.row_bytes)


@dataclass(frozen=True, slots=True, repr=False)
class Captured(TextDisplay):
    """Report of one finished capture.

    Attributes:
        key: Key of the capture in the store.
        rows: Number of rows.
        reused_rows: Rows that an earlier run had written.
        bytes: Bytes on disk.
        layers: Storage of each layer; empty if only losses were captured.
        seconds: Wall time.
        cpu_seconds: CPU time of this process.
        notes: Layers that were skipped or unused, and anything suspicious.
        store: Store that holds the capture.
    """

    key: CaptureKey
    rows: int
    reused_rows: int
    bytes: int
    layers: tuple[LayerReport, ...]
    seconds: float
    cpu_seconds: float
    notes: tuple[str, ...] = ()
    store: Store | None = field(default=None, compare=False)

    @property
    def dense_bytes(self) -> int:
        """Bytes of the dense gradients of all rows in float32."""
        return self.rows * sum(layer.dense_bytes for layer in self.layers)

    def __str__(self) -> str:
        ratio = self.dense_bytes / self.bytes if self.bytes else 0.0
        new = self.rows - self.reused_rows
        pace = f"{new / self.seconds:.0f} rows/s" if self.seconds > 0 and new else "nothing to do"
        size = f"{self.rows} rows of {len(self.layers)} layers in {format_bytes(self.bytes)}, "
        size += f"{ratio:.1f}x smaller than dense"
        if not self.layers:
            size = f"the losses of {self.rows} rows in {format_bytes(self.bytes)}"
        seconds = f"{self.seconds:.1f} s ({pace}, {self.cpu_seconds:.1f} s of CPU time)"
        head = f"{self.key.split} at {self.key.checkpoint}: {size}; {seconds}"
        return "\n".join([head, *(f"note: {note}" for note in self.notes)])


class CapturedList(TableDisplay, list[Captured]):
    """Reports of several captures, printed as a table."""

    def _table(self) -> ResultTable:
        caption = f"{len(self)} captures" + (", 10 shown" if len(self) > 10 else "")
        rows = [
            [*names, str(one.rows), format_bytes(one.bytes), f"{one.seconds:.1f}"]
            for one in self[:10]
            for names in [(one.key.split, one.key.checkpoint)]
        ]
        columns = ["split", "checkpoint", "rows", "size", "seconds"]
        return ResultTable(caption, columns, rows, frozenset({2, 3, 4}))


class LayerTable(tuple[LayerReport, ...]):
    """Layers of a model; prints as a table."""

    __slots__ = ()

    def __repr__(self) -> str:
        head = ("layer", "type", "parameters", "T", "factors", "dense", "kept as", "bytes")
        names = [(row.name, row.type, str(row.parameters)) for row in self]
        if not any(row.storage for row in self):
            return text_table(head[:3], names, right={2})
        table = [
            (
                *name,
                f"{row.positions:.4g}",
                format_bytes(row.factor_bytes),
                format_bytes(row.dense_bytes),
                row.storage,
                format_bytes(row.row_bytes),
            )
            for name, row in zip(names, self, strict=True)
        ]
        factors = format_bytes(sum(row.factor_bytes for row in self))
        dense = format_bytes(sum(row.dense_bytes for row in self))
        total = format_bytes(sum(row.row_bytes for row in self))
        count = str(sum(row.parameters for row in self))
        table.append(("per sample", "", count, "", factors, dense, "", total))
        return text_table(head, table, right={2, 3, 4, 5, 7})


@_arguments.checked(CaptureError)
def layers(
    model: nn.Module,
    batch: Any = None,
    *,
    task: Task | None = None,
    layers: LayerChoice = None,
    encoding: Encoding = "plain",
    keep: KeepChoice = None,
    tolerance: float = 0.0,
    mode: Mode | None = "eval",
) -> LayerTable:
    """List the layers of a model with their sizes and, with a batch, the bytes that each would take.

    With a batch, the model runs once or twice.

    Args:
        model: The model.
        batch: Example batch, as the loader yields it; None lists names and sizes only.
        task: Task of the capture; None uses the sum of the model's outputs.
        layers: Names, globs or module types of layers; None for all.
        encoding: Encoding of stored arrays.
        keep: How gradients are stored, as in `gk.capture`.
        tolerance: Largest relative error of a gradient whose rank is cut.
        mode: `"eval"` or `"train"`; None leaves the model's mode.

    Returns:
        One entry per layer; with a batch: T (positions per sample), bytes of factors and of the dense
        gradient per sample, and the storage that `gk.capture` would choose.

    Raises:
        CaptureError: The model or batch cannot be captured, or no layer matches `layers`.

    Example:
        >>> import torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.Linear(32, 10))
        >>> layers(model)
        layer  type    parameters
        0      Linear        2080
        1      Linear         330
        >>> layers(model, torch.randn(2, 64))[0].storage
        'factors'
    """
    model = uncompiled(model)
    if batch is None:
        units = select_layers(units_of(model), layers, error=CaptureError, hint=HINT)
        return LayerTable(LayerReport(unit.name, unit.type, unit.size) for unit in units)
    with ready(model), in_mode(model, mode):
        device = device_of(model)
        part = to_device(rows_of(batch, 0, min(batch_size(batch), 8)), device)
        settings = CaptureSettings(layers, encoding=encoding, keep=keep, tolerance=tolerance)
        prepared = prepare_capture(model, task or _SumOfOutputs(), part, settings)
    return LayerTable(report_layer(layer) for layer in prepared.layers)


class _SumOfOutputs(Task):
    """A target that depends on all of a model's outputs."""

    def losses(self, model: nn.Module, batch: Any) -> torch.Tensor:
        """Return the sum of each sample's outputs `[B]`."""
        takes_labels = isinstance(batch, tuple | list) and len(batch) >= 2
        inputs = batch[:-1] if takes_labels else batch
        if isinstance(batch, Mapping):
            inputs = {name: value for name, value in batch.items() if name != "labels"}
        answer = find_logits(call(model, inputs))
        return answer.reshape(batch_size(batch), -1).sum(1)
