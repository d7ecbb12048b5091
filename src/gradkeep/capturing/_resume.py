"""Checks of rows: their identity, that they are repeatable, and that they are those of an earlier run.

Contents: the fingerprint of every delivered row must be the stored one. Model and task: some stored rows
are recomputed and compared before any row is added. While a capture runs, some rows run without their batch.
"""

from __future__ import annotations

import random
import re
import sys
import sysconfig
import time
import types
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch
import xxhash
from torch import nn

from gradkeep.capturing._batches import (
    batch_size,
    format_ids,
    leaves,
    map_leaves,
    rows_of,
    to_device,
)
from gradkeep.capturing._proofs import backward_per_layer, moved_rows_error, random_weights
from gradkeep.capturing._readiness import device_of, has_active_dropout, in_double, stored_weight
from gradkeep.capturing._storage import Adjustments, storage_of
from gradkeep.capturing.tasks._tasks import measure_losses
from gradkeep.errors import CaptureError, NotSealedError
from gradkeep.factors import form_from_fields
from gradkeep.factors._bits import Bits
from gradkeep.factors._outer import Outer
from gradkeep.factors._tied import places_array
from gradkeep.query._gradients import gradients_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from torch import Tensor, nn

    from gradkeep.capturing._readiness import Mode
    from gradkeep.capturing._rows import RowArrays, RowMaker
    from gradkeep.capturing._tracer import Traced, Tracer
    from gradkeep.capturing.rules._rules import LayerUnit
    from gradkeep.capturing.tasks._tasks import Task
    from gradkeep.factors._form import AnyForm, GradientRows, Storage
    from gradkeep.store import Block, CaptureKey, Store

    Projection = Callable[[LayerUnit, Tensor], Tensor]
    Ids = np.ndarray[Any, np.dtype[np.int64]]
    Digests = np.ndarray[Any, np.dtype[np.uint64]]

_IGNORED_NAMES = re.compile(
    r"device|path|name|dtype|implementation|version|loss|cache|dropout|forward"
)
_CONFIGURATION_NAMES = re.compile(r"act|eps|norm|scal|slope|temperature")
_INSTALLED = tuple(
    {sysconfig.get_paths()[kind] for kind in ("purelib", "platlib", "stdlib", "platstdlib")}
)


@dataclass(frozen=True, slots=True, eq=False)
class RowFingerprints:
    """The fingerprint `[N]` of each known row, ordered by id.

    >>> known = RowFingerprints.of(np.array([7, 3]), np.array([70, 30], np.uint64))
    >>> known.changed(np.array([3, 7, 9]), np.array([30, 71, 90], np.uint64))
    array([7])
    """

    ids: Ids
    digests: Digests

    @classmethod
    def of(cls, ids: Any, digests: Any) -> Self:
        """Build from rows in any order."""
        order = np.argsort(ids, kind="stable")
        return cls(np.asarray(ids, np.int64)[order], np.asarray(digests, np.uint64)[order])

    def __len__(self) -> int:
        return len(self.ids)

    def known(self, ids: Ids) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """Return a mask `[B]` of the rows that are known."""
        at = np.searchsorted(self.ids, ids)
        inside = at < len(self.ids)
        mask = np.zeros(len(ids), np.bool_)
        mask[inside] = self.ids[at[inside]] == ids[inside]
        return mask

    def changed(self, ids: Ids, digests: Digests) -> Ids:
        """Return the ids of known rows with another fingerprint."""
        known = self.known(ids)
        before = self.digests[np.searchsorted(self.ids, ids[known])]
        changed: Ids = ids[known][before != digests[known]]
        return changed


def changed_rows_error(ids: Ids, *, path: str, known: int) -> CaptureError:
    """Build the error about rows whose contents have changed."""
    return CaptureError(
        f"the data of sample {ids[0]} has changed since this capture was started",
        code="capture.rows_changed",
        path=path,
        found=f"other inputs or labels in {len(ids)} of {known} rows: {format_ids(ids)}",
        fix=f"Use the same data in the same order, {_ANOTHER}",
    )


