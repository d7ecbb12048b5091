"""Forward and backward pass with hooks: the calls of every layer, and its gradients from them."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils._pytree import tree_flatten, tree_map_only

from gradkeep.capturing._batches import batch_size, to_device
from gradkeep.capturing._pooling import fast_pooling
from gradkeep.capturing._storage import Adjustments, BatchMismatchError, convert_form, no_gradients
from gradkeep.capturing.rules._layers import (
    LayerGradients,
    dense_gradients,
    module_gradients,
    whole_model_gradients,
)
from gradkeep.capturing.rules._rules import (
    BROADCAST,
    DENSE_RULES,
    calls_by_module,
    calls_of,
    unit_gradients,
    watched_modules,
)
from gradkeep.capturing.rules._uses import FoundUse, WeightUse, broadcasting, find_products
from gradkeep.errors import CaptureError, GradkeepError
from gradkeep.factors._dense import Dense, DenseRows
from gradkeep.remat import stash

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager

    from gradkeep.capturing._proofs import RuleProofs, Rules
    from gradkeep.capturing.rules._rules import LayerUnit
    from gradkeep.capturing.tasks._tasks import Measured, Task
    from gradkeep.factors._form import AnyForm
    from gradkeep.query._gradients import GradientOf
    from gradkeep.remat.planned._session import StashedTensor


@dataclass(slots=True, eq=False)
class LayerCall:
    """One call of a watched module; the backward pass fills in the suffixes."""

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    shapes: tuple[torch.Size, ...]
    """Shapes of the output tensors that carry gradients."""
    input_shape: torch.Size
    """Shape of the first input tensor."""
    edges: tuple[GradientEdge, ...]
    """Gradient edges of those tensors, before any in-place change."""
    suffixes: list[torch.Tensor | None] = field(default_factory=list)
    original: torch.Tensor | None = None
    """The first input itself, by which layers that share an input are found."""
    stashed: StashedTensor | None = None
    """The input, if a memory budget may evict it."""
    differentiated: bool = False
    """True if a backward pass ran that can itself be differentiated."""

    @property
    def input(self) -> torch.Tensor:
        """First tensor that the module was called with."""
        self.unstash()
        for value in (*self.args, *self.kwargs.values()):
            if isinstance(value, torch.Tensor):
                return value
        raise TypeError(f"{type(self.module).__name__} was called without a tensor")

    def unstash(self) -> None:
        """Take the input back from the memory budget."""
        if self.stashed is not None:
            self.args, self.stashed = (self.stashed.get(),), None

    def release(self) -> None:
        """Free all tensors of the call."""
        self.args, self.kwargs, self.original, self.stashed = (), {}, None, None
        self.suffixes = [None] * len(self.suffixes)

    def suffix(self, index: int = 0) -> torch.Tensor:
        """Return the gradient at an output; zeros if the loss does not depend on it."""
        suffix = self.suffixes[index] if index < len(self.suffixes) else None
        if suffix is not None:
            return suffix
        reference = self.input
        dtype = reference.dtype if reference.dtype.is_floating_point else torch.get_default_dtype()
        return torch.zeros(self.shapes[index], dtype=dtype, device=reference.device)


@contextlib.contextmanager
def watching(
    modules: Sequence[nn.Module],
    *,
    by_hooks: bool = False,
    light: Collection[nn.Module] = (),
    spread: Collection[nn.Module] = (),
    rows: int = 0,
) -> Iterator[list[LayerCall]]:
    """Record the calls of these modules, in order, until the block ends; hooks are removed on any exit.

    Inputs are held by reference: torch itself rejects models that overwrite what a weight's gradient needs. The
    single input of `light` modules is stashed, so that a memory budget can evict and recompute it. The outputs
    of `spread` modules, which all `rows` samples share, are expanded to `[B, ...]`, so that each sample has its
    own gradient. With `by_hooks` the suffixes are filled by the caller's backward pass; else by `fill`.
    """
    calls: list[LayerCall] = []

    def record(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        # Positions `[T]` or `[1, T]` that all samples share.
        is_spread = module in spread and (args[0].dim() == 1 or args[0].shape[0] != rows)
        if is_spread:
            args, output = (expand_shared(args[0], rows), *args[1:]), expand_shared(output, rows)
        outputs = [t for t in _tensors(output) if t.requires_grad]
        if not outputs:
            return None  # under no_grad, or detached: the proof on the first batch notices
        inputs = _tensors(args[0] if len(args) == 1 and not kwargs else (args, kwargs))
        if not kwargs and len(args) == len(inputs) == 1 and inputs[0] is args[0]:
            args = (inputs[0].detach(),)
        else:
            args, kwargs = tree_map_only(torch.Tensor, torch.Tensor.detach, (args, kwargs))
        shapes, original = tuple(t.shape for t in outputs), inputs[0] if inputs else None
        shape = torch.Size() if original is None else original.shape
        edges = () if by_hooks else tuple(get_gradient_edge(t) for t in outputs)
        call = LayerCall(module, args, kwargs, shapes, shape, edges, original=original)
        if by_hooks:
            call.suffixes = [None] * len(outputs)
            for index, tensor in enumerate(outputs):
                tensor.register_hook(_adding_hook(call, index))  # type: ignore[no-untyped-call]
        if module in light and len(inputs) == len(args) == 1 and not kwargs:
            call.stashed = stash(inputs[0])
            call.args, call.original = (), None
        calls.append(call)
        return output if is_spread else None

    with contextlib.ExitStack() as stack:
        for module in dict.fromkeys(modules):
            if isinstance(module, WeightUse):
                continue
            handle = module.register_forward_hook(record, with_kwargs=True)
            stack.callback(handle.remove)
        # The fused inference path of transformer layers does not call hooks.
        fused = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(False)
        stack.callback(torch.backends.mha.set_fastpath_enabled, fused)
        yield calls


def use_call(one: FoundUse) -> LayerCall:
    """Return a use of a weight as a call with one input and one output."""
    x = one.input
    return LayerCall(one.use, (x,), {}, (one.shape,), x.shape, (one.edge,), original=x)


def _tensors(tree: Any) -> list[torch.Tensor]:
    """Return all tensors of a module's inputs or outputs, mostly a single one."""
    if isinstance(tree, torch.Tensor):
        return [tree]
    return [t for t in tree_flatten(tree)[0] if isinstance(t, torch.Tensor)]


