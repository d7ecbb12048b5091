"""What was captured, or would be, layer by layer, as a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, overload

from gradkeep import _arguments
from gradkeep._budgets import format_bytes
from gradkeep._display import text_table
from gradkeep.capturing._batches import batch_size, rows_of, to_device
from gradkeep.capturing._first_batch import CaptureSettings, prepare_capture
from gradkeep.capturing._readiness import device_of, in_mode, ready, uncompiled
from gradkeep.capturing.rules._rules import HINT, units_of
from gradkeep.capturing.tasks._tasks import Task, call, logits_of
from gradkeep.errors import CaptureError
from gradkeep.query._layers import select_layers

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch
    from torch import nn

    from gradkeep.capturing._first_batch import KeepChoice
    from gradkeep.capturing._keeping import LayerKeeping
    from gradkeep.capturing._readiness import Mode
    from gradkeep.factors._form import Storage
    from gradkeep.query._layers import LayerChoice
    from gradkeep.store import CaptureKey, Encoding


class CaptureWarning(UserWarning):
    """Something about a capture that its user should look at."""


@dataclass(frozen=True, slots=True)
class KeptLayer:
    """How one layer is kept."""

    name: str
    type: str
    parameters: int
    positions: float
    """T, the mean number of positions of a sample."""
    factor_bytes: float
    """Bytes of a sample's factors in float32."""
    dense_bytes: int
    """Bytes of a sample's dense gradient in float32."""
    storage: Storage
    row_bytes: float
    """Bytes that a sample takes as it is kept."""


def kept_layer(keeping: LayerKeeping) -> KeptLayer:
    """The facts of a layer for people."""
    return KeptLayer(
        name=keeping.unit.name,
        type=keeping.unit.type,
        parameters=keeping.unit.size,
        positions=keeping.positions,
        factor_bytes=keeping.factor_bytes,
        dense_bytes=keeping.dense_bytes,
        storage=keeping.storage,
        row_bytes=keeping.row_bytes,
    )


@dataclass(frozen=True, slots=True)
class Captured:
    """One finished capture."""

    key: CaptureKey
    rows: int
    reused_rows: int
    """Rows that an earlier run had written already."""
    bytes: int
    layers: tuple[KeptLayer, ...]
    seconds: float
    cpu_seconds: float
    notes: tuple[str, ...] = ()
    """What was skipped, unused, or looks wrong."""

    @property
    def dense_bytes(self) -> int:
        """What the dense gradients of all rows would take in float32."""
        return self.rows * sum(layer.dense_bytes for layer in self.layers)

    def __str__(self) -> str:
        ratio = self.dense_bytes / self.bytes if self.bytes else 0.0
        new = self.rows - self.reused_rows
        pace = f"{new / self.seconds:.0f} rows/s" if self.seconds > 0 and new else "nothing to do"
        kept = f"{self.rows} rows of {len(self.layers)} layers in {format_bytes(self.bytes)}, "
        kept += f"{ratio:.1f}x smaller than dense"
        if not self.layers:
            kept = f"the losses of {self.rows} rows in {format_bytes(self.bytes)}"
        seconds = f"{self.seconds:.1f} s ({pace}, {self.cpu_seconds:.1f} s of CPU time)"
        head = f"{self.key.split} at {self.key.checkpoint}: {kept}; {seconds}"
        return "\n".join([head, *(f"note: {note}" for note in self.notes)])


@dataclass(frozen=True, slots=True)
class ListedLayer:
    """A layer of a model of which only the parameters are known."""

    name: str
    type: str
    parameters: int


@dataclass(frozen=True, slots=True)
class LayerTable(Sequence["KeptLayer | ListedLayer"]):
    """The layers of a model; shows itself as a table."""

    rows: tuple[KeptLayer | ListedLayer, ...]

    @overload
    def __getitem__(self, index: int) -> KeptLayer | ListedLayer: ...
    @overload
    def __getitem__(self, index: slice) -> LayerTable: ...
    def __getitem__(self, index: int | slice) -> KeptLayer | ListedLayer | LayerTable:
        return LayerTable(self.rows[index]) if isinstance(index, slice) else self.rows[index]

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[KeptLayer | ListedLayer]:
        return iter(self.rows)

    def __repr__(self) -> str:
        head = ("layer", "type", "parameters", "T", "factors", "dense", "kept as", "bytes")
        table = [_cells(row) for row in self.rows]
        kept = [row for row in self.rows if isinstance(row, KeptLayer)]
        if not kept:
            return text_table(head[:3], [cells[:3] for cells in table], right={2})
        factors = format_bytes(sum(row.factor_bytes for row in kept))
        dense = format_bytes(sum(row.dense_bytes for row in kept))
        total = format_bytes(sum(row.row_bytes for row in kept))
        count = str(sum(row.parameters for row in kept))
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
    """The layers of a model with their sizes; with a batch also what each would take to keep.

    A batch is run through the model once or twice: T (positions per sample), bytes of factors and
    of the dense gradient per sample, and the way that `gk.capture` would choose. `layers` takes
    names, globs and types, as it does there.

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
        return LayerTable(tuple(ListedLayer(unit.name, unit.type, unit.size) for unit in units))
    with ready(model), in_mode(model, mode):
        device = device_of(model)
        part = to_device(rows_of(batch, 0, min(batch_size(batch), 8)), device)
        settings = CaptureSettings(layers, encoding=encoding, keep=keep, tolerance=tolerance)
        prepared = prepare_capture(model, task or _SumOfOutputs(), part, settings)
    return LayerTable(tuple(kept_layer(keeping) for keeping in prepared.kept))


class _SumOfOutputs(Task):
    """Any number that depends on all of a model's answer."""

    def losses(self, model: nn.Module, batch: Any) -> torch.Tensor:
        """The sum of each sample's answer `[B]`"""
        takes_labels = isinstance(batch, tuple | list) and len(batch) >= 2
        inputs = batch[:-1] if takes_labels else batch
        if isinstance(batch, Mapping):
            inputs = {name: value for name, value in batch.items() if name != "labels"}
        answer = logits_of(call(model, inputs))
        return answer.reshape(batch_size(batch), -1).sum(1)


def _cells(row: KeptLayer | ListedLayer) -> tuple[str, ...]:
    if isinstance(row, ListedLayer):
        return (row.name, row.type, str(row.parameters), "", "", "", "", "")
    return (
        row.name,
        row.type,
        str(row.parameters),
        f"{row.positions:.4g}",
        format_bytes(row.factor_bytes),
        format_bytes(row.dense_bytes),
        row.storage,
        format_bytes(row.row_bytes),
    )
