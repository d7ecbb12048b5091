"""Cost of a capture before it runs: bytes per row, seconds and memory, from shapes and one timed sample."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import math
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from gradkeep.capturing._batches import batch_size, leaves, map_leaves, rows_of, to_device
from gradkeep.capturing._choice import (
    block_sizes,
    choose_side,
    count_coordinates,
    count_operations,
    count_pairs,
    default_layers,
    moment_bytes,
    moment_values,
)
from gradkeep.capturing._coordinates import coordinate_storage
from gradkeep.capturing._first_batch import (
    PreparedCapture,
    prepare_capture,
    requested_storages,
    rows_at_once,
    segment_bytes,
    segment_rows,
)
from gradkeep.capturing._proofs import candidate_rules, is_shared, product_uses
from gradkeep.capturing._readiness import LOW, device_of, in_mode, ready
from gradkeep.capturing._rows import GradientMaker
from gradkeep.capturing._storage import choose_storage
from gradkeep.capturing._tracer import LayerCall, Tracer, fill, use_call
from gradkeep.capturing.rules._layers import (
    LayerGradients,
    dense_gradients,
    linear_gradients,
    lookup_form,
    tied_pieces,
)
from gradkeep.capturing.rules._rules import (
    DENSE_RULES,
    HINT,
    LayerUnit,
    calls_by_module,
    calls_of,
    tensors,
    unit_gradients,
    units_of,
    watched_modules,
)
from gradkeep.capturing.rules._uses import find_products
from gradkeep.errors import CaptureError, GradkeepError
from gradkeep.factors._bits import PACKED
from gradkeep.factors._lookup import LookupRows
from gradkeep.query._engine import DEFAULT_BUDGET
from gradkeep.query._gradients import select_layers
from gradkeep.query._planner import FLOPS, WRITE
from gradkeep.store import Ragged

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from gradkeep.capturing._first_batch import CaptureSettings, Keep
    from gradkeep.capturing._readiness import Mode
    from gradkeep.capturing._rows import RowMaker
    from gradkeep.capturing._storage import LayerStorage
    from gradkeep.capturing.rules._uses import ProductUse
    from gradkeep.capturing.tasks._tasks import Measured, Task
    from gradkeep.factors._form import AnyForm
    from gradkeep.query._gradients import GradientOf

    Numbers = Mapping[int, torch.Tensor]
    """Real tensors of a batch, by the storages of the fake ones."""

_PROOF_PASSES = 4.0
_QUICK_SECONDS = 0.5
"""Seconds that proving the first rows may be predicted to take; above, only shapes are used."""
_TIMED_SECONDS = 1.5
"""Seconds that the timed pass may be predicted to take; longer sequences are cut."""


class PassWork(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Count the operations of one pass, forward and backward to the layers' outputs."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._weights = {_storage(parameter) for parameter in model.parameters()}
        self._saved: dict[int, torch.UntypedStorage] = {}
        self.flops = self.written = self.largest = 0.0
        """Operations, written values, and bytes of the largest written tensor."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in () if func.is_view else tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self.written += leaf.numel()
                self.largest = max(self.largest, leaf.numel() * leaf.element_size())
        return result

    @contextlib.contextmanager
    def counting(self) -> Iterator[None]:
        """Count operators, and the tensors that autograd saves, until the block ends."""
        hooks = torch.autograd.graph.saved_tensors_hooks(self._save, lambda tensor: tensor)
        with hooks, FlopCounterMode(display=False) as flops, self:
            yield
        self.flops += flops.get_total_flops()

    def _save(self, tensor: torch.Tensor) -> torch.Tensor:
        if _storage(tensor) not in self._weights:  # held, so that addresses are not reused
            self._saved[_storage(tensor)] = tensor.untyped_storage()
        return tensor

    @property
    def saved(self) -> float:
        """Bytes that autograd saves."""
        return sum(storage.nbytes() for storage in self._saved.values())

    @property
    def seconds(self) -> float:
        """Predicted seconds on one core of a server; each written value is accessed four times."""
        return self.flops / FLOPS + 4 * self.written * WRITE


