"""Checks of a recorded training step, against what autograd computed in the same step.

Three properties make recorded rows the samples' own gradients:

- Their sum is the gradient that `backward()` adds to each weight.
- A layer's rows of one sample depend on that sample alone: the outermost module runs once more with one
  sample replaced, and no other sample's rows may change.
- The loss is a sum over samples: the gradient at one sample's outputs has no derivative with respect to
  another sample's outputs.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.graph import get_gradient_edge
from torch.nn.utils.rnn import PackedSequence
from torch.overrides import TorchFunctionMode

from gradkeep.capturing._batches import copied, leaves, map_leaves
from gradkeep.capturing._proofs import fits
from gradkeep.capturing._readiness import restore_buffers
from gradkeep.capturing.rules._layers import by_sample
from gradkeep.capturing.rules._rules import calls_by_module
from gradkeep.errors import CaptureError
from gradkeep.remat.planned._session import budget_is_active

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping

    from torch import Tensor, nn
    from torch.autograd.graph import GradientEdge

    from gradkeep.capturing._recording import GradientRecording
    from gradkeep.capturing._tracer import LayerCall
    from gradkeep.capturing.rules._layers import LayerGradients, SampleAxis
    from gradkeep.capturing.rules._rules import LayerUnit

_SUM_ERRORS = {torch.float32: 1e-3, torch.float64: 1e-7}
"""Relative error of a sum of rows by its dtype; 2e-2 for 16 bits."""


class StepChecks(TorchFunctionMode):
    """Checks of one step: all of them if its turn has come, the first two if its shapes are new."""

    def __init__(self, recording: GradientRecording, calls: list[LayerCall], rows: int) -> None:
        super().__init__()
        self._recording, self._calls, self._rows = recording, calls, rows
        step = recording.step
        self._sample = (step * 7) % max(1, rows)
        """The sample that is replaced."""
        # The first four steps, every 64th, and powers of two.
        self._scheduled = step < 4 or step % 64 == 0 or step.bit_count() == 1
        self._probed = self._scheduled
        self._totals: dict[nn.Parameter, Tensor] = {}
        self._depth, self._start, self._inputs = 0, 0, None
        devices = {p.device for p in recording.model.parameters() if p.device.type == "cuda"}
        self._devices = sorted(device.index for device in devices)
        self._random: list[Tensor] = []
        self._outputs: list[tuple[nn.Module, GradientEdge]] = []

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Check the passes inside of the block."""
        units, model = self._recording.units, self._recording.model
        with contextlib.ExitStack() as stack:
            for weight in (weight for unit in units for weight in unit.weights):
                handle = weight.register_hook(self._adder(weight))  # type: ignore[no-untyped-call]
                stack.callback(handle.remove)
            # Probes run the model and the loss again, which a memory plan does not expect.
            if self._rows > 1 and not budget_is_active():
                # A loop may call parts of the model directly; hooks on all of them take time.
                for module in model.modules() if self._scheduled else [model]:
                    before = module.register_forward_pre_hook(self._enter, with_kwargs=True)
                    after = module.register_forward_hook(self._leave, with_kwargs=True)
                    stack.callback(before.remove)
                    stack.callback(after.remove)
                if self._scheduled:
                    for module in {module: None for unit in units for module in unit.modules}:
                        stack.callback(module.register_forward_hook(self._note_output).remove)
                    stack.enter_context(self)
            yield

    def _is_probed(self) -> bool:
        self._probed = self._probed or self._recording.is_new(self._calls, self._rows)
        return self._probed

    def _adder(self, weight: nn.Parameter) -> Callable[[Tensor], None]:
        def add(gradient: Tensor) -> None:
            if self._recording.step >= 8 and not self._is_probed():
                return  # sums are also compared in the first eight steps
            gradient = gradient.detach()
            gradient = gradient.to_dense() if gradient.is_sparse else gradient
            before = self._totals.get(weight)
            # A copy: autograd hands the same memory on to .grad, which the loop may change.
            self._totals[weight] = gradient.clone() if before is None else before + gradient

        return add

    def check_sums(
        self,
        pieces: Mapping[LayerUnit, LayerGradients],
        scale: float,
        few_bits: Collection[nn.Module],
    ) -> None:
        """Compare the sum of each layer's rows, which were multiplied by `scale`, with its gradient.

        Modules in `few_bits` computed with fewer bits than their weights have.
        """
        for unit, piece in pieces.items() if self._totals else ():
            totals = [self._totals.get(w, torch.zeros_like(w)).reshape(-1) for w in unit.weights]
            truth = torch.cat(totals)
            total = piece.form.weighted_sum(piece.rows, truth.new_full((1, self._rows), 1 / scale))
            tolerance = _SUM_ERRORS.get(truth.dtype, 2e-2)
            tolerance = 2e-2 if any(module in few_bits for module in unit.modules) else tolerance
            if not fits(total[0], truth, tolerance):
                raise CaptureError(
                    f"layer {unit.name}: the recorded rows do not add up to the gradient of backward()",
                    code="capture.sums_differ",
                    found=f"a {unit.type} used elsewhere too, with a changed forward, or with gradient hooks",
                    fix=f"Leave it out with layers='!{unit.name}', or replay with gk.capture.",
                )

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if self._depth == 0:
            self._start = len(self._calls)
            self._inputs = copied((args, kwargs))
            states = [torch.cuda.get_rng_state(index) for index in self._devices]
            self._random = [torch.get_rng_state(), *states]
        self._depth += 1

    def _leave(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if self._depth == 1 and len(self._calls) > self._start and self._is_probed():
            self._replay(module)  # at a depth of one: calls inside of it are not outermost
        self._depth -= 1

    def _replay(self, module: nn.Module) -> None:
        """Run a module again with one sample replaced, and compare the inputs of layers."""
        first = self._recording.batch_first
        changed = _with_sample_replaced(self._inputs, self._rows, self._sample, batch_first=first)
        if changed is None:
            return
        calls = self._calls[self._start :]
        original, axes = calls_by_module(calls), self._recording.axes_by_module(calls, self._rows)
        turns = dict.fromkeys(original, 0)

        def compare(layer: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            turn, turns[layer] = turns[layer], turns[layer] + 1
            read = next((leaf for leaf in leaves((args, kwargs)) if _is_tensor(leaf)), None)
            if layer not in axes or turn >= len(original[layer]) or read is None:
                return
            if self._changes_others(original[layer][turn].input, read, axes[layer]):
                names = self._recording.model.named_modules()
                raise CaptureError(
                    f"layer {next((n for n, m in names if m is layer), '')}: replacing one sample of "
                    "the batch changes the rows of another",
                    code="capture.rows_of_others",
                    found="a model that mixes or reorders samples, or joins several views of a sample",
                    fix="Replay the checkpoint with gk.capture, which reads rows from single samples.",
                )

        args, kwargs = changed
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            stack.enter_context(torch.random.fork_rng(self._devices))
            stack.enter_context(restore_buffers(self._recording.model))
            for layer in original:
                stack.callback(layer.register_forward_hook(compare, with_kwargs=True).remove)
            torch.set_rng_state(self._random[0])
            for index, state in zip(self._devices, self._random[1:], strict=True):
                torch.cuda.set_rng_state(state, index)
            module(*args, **kwargs)

    def _changes_others(self, one: Tensor, other: Tensor, axis: SampleAxis) -> bool:
        """Return True if a layer's input changed for a sample that was not replaced."""
        if one.shape != other.shape:
            # Another length is padding by the model; another number of rows moves samples.
            return axis == "flat" and len(one) != len(other)
        one, other = (by_sample(t.detach(), self._rows, axis).flatten(1) for t in (one, other))
        if one.shape[1] == 0:
            return False
        scale = one.abs().amax().double() if one.dtype.is_floating_point else 0.0
        change = (other.double() - one.double()).abs().amax(1)
        change[self._sample] = 0
        # Other samples may change by 1e-3 of the largest input: routing changes the sizes of
        # matrix products, which then round differently.
        return bool((change > 1e-3 * scale).any())

    def _note_output(self, module: nn.Module, args: Any, output: Any) -> None:
        if isinstance(output, torch.Tensor) and output.requires_grad:
            # The last four outputs, which are nearest to the loss.
            self._outputs = [*self._outputs, (module, get_gradient_edge(output))][-4:]

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.backward and self._outputs:
            before = [(call, list(call.suffixes), call.differentiated) for call in self._calls]
            try:
                self._probe_loss(args[0])
            finally:
                for call, suffixes, differentiated in before:
                    call.suffixes, call.differentiated = suffixes, differentiated
        return func(*args, **(kwargs or {}))

    def _probe_loss(self, loss: Tensor) -> None:
        """Test that the loss is a sum over samples."""
        axes = self._recording.axes_by_module(self._calls, self._rows)
        outputs = [(axes[module], edge) for module, edge in self._outputs if module in axes]
        if loss.numel() != 1 or not loss.requires_grad or not outputs:
            return
        try:
            own, others = self._second_derivatives(loss, outputs)
        except RuntimeError as error:
            self._recording.warn_unproved(str(error).splitlines()[0])
            return
        # By rounding, the others' second derivatives may reach 1e-4 of the sample's own.
        if others > 1e-4 * own:
            raise CaptureError(
                "the gradient of one sample depends on the outputs of others",
                code="capture.loss_mixes_samples",
                found="a loss over the whole batch, such as a contrastive loss",
                fix="Record a loss per sample; with a loss over the batch no sample has its own gradient.",
            )

    def _second_derivatives(
        self, loss: Tensor, outputs: list[tuple[SampleAxis, GradientEdge]]
    ) -> tuple[float, float]:
        """Return the largest second derivative at the probed sample's outputs, and at all others'."""
        axes, edges = [axis for axis, _ in outputs], [edge for _, edge in outputs]
        options: dict[str, Any] = {"retain_graph": True, "allow_unused": True}
        first = torch.autograd.grad(loss, edges, create_graph=True, **options)
        generator = torch.Generator().manual_seed(self._sample)
        direction = loss.new_zeros(())
        for gradient, axis in zip(first, axes, strict=True):
            if gradient is not None and gradient.requires_grad:
                row = by_sample(gradient, self._rows, axis)[self._sample]
                weights = torch.rand(row.shape, generator=generator).to(row)
                direction = direction + (row * (weights + 0.5)).sum()
        if not direction.requires_grad:
            return 0.0, 0.0  # linear in the outputs, hence a sum over samples
        own = others = 0.0
        second = torch.autograd.grad(direction, edges, **options)
        for derivative, axis in zip(second, axes, strict=True):
            if derivative is not None and derivative.numel():
                size = by_sample(derivative.detach(), self._rows, axis).flatten(1).abs().amax(1)
                own = max(own, float(size[self._sample]))
                size[self._sample] = 0
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
