"""The table that a user picks layers from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, overload

from gradkeep._budgets import format_bytes
from gradkeep.capturing import _select
from gradkeep.capturing._batches import moved, rows_of, size_of
from gradkeep.capturing._captured import KeptLayer, kept_layer
from gradkeep.capturing._mode import in_mode
from gradkeep.capturing._prepare import Wishes, prepare
from gradkeep.capturing._task import Task, call, logits_of
from gradkeep.capturing._units import units_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch
    from torch import nn

    from gradkeep.capturing._mode import Mode
    from gradkeep.capturing._prepare import Plan
    from gradkeep.capturing._select import Selection
    from gradkeep.store import Encoding

_TRIED = 8


@dataclass(frozen=True, slots=True)
class ListedLayer:
    """A layer of a model of which only the parameters are known."""

    name: str
    type: str
    parameters: int


@dataclass(frozen=True, slots=True)
class Layers(Sequence["KeptLayer | ListedLayer"]):
    """The layers of a model; shows itself as a table."""

    rows: tuple[KeptLayer | ListedLayer, ...]

    @overload
    def __getitem__(self, index: int) -> KeptLayer | ListedLayer: ...
    @overload
    def __getitem__(self, index: slice) -> Layers: ...
    def __getitem__(self, index: int | slice) -> KeptLayer | ListedLayer | Layers:
        return Layers(self.rows[index]) if isinstance(index, slice) else self.rows[index]

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[KeptLayer | ListedLayer]:
        return iter(self.rows)

    def __repr__(self) -> str:
        head = ("layer", "type", "parameters", "T", "factors", "dense", "kept as", "bytes")
        table = [head, *(_cells(row) for row in self.rows)]
        kept = [row for row in self.rows if isinstance(row, KeptLayer)]
        if kept:
            factors = format_bytes(sum(row.factor_bytes for row in kept))
            dense = format_bytes(sum(row.dense_bytes for row in kept))
            total = format_bytes(sum(row.row_bytes for row in kept))
            count = str(sum(row.parameters for row in kept))
            table.append(("per sample", "", count, "", factors, dense, "", total))
        else:
            table = [cells[:3] for cells in table]
        widths = [max(len(cells[at]) for cells in table) for at in range(len(table[0]))]
        lines = [
            "  ".join(
                cell.ljust(width) if at in (0, 1, 6) else cell.rjust(width)
                for at, (cell, width) in enumerate(zip(cells, widths, strict=True))
            ).rstrip()
            for cells in table
        ]
        return "\n".join(lines)


def layers(
    model: nn.Module,
    batch: Any = None,
    *,
    task: Task | None = None,
    select: Selection | Sequence[str | type] = None,
    encoding: Encoding = "plain",
    plan: Plan = None,
    tolerance: float = 0.0,
    mode: Mode | None = "eval",
) -> Layers:
    """The layers of a model with their sizes; with a batch also what each would take to keep.

    A batch is run through the model once or twice: T (positions per sample), bytes of factors and
    of the dense gradient per sample, and the way that `gk.capture` would choose. `select` takes
    names, globs and types, as `layers=` does there.

    >>> import torch
    >>> model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.Linear(32, 10))
    >>> layers(model)
    layer  type    parameters
    0      Linear        2080
    1      Linear         330
    >>> layers(model, torch.randn(2, 64))[0].storage
    'factors'
    """
    if batch is None:
        units = _select.selected(units_of(model), select)
        return Layers(tuple(ListedLayer(unit.name, unit.type, unit.size) for unit in units))
    with in_mode(model, mode):
        device = next(model.parameters()).device
        part = moved(rows_of(batch, 0, min(size_of(batch), _TRIED)), device)
        wishes = Wishes(select, encoding=encoding, plan=plan, tolerance=tolerance)
        prepared = prepare(model, task or _Sum(), part, wishes)
    return Layers(tuple(kept_layer(keeping) for keeping in prepared.kept))


class _Sum(Task):
    """Any number that depends on all of a model's answer."""

    def losses(self, model: nn.Module, batch: Any) -> torch.Tensor:
        """The sum of each sample's answer `[B]`"""
        takes_labels = isinstance(batch, tuple | list) and len(batch) >= 2
        inputs = batch[:-1] if takes_labels else batch
        if isinstance(batch, Mapping):
            inputs = {name: value for name, value in batch.items() if name != "labels"}
        answer = logits_of(call(model, inputs))
        return answer.reshape(size_of(batch), -1).sum(1)


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