@dataclass(frozen=True, slots=True, eq=False)
class ShapedCapture:
    """A capture whose tensors may have shapes but no values, and what is known of its speed."""

    prepared: PreparedCapture
    rows: int
    """Samples of the probe batch."""
    pass_seconds: float
    """Predicted seconds per row of a pass, forward and backward to the layers' outputs."""
    saved: float
    """Bytes per row that autograd saves."""
    largest: float
    """Bytes per row of the largest tensor that is written."""
    values: float
    """Bytes per row of values beside gradients, such as losses."""
    token_values: float
    """Bytes per row of token losses, which compressed captures do not store."""
    pace: float = 1.0
    """Measured seconds of a pass over the predicted ones."""
    measured_bytes: float | None = None
    """Measured bytes per row; None if no rows were computed."""
    measured_seconds: float = 0.0

    def rounded(self, prepared: PreparedCapture) -> ShapedCapture:
        """Return the same capture with its gradients stored in fewer bits."""
        measured = self.measured_bytes
        if measured is not None:
            measured += prepared.row_bytes - self.prepared.row_bytes
        return dataclasses.replace(self, prepared=prepared, measured_bytes=measured)

    @property
    def factor_bytes(self) -> int:
        """Bytes of the factors of the probe batch."""
        return sum(piece.rows.nbytes for piece in self.prepared.pieces.values())


def probe_capture(
    model: nn.Module,
    task: Task,
    batch: Any,
    settings: CaptureSettings,
    mode: Mode | None,
    *,
    hollow: bool,
) -> ShapedCapture:
    """Run the first samples if that is quick; else use shapes and time one short sample."""
    if settings.compressed is not None:
        settings = settings.exact
    part = rows_of(batch, 0, min(batch_size(batch), 16))
    shaped: ShapedCapture | None = None
    try:
        shaped = plan_shapes(model, task, part, settings, mode=mode)
    except GradkeepError:
        raise
    except Exception as error:
        # A model may branch on values, which fake tensors do not have.
        if hollow:
            raise CaptureError(
                "the model does not run on shapes alone",
                code="capture.needs_values",
                found=f"{type(error).__name__}: {str(error).splitlines()[0][:200]}",
                fix="Build the model and the batch with values, on the CPU.",
            ) from error
    if shaped is not None and hollow:
        return shaped
    with ready(model), in_mode(model, mode):
        if shaped is not None:
            seconds, held = shaped.rows * shaped.pass_seconds, shaped.rows * shaped.saved
            if seconds > _QUICK_SECONDS or held + shaped.factor_bytes > DEFAULT_BUDGET // 4:
                pace = measure_pace(model, task, part, settings.of, shaped.pass_seconds)
                return dataclasses.replace(shaped, pace=pace)
        device = device_of(model)
        own = to_device(part if shaped is not None else rows_of(part, 0, 2), device)
        prepared = prepare_capture(model, task, own, settings)
        shaped = measure_shapes(prepared, own) if shaped is None else shaped
        pace = measure_pace(model, task, own, settings.of, shaped.pass_seconds)
        maker = GradientMaker.of(prepared, watched={}, device=device)
        row_seconds, row_bytes = measure_rows(maker, own)
        # If it is quick, run as many rows at once as a capture does: batches have a fixed cost.
        many = min(batch_size(batch), int(_QUICK_SECONDS / 4 / max(row_seconds, 1e-6)), 256)
        if many > batch_size(own):
            own = to_device(rows_of(batch, 0, many), device)
            row_seconds, row_bytes = min(measure_rows(maker, own) for _ in range(3))
    shaped = dataclasses.replace(shaped, prepared=prepared, pace=pace)
    return dataclasses.replace(shaped, measured_bytes=row_bytes, measured_seconds=row_seconds)


