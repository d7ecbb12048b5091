"""Checks of a recorded training step, against what autograd computed in the same step.

Three properties make recorded rows the samples' own gradients:

- Their sum is the gradient that `backward()` adds to each weight (`WeightGradients`).
- A layer's rows of one sample depend on that sample alone (`SampleProbe`): the outermost module
  runs once more with one sample replaced, and no other sample's rows may change.
- The loss is a sum over samples (`LossProbe`): the gradient at one sample's outputs has no
  derivative with respect to another sample's outputs.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.graph import get_gradient_edge
from torch.nn.utils.rnn import PackedSequence
from torch.overrides import TorchFunctionMode

from gradkeep.capturing._audit import restore_buffers
from gradkeep.capturing._batches import copied, leaves, map_leaves
from gradkeep.capturing._proofs import fits
from gradkeep.capturing.rules._layers import by_sample
from gradkeep.capturing.rules._rules import calls_by_module
from gradkeep.errors import CaptureError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

    from torch import Tensor, nn
    from torch.autograd.graph import GradientEdge

    from gradkeep.capturing._tracer import LayerCall
    from gradkeep.capturing.rules._layers import LayerGradients, SampleAxis
    from gradkeep.capturing.rules._rules import LayerUnit

_SUM_ERRORS = {torch.float32: 1e-3, torch.float64: 1e-7}
_FEW_BITS = 2e-2
"""Relative error of a sum of rows by its dtype, and for 16 bits."""


class WeightGradients:
    """Collect what the backward passes of one step add to each weight."""

    def __init__(self, units: Sequence[LayerUnit], *, enabled: Callable[[], bool]) -> None:
        self._weights = [weight for unit in units for weight in unit.weights]
        self._enabled = enabled
        self._totals: dict[nn.Parameter, Tensor] = {}
        self.complete = False

    @contextlib.contextmanager
    def collecting(self) -> Iterator[None]:
        """Collect until the block ends."""
        with contextlib.ExitStack() as stack:
            for weight in self._weights:
                handle = weight.register_hook(self._adder(weight))  # type: ignore[no-untyped-call]
                stack.callback(handle.remove)
            yield

    def _adder(self, weight: nn.Parameter) -> Callable[[Tensor], None]:
        def add(gradient: Tensor) -> None:
            if not self._enabled():
                return
            self.complete = True
            gradient = gradient.detach()
            gradient = gradient.to_dense() if gradient.is_sparse else gradient
            before = self._totals.get(weight)
            # A copy: autograd hands the same memory on to .grad, which the loop may change.
            self._totals[weight] = gradient.clone() if before is None else before + gradient

        return add

    def check(
        self,
        pieces: Mapping[LayerUnit, LayerGradients],
        *,
        rows: int,
        scale: float,
        autocast: Collection[nn.Module],
    ) -> None:
        """Compare the sum of each layer's recorded rows with the gradient of its weights.

        Args:
            pieces: Gradients of each layer's rows.
            rows: Number of samples.
            scale: Factor that rows were multiplied by.
            autocast: Modules that computed with fewer bits than their weights have.
        """
        for unit, piece in pieces.items():
            parts = [
                self._totals.get(weight, torch.zeros_like(weight)).reshape(-1)
                for weight in unit.weights
            ]
            weights = torch.full((1, rows), 1 / scale, dtype=parts[0].dtype, device=parts[0].device)
            total = piece.form.weighted_sum(piece.rows, weights)[0]
            truth = torch.cat(parts)
            few_bits = any(module in autocast for module in unit.modules)
            tolerance = _FEW_BITS if few_bits else _SUM_ERRORS.get(truth.dtype, _FEW_BITS)
            if not fits(total, truth, tolerance):
                raise CaptureError(
                    f"layer {unit.name}: the recorded rows do not add up to the "
                    "gradient of backward()",
                    code="capture.sums_differ",
                    found=f"a {unit.type} whose weight is also used elsewhere, whose "
                    "forward is changed, or whose gradients a hook changes",
                    fix=f"Leave it out with layers='!{unit.name}', or replay the "
                    "checkpoint with gk.capture.",
                )


@dataclass(frozen=True, slots=True, eq=False)
class ProbedStep:
    """A step that is probed, and the sample that is replaced in it."""

    model: nn.Module
    calls: list[LayerCall]
    rows: int
    sample: int
    axes: Callable[[Sequence[LayerCall]], Mapping[nn.Module, SampleAxis]]

    def by_sample(self, tensor: Tensor, axis: SampleAxis) -> Tensor:
        """Return the tensor as `[B, ...]`."""
        return by_sample(tensor.detach(), self.rows, axis).flatten(1)


class SampleProbe:
    """Run outermost modules again with one sample replaced, and compare the inputs of layers."""

    def __init__(
        self, step: ProbedStep, *, enabled: Callable[[], bool], batch_first: bool | None
    ) -> None:
        self._step, self._enabled, self._batch_first = step, enabled, batch_first
        self._depth, self._start, self._replaying = 0, 0, False
        self._inputs: Any = None
        devices = {p.device for p in step.model.parameters() if p.device.type == "cuda"}
        self._devices = sorted(device.index for device in devices)
        self._random: list[Tensor] = []

    @contextlib.contextmanager
    def watching(self, modules: Iterable[nn.Module]) -> Iterator[None]:
        """Probe every outermost call of these modules until the block ends."""
        with contextlib.ExitStack() as stack:
            for module in modules:
                before = module.register_forward_pre_hook(self._enter, with_kwargs=True)
                after = module.register_forward_hook(self._leave, with_kwargs=True)
                stack.callback(before.remove)
                stack.callback(after.remove)
            yield

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if self._replaying:
            return
        if self._depth == 0:
            self._start = len(self._step.calls)
            self._inputs = copied((args, kwargs))
            states = [torch.cuda.get_rng_state(index) for index in self._devices]
            self._random = [torch.get_rng_state(), *states]
        self._depth += 1

    def _leave(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if self._replaying:
            return
        self._depth -= 1
        if self._depth == 0 and len(self._step.calls) > self._start and self._enabled():
            self._replaying = True
            try:
                self._replay(module)
            finally:
                self._replaying = False

    def _replay(self, module: nn.Module) -> None:
        changed = _with_sample_replaced(
            self._inputs, self._step.rows, self._step.sample, batch_first=self._batch_first
        )
        if changed is None:
            return
        calls = self._step.calls[self._start :]
        original, axes = calls_by_module(calls), self._step.axes(calls)
        turns = dict.fromkeys(original, 0)

        def compare(layer: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            turn, turns[layer] = turns[layer], turns[layer] + 1
            read = next((leaf for leaf in leaves((args, kwargs)) if _is_tensor(leaf)), None)
            if layer in axes and turn < len(original[layer]) and read is not None:
                self._compare(layer, original[layer][turn].input, read, axes[layer])

        args, kwargs = changed
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            stack.enter_context(torch.random.fork_rng(self._devices))
            stack.enter_context(restore_buffers(self._step.model))
            for layer in original:
                stack.callback(layer.register_forward_hook(compare, with_kwargs=True).remove)
            torch.set_rng_state(self._random[0])
            for index, state in zip(self._devices, self._random[1:], strict=True):
                torch.cuda.set_rng_state(state, index)
            module(*args, **kwargs)

    def _compare(self, layer: nn.Module, one: Tensor, other: Tensor, axis: SampleAxis) -> None:
        if self._changes_others(one, other, axis):
            name = next((n for n, m in self._step.model.named_modules() if m is layer), "")
            raise CaptureError(
                f"layer {name}: replacing one sample of the batch changes the "
                "rows of another sample",
                code="capture.rows_of_others",
                found="a model that mixes samples, reorders them (sorting by length), "
                "or joins several views of a sample",
                fix="Replay the checkpoint with gk.capture, which reads rows from single samples.",
            )

    def _changes_others(self, one: Tensor, other: Tensor, axis: SampleAxis) -> bool:
        """Return True if a layer's input changed for a sample that was not replaced."""
        if one.shape != other.shape:
            # Another length is padding by the model; another number of rows moves samples.
            return axis == "flat" and len(one) != len(other)
        one, other = (self._step.by_sample(tensor, axis) for tensor in (one, other))
        if one.shape[1] == 0:
            return False
        scale = one.abs().amax().double() if one.dtype.is_floating_point else 0.0
        change = (other.double() - one.double()).abs().amax(1)
        change[self._step.sample] = 0
        # Other samples may change by 1e-3 of the largest input: routing changes the sizes of
        # matrix products, which then round differently.
        return bool((change > 1e-3 * scale).any())