def expand_shared(tensor: torch.Tensor, rows: int) -> torch.Tensor:
    """Return a view `[B, ...]` of what all samples share, `[...]` or `[1, ...]`."""
    one = tensor if tensor.shape[0] == 1 else tensor.unsqueeze(0)
    return one.expand(rows, *one.shape[1:])


def call_pattern(calls: Iterable[LayerCall], rows: int, *, spread: bool = False) -> tuple[Any, ...]:
    """Return what the validity of a rule depends on: one or several rows and calls, and their shapes."""
    seen = []
    for call in calls:
        pair = call.input_shape, call.shapes[0]
        if spread:
            one, other = (torch.Size(s[1:] if s[0] == 1 else s) for s in pair)
            pair = torch.Size((rows, *one)), torch.Size((rows, *other))
        seen.append(tuple((len(shape), _size_class(shape, rows)) for shape in pair))
    return (rows == 1, len(seen) > 1, frozenset(seen)) if seen else ()


def _size_class(shape: Sequence[int], rows: int) -> int:
    """Classify how the first dimension counts the samples."""
    if not shape:
        return 3
    size = shape[0]
    return 0 if size == rows else 1 if size == 1 else 2 if rows and size % rows == 0 else 3


def fill(
    calls: Sequence[LayerCall],
    target: torch.Tensor,
    *,
    callback: Callable[[LayerCall], None] | None = None,
    retain: bool = False,
) -> None:
    """Run the backward pass from the summed target to the calls, without computing weight gradients.

    `callback` gets each call as soon as it has all its suffixes, during the pass. `retain` keeps the graph for
    another pass.
    """
    edges = [edge for call in calls for edge in call.edges]
    if not edges:
        return
    if callback is None:
        gradients = iter(
            torch.autograd.grad(target.sum(), edges, allow_unused=True, retain_graph=retain)
        )
        for call in calls:
            call.suffixes = [next(gradients) for _ in call.edges]
        return
    # Backpropagate only to the earliest recorded outputs; pre-hooks capture the rest.
    ends = _earliest({edge.node for edge in edges})
    last = []
    with contextlib.ExitStack() as stack:
        for call in calls:
            call.suffixes = [None] * len(call.edges)
            for index, edge in enumerate(call.edges):
                if edge.node in ends:
                    last.append((call, index))
                else:
                    hook = _suffix_hook(call, index, callback)
                    stack.callback(edge.node.register_prehook(hook).remove)
        edges = [call.edges[index] for call, index in last]
        suffixes = torch.autograd.grad(target.sum(), edges, allow_unused=True)
    for (call, index), suffix in zip(last, suffixes, strict=True):
        call.suffixes[index] = suffix