def plan_shapes(
    model: nn.Module,
    task: Task,
    batch: Any,
    settings: CaptureSettings,
    *,
    mode: Mode | None = "eval",
) -> ShapedCapture:
    """Determine from shapes how each chosen layer is captured, and the cost of one pass.

    The weights may be on the meta device; real ones are not read. Nothing is proved against autograd. Models
    whose shapes depend on values, such as a branch on a value, raise an error of torch. Cost: the calls of one
    forward and two backward passes, without their arithmetic.
    """
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    hollow = _hollow_model(model, fake)
    fake_batch, numbers = _hollow_batch(batch, fake)
    units = select_layers(units_of(hollow), settings.layers, error=CaptureError, hint=HINT)
    tracer, work = Tracer(hollow, task, settings.of), PassWork(hollow)
    with in_mode(hollow, mode), fake:
        with work.counting():
            modules = [*watched_modules(units), *hollow.modules()]
            measured, target, calls = tracer.forward(modules, fake_batch)
        products = product_uses(units, calls)
        calls += map(use_call, find_products(target, products.values()))
        weights = tensors(units)
        reached = torch.autograd.grad(target.sum(), weights, retain_graph=True, allow_unused=True)
        with work.counting():
            fill(calls, target)
    gradients = dict(zip(weights, reached, strict=True))
    used = [unit for unit in units if any(gradients[w] is not None for w in unit.weights)]
    by_module, rows = calls_by_module(calls), batch_size(batch)
    with torch.no_grad():
        pieces = dict(
            _shaped_piece(hollow, unit, by_module, rows, numbers, products.get(unit))
            for unit in used
        )
    requested = requested_storages(list(pieces), settings.keep, {})
    # The rank within a tolerance depends on values: factors are an upper bound.
    requested = {
        unit: "factors" if storage == "low rank" else storage for unit, storage in requested.items()
    }
    layers = choose_storage(
        pieces,
        encoding=settings.encoding,
        requested=requested,
        tolerance=0.0,
        tokens=None if measured.tokens is None else measured.tokens.shape[1],
    )
    tracer = dataclasses.replace(tracer, units=tuple(pieces))
    return _shaped(PreparedCapture(tracer, tuple(layers), (), pieces), measured, work, rows)


def measure_shapes(prepared: PreparedCapture, batch: Any) -> ShapedCapture:
    """Measure the shapes of a prepared capture, in one pass over the batch."""
    tracer, work = prepared.tracer, PassWork(prepared.tracer.model)
    with work.counting():
        measured, target, calls = tracer.forward(watched_modules(tracer.units), batch)
        fill(calls, target)
    return _shaped(prepared, measured, work, batch_size(batch))


def _shaped(
    prepared: PreparedCapture, measured: Measured, work: PassWork, rows: int
) -> ShapedCapture:
    tokens = measured.tokens
    values = (measured.losses, measured.outputs, measured.slopes, measured.labels)
    sizes = [v.nbytes / len(v) for v in (*values, measured.predictions) if v is not None]
    return ShapedCapture(
        prepared,
        rows,
        pass_seconds=work.seconds / rows,
        saved=work.saved / rows,
        largest=work.largest / rows,
        values=20.0 + sum(sizes),  # id, fingerprint and norm take 20 bytes
        token_values=0.0 if tokens is None else 4.0 * tokens.numel() / rows + 8,
    )


def _hollow_model(model: nn.Module, mode: FakeTensorMode) -> nn.Module:
    """Copy a model with fake weights; real ones are neither copied nor read."""
    plain = [value for module in model.modules() for value in vars(module).values()]
    held = [v for v in (*model.buffers(), *plain) if isinstance(v, torch.Tensor)]
    with mode:
        fakes: dict[int, Any] = {id(tensor): _like(tensor) for tensor in held}
        for weight in model.parameters():
            fakes[id(weight)] = nn.Parameter(_like(weight), requires_grad=weight.requires_grad)
    return copy.deepcopy(model, fakes)


def _hollow_batch(batch: Any, mode: FakeTensorMode) -> tuple[Any, Numbers]:
    numbers: dict[int, torch.Tensor] = {}

    def hollow(leaf: Any) -> Any:
        if isinstance(leaf, np.ndarray) and leaf.dtype.kind in "biuf":
            leaf = torch.from_numpy(leaf)
        if not isinstance(leaf, torch.Tensor):
            return leaf
        with mode:
            fake = _like(leaf)
        if not leaf.is_meta:
            numbers[_storage(fake)] = leaf
        return fake

    return map_leaves(batch, hollow), numbers