class LossProbe(TorchFunctionMode):
    """Test before each `loss.backward()` that the loss is a sum over samples."""

    def __init__(
        self, step: ProbedStep, modules: Sequence[nn.Module], *, unproved: Callable[[str], None]
    ) -> None:
        super().__init__()
        self._step, self._modules, self._unproved = step, modules, unproved
        self._outputs: list[tuple[nn.Module, GradientEdge]] = []

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Note the outputs of the layers until the block ends."""
        with contextlib.ExitStack() as stack:
            for module in dict.fromkeys(self._modules):
                stack.callback(module.register_forward_hook(self._note).remove)
            stack.enter_context(self)
            yield

    def _note(self, module: nn.Module, args: Any, output: Any) -> None:
        if isinstance(output, torch.Tensor) and output.requires_grad:
            # The last four outputs, which are nearest to the loss.
            self._outputs = [*self._outputs, (module, get_gradient_edge(output))][-4:]

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.backward and self._outputs:
            before = [(call, list(call.suffixes), call.differentiated) for call in self._step.calls]
            try:
                self._probe(args[0])
            finally:
                for call, suffixes, differentiated in before:
                    call.suffixes, call.differentiated = suffixes, differentiated
        return func(*args, **(kwargs or {}))

    def _probe(self, loss: Tensor) -> None:
        axes = self._step.axes(self._step.calls)
        outputs = [(module, edge) for module, edge in self._outputs if module in axes]
        if loss.numel() != 1 or not loss.requires_grad or not outputs:
            return
        edges = [edge for _, edge in outputs]
        try:
            own, others = self._second_derivatives(loss, edges, [axes[m] for m, _ in outputs])
        except RuntimeError as error:
            self._unproved(str(error).splitlines()[0])
            return
        # By rounding, the others' second derivatives may reach 1e-4 of the sample's own.
        if others > 1e-4 * own:
            raise CaptureError(
                "the loss mixes samples: the gradient of one sample depends on "
                "the outputs of others",
                code="capture.loss_mixes_samples",
                found="a loss over the whole batch, such as a contrastive loss or one "
                "with batch statistics",
                fix="Record a loss per sample; with a loss over the batch no sample has "
                "its own gradient.",
            )

    def _second_derivatives(
        self, loss: Tensor, edges: list[GradientEdge], axes: list[SampleAxis]
    ) -> tuple[float, float]:
        """Return the largest second derivative at the probed sample's outputs, and at all others'."""
        first = torch.autograd.grad(
            loss, edges, create_graph=True, retain_graph=True, allow_unused=True
        )
        generator = torch.Generator().manual_seed(self._step.sample)
        direction = loss.new_zeros(())
        for gradient, axis in zip(first, axes, strict=True):
            if gradient is not None and gradient.requires_grad:
                row = by_sample(gradient, self._step.rows, axis)[self._step.sample]
                weights = torch.rand(row.shape, generator=generator).to(row)
                direction = direction + (row * (weights + 0.5)).sum()
        if not direction.requires_grad:
            return 0.0, 0.0  # linear in the outputs, hence a sum over samples
        second = torch.autograd.grad(direction, edges, retain_graph=True, allow_unused=True)
        own = others = 0.0
        for derivative, axis in zip(second, axes, strict=True):
            if derivative is not None and derivative.numel():
                size = self._step.by_sample(derivative, axis).abs().amax(1)
                own = max(own, float(size[self._step.sample]))
                size[self._step.sample] = 0
                others = max(others, float(size.max()))
        return own, others


def _is_tensor(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.dim() > 0


def _with_sample_replaced(
    inputs: Any, rows: int, sample: int, *, batch_first: bool | None
) -> Any | None:
    """Replace one sample of the inputs by another; None if no other sample differs."""
    args, kwargs = inputs
    if any(isinstance(value, PackedSequence) for value in (*args, *kwargs.values())):
        return None  # its rows are not samples
    tensors = [leaf for leaf in leaves(inputs) if _is_tensor(leaf)]
    dims = (0, 1) if batch_first is None else (0,) if batch_first else (1,)
    dim = next((d for d in dims if any(t.dim() > d and t.shape[d] == rows for t in tensors)), None)
    if dim is None:
        return None
    counted = [t for t in tensors if t.dim() > dim and t.shape[dim] == rows]
    others = (*range(sample + 1, rows), *range(sample))
    differs = (
        other
        for other in others
        if any(not torch.equal(t.select(dim, sample), t.select(dim, other)) for t in counted)
    )
    other = next(differs, None)
    if other is None:
        return None
    index = torch.arange(rows)
    index[sample] = other

    def replace(leaf: Any) -> Any:
        if _is_tensor(leaf) and leaf.dim() > dim and leaf.shape[dim] == rows:
            return leaf.index_select(dim, index.to(leaf.device))
        return leaf

    return map_leaves(inputs, replace)
