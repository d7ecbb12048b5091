"""Store gradients while a model trains: hooks around an existing training loop."""

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
from gradkeep.capturing._loader import parse_ids, plain
from gradkeep.capturing._readiness import in_mode
from gradkeep.capturing._recording_checks import StepChecks
from gradkeep.capturing._report import CaptureWarning
from gradkeep.capturing._resume import find_earlier_run
from gradkeep.capturing._rows import arrays_for, norm_values
from gradkeep.capturing._storage import choose_storage, rows_to_store
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
from gradkeep.query._gradients import select_layers

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator, Mapping, Sequence

    from gradkeep.capturing._storage import LayerStorage
    from gradkeep.capturing.rules._layers import SampleAxis
    from gradkeep.capturing.rules._rules import LayerUnit
    from gradkeep.query._gradients import LayerChoice
    from gradkeep.store import CaptureKey, Encoding, Schema, Store, Writer

Reduction = Literal["mean", "sum"]


@dataclasses.dataclass(slots=True, eq=False, repr=False)
class GradientRecording:
    """A running recording, created by `gk.recording`.

    Attributes:
        key: Key of the capture in the store.
        rows: Rows recorded so far.
    """

    key: CaptureKey
    store: Store
    model: nn.Module
    units: Sequence[LayerUnit]
    reduction: Reduction
    encoding: Encoding
    batch_first: bool | None
    rows: int = 0
    step: int = 0
    _layers: list[LayerStorage] | None = None
    _writer: Writer | None = None
    _names: tuple[str, ...] = ()
    _patterns: set[int] = dataclasses.field(default_factory=set)
    _warned_unproved: bool = False

    @contextlib.contextmanager
    def batch(
        self, ids: Any, *, divisor: float | None = None, keep: Mapping[str, Any] | None = None
    ) -> Iterator[None]:
        """Store the gradients of the backward pass that runs inside of the block.

        Args:
            ids: Ids `[B]` of the samples.
            divisor: Divisor of the loss if it is neither the mean nor the sum that `gk.recording` expects:
                a number of valid tokens, class weights, a loss scale. Gradients are multiplied by it.
            keep: Further values `[B]` to store with the samples, by name.

        Raises:
            CaptureError: The recorded rows are not the samples' own gradients.
        """
        own = parse_ids(ids)
        modules = [module for unit in self.units for module in unit.modules]
        with watching(modules, by_hooks=True) as calls:
            checks = StepChecks(self, calls, len(own))
            with checks.watching():
                yield
        scale = divisor if divisor is not None else len(own) if self.reduction == "mean" else 1
        with torch.no_grad():
            self._take(own, calls, float(scale), dict(keep or {}), checks)
        self.step += 1

    def is_new(self, calls: Sequence[LayerCall], rows: int) -> bool:
        """Return True if no earlier step called the layers with these shapes, and remember them."""
        pattern = hash((rows, *((id(call.module), call.shapes) for call in calls)))
        # At most 64 patterns: sequence lengths may never repeat.
        if pattern in self._patterns or len(self._patterns) >= 64:
            return False
        self._patterns.add(pattern)
        return True

    def axes_by_module(self, calls: Sequence[LayerCall], rows: int) -> dict[nn.Module, SampleAxis]:
        """Return the sample axis of each module's calls, where their shapes determine it."""
        by_module = calls_by_module(calls)
        units = [unit for unit in self.units if any(m in by_module for m in unit.modules)]
        try:
            axes = self._axes(by_module, rows, units)
        except CaptureError:
            return {}  # raised again when the rows are taken
        return {module: axis for unit, axis in axes.items() for module in unit.modules}

    def warn_unproved(self, reason: str) -> None:
        """Warn once that the loss cannot be checked."""
        if not self._warned_unproved:
            self._warned_unproved = True
            warnings.warn(
                f"that the loss is a sum over samples cannot be checked: {reason}",
                CaptureWarning,
                stacklevel=2,
            )

    def _take(
        self,
        ids: np.ndarray[Any, Any],
        calls: list[LayerCall],
        scale: float,
        keep: dict[str, Any],
        checks: StepChecks,
    ) -> None:
        by_module: dict[nn.Module, list[LayerCall]] = {}
        autocast: set[nn.Module] = set()
        for call in calls:
            if all(suffix is None for suffix in call.suffixes):
                continue
            if call.differentiated:
                raise CaptureError(
                    "a backward pass inside of batch() can itself be differentiated",
                    code="capture.double_backward",
                    found="create_graph=True, as for gradient penalties",
                    fix="Record batches without it, or replay the checkpoint with gk.capture.",
                )
            dtype = next(call.module.parameters()).dtype
            tensors = [call.input, *(s for s in call.suffixes if s is not None)]
            if any(t.is_floating_point() and t.dtype.itemsize < dtype.itemsize for t in tensors):
                autocast.add(call.module)
                inputs = (call.args, call.kwargs, call.suffixes)
                wide = functools.partial(_widened, dtype)
                call.args, call.kwargs, call.suffixes = tree_map_only(torch.Tensor, wide, inputs)
            call.suffixes = [None if s is None else s.detach() * scale for s in call.suffixes]
            by_module.setdefault(call.module, []).append(call)
        if not by_module:
            raise CaptureError(
                "no backward pass ran through the chosen layers inside of batch()",
                code="capture.no_backward",
                fix="Put the forward pass and loss.backward() inside of `with rec.batch(ids):`.",
            )
        axes = self._axes(by_module, len(ids), self.units)
        pieces = {
            unit: unit_gradients(
                dataclasses.replace(unit, axis=axis), _calls_of(unit, by_module), rows=len(ids)
            )
            for unit, axis in axes.items()
        }
        checks.check_sums(pieces, scale, autocast)
        if self._writer is None:
            _warn_flat(axes, by_module, len(ids))
        if self._layers is None:
            self._layers = choose_storage(
                pieces, encoding=self.encoding, requested={}, tolerance=0.0
            )
        factors, arrays = rows_to_store(self._layers, pieces)
        values = {name: plain(torch.as_tensor(value)) for name, value in keep.items()}
        values |= norm_values(self._layers, factors)
        finite = np.isfinite(values["norms"]).all(1)
        if not finite.all():
            raise CaptureError(
                f"the gradient of sample {ids[finite.argmin()]} is not finite",
                code="capture.infinite_gradient",
            )
        if self._writer is None:
            self._writer = self.store.write(self.key, self._schema(values))
            self._names = tuple(values)
        if tuple(values) != self._names:
            raise CaptureError(
                "batches must store the same values",
                code="capture.other_values",
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
        """Return the dimension along which each layer's samples lie.

        It is ambiguous for sequences with as many steps as there are samples: then other layers, earlier batches
        or `batch_first` decide.
        """
        candidates = {unit: _possible_axes(unit, calls, rows) for unit in units}
        ambiguous = []
        for unit, axes in candidates.items():
            values = _calls_of(unit, calls)[0].input
            # Steps of samples, `[B, T, D]` or tokens `[B, T]`; images have their channels there.
            is_sequence = values.dim() == (3 if values.dtype.is_floating_point else 2)
            if axes[:2] == ["first", "second"] and is_sequence:
                ambiguous.append(unit)
        if self.batch_first is None:
            certain = {axes[0] for unit, axes in candidates.items() if unit not in ambiguous}
            if len(certain) == 1 and not certain <= {"flat"}:
                self.batch_first = certain == {"first"}
        if ambiguous and self.batch_first is None:
            warnings.warn(
                f"layer {ambiguous[0].name} is called with as many steps as samples, {rows}: the first "
                "dimension is assumed to be the samples; pass batch_first=True to confirm this, or "
                "batch_first=False if it is the second",
                CaptureWarning,
                stacklevel=5,
            )
            self.batch_first = True
        for unit in ambiguous:
            candidates[unit] = ["first" if self.batch_first else "second"]
        return {unit: axes[0] for unit, axes in candidates.items()}

    def _schema(self, values: Mapping[str, Any]) -> Schema:
        assert self._layers is not None
        return gs.Schema(
            arrays=(*arrays_for(values), *(a for layer in self._layers for a in layer.arrays)),
            layers=tuple(layer.schema_layer() for layer in self._layers),
            fingerprints={
                # Weights change between batches: rows of a recording only match each other.
                "weights": f"recording {self.key.run} {self.key.checkpoint}",
                "of": "loss",
                "model": type(self.model).__name__,
            },
        )

    @contextlib.contextmanager
    def sealing(self) -> Iterator[None]:
        """Seal the recorded rows when the block ends without an error."""
        try:
            yield
        except BaseException as error:
            if self._writer is not None:
                self._writer.__exit__(type(error), error, None)
            raise
        if self._writer is not None:
            self._writer.seal()


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
    """Store the per-sample gradients of a training loop as it runs, at the weights of each step.

    Only layers with a factor rule (linear, convolution, embedding, normalization) can be recorded. The
    capture is sealed when the block ends without an error. Cost: holding references during the step, then
    writing.

    Args:
        store: Store, or the path of one, to write to.
        model: Model that the loop trains.
        checkpoints: Name of the checkpoint that the rows belong to, such as `"epoch-1"`.
        split: Name of the data set.
        run: Name of the training run.
        name: Name of the capture.
        layers: Names, globs or module types of the layers to record; None for all.
        encoding: Encoding of stored arrays.
        reduction: `"mean"` or `"sum"`: how the loop's loss combines the samples of a batch.
        batch_first: True for sequences `[B, T, ...]`, False for `[T, B, ...]`; None infers it from sizes,
            which is ambiguous if T equals B.
        uncovered: `"error"` raises for layers without a factor rule, `"skip"` leaves them out.

    Yields:
        The recording; run each step inside of `with rec.batch(ids):`.

    Raises:
        CaptureError: The capture exists already, or a layer cannot be recorded.

    Example:
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
    if find_earlier_run(opened, key) is not None:
        raise CaptureError(
            "this capture exists already, and a recording cannot be resumed",
            code="capture.exists",
            path=opened.backend.describe(key.folder),
            fix="Use another checkpoints= or name=, or delete it first.",
        )
    one_of("reduction", reduction, words=("mean", "sum"), error=CaptureError)
    units = select_layers(units_of(model), layers, error=CaptureError, hint=HINT)
    without = [unit for unit in units if unit.rule in DENSE_RULES]
    if without and uncovered == "error":
        raise CaptureError(
            "some layers cannot be recorded while training",
            code="capture.not_recordable",
            found=", ".join(f"{unit.name} ({unit.type})" for unit in without),
            fix="Pass uncovered='skip', choose layers=, or replay the checkpoint with gk.capture.",
        )
    units = [unit for unit in units if unit.rule not in DENSE_RULES]
    with in_mode(model, "train" if model.training else "eval"):
        pass  # only its checks: the loop sets the mode
    optional(flag, "batch_first", batch_first, error=CaptureError)
    rec = GradientRecording(key, opened, model, units, reduction, encoding, batch_first)
    with rec.sealing():
        yield rec


def _widened(dtype: torch.dtype, tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def _warn_flat(
    axes: Mapping[LayerUnit, SampleAxis], calls: Mapping[nn.Module, list[LayerCall]], rows: int
) -> None:
    """Warn how several rows per id are read: shapes cannot tell tokens from copies."""
    flat = [unit for unit, axis in axes.items() if axis == "flat"]
    if flat and rows > 1:
        count = len(_calls_of(flat[0], calls)[0].input)
        warnings.warn(
            f"layer {flat[0].name} is called with {count} rows for {rows} ids: rows 0 to "
            f"{count // rows - 1} are stored as the tokens of the first sample; consecutive copies of all "
            "samples need an id each",
            CaptureWarning,
            stacklevel=5,
        )


def _calls_of(unit: LayerUnit, calls: Mapping[nn.Module, list[LayerCall]]) -> list[LayerCall]:
    own = calls_of(unit, calls)
    if not own:
        raise CaptureError(
            f"layer {unit.name} has no gradient in this batch",
            code="capture.no_layer_gradient",
            fix=f"Leave it out with layers='!{unit.name}'.",
        )
    return own


def _possible_axes(
    unit: LayerUnit, calls: Mapping[nn.Module, list[LayerCall]], rows: int
) -> list[SampleAxis]:
    own = _calls_of(unit, calls)
    shapes = [shape for call in own for shape in (call.input.shape, call.shapes[0])]
    axes = [axis for axis in SAMPLE_AXES if all(possible(shape, rows, axis) for shape in shapes)]
    if not axes:
        raise CaptureError(
            f"layer {unit.name} was not called with one row per sample",
            code="capture.rows_per_sample",
            found=f"input {tuple(own[0].input.shape)} for {rows} ids",
            fix=f"Pass an id per sample; leave out shared layers with layers='!{unit.name}'.",
        )
    return axes