def _like(tensor: torch.Tensor) -> torch.Tensor:
    # On the CPU, where tensors that a model creates are by default; 16 bits are widened to float32.
    dtype = torch.float32 if tensor.dtype in LOW else tensor.dtype
    return torch.empty(tensor.shape, dtype=dtype, device="cpu")


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _shaped_piece(
    model: nn.Module,
    unit: LayerUnit,
    calls: dict[nn.Module, list[LayerCall]],
    rows: int,
    numbers: Numbers,
    product: ProductUse | None,
) -> tuple[LayerUnit, LayerGradients]:
    """Return the unit with its rule, and the shapes of its gradients."""
    if is_shared(unit, calls, rows):
        own = calls_of(unit, calls)
        return dataclasses.replace(unit, axis="shared"), _lookup(unit, own, rows, {}, shared=True)
    for rule in candidate_rules(model, unit, calls, rows=rows, product=product):
        if rule.rule in DENSE_RULES:
            break
        own = calls_of(rule, calls)
        looked = [call for call in own if isinstance(call.module, nn.Embedding)]
        with contextlib.suppress(RuntimeError, TypeError, ValueError, IndexError):
            if rule.rule == "embedding":
                return rule, _lookup(unit, own, rows, numbers)
            if rule.rule == "tied":
                low = _lookup(unit, looked, rows, numbers)
                high = linear_gradients(rule, [call for call in own if call not in looked], rows)
                return rule, tied_pieces(unit, low, high)
            return rule, unit_gradients(rule, own, rows=rows)
    values = torch.empty(rows, unit.size, device="meta")
    piece = dense_gradients(unit.name, unit.parameters, values)
    return dataclasses.replace(unit, rule="module"), piece


def _lookup(
    unit: LayerUnit, calls: list[LayerCall], rows: int, numbers: Numbers, *, shared: bool = False
) -> LayerGradients:
    """Count the distinct tokens of the real batch, or all of them if it is not known."""
    table: Any = calls[0].module
    each = sum(call.input.numel() for call in calls) // (1 if shared else rows)
    counts = [min(each, table.num_embeddings)] * rows
    known = numbers.get(_storage(calls[0].input)) if len(calls) == 1 else None
    if known is not None and known.numel() == calls[0].input.numel():
        tokens = known.reshape(rows, -1).cpu()
        counts = [len(row[row != table.padding_idx].unique()) for row in tokens]
    offsets = torch.tensor([0, *counts]).cumsum(0)
    ids = torch.empty(sum(counts), dtype=torch.int64, device="meta")
    shape = sum(counts), table.embedding_dim
    g = torch.empty(shape, device="meta", dtype=table.weight.dtype)
    return LayerGradients(lookup_form(unit, table), LookupRows(ids, g, offsets))


def measure_pace(
    model: nn.Module, task: Task, batch: Any, of: GradientOf | None, predicted: float
) -> float:
    """Return the measured seconds of one sample, forward and backward, over the predicted seconds.

    Sequences are cut to fewer tokens if a whole one would take long; 1 for a long sample that cannot be
    cut.
    """
    one = to_device(rows_of(batch, 0, 1), device_of(model))
    share = _TIMED_SECONDS / max(predicted, 1e-9)
    if share < 1:
        lengths = {
            leaf.shape[1] if leaf.dim() == 2 and not leaf.is_floating_point() else None
            for leaf in leaves(one)
            if isinstance(leaf, torch.Tensor) and leaf.dim() > 1
        }
        tokens = lengths.pop() if len(lengths) == 1 else None
        if tokens is None and share < 1 / 4:
            return 1.0
        if tokens is not None:
            _timed(model, task, _cut(one, 8), of)  # warms up
            one = _cut(one, max(16, int(share * tokens)))
    work = PassWork(model)
    with work.counting():
        spent = least = _timed(model, task, one, of)
    while spent < 2 * _TIMED_SECONDS / 15:  # counting operators slows short passes down
        seconds = _timed(model, task, one, of)
        least, spent = min(least, seconds), spent + max(seconds, _TIMED_SECONDS / 30)
    return least / work.seconds