_ANOTHER = "store these rows as another capture with name=, or delete the old one first."
_VALUES = ("loss", "output", "slope", "label")
_WITHIN = {"float32": 1e-3, "float64": 1e-7}
"""Relative errors of values that are computed twice, in batches of other sizes."""


@dataclass(frozen=True, slots=True, eq=False)
class EarlierRun:
    """Rows of an earlier run."""

    key: CaptureKey
    block: Block
    sealed: bool
    contents: RowFingerprints
    """Fingerprint of each stored sample."""

    @property
    def storages(self) -> dict[str, Storage]:
        """Storage of each layer, which a resumed run must use too."""
        layers = self.block.schema.layers
        return {layer.name: storage_of(form_from_fields(layer.form)) for layer in layers}

    @property
    def adjustments(self) -> Adjustments:
        """Adjustments that later batches of the earlier run needed."""
        return Adjustments.from_text(str(self.block.schema.fingerprints.get("adjustments", "")))

    @property
    def placed(self) -> bool:
        """True if layers store which tokens their positions are."""
        forms = (form_from_fields(layer.form) for layer in self.block.schema.layers if layer.form)
        return any(places_array(form) in self.block.names for form in forms)

    def check(self, ids: np.ndarray[Any, Any], digests: np.ndarray[Any, Any]) -> None:
        """Raise if a stored sample has other contents now."""
        changed = self.contents.changed(ids, digests)
        if len(changed):
            raise changed_rows_error(changed, path=self.block.path, known=len(self.block))

    def check_all(self, delivered: Iterable[tuple[Any, Any, Any]], maker: RowMaker | None) -> None:
        """Raise unless ids, fingerprints and batches of a whole pass are those of the store.

        All rows are compared before the error is raised, so that it can name them.
        """
        changed, new = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
        seen = 0
        proof = None if maker is None else RecomputeCheck(self, maker)
        for ids, digests, batch in delivered:
            changed.append(self.contents.changed(ids, digests))
            new.append(ids[~self.contents.known(ids)])
            seen += len(ids)
            if proof is not None and not len(changed[-1]):
                proof.check_batch(ids, batch)
        other, added = np.concatenate(changed), np.concatenate(new)
        if len(other):
            raise changed_rows_error(other, path=self.block.path, known=len(self.block))
        left_out = self.block.manifest.next_row - len(self.block)
        if len(added) > left_out or seen - len(added) < len(self.block):
            raise CaptureError(
                "these are not the rows of the finished capture",
                code="capture.other_rows",
                path=self.block.path,
                found=f"{seen} rows, of which {len(added)} are new {format_ids(added)}".rstrip(),
                expected=f"the {len(self.block)} stored rows",
                fix=f"Use the same data, {_ANOTHER}",
            )


def find_earlier_run(store: Store, key: CaptureKey) -> EarlierRun | None:
    """Find the stored rows of this capture; None if there are none."""
    if not store.has(key):
        return None
    try:
        block, sealed = store.read(key), True
    except NotSealedError:
        block, sealed = store.read(key, live=True), False
    known = "example" in block.names
    contents = RowFingerprints.of(*(block.ids, block.column("example")) if known else ([], []))
    return EarlierRun(key, block, sealed, contents)