def _suffix_hook(call: LayerCall, index: int, callback: Callable[[LayerCall], None]) -> Any:
    number = call.edges[index].output_nr

    def hook(gradients: tuple[torch.Tensor | None, ...]) -> None:
        call.suffixes[index] = gradients[number]
        if all(suffix is not None for suffix in call.suffixes):
            callback(call)

    return hook


def _earliest(nodes: set[Any]) -> set[Any]:
    """Return the nodes of a graph from which no other of them can be reached."""
    reaches: dict[Any, bool] = {}
    for root in nodes:
        stack = [root]
        while stack:
            node = stack[-1]
            if node in reaches:
                stack.pop()
                continue
            below = [child for child, _ in node.next_functions if child is not None]
            waiting = [child for child in below if child not in reaches]
            if waiting:
                stack += waiting
                continue
            reaches[node] = any(child in nodes or reaches[child] for child in below)
            stack.pop()
    return {node for node in nodes if not reaches[node]}


def _adding_hook(call: LayerCall, index: int) -> Any:
    def hook(gradient: torch.Tensor) -> None:
        before = call.suffixes[index]
        call.differentiated |= gradient.requires_grad
        # Backward passes through the same graph add up, as gradients do.
        call.suffixes[index] = gradient if before is None else before + gradient

    return hook


@dataclass(frozen=True, slots=True, eq=False)
class Traced:
    """Measured values and gradients of one batch."""

    measured: Measured
    pieces: dict[LayerUnit, LayerGradients]