def _timed(model: nn.Module, task: Task, batch: Any, of: GradientOf | None) -> float:
    wall, processor = time.perf_counter(), time.process_time()
    _, target, calls = Tracer(model, task, of).forward(watched_modules(units_of(model)), batch)
    fill(calls, target)
    # CPU time ignores other processes; wall time does not add up several threads.
    return min(time.perf_counter() - wall, time.process_time() - processor)


def _cut(batch: Any, to: int) -> Any:
    def shorter(leaf: Any) -> Any:
        return leaf[:, :to] if isinstance(leaf, torch.Tensor) and leaf.dim() == 2 else leaf

    return map_leaves(batch, shorter)


def measure_rows(maker: RowMaker, batch: Any) -> tuple[float, float]:
    """Compute the rows of a batch as a capture does; return the seconds and bytes of one."""
    rows = batch_size(batch)
    wall, processor = time.perf_counter(), time.process_time()
    arrays = maker.make(batch, alone=True)
    seconds = min(time.perf_counter() - wall, time.process_time() - processor)
    encoded = {array.name: array.row_bytes for layer in maker.layers for array in layer.arrays}
    total = 0.0
    for name, values in {**arrays.values, **arrays.gradients}.items():
        array = values.values if isinstance(values, Ragged) else values
        total += len(array) * encoded[name] if name in encoded else array.nbytes
        total += 8 * (len(values.offsets) - 1) if isinstance(values, Ragged) else 0
    return seconds / rows, total / rows + 16


