"""Keeping gradients while a model trains: hooks around a loop that is already there."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import warnings
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import nn
from torch.utils._pytree import tree_map_only

import gradkeep.store as gs
from gradkeep._arguments import flag, one_of, optional
from gradkeep.capturing._keeping import choose_storage, rows_to_store
from gradkeep.capturing._loader import checked_ids, plain
from gradkeep.capturing._readiness import in_mode
from gradkeep.capturing._recording_checks import LossProbe, ProbedStep, SampleProbe, WeightGradients
from gradkeep.capturing._report import CaptureWarning
from gradkeep.capturing._resume import earlier_run
from gradkeep.capturing._rows import arrays_for, norm_values
from gradkeep.capturing._tracer import LayerCall, watching
from gradkeep.capturing.rules._layers import SAMPLE_AXES, possible
from gradkeep.capturing.rules._rules import (
    DENSE_RULES,
    HINT,
    calls_by_module,
    calls_of,
    unit_gradients,
    units_of,
)
from gradkeep.errors import CaptureError
from gradkeep.factors._form import form_to_fields
from gradkeep.query._layers import select_layers
from gradkeep.remat.planned._session import budget_is_active

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from gradkeep.capturing._keeping import LayerKeeping
    from gradkeep.capturing.rules._layers import SampleAxis
    from gradkeep.capturing.rules._rules import LayerUnit
    from gradkeep.query._layers import LayerChoice
    from gradkeep.store import CaptureKey, Encoding, Schema, Store, Writer

Reduction = Literal["mean", "sum"]


class GradientRecording:
    """A recording under way; made by `gk.recording`."""

    def __init__(
        self,
        store: Store,
        key: CaptureKey,
        model: nn.Module,
        units: Sequence[LayerUnit],
        *,
        reduction: Reduction,
        encoding: Encoding,
        batch_first: bool | None,
    ) -> None:
        self.key = key
        self._store, self._model, self._units = store, model, list(units)
        self._reduction, self._encoding = reduction, encoding
        self._batch_first = batch_first
        self._kept: list[LayerKeeping] | None = None
        self._writer: Writer | None = None
        self._names: tuple[str, ...] = ()
        self._step = 0
        self._patterns: set[int] = set()
        self._told_unproved = False
        self.rows = 0

    @contextlib.contextmanager
    def batch(
        self, ids: Any, *, divisor: float | None = None, keep: Mapping[str, Any] | None = None
    ) -> Iterator[None]:
        """Keep the gradients of the backward pass that runs inside of the block.

        `ids [B]` name the samples. The loss may be a mean or a sum, as `gk.recording` was told; a
        loss with another divisor (valid tokens, class weights, a loss scale) gives it here, and
        it is multiplied back. `keep` holds further values `[B]` of the samples.
        """
        own = checked_ids(ids)
        modules = [module for unit in self._units for module in unit.modules]
        with watching(modules, by_hooks=True) as calls, self._checking(calls, len(own)) as sums:
            yield
        scale = divisor if divisor is not None else len(own) if self._reduction == "mean" else 1
        with torch.no_grad():
            self._take(own, calls, float(scale), dict(keep or {}), sums)
        self._step += 1

    @contextlib.contextmanager
    def _checking(self, calls: list[LayerCall], rows: int) -> Iterator[WeightGradients]:
        """Check the step that runs inside of the block, if its turn has come or its shapes are new."""
        step = self._step
        # A step of every power of two, too: early steps are cheap to lose, late ones are many.
        scheduled = step < 4 or step % 64 == 0 or step.bit_count() == 1
        probed = _Turn(functools.partial(self._is_new, calls, rows), scheduled)
        # First steps whose sums are compared, first steps that are probed, and how often later
        # steps are.
        summed = _Turn(probed, step < 8)
        sums = WeightGradients(self._units, wanted=summed)
        axes = functools.partial(self._axes_by_module, rows=rows)
        with contextlib.ExitStack() as stack:
            stack.enter_context(sums.collecting())
            # Probes run the model and the loss again, which a budget's plan does not expect.
            if rows > 1 and not budget_is_active():
                probes = ProbedStep(self._model, calls, rows, (step * 7) % rows, axes)
                sample = SampleProbe(probes, wanted=probed, batch_first=self._batch_first)
                # A loop may call parts of the model by themselves; hooks on all of them take time.
                modules = self._model.modules() if scheduled else [self._model]
                stack.enter_context(sample.watching(modules))
                if scheduled:
                    own = [module for unit in self._units for module in unit.modules]
                    loss = LossProbe(probes, own, unproved=self._warn_unproved)
                    stack.enter_context(loss.watching())
            yield sums

    def _is_new(self, calls: Sequence[LayerCall], rows: int) -> bool:
        """Whether no earlier step called the layers with these shapes; notes them."""
        pattern = hash((rows, *((id(call.module), call.shapes) for call in calls)))
        # Patterns of shapes that are checked when they first occur; a bound for lengths that
        # never repeat.
        if pattern in self._patterns or len(self._patterns) >= 64:
            return False
        self._patterns.add(pattern)
        return True

    def _axes_by_module(
        self, calls: Sequence[LayerCall], *, rows: int
    ) -> dict[nn.Module, SampleAxis]:
        """How samples lie in the calls of each module, where their shapes tell."""
        by_module = calls_by_module(calls)
        units = [unit for unit in self._units if any(m in by_module for m in unit.modules)]
        try:
            axes = self._axes(by_module, rows, units)
        except CaptureError:
            return {}  # raised again when the rows are taken
        return {module: axis for unit, axis in axes.items() for module in unit.modules}

    def _warn_unproved(self, reason: str) -> None:
        if not self._told_unproved:
            self._told_unproved = True
            warnings.warn(
                f"it cannot be checked that the loss is a sum over samples: {reason}",
                CaptureWarning,
                stacklevel=2,
            )

    def _take(
        self,
        ids: np.ndarray[Any, Any],
        calls: list[LayerCall],
        scale: float,
        keep: dict[str, Any],
        sums: WeightGradients,
    ) -> None:
        by_module: dict[nn.Module, list[LayerCall]] = {}
        autocast: set[nn.Module] = set()
        for call in calls:
            if all(suffix is None for suffix in call.suffixes):
                continue
            if call.differentiated:
                raise CaptureError(
                    "a gradient of gradients was taken inside of batch()",
                    found="a backward pass with create_graph=True, as for gradient penalties",
                    fix="record the batches without it; or replay the checkpoint with gk.capture",
                )
            dtype = next(call.module.parameters()).dtype
            tensors = [call.input, *(s for s in call.suffixes if s is not None)]
            if any(t.is_floating_point() and t.dtype.itemsize < dtype.itemsize for t in tensors):
                autocast.add(call.module)
                call.args, call.kwargs = tree_map_only(
                    torch.Tensor, functools.partial(_widened, dtype), (call.args, call.kwargs)
                )
                call.suffixes = [s if s is None else _widened(dtype, s) for s in call.suffixes]
            call.suffixes = [None if s is None else s.detach() * scale for s in call.suffixes]
            by_module.setdefault(call.module, []).append(call)
        if not by_module:
            raise CaptureError(
                "no backward pass ran through the chosen layers inside of batch()",
                fix="put the forward pass and loss.backward() inside of `with rec.batch(ids):`",
            )
        axes = self._axes(by_module, len(ids), self._units)
        pieces = {
            unit: unit_gradients(
                dataclasses.replace(unit, axis=axis), _calls_of(unit, by_module), rows=len(ids)
            )
            for unit, axis in axes.items()
        }
        if sums.complete:
            sums.check(pieces, rows=len(ids), scale=scale, autocast=autocast)
        if self._writer is None:
            _tell_flat(axes, by_module, len(ids))
        if self._kept is None:
            self._kept = choose_storage(pieces, encoding=self._encoding, wanted={}, tolerance=0.0)
        factors, arrays = rows_to_store(self._kept, pieces)
        values = {name: plain(torch.as_tensor(value)) for name, value in keep.items()}
        values |= norm_values(self._kept, factors)
        finite = np.isfinite(values["norms"]).all(1)
        if not finite.all():
            raise CaptureError(f"the gradient of sample {ids[finite.argmin()]} is not a number")
        if self._writer is None:
            self._writer = self._store.write(self.key, self._schema(values))
            self._names = tuple(values)
        if tuple(values) != self._names:
            raise CaptureError(
                "every batch must keep the same values",
                found=", ".join(values),
                expected=", ".join(self._names),
            )
        self._writer.append(ids, values | arrays)
        self.rows += len(ids)

    def _axes(
        self,
        calls: Mapping[nn.Module, list[LayerCall]],
        rows: int,
        units: Sequence[LayerUnit],
    ) -> dict[LayerUnit, SampleAxis]:
        """Along which dimension each layer's samples lie.

        Sequences of as many steps as there are samples leave it open: then it is what other layers or earlier
        batches showed, or what was said.
        """
        found = {unit: _possible_axes(unit, calls, rows) for unit in units}
        open_ones = []
        for unit, axes in found.items():
            values = _calls_of(unit, calls)[0].input
            # Steps of samples, `[B, T, D]` or tokens `[B, T]`; images have their channels there.
            is_sequence = values.dim() == (3 if values.dtype.is_floating_point else 2)
            if axes[:2] == ["first", "second"] and is_sequence:
                open_ones.append(unit)
        if self._batch_first is None:
            certain = {axes[0] for unit, axes in found.items() if unit not in open_ones}
            if len(certain) == 1 and not certain <= {"flat"}:
                self._batch_first = certain == {"first"}
        if open_ones and self._batch_first is None:
            warnings.warn(
                f"layer {open_ones[0].name} is called with as many steps as samples, {rows}: the first "
                "dimension is taken for the samples; pass batch_first=True to say so, or batch_first=False "
                "if it is the second",
                CaptureWarning,
                stacklevel=5,
            )
            self._batch_first = True
        for unit in open_ones:
            found[unit] = ["first" if self._batch_first else "second"]
        return {unit: axes[0] for unit, axes in found.items()}

    def _schema(self, values: Mapping[str, Any]) -> Schema:
        assert self._kept is not None
        return gs.Schema(
            arrays=(*arrays_for(values), *(a for kept in self._kept for a in kept.arrays)),
            layers=tuple(
                gs.Layer(k.unit.name, k.unit.type, k.unit.size, form_to_fields(k.form))
                for k in self._kept
            ),
            fingerprints={
                # The weights move on between batches: rows of one recording belong together,
                # and to nothing else.
                "weights": f"recording {self.key.run} {self.key.checkpoint}",
                "of": "loss",
                "model": type(self._model).__name__,
            },
        )

    def finish(self) -> None:
        """Seal what was recorded."""
        if self._writer is not None:
            self._writer.seal()

    def abandon(self) -> None:
        """Stop without sealing, as after an error."""
        if self._writer is not None:
            self._writer.__exit__(RuntimeError, RuntimeError("abandoned"), None)


@dataclasses.dataclass(slots=True)
class _Turn:
    """Whether it is a check's turn: always, or once something says so."""

    ask: Callable[[], bool]
    now: bool

    def __call__(self) -> bool:
        self.now = self.now or self.ask()
        return self.now


