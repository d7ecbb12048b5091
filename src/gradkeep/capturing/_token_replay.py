"""Running chosen rows again, to tell their tokens apart where only whole rows are kept."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from gradkeep.capturing._batches import batch_size, digests, rows_of, to_device
from gradkeep.capturing._calls import fill
from gradkeep.capturing._capture import task_batches
from gradkeep.capturing._columns import without_columns
from gradkeep.capturing._fingerprints import RowFingerprints
from gradkeep.capturing._first_batch import CaptureSettings, prepare_capture
from gradkeep.capturing._mode import device_of, draws_at_random, in_mode
from gradkeep.capturing._readiness import ready, uncompiled
from gradkeep.capturing._weights import fingerprint_weights
from gradkeep.capturing.coordinates._basis import load_basis
from gradkeep.capturing.rules._positions import token_products
from gradkeep.capturing.rules._units import watched
from gradkeep.capturing.tasks._task import Task
from gradkeep.errors import CaptureError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    import numpy as np
    from torch import Tensor, nn

    from gradkeep.capturing._calls import LayerCall
    from gradkeep.capturing._columns import Columns
    from gradkeep.capturing._loader import Batches, Ids
    from gradkeep.capturing._tracer import Tracer
    from gradkeep.capturing.coordinates._basis import CaptureBasis
    from gradkeep.capturing.rules._units import LayerUnit
    from gradkeep.factors._form import AnyForm
    from gradkeep.query import Gradients
    from gradkeep.store import Store

_SCRATCH = 64 << 20


@dataclass(frozen=True, slots=True, eq=False)
class ReplayedTokens:
    """What each token of N rows adds to their products with K directions."""

    values: Tensor
    """`[K, N, T]` float32, zeros behind shorter rows"""
    rest: Tensor
    """`[K, N]` float32: layers without positions"""
    lengths: Tensor
    """`[N]` int64: from which token on nothing is added"""
    layers: tuple[str, ...]
    rest_layers: tuple[str, ...]


def replay_tokens(
    store: Store,
    train: Gradients,
    asked: Mapping[str, Tensor],
    model: nn.Module,
    loader: Iterable[Any],
    *,
    task: Task,
    train_ids: np.ndarray[Any, np.dtype[np.int64]],
    ids: Ids | None = None,
    columns: Columns | None = None,
) -> ReplayedTokens:
    """Products of chosen rows' tokens with queries, from a second run of those rows.

    `asked` gives for each layer of the capture K dense directions `[K, P]`, or, where it is kept as
    coordinates, those of the queries `[K, size]`, which are taken back through the basis. The loader
    delivers the captured rows, in any batches, with `ids` and `columns` as they were captured; what has other weights or contents than the capture is
    refused. Cost: one pass forward and back over the chosen rows, 2 K T P operations for each, and
    all K directions at once.
    """
    _check_task(train, task)
    if not len(train_ids):
        raise CaptureError("no training rows were asked about", fix="pass ids of some rows")
    facts: Any = train.block.schema.fingerprints
    model, mode = uncompiled(model), facts.get("mode")
    with ready(model), in_mode(model, mode):
        if fingerprint_weights(model) != train.weights:
            raise CaptureError(
                f"the model does not have the weights that {train.key.split} was captured at",
                found=f"checkpoint {train.key.checkpoint}",
                fix="load that checkpoint into the model first",
            )
        if draws_at_random(model):
            raise CaptureError(
                f"{train.key.split} was captured in train mode, with numbers drawn at random",
                fix="rows come out otherwise each time: capture with mode='eval'",
            )
        batches = task_batches(loader, model, task, mode, ids=ids, columns=columns)
        rows = _CapturedRows(train, batches)
        first, device = rows.first(), device_of(model)
        probe = to_device(rows_of(first, 0, min(2, batch_size(first))), device)
        prepared = prepare_capture(model, task, probe, CaptureSettings(of=facts.get("of")))
        units = [unit for unit in prepared.tracer.units if unit.name in train.forms]
        _check_layers(train, units)
        forms = {unit: prepared.pieces[unit].form for unit in units}
        replay = _Replay(
            dataclasses.replace(prepared.tracer, units=units),
            _directions(store, train, asked, forms, device),
            whole=train.of == "loss",
        )
        return replay.over(rows.chosen(train_ids), train_ids, device)


class _Replay:
    """Runs rows and adds up what their tokens carry."""

    def __init__(
        self, tracer: Tracer, directions: Mapping[LayerUnit, Tensor], *, whole: bool
    ) -> None:
        self.tracer, self.directions = tracer, directions
        self.whole = whole
        """Whether the gradients of losses are asked for, whatever was captured."""
        self.placed: dict[str, None] = {}
        self.rest: dict[str, None] = {}

    def over(
        self,
        rows: Iterable[tuple[list[int], Any]],
        ids: np.ndarray[Any, np.dtype[np.int64]],
        device: torch.device,
    ) -> ReplayedTokens:
        """All rows, wherever they stand among the wanted ones."""
        parts: dict[int, tuple[Tensor, Tensor]] = {}
        for numbers, batch in rows:
            values, rest = self._batch(to_device(batch, device))
            for at, number in enumerate(numbers):
                parts[number] = (values[:, at].float().cpu(), rest[:, at].float().cpu())
        found = [parts[int(number)] for number in ids]
        longest = max(values.shape[1] for values, _ in found)
        padded = [torch.nn.functional.pad(v, (0, longest - v.shape[1])) for v, _ in found]
        values = torch.stack(padded, 1)
        places = torch.arange(1, longest + 1)
        return ReplayedTokens(
            values=values,
            rest=torch.stack([rest for _, rest in found], 1),
            lengths=((values != 0).any(0) * places).amax(1),
            layers=tuple(self.placed),
            rest_layers=tuple(self.rest),
        )

    def _batch(self, batch: Any) -> tuple[Tensor, Tensor]:
        """Products `[K, B, T]` of tokens and `[K, B]` of what has none."""
        rows, tracer = batch_size(batch), self.tracer
        measured, target, calls = tracer.forward(watched(list(tracer.units)), batch)
        if measured.tokens is None:
            raise CaptureError(
                "the task has no tokens to tell apart",
                found=tracer.task.describe(),
                fix="gk.LanguageModelling, or a task whose measure gives tokens [B, T]",
            )
        fill(calls, target)
        tokens = measured.tokens.shape[1]
        count = len(next(iter(self.directions.values())))
        values = target.new_zeros(count, rows, tokens, dtype=torch.float64)
        rest = target.new_zeros(count, rows, dtype=torch.float64)
        left: list[LayerUnit] = []
        with torch.no_grad():
            for unit in tracer.units:
                own = [c for m in dict.fromkeys(unit.modules) for c in calls if c.module is m]
                found = self._placed(unit, own, rows, tokens)
                if found is None:
                    left.append(unit)
                else:
                    values += found
                    self.placed[unit.name] = None
        if left:
            traced = dataclasses.replace(tracer, units=left).run(batch)
            with torch.no_grad():
                for unit in left:
                    piece = traced.pieces[unit]
                    kept = piece.rows.widened()
                    moved = self.directions[unit].to(kept.example)
                    rest += piece.form.along(kept, moved, scratch=_SCRATCH)
                    self.rest[unit.name] = None
        slopes = tracer.loss_slopes(measured) if self.whole else None
        if slopes is not None:
            values, rest = values * slopes.unsqueeze(1), rest * slopes
        return values, rest

    def _placed(
        self, unit: LayerUnit, calls: list[LayerCall], rows: int, tokens: int
    ) -> Tensor | None:
        if not calls:
            return None
        return token_products(unit, calls, self.directions[unit], rows=rows, tokens=tokens)


def _directions(
    store: Store,
    train: Gradients,
    asked: Mapping[str, Tensor],
    forms: Mapping[LayerUnit, AnyForm],
    device: torch.device,
) -> dict[LayerUnit, Tensor]:
    """Dense directions `[K, P]` of each layer."""
    bases = {form.basis for form in train.forms.values()} - {None}
    basis = _basis(store, str(next(iter(bases)))) if bases else None
    found = {}
    for unit, form in forms.items():
        values = asked[unit.name].to(device)
        if train.forms[unit.name].basis is not None and basis is not None:
            values = basis.layers[unit.name].pulled_back(form, values)
        found[unit] = values
    return found


def _basis(store: Store, fingerprint: str) -> CaptureBasis:
    for key in store.bases():
        found = load_basis(store, key)
        if found is not None and found.fingerprint == fingerprint:
            return found
    raise CaptureError(
        "the basis of these coordinates is not in the store",
        path=store.location,
        found=f"{len(store.bases())} others",
        fix="look for it in the store that the rows were captured in",
    )


class _CapturedRows:
    """The rows of a loader, of which those of the capture must have the contents that it saw."""

    def __init__(self, train: Gradients, batches: Batches) -> None:
        self._train, self._batches, self._known = train, batches, None
        if "example" in train.block.names:
            self._known = RowFingerprints.of(train.ids, train.block.column("example"))

    def first(self) -> Any:
        """The first batch."""
        own, batch = next(iter(self._batches))
        self._check(own, batch)
        return without_columns(batch)

    def chosen(self, ids: np.ndarray[Any, Any]) -> Iterator[tuple[list[int], Any]]:
        """Wanted rows with their ids, as many at a time as stand beside each other."""
        missing = {int(number) for number in ids}
        for own, batch in self._batches:
            self._check(own, batch)
            at = [row for row, number in enumerate(own.tolist()) if number in missing]
            missing -= {int(own[row]) for row in at}
            given = without_columns(batch)
            for start, stop in _runs(at):
                yield [int(own[row]) for row in range(start, stop)], rows_of(given, start, stop)
            if not missing:
                return
        raise CaptureError(
            "the loader does not deliver all rows that are asked about",
            found=f"no sample {sorted(missing)[:5]}",
            fix="give the loader that the rows were captured from",
        )

    def _check(self, own: np.ndarray[Any, Any], batch: Any) -> None:
        if self._known is None:
            return
        changed = self._known.changed(own, digests(batch))
        if len(changed):
            raise CaptureError(
                f"sample {changed[0]} is not what it was when {self._train.key.split} was captured",
                found="other contents under the same id",
                fix="give the loader of then, with loader_ids= and columns= as the capture had them",
            )


def _runs(at: list[int]) -> Iterator[tuple[int, int]]:
    """Consecutive numbers as `(start, stop)`."""
    begin = 0
    for end in range(1, len(at) + 1):
        if end == len(at) or at[end] != at[end - 1] + 1:
            yield at[begin], at[end - 1] + 1
            begin = end


def _check_task(train: Gradients, task: object) -> None:
    if not isinstance(task, Task):
        raise CaptureError(
            "task must be a gk.Task", found=type(task).__name__, fix="pass that of the capture"
        )
    captured = train.block.schema.fingerprints.get("task")
    if captured != task.describe():
        raise CaptureError(
            f"{train.key.split} was captured with another task",
            found=task.describe(),
            expected=str(captured),
        )


def _check_layers(train: Gradients, units: list[LayerUnit]) -> None:
    missing = sorted(set(train.forms) - {unit.name for unit in units})
    if missing:
        raise CaptureError(
            f"the model does not have layers that {train.key.split} was captured with",
            found=f"no {', '.join(missing[:4])}",
            fix="give the model of then",
        )