class RecomputeCheck:
    """Recompute some stored rows as they are delivered, and compare them with the store."""

    def __init__(self, earlier: EarlierRun, maker: RowMaker) -> None:
        self._earlier, self._maker = earlier, maker
        ids = earlier.block.ids
        # Eight rows, from the first to the last.
        places = np.linspace(0, len(ids) - 1, min(len(ids), 8)).round().astype(int)
        self._places = {int(ids[place]): int(place) for place in places}

    def check_batch(self, ids: np.ndarray[Any, Any], batch: Any) -> None:
        """Recompute the chosen rows of the batch; raise if they differ from the store."""
        for row in np.flatnonzero(np.isin(ids, list(self._places))).tolist():
            number = int(ids[row])
            arrays = self._maker.make(rows_of(batch, row, row + 1), alone=True)
            other = self._differences(self._places.pop(number), arrays)
            if other:
                raise CaptureError(
                    f"sample {number} differs from the stored row: the model or the task has changed",
                    code="capture.function_changed",
                    path=self._earlier.block.path,
                    found="; ".join(other[:6]),
                    fix=f"Use the code of the earlier run, {_ANOTHER}",
                )

    def _differences(self, place: int, arrays_now: RowArrays) -> list[str]:
        block = self._earlier.block
        differences = []
        names = [name for name in _VALUES if name in block.names and name in arrays_now.values]
        stored = block.read_rows(np.array([place]), names)
        for name in names:
            was, now = np.asarray(stored[name])[0], np.asarray(arrays_now.values[name])[0]
            near = _WITHIN.get(str(now.dtype), 0.0)
            if not np.allclose(now, was, rtol=near, atol=near / 10, equal_nan=True):
                differences.append(f"{name} {now:.6g}, stored {was:.6g}")
        if not arrays_now.layers:
            return differences
        of: Any = "output" if block.schema.fingerprints.get("of") == "output" else "loss"
        gradients = gradients_of(block, self._earlier.key, None, of)
        before = gradients.rows([place]).factors
        for name, form in gradients.forms.items():
            arrays = [block.schema.array(array) for array in form.arrays]
            encoded = any(array.encoding != "plain" for array in arrays)
            was, now = _gradient(form, before[name]), _gradient(form, arrays_now.layers[name])
            near = 10 * _WITHIN.get(arrays[0].dtype, 1e-3)
            near = max(near, 3e-2 if encoded else 0.0, _recompute_error(form))
            error, scale = float((now - was).norm()), float(was.norm())
            if not error <= near * scale:
                differences.append(f"gradient of {name} off by {error / max(scale, 1e-300):.1%}")
        return differences


def _recompute_error(form: AnyForm) -> float:
    """Return the relative error of a row that is computed a second time."""
    if isinstance(form, Outer):
        # Another cut of the rank may err in the other direction.
        return {0: 3 * form.error, 16: 0.4}.get(form.levels, 0.9)
    if isinstance(form, Bits):  # coordinates near a bound between levels may cross it
        return 0.2 if form.group else {1: 0.2, 4: 0.1, 8: 0.03}.get(form.bits, 0.01)
    return 0.0


@torch.no_grad()
def _gradient(form: AnyForm, rows: GradientRows) -> torch.Tensor:
    """Return the whole gradient `[P]` of a single row."""
    wide = rows.widened()
    return form.weighted_sum(wide, wide.example.new_ones(1, 1))[0].double().cpu()


def fingerprint_weights(model: nn.Module) -> str:
    """Return a digest of all parameters and buffers with their names, shapes and dtypes."""
    digest = xxhash.xxh3_128()
    for name, tensor in sorted(model.state_dict(keep_vars=True).items()):
        if not isinstance(tensor, torch.Tensor):
            continue
        value = stored_weight(tensor)
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}\n".encode())
        plain = value.detach().cpu().contiguous().reshape(-1)
        digest.update(plain.view(torch.uint8).numpy().data if plain.numel() else b"")
    return digest.hexdigest()


def fingerprint_function(model: nn.Module) -> str:
    """Return a digest that changes when a model with the same weights computes another function.

    It begins with the version of Python, whose compiler decides which names code refers to.
    """
    digest = xxhash.xxh3_128()
    for path, module in model.named_modules():
        digest.update(f"{path} {type(module).__qualname__}\n".encode())
        for line in _describe_module(module):
            digest.update(f"  {line}\n".encode())
    return f"{sys.version_info.major}.{sys.version_info.minor} {digest.hexdigest()}"