@contextlib.contextmanager
def recording(
    store: Store | str | os.PathLike[str],
    model: nn.Module,
    *,
    checkpoints: str,
    split: str = "train",
    run: str = "main",
    name: str = "main",
    layers: LayerChoice = None,
    encoding: Encoding = "plain",
    reduction: Reduction = "mean",
    batch_first: bool | None = None,
    uncovered: Literal["error", "skip"] = "error",
) -> Iterator[GradientRecording]:
    """Keep the per-sample gradients of a training loop as it runs, at the weights of each step.

    Only layers with a factor rule can be recorded (linear, convolution, embedding, normalisation);
    others are an error, or left out with `uncovered="skip"`. Whether sequences are `[B, T, ...]` or
    `[T, B, ...]` is seen by their sizes; `batch_first` says it where T may be B. Sealed when the block ends
    well.
    Cost: keeping references during the step, then writing.

    >>> import gradkeep as gk, tempfile
    >>> model, store = torch.nn.Linear(4, 3), gk.open(tempfile.mkdtemp())
    >>> with gk.recording(store, model, checkpoints="epoch-1") as rec:
    ...     for ids in ([0, 1], [2, 3]):
    ...         with rec.batch(ids):
    ...             model(torch.randn(2, 4)).square().sum(1).mean().backward()
    >>> len(gk.gradients(store, split="train"))
    4
    """
    opened = gs.open(store)
    key = gs.CaptureKey(checkpoints, split, run, name)
    if earlier_run(opened, key) is not None:
        raise CaptureError(
            "there is such a capture already, and training cannot be resumed in the middle of one",
            path=opened.backend.describe(key.folder),
            fix="use another checkpoints= or name=, or delete it first",
        )
    one_of("reduction", reduction, words=("mean", "sum"), error=CaptureError)
    units = select_layers(units_of(model), layers, error=CaptureError, hint=HINT)
    without = [unit for unit in units if unit.rule in DENSE_RULES]
    if without and uncovered == "error":
        raise CaptureError(
            "some layers cannot be recorded while training",
            found=", ".join(f"{unit.name} ({unit.type})" for unit in without),
            fix="pass uncovered='skip', choose layers=, or replay the checkpoint with gk.capture",
        )
    units = [unit for unit in units if unit.rule not in DENSE_RULES]
    with in_mode(model, "train" if model.training else "eval"):
        pass  # only the checks: a loop switches modes itself
    optional(flag, "batch_first", batch_first, error=CaptureError)
    rec = GradientRecording(
        *(opened, key, model, units),
        reduction=reduction,
        encoding=encoding,
        batch_first=batch_first,
    )
    try:
        yield rec
    except BaseException:
        rec.abandon()
        raise
    rec.finish()


