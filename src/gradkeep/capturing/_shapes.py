"""Shapes of a capture before it runs: a pass over fake tensors, and its operations."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from gradkeep.capturing._batches import batch_size, map_leaves
from gradkeep.capturing._first_batch import (
    PreparedCapture,
    requested_storages,
)
from gradkeep.capturing._proofs import candidate_rules, is_shared
from gradkeep.capturing._readiness import LOW, in_mode
from gradkeep.capturing._storage import choose_storage
from gradkeep.capturing._tracer import LayerCall, Tracer, fill
from gradkeep.capturing.rules._layers import (
    LayerGradients,
    dense_gradients,
    linear_gradients,
    tied_pieces,
)
from gradkeep.capturing.rules._rules import (
    DENSE_RULES,
    HINT,
    LayerUnit,
    calls_of,
    tensors,
    unit_gradients,
    units_of,
    watched_modules,
)
from gradkeep.errors import CaptureError
from gradkeep.factors._lookup import Lookup, LookupRows
from gradkeep.query._gradients import select_layers
from gradkeep.query._planner import FLOPS, WRITE

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from gradkeep.capturing._first_batch import CaptureSettings
    from gradkeep.capturing._readiness import Mode
    from gradkeep.capturing.tasks._tasks import Measured, Task

    Numbers = Mapping[int, torch.Tensor]
    """Real tensors of a batch, by the storages of the fake ones."""


@dataclass(frozen=True, slots=True, eq=False)
class PassWork:
    """Cost of one pass over one sample, forward and backward to the layers' outputs."""

    flops: float
    written: float
    """Values that operators write."""
    saved: float
    """Bytes that autograd saves."""
    largest: float
    """Bytes of the largest tensor that is written."""

    @property
    def seconds(self) -> float:
        """Predicted seconds on one core of a server; each written value is accessed four times."""
        return self.flops / FLOPS + 4 * self.written * WRITE


@dataclass(frozen=True, slots=True, eq=False)
class ShapedCapture:
    """A capture whose tensors have shapes, but no values."""

    prepared: PreparedCapture
    rows: int
    """Samples of the probe batch."""
    work: PassWork
    values: float
    """Bytes per row of values beside gradients, such as losses."""
    token_values: float
    """Bytes per row of token losses, which compressed captures do not store."""


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
    rows = batch_size(batch)
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    hollow = _hollow_model(model, fake)
    fake_batch, numbers = _hollow_batch(batch, fake)
    units = select_layers(units_of(hollow), settings.layers, error=CaptureError, hint=HINT)
    tracer = Tracer(hollow, task, settings.of)
    count = PassCount(hollow)
    with in_mode(hollow, mode), fake:
        with (
            count.operators(),
            torch.autograd.graph.saved_tensors_hooks(count.saving, lambda tensor: tensor),
        ):
            modules = [*watched_modules(units), *hollow.modules()]
            measured, target, calls = tracer.forward(modules, fake_batch)
        reached = torch.autograd.grad(
            target.sum(), tensors(units), retain_graph=True, allow_unused=True
        )
        with count.operators():
            fill(calls, target)
    gradients = dict(zip(tensors(units), reached, strict=True))
    used = [unit for unit in units if any(gradients[w] is not None for w in unit.weights)]
    unused = [unit for unit in units if unit not in used]
    shapes = _Pieces(hollow, calls, rows, numbers)
    pieces = dict(shapes.piece(unit) for unit in used)
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
    tracer = dataclasses.replace(tracer, units=tuple(pieces), unused=tuple(unused))
    prepared = PreparedCapture(tracer, tuple(layers), (), pieces)
    return _shaped(prepared, measured, count.per_row(rows), rows)


def measure_shapes(prepared: PreparedCapture, batch: Any) -> ShapedCapture:
    """Measure the shapes of a prepared capture, in one pass over the batch."""
    rows, tracer = batch_size(batch), prepared.tracer
    count = PassCount(tracer.model)
    with count.operators():
        with torch.autograd.graph.saved_tensors_hooks(count.saving, lambda tensor: tensor):
            measured, target, calls = tracer.forward(watched_modules(tracer.units), batch)
        fill(calls, target)
    return _shaped(prepared, measured, count.per_row(rows), rows)


def _shaped(
    prepared: PreparedCapture, measured: Measured, work: PassWork, rows: int
) -> ShapedCapture:
    tokens = measured.tokens
    values = (measured.losses, measured.outputs, measured.slopes, measured.labels)
    sizes = [v.nbytes / len(v) for v in (*values, measured.predictions) if v is not None]
    return ShapedCapture(
        prepared=prepared,
        rows=rows,
        work=work,
        values=20.0 + sum(sizes),  # id, fingerprint and norm take 20 bytes
        token_values=0.0 if tokens is None else 4.0 * tokens.numel() / rows + 8,
    )


def _hollow_model(model: nn.Module, mode: FakeTensorMode) -> nn.Module:
    """Copy a model with fake weights; real ones are neither copied nor read."""
    fakes: dict[int, Any] = {}
    with mode:
        for parameter in model.parameters():
            fakes[id(parameter)] = nn.Parameter(
                _like(parameter), requires_grad=parameter.requires_grad
            )
        plain = [value for module in model.modules() for value in vars(module).values()]
        for tensor in (*model.buffers(), *plain):
            if isinstance(tensor, torch.Tensor):
                fakes[id(tensor)] = _like(tensor)
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