def _describe_module(module: nn.Module) -> Iterator[str]:
    for name, value in sorted(vars(module).items()):
        if name.startswith("_") or _IGNORED_NAMES.search(name.lower()):
            continue
        text = _value(value)
        if text is not None:
            yield f"{name} {text}"
        elif hasattr(value, "__dict__") and not isinstance(value, type) and not callable(value):
            yield from _configuration(name, value)
    for function in _own_functions(type(module)):
        yield f"{function.__name__} {' '.join(_names(function.__code__))}"


def _value(value: Any) -> str | None:
    """Describe a setting; None for flags, counters, sizes, tensors and modules."""
    if isinstance(value, float | str):
        return repr(value)
    if isinstance(value, types.FunctionType):
        own = " ".join(_names(value.__code__)) if _is_own(value) else ""
        return f"{value.__qualname__} {own}"
    if isinstance(value, types.BuiltinFunctionType):
        return str(value.__qualname__)
    return None


def _configuration(name: str, value: Any) -> Iterator[str]:
    for key, inner in sorted(vars(value).items(), key=lambda item: str(item[0])):
        key = str(key).lower()
        if _CONFIGURATION_NAMES.search(key) and not _IGNORED_NAMES.search(key):
            text = _value(inner)
            if text is not None:
                yield f"{name}.{key} {text}"


def _own_functions(kind: type) -> Iterator[types.FunctionType]:
    """Yield the functions of a class and its bases that no installed package defines."""
    for base in kind.__mro__:
        for name, function in sorted(vars(base).items()):
            is_function = isinstance(function, types.FunctionType) and name != "__init__"
            if is_function and _is_own(function):
                yield function


def _is_own(function: types.FunctionType) -> bool:
    return not function.__code__.co_filename.startswith(_INSTALLED)


def _names(code: types.CodeType) -> list[str]:
    """Return the names and float constants that code refers to, inner functions included."""
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= set(_names(constant))
        elif isinstance(constant, float):
            names.add(repr(constant))
    return sorted(names)


def run_rows(
    model: nn.Module, task: Task, batch: Any, rows: slice, tracer: Tracer | None = None
) -> tuple[Tensor, Tensor | None]:
    """Run some rows of a batch without the others.

    Returns their losses and, with a tracer, the tensor that it differentiates.
    """
    some = to_device(rows_of(batch, rows.start, rows.stop), device_of(model))
    if tracer is None:
        return measure_losses(task, model, some).losses.detach(), None
    measured, target = tracer.measure(some)
    return measured.losses.detach(), target


def check_repeatable(model: nn.Module, task: Task, batch: Any, mode: Mode | None) -> bool:
    """Return True if a second pass gives the same losses; raise if it must and does not, or if rows mix.

    Gradients are stored under a row's id alone. A model that counts its calls, carries a state from batch
    to batch or draws at random gives the same row another gradient each time; one that uses statistics
    of the batch gives another one beside other rows. Cost: three forward passes of a few rows.
    """
    if has_active_dropout(model):
        return False  # the user chose train mode
    count = min(4, batch_size(batch))
    one, _ = run_rows(model, task, batch, slice(0, count))
    if one.shape != (count,):
        return True  # raises where rows are computed
    second, _ = run_rows(model, task, batch, slice(0, count))
    # Tolerances relative to the mean loss: 1e-3 for a second pass, 1e-2 beside other rows. Matrix
    # products of other sizes round differently, in models that use 16 bits by up to 1%.
    if not _is_close(one, second, 1e-3):
        if mode == "train":
            return False
        raise CaptureError(
            "the model gives the same samples different losses in a second pass",
            code="capture.not_repeatable",
            found="a counter, a running mean, hidden states, or random numbers",
            fix="Switch it off, or pass mode='train' to store the gradients of a single pass.",
        )
    few = min(2, count - 1)
    if few and not _is_close(one[:few], run_rows(model, task, batch, slice(0, few))[0], 1e-2):
        raise CaptureError(
            "a sample's loss depends on the other samples of its batch",
            code="capture.samples_mix",
            fix="Capture in eval mode (mode='eval'), without batch statistics.",
        )
    return True