@dataclass(slots=True, eq=False)
class Tracer:
    """A model, a task and the units to capture; `run` captures a batch."""

    model: nn.Module
    task: Task
    of: GradientOf | None = None
    """None for the output if the task gives it with its slope, else the loss."""
    units: Sequence[LayerUnit] = ()
    unused: Sequence[LayerUnit] = ()
    """Units that the loss of the first batch did not depend on."""
    reached: frozenset[LayerUnit] = frozenset()
    """Unused units whose modules run nevertheless, such as a model with an unused scale."""
    proofs: RuleProofs | None = None
    """Rules of the units by call pattern; None if the tracer only runs forward."""

    def run(
        self,
        batch: Any,
        *,
        reducer: Reducer | None = None,
        light: Collection[nn.Module] = (),
        device: torch.device | None = None,
        within: Callable[[Any], AbstractContextManager[Any]] = contextlib.nullcontext,
    ) -> Traced:
        """Compute the gradients of every unit for every sample of the batch, by proved rules.

        The `reducer` gets its units' gradients during the backward pass, and their factors are freed; until then
        autograd holds the inputs of `light` modules. A batch with a new call pattern is proved first. Every pass
        gets a copy of the batch on the `device`; without a device, the batch itself. Passes that are not proofs run
        inside of the context `within(batch)`.
        """

        def batch_copy() -> Any:
            return batch if device is None else to_device(batch, device)

        own = batch_copy()
        try:
            with within(own):
                return self._run(own, None, reducer, light)
        except _UnprovedError as unproved:
            (ran,) = unproved.args
        assert self.proofs is not None
        rules = self.proofs.prove(self, self.units, batch_copy(), ran)
        own = batch_copy()
        with within(own):
            return self._run(own, rules, reducer, light)

    def _run(
        self, batch: Any, rules: Rules | None, reducer: Reducer | None, light: Collection[nn.Module]
    ) -> Traced:
        rows, proofs = batch_size(batch), self.proofs
        assert proofs is not None, "a tracer runs once its rules are proved"
        modules = [*watched_modules([*self.units, *self.unused]), *proofs.modules]
        spread = proofs.spread(self.units)
        if rules is not None:
            new = [rule for rule in rules.values() if rule is not None and rule.axis == "shared"]
            spread |= {module for rule in new for module in rule.modules}
        try:
            measured, target, calls = self.forward(modules, batch, light=light, spread=spread)
        except Exception as error:
            copied = frozenset(unit.name for unit in self.units if unit.rule == BROADCAST)
            is_memory = isinstance(error, MemoryError) or "memory" in str(error).lower()
            if not copied or is_memory or isinstance(error, GradkeepError):
                raise
            raise BatchMismatchError(
                "the model does not run this batch with a copy of its parameters per sample",
                Adjustments(single=copied),
                code="capture.not_broadcast",
                found=f"{type(error).__name__}: {str(error)[:200]}",
                fix="Begin with a batch of the same kind, or capture without these parameters.",
            ) from error
        by_module = calls_by_module(calls)
        if rules is None:
            rules = proofs.rules(self.units, by_module, rows)
            if rules is None:
                raise _UnprovedError(
                    [u for u in self.units if any(m in by_module for m in u.modules)]
                )
        else:
            proofs.add(rules, by_module, rows)
        pieces: dict[LayerUnit, LayerGradients] = {}
        if reducer is None:
            fill(calls, target)
        else:
            reduction = _Reduction(reducer, by_module, measured, rules, proofs.forms, rows)
            fill(calls, target, callback=reduction.add_call)
            pieces |= reduction.finish()
        reduced = set(pieces)
        unused = [unit for unit in self.unused if unit not in self.reached]
        late = [unit for unit in unused if is_reached(unit, by_module)]
        if late:
            raise BatchMismatchError(
                f"layer {late[0].name} is used by this batch, but not by the first one",
                Adjustments(late=frozenset(unit.name for unit in late)),
                frozenset(unit.name for unit in unused),
                code="capture.late_layer",
                fix="Leave the layer out, or begin with a batch that uses it.",
            )
        rerun: dict[tuple[Any, ...], dict[LayerUnit, LayerUnit]] = {}
        with torch.no_grad():
            for unit in self.units:
                rule = rules[unit]
                if unit in reduced:
                    continue
                if rule is None:
                    pieces[unit] = no_gradients(unit, rows, target.detach(), proofs.forms[unit])
                elif rule.rule in DENSE_RULES:  # all units of a module, or of the model, at once
                    module = None if rule.rule == "whole" else rule.modules[0]
                    rerun.setdefault((module, rule.rule, rule.axis), {})[rule] = unit
                else:
                    pieces[unit] = unit_gradients(rule, calls_of(rule, by_module), rows=rows)
            for (module, *_), units in rerun.items():
                if module is None:
                    dense = whole_model_gradients(list(units), self.measure, batch, rows=rows)
                else:
                    dense = module_gradients(list(units), by_module.get(module, ()), rows=rows)
                pieces |= {units[rule]: piece for rule, piece in dense.items()}
            for unit in self.units:
                if unit not in reduced:
                    pieces[unit] = convert_form(pieces[unit], proofs.forms[unit])
                    if reducer is not None and unit in reducer.units:
                        pieces[unit] = reducer.reduce(unit, pieces[unit], measured)
        return Traced(measured, {unit: pieces[unit] for unit in self.units})

    def forward(
        self,
        modules: Sequence[nn.Module],
        batch: Any,
        *,
        light: Collection[nn.Module] = (),
        spread: Collection[nn.Module] | None = None,
    ) -> tuple[Measured, torch.Tensor, list[LayerCall]]:
        """Run the batch forward; return the measured values, the target, and the calls of the modules."""
        if spread is None:
            spread = {m for unit in self.units if unit.axis == "shared" for m in unit.modules}
        rows = batch_size(batch)
        with (
            fast_pooling(self.model),
            broadcasting(modules, rows) as broadcasts,
            watching(modules, light=light, spread=spread, rows=rows) as calls,
        ):
            measured, target = self.measure(batch)
        uses = [*broadcasts, *find_products(target, modules)]
        return measured, target, [*calls, *map(use_call, uses)]

    def loss_slopes(self, measured: Measured) -> torch.Tensor | None:
        """Return the factors `[B]` from captured to loss gradients; None if they are equal."""
        if measured.slopes is None or not self._of_outputs(measured):
            return None
        return measured.slopes.detach()

    def _of_outputs(self, measured: Measured) -> bool:
        if self.of == "loss" or measured.outputs is None:
            return False
        return measured.slopes is not None or self.of is not None

    def measure(self, batch: Any) -> tuple[Measured, torch.Tensor]:
        """Return the measured values of the task, and the target `[B]` to differentiate."""
        rows = batch_size(batch)
        with torch.enable_grad():
            measured = self.task.measure(self.model, batch)
            _check_shape("losses", measured.losses, rows)
            if self.of == "loss":
                return measured, measured.losses
            if measured.outputs is not None and self._of_outputs(measured):
                _check_shape("outputs", measured.outputs, rows)
                return measured, measured.outputs
            if self.of is None:
                return measured, measured.losses
            outputs = self.task.outputs(self.model, batch)
        if outputs is None:
            raise CaptureError(
                f"{self.task.describe()} has no output",
                code="capture.no_output",
                fix="Give the task outputs(model, batch) -> [B], or pass of='loss'.",
            )
        _check_shape("outputs", outputs, rows)
        return measured, outputs