def _widened(dtype: torch.dtype, tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def _tell_flat(
    axes: Mapping[LayerUnit, SampleAxis], calls: Mapping[nn.Module, list[LayerCall]], rows: int
) -> None:
    """Say how several rows for one id are read: nothing in a step tells tokens from copies."""
    flat = [unit for unit, axis in axes.items() if axis == "flat"]
    if flat and rows > 1:
        count = len(_calls_of(flat[0], calls)[0].input)
        warnings.warn(
            f"layer {flat[0].name} is called with {count} rows for {rows} ids: rows 0 to "
            f"{count // rows - 1} are kept as the first sample's, as the tokens of a sequence lie; copies "
            "of all samples one after the other need an id each",
            CaptureWarning,
            stacklevel=5,
        )


def _calls_of(unit: LayerUnit, calls: Mapping[nn.Module, list[LayerCall]]) -> list[LayerCall]:
    own = calls_of(unit, calls)
    if not own:
        raise CaptureError(
            f"layer {unit.name} got no gradient in this batch",
            fix="leave it out with layers='!...'",
        )
    return own


def _possible_axes(
    unit: LayerUnit, calls: Mapping[nn.Module, list[LayerCall]], rows: int
) -> list[SampleAxis]:
    own = _calls_of(unit, calls)
    shapes = [shape for call in own for shape in (call.input.shape, call.shapes[0])]
    found = [axis for axis in SAMPLE_AXES if all(possible(shape, rows, axis) for shape in shapes)]
    if not found:
        raise CaptureError(
            f"layer {unit.name} was not called with one row per sample",
            found=f"input {tuple(own[0].input.shape)} for {rows} ids",
            fix="give as many ids as there are samples in the batch; leave out a layer that all samples "
            f"share, such as position embeddings, with layers='!{unit.name}'",
        )
    return found