def _is_close(one: Tensor, other: Tensor, tolerance: float) -> bool:
    one, other = one.double(), other.double()
    limit = tolerance * float(one.abs().nan_to_num().mean()) + 1e-6
    return one.shape == other.shape and bool(
        torch.allclose(one, other, rtol=tolerance, atol=limit, equal_nan=True)
    )


@dataclass(slots=True, eq=False)
class RowAudit:
    """Check some rows of a capture as they are computed; without a tracer, their losses only."""

    model: nn.Module
    task: Task
    device: torch.device
    tracer: Tracer | None = None
    """Computes gradients; None if only losses are stored."""
    project: Projection | None = None
    """Maps a unit's gradients `[K, P]` to what is stored; None for the identity."""
    checks: int = 0
    """Number of checks so far."""
    seconds: float = 0.0
    """Time spent in checks."""
    is_last: bool = False
    """Set for the last batch, which is always checked."""
    _total: float = 0.0
    _batches: int = 0
    _odd: set[tuple[Any, ...]] = field(default_factory=set)
    _slack: float = 1.0
    _random: random.Random = field(default_factory=lambda: random.Random(0))

    def check_batch(
        self, ids: Any, batch: Any, losses: Tensor, traced: Traced | None, seconds: float
    ) -> None:
        """Check some rows of a batch that took `seconds` to capture, if a check is due."""
        self._total += seconds
        count = self._due(batch)
        if not count:
            return
        started = time.perf_counter()
        rows = batch_size(batch)
        start = self._random.randrange(rows - count + 1)
        try:
            self._check(ids, batch, losses, traced, slice(start, start + count))
        finally:
            self.checks += 1
            self.seconds += time.perf_counter() - started

    def _due(self, batch: Any) -> int:
        """Return the number of rows to check; 0 for the first batch, which is proved."""
        rows, self._batches = batch_size(batch), self._batches + 1
        shape = tuple(x.shape for x in leaves(batch) if isinstance(x, torch.Tensor | np.ndarray))
        is_new = shape not in self._odd and len(self._odd) <= 8
        self._odd |= {shape} if is_new else set()
        is_last, self.is_last = self.is_last, False
        if self._batches == 1:
            return 0
        # A sixteenth of the rows, at most 8.
        few = max(1, min(8, rows // 16))
        if is_new:
            # A batch with a new shape: at least 4 rows, for the first 8 shapes.
            return max(few, min(rows, 4))
        # Other checks may take 1% of the time of the capture.
        allowed = max(0.002, 0.01 * self._total)
        each = self.seconds / max(1, self.checks)
        within = self.seconds + each <= allowed
        return few if is_last or self._batches == 2 or within else 0

    def _check(
        self, ids: Any, batch: Any, losses: Tensor, traced: Traced | None, part: slice
    ) -> None:
        differences = self._differences(batch, losses, traced, part)
        if differences.row is None and not differences.layers:
            return
        confirmed = self._differencesin_double(batch, part, differences)
        if confirmed.row is not None:
            raise CaptureError(
                f"the loss of sample {int(ids[part.start + confirmed.row])} changes without its batch",
                code="capture.samples_mix_later",
                found="an overflowing capacity, batch statistics, or a model that changes",
                fix="Switch it off while you capture, or capture with batches of one row.",
            )
        if confirmed.layers:
            raise moved_rows_error(confirmed.layers, int(ids[part.start]))
        self._slack *= 10  # the difference was rounding

    def _tolerance(self) -> float:
        """Return the relative error of a pass over some rows in the model's precision."""
        proofs = None if self.tracer is None else self.tracer.proofs
        return 1e-3 if proofs is None or proofs.tolerance >= 1e-3 else 10 * proofs.tolerance

    def _differences(
        self, batch: Any, losses: Tensor, traced: Traced | None, part: slice, within: float = 0.0
    ) -> _Differences:
        tracer = None if traced is None else self.tracer
        alone, target = run_rows(self.model, self.task, batch, part, tracer)
        differences = _compare_losses(losses, alone, part, within or 1e-3)
        if tracer is None or traced is None or target is None:
            return differences
        near = within or self._slack * self._tolerance()
        weights = random_weights(target, seed=1)

        def compare(unit: LayerUnit, truth: Tensor) -> None:
            piece = traced.pieces[unit]
            rows = piece.rows.take(part.start, part.stop).widened()
            own = piece.form.weighted_sum(rows, weights.unsqueeze(0).to(rows.example))[0]
            expected = truth if self.project is None else self.project(unit, truth.unsqueeze(0))[0]
            error, scale = float((own.to(expected) - expected).norm()), float(expected.norm())
            if not error <= near * max(scale, float(own.norm())):
                differences.layers.append(unit.name)

        units = [unit for unit in tracer.units if unit.rule != "whole"]
        for unit in backward_per_layer((target * weights).sum(), units, compare):
            piece = traced.pieces[unit]  # the rows alone do not use it
            lengths = piece.form.squared_norms(piece.rows.take(part.start, part.stop).widened())
            if bool((lengths > 0).any()):
                differences.layers.append(unit.name)
        return differences

    def _differencesin_double(
        self, batch: Any, part: slice, differences: _Differences
    ) -> _Differences:
        """Compare again in double precision, where rounding does not matter."""
        if next(self.model.parameters()).dtype != torch.float64:
            try:
                with in_double(self.model):
                    return self._recapture(map_leaves(batch, _to_double), part, 1e-6)
            except CaptureError:
                raise
            except (RuntimeError, TypeError, ValueError, AttributeError):
                pass  # the model uses a precision of its own
        elif self._tolerance() < 1e-3:
            return differences
        return self._recapture(batch, part, 0.3)  # parts of the model compute with fewer bits

    def _recapture(self, batch: Any, part: slice, within: float) -> _Differences:
        """Capture the whole batch again, and compare some of its rows with the same rows run alone."""
        if self.tracer is None:
            losses, _ = run_rows(self.model, self.task, batch, slice(0, batch_size(batch)))
            return self._differences(batch, losses, None, part, within)
        traced = self.tracer.run(batch, device=self.device)
        project, self.project = self.project, None
        try:
            return self._differences(batch, traced.measured.losses.detach(), traced, part, within)
        finally:
            self.project = project


@dataclass(slots=True, eq=False)
class _Differences:
    """Rows and layers that differ when some rows run alone."""

    row: int | None
    """First row whose loss differs."""
    layers: list[str] = field(default_factory=list)


def _compare_losses(batch: Tensor, alone: Tensor, part: slice, within: float) -> _Differences:
    batch, alone = batch.detach().double(), alone.double()
    size = float(batch.abs().nan_to_num().mean())
    wrong = (batch[part] - alone).abs() > within * (alone.abs() + 0.1 * size) + 1e-12
    return _Differences(int(wrong.int().argmax()) if wrong.any() else None)


def change_of_first_rows(
    before: Mapping[str, Any], after: Mapping[str, Any], within: float
) -> str | None:
    """Describe how losses or norms of the first rows differ from before; None if they do not."""
    for name in {"loss", "norm"} & before.keys():
        was, now = (torch.as_tensor(values[name]) for values in (before, after))
        if not _is_close(was, now, within):
            return f"{name} {now.tolist()}, not {was.tolist()}"
    return None


def _to_double(leaf: Any) -> Any:
    if isinstance(leaf, np.ndarray) and leaf.dtype == np.float32:
        return leaf.astype(np.float64)
    is_single = isinstance(leaf, torch.Tensor) and leaf.dtype == torch.float32
    return leaf.double() if is_single else leaf