class _UnprovedError(Exception):
    """A batch has a call pattern without a proved rule; its argument is the list of units that ran."""


def is_reached(unit: LayerUnit, calls: dict[nn.Module, list[LayerCall]]) -> bool:
    """Return True if the backward pass reached a module of the unit."""
    return any(suffix is not None for call in calls_of(unit, calls) for suffix in call.suffixes)


def check_measured(name: str, values: torch.Tensor, rows: int) -> None:
    """Raise unless there is one value for each sample."""
    if not isinstance(values, torch.Tensor) or values.shape != (rows,):
        raise CaptureError(
            f"{name} must be one value per sample, shape ({rows},)",
            code="capture.not_per_sample",
            found=getattr(values, "shape", type(values).__name__),
            fix="Compute the loss with reduction='none'; for sequences, sum over the tokens.",
        )


def _check_shape(name: str, values: torch.Tensor, rows: int) -> None:
    check_measured(name, values, rows)
    if not values.requires_grad:
        raise CaptureError(
            f"the {name} do not depend on any trainable parameter",
            code="capture.no_graph",
            fix="Check that parameters have requires_grad=True and that the task does not detach.",
        )


@dataclass(frozen=True, slots=True, eq=False)
class Reducer:
    """Replaces gradients of some units during the backward pass."""

    units: Collection[LayerUnit]
    reduce: Callable[[LayerUnit, LayerGradients, Measured], LayerGradients]


def restore_gradients(
    unit: LayerUnit, piece: LayerGradients, measured: Measured | None = None
) -> LayerGradients:
    """Multiply out factors; for a `Reducer`."""
    if isinstance(piece.form, Dense):
        return piece
    return dense_gradients(unit.name, piece.form.parameters, piece.form.restore(piece.rows))


def empty_gradients(piece: LayerGradients) -> LayerGradients:
    """Return rows without values, for a reducer that sums gradients elsewhere."""
    values = piece.rows.example.new_empty(len(piece.rows), 0)
    return LayerGradients(Dense(piece.form.parameters, "", 0), DenseRows(values))


@dataclass(slots=True, eq=False)
class _Reduction:
    """Reduce each unit's gradients when all calls of its modules have their suffixes.

    The calls of a module that belongs to several units are freed with the last of them.
    """

    _reducer: Reducer
    _calls: Mapping[nn.Module, list[LayerCall]]
    _measured: Measured
    _rules: Rules
    _forms: Mapping[LayerUnit, AnyForm]
    _rows: int
    _pieces: dict[LayerUnit, LayerGradients] = field(default_factory=dict)
    _waiting: dict[nn.Module, set[LayerUnit]] = field(default_factory=dict)
    _missing: dict[LayerUnit, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for unit in self._reducer.units:
            rule = self._rules[unit]
            if rule is None or rule.rule in DENSE_RULES:
                continue
            self._missing[unit] = len(calls_of(rule, self._calls))
            for module in rule.modules:
                self._waiting.setdefault(module, set()).add(unit)

    @torch.no_grad()
    def add_call(self, call: LayerCall) -> None:
        """Add a call that has its suffixes."""
        for unit in list(self._waiting.get(call.module, ())):
            self._missing[unit] -= 1
            if self._missing[unit] == 0:
                self._reduce(unit)
        if self._waiting.get(call.module):
            call.unstash()

    @torch.no_grad()
    def finish(self) -> dict[LayerUnit, LayerGradients]:
        """Reduce the units at the end of the pass, and return all reduced gradients."""
        for unit in self._missing:
            if unit not in self._pieces:
                self._reduce(unit)
        return self._pieces

    def _reduce(self, unit: LayerUnit) -> None:
        rule = self._rules[unit]
        assert rule is not None
        piece = unit_gradients(rule, calls_of(rule, self._calls), rows=self._rows)
        piece = convert_form(piece, self._forms[unit])
        self._pieces[unit] = self._reducer.reduce(unit, piece, self._measured)
        for module in dict.fromkeys(rule.modules):
            self._waiting[module].discard(unit)
            if not self._waiting[module]:
                for call in self._calls[module]:
                    call.release()