class PassCount:
    """Count the operators of a pass, and the bytes that autograd saves."""

    def __init__(self, model: nn.Module) -> None:
        self._weights = {_storage(parameter) for parameter in model.parameters()}
        self._saved: dict[int, torch.UntypedStorage] = {}
        self._flops = 0.0
        self._written = _Written()

    @contextlib.contextmanager
    def operators(self) -> Iterator[None]:
        """Count operators until the block ends."""
        with FlopCounterMode(display=False) as flops, self._written:
            yield
        self._flops += flops.get_total_flops()

    def saving(self, tensor: torch.Tensor) -> torch.Tensor:
        """Count a tensor that autograd saves, holding its storage so that addresses are not reused."""
        if _storage(tensor) not in self._weights:
            self._saved[_storage(tensor)] = tensor.untyped_storage()
        return tensor

    def per_row(self, rows: int) -> PassWork:
        """Return the cost per row."""
        saved = sum(storage.nbytes() for storage in self._saved.values())
        written = self._written
        return PassWork(
            self._flops / rows, written.values / rows, saved / rows, written.largest / rows
        )


class _Written(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Count the values of all results that are not views."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.values = self.largest = 0.0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if not func.is_view:
            for leaf in tree_leaves(result):
                if isinstance(leaf, torch.Tensor):
                    self.values += leaf.numel()
                    self.largest = max(self.largest, leaf.numel() * leaf.element_size())
        return result


class _Pieces:
    """Compute the shapes of gradients of units on the meta device, by their rules."""

    def __init__(
        self, model: nn.Module, calls: Sequence[LayerCall], rows: int, numbers: Numbers
    ) -> None:
        self._model, self._rows, self._numbers = model, rows, numbers
        self._by_module: dict[nn.Module, list[LayerCall]] = {}
        self._tokens: dict[LayerCall, torch.Tensor | None] = {}
        sources: dict[tuple[Any, ...], torch.Tensor] = {}
        for call in calls:
            own = _on_meta(call, sources)
            self._by_module.setdefault(call.module, []).append(own)
            self._tokens[own] = numbers.get(_storage(call.input)) if _has_tensor(call) else None

    def piece(self, unit: LayerUnit) -> tuple[LayerUnit, LayerGradients]:
        """Return the unit with its rule, and the shapes of its gradients."""
        if is_shared(unit, self._by_module, self._rows):
            shared = dataclasses.replace(unit, axis="shared")
            return shared, self._lookup(unit, self._by_module[unit.modules[0]], shared=True)
        for rule in candidate_rules(self._model, unit, self._by_module, rows=self._rows):
            if rule.rule in DENSE_RULES:
                break
            own = calls_of(rule, self._by_module)
            with contextlib.suppress(RuntimeError, TypeError, ValueError, IndexError):
                return rule, self._factored(rule, own)
        return dataclasses.replace(unit, rule="module"), self._dense(unit)

    def _dense(self, unit: LayerUnit) -> LayerGradients:
        values = torch.empty(self._rows, unit.size, device="meta")
        return dense_gradients(unit.name, unit.parameters, values)

    def _factored(self, unit: LayerUnit, calls: list[LayerCall]) -> LayerGradients:
        if unit.rule == "embedding":
            return self._lookup(unit, calls, shared=False)
        if unit.rule == "norm":
            return self._dense(unit)
        if unit.rule != "tied":
            return unit_gradients(unit, calls, rows=self._rows)
        looked = [call for call in calls if isinstance(call.module, nn.Embedding)]
        read = [call for call in calls if not isinstance(call.module, nn.Embedding)]
        low = self._lookup(unit, looked, shared=False)
        high = linear_gradients(
            unit.name, read[0].module, unit.parameters, read, rows=self._rows, axis=unit.axis
        )
        return tied_pieces(unit, low, high)

    def _lookup(self, unit: LayerUnit, calls: list[LayerCall], *, shared: bool) -> LayerGradients:
        """Count the distinct tokens of the real batch, or all of them if it is not known."""
        module = calls[0].module
        assert isinstance(module, nn.Embedding)
        form = Lookup(
            unit.parameters[:1],
            prefix=f"{unit.name}.prefix",
            suffix=f"{unit.name}.suffix",
            rows=module.num_embeddings,
            width=module.embedding_dim,
        )
        each = sum(call.input.numel() for call in calls) // (1 if shared else self._rows)
        counts = [min(each, module.num_embeddings)] * self._rows
        known = self._tokens[calls[0]] if len(calls) == 1 and not shared else None
        if known is not None and known.numel() == calls[0].input.numel():
            tokens = known.reshape(self._rows, -1).cpu()
            counts = [len(row[row != module.padding_idx].unique()) for row in tokens]
        offsets = torch.tensor([0, *counts]).cumsum(0)
        ids = torch.empty(sum(counts), dtype=torch.int64, device="meta")
        g = torch.empty(sum(counts), module.embedding_dim, device="meta", dtype=module.weight.dtype)
        return LayerGradients(form, LookupRows(ids, g, offsets))


def _has_tensor(call: LayerCall) -> bool:
    return any(isinstance(leaf, torch.Tensor) for leaf in (*call.args, *call.kwargs.values()))


def _on_meta(call: LayerCall, sources: dict[tuple[Any, ...], torch.Tensor]) -> LayerCall:
    """Copy a call with shapes only; calls that read the same tensor share a source."""
    inputs: tuple[torch.Tensor, ...] = ()
    if _has_tensor(call):
        first = call.input
        inputs = (torch.empty(first.shape, dtype=first.dtype, device="meta"),)
    source = None
    if call.original is not None and inputs:
        from_ = call.original
        key = (_storage(from_), from_.storage_offset(), from_.shape, from_.stride(), from_.dtype)
        source = sources.setdefault(key, inputs[0])
    count = len(call.shapes)
    return LayerCall(
        call.module, inputs, {}, call.shapes, call.input_shape, (), [None] * count, source
    )