@dataclass(frozen=True, slots=True)
class CaptureCost:
    """Cost of a capture, per row and fixed."""

    layers: tuple[LayerStorage, ...]
    row_bytes: float
    """Bytes on disk per row, everything included."""
    query_bytes: float
    """Bytes on disk per query row, whose coordinates are not rounded."""
    segment_rows: int
    basis_bytes: float
    row_seconds: float
    fixed_seconds: float
    """Seconds of the proof on the first rows, and of the basis."""
    row_memory: float
    """Bytes of memory per sample that runs at once."""
    fixed_memory: float
    """Further bytes of memory beside the model: moments, basis, segments."""
    coordinates: int = 0
    """Coordinates per row; 0 for whole gradients."""

    def disk_bytes(self, rows: int, queries: int) -> float:
        """Return the bytes of all rows and queries, with segment headers and the basis."""
        names = [array.name for layer in self.layers for array in layer.arrays]
        names += ["id", "example", "loss", "norm", "label"]
        # An array takes 160 bytes of a segment's header, and its name twice.
        header = sum(160 + 2 * len(name) for name in names)
        segments = -(-rows // self.segment_rows) + -(-queries // self.segment_rows)
        total = rows * self.row_bytes + queries * self.query_bytes
        return total + segments * header + self.basis_bytes


def exact_cost(shaped: ShapedCapture) -> CaptureCost:
    """Estimate the cost of whole gradients, from measured rows or from shapes."""
    prepared = shaped.prepared
    row_bytes, row_seconds = shaped.measured_bytes, shaped.measured_seconds
    pass_seconds = shaped.pace * shaped.pass_seconds
    if row_bytes is None:
        values = shaped.values + shaped.token_values + 4.0 * len(prepared.layers)
        row_bytes = prepared.row_bytes + values
        norms = sum(
            2.0 * g * layer.positions**2 * (r + c)
            for layer in prepared.layers
            for g, r, c in block_sizes([layer.form])
            if c > 1
        )
        row_seconds = pass_seconds + max(1.0, shaped.pace) * norms / FLOPS
    tried = min(rows_at_once(prepared, shaped.rows), 32)
    segment = segment_bytes(None)
    return CaptureCost(
        layers=prepared.layers,
        row_bytes=row_bytes,
        query_bytes=row_bytes,
        segment_rows=segment_rows(prepared.row_bytes, segment),
        basis_bytes=0.0,
        # A value is written, read or hashed six times on its way to the disk.
        row_seconds=row_seconds + 6.0 * row_bytes / 4 * WRITE,
        fixed_seconds=_PROOF_PASSES * tried * pass_seconds,
        row_memory=2 * (shaped.saved + shaped.factor_bytes / shaped.rows + row_bytes),
        fixed_memory=2.0 * min(segment, tried * row_bytes),
    )


def coordinate_cost(
    shaped: ShapedCapture, keep: Keep, *, rows: int, all_layers: bool
) -> CaptureCost:
    """Estimate the cost of compressed rows: the proof, a pass over some rows for the basis, one over all.

    Without `all_layers`, only `default_layers` are used.
    """
    exact = {layer.unit: layer for layer in shaped.prepared.layers}
    pieces = shaped.prepared.pieces
    units = list(pieces) if all_layers else default_layers(list(pieces), keep)
    forms = {unit: pieces[unit].form for unit in units}
    positions = {unit: exact[unit].positions for unit in units}
    sizes = block_sizes(forms.values())
    side = choose_side(sizes, keep, list(pieces))
    used = keep.sample(max(k.positions for k in shaped.prepared.layers), rows)
    pairs = {}
    for unit in units:  # the rank of moments is at most their number of positions
        rank = min(side, math.ceil(used * positions[unit])) if keep.whitened else side
        pairs[unit] = count_pairs(block_sizes([forms[unit]]), rank)
    available = sum(pairs.values())
    size, group, fold = count_coordinates(available, keep)
    step = group or (8 // keep.bits if keep.bits in PACKED else 1)
    # Assuming that all pairs of vectors are worth the same.
    shares = {unit: size * pairs[unit] // max(1, available) // step * step for unit in units}
    layers = tuple(
        coordinate_storage(exact[u], shares[u], keep.bits, group, is_first=u is units[0])
        for u in units
    )
    row_bytes = sum(layer.row_bytes for layer in layers) + shaped.values
    basis = sum(4 * g * (r * min(side, r) + c * min(side, c)) for g, r, c in sizes)
    moved = sum(2 * positions[u] * count_operations(block_sizes([forms[u]]), side) for u in units)
    basis_flops = sum(_basis_flops(forms[u], used * positions[u], side, keep) for u in units)
    restored = max((4.0 * u.size for u in units if forms[u].kind == "tied"), default=0.0)
    pass_seconds, tried = shaped.pace * shaped.pass_seconds, 2
    product = max(1.0, shaped.pace) / FLOPS  # seconds of an operation of large matrix products
    proof = tried * shaped.factor_bytes / shaped.rows + 3 * 4.0 * max(u.size for u in pieces)
    return CaptureCost(
        layers=layers,
        row_bytes=row_bytes,
        query_bytes=4.0 * size + shaped.values,
        segment_rows=segment_rows(row_bytes, segment_bytes(None), coordinates=True),
        basis_bytes=basis + (12.0 * fold * size if keep.whitened else 4.0 * size),
        row_seconds=pass_seconds + product * moved,
        fixed_seconds=(tried * (_PROOF_PASSES + 1) + used) * pass_seconds + product * basis_flops,
        row_memory=2 * (shaped.saved + shaped.largest),
        fixed_memory=max(proof, moment_bytes(forms.values()) + 3 * restored, 2.0 * basis),
        coordinates=size,
    )


def _basis_flops(form: AnyForm, positions: float, side: int, keep: Keep) -> float:
    """Count operations for second moments of both sides and, if whitened, their eigenvectors."""
    total = 0.0
    for groups, rows, cols in block_sizes([form]):
        sides = [moment_values(form, rows), moment_values(form, cols)]
        total += 1.2 * groups * positions * sum(sides) if cols > 1 else 0.0
        for size, values in zip((rows, cols), sides, strict=True):
            if keep.whitened and values > size:
                few = size > 512 and side <= size // 4  # by subspace iteration
                total += groups * (12.0 * size**2 * side if few else 40.0 * size**3)
    return total
