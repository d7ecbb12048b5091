"""Projected gradients of a batch from one pass forward and back, without `torch.func`.

Every layer's factors are sketched as they are; a projector that wants dense gradients gets them
restored.
"""

from __future__ import annotations

import contextlib
import logging
import math
from typing import TYPE_CHECKING, Any

import torch

from gradkeep.capturing._first_batch import CaptureSettings, prepare_capture, rows_at_once
from gradkeep.capturing.tasks._tasks import Measured, Task
from gradkeep.compat.trak.projectors import SketchProjector
from gradkeep.curvature._project import project_layers
from gradkeep.errors import CaptureError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor, nn

    from gradkeep.capturing._first_batch import PreparedCapture
    from gradkeep.capturing.rules._layers import LayerGradients
    from gradkeep.compat.trak.modelout_functions import AbstractModelOutput
    from gradkeep.compat.trak.projectors import AbstractProjector

_log = logging.getLogger("TRAK")


class LayerTracer:
    """A model's chosen parameters, watched layer by layer."""

    def __init__(self, model: nn.Module, task: AbstractModelOutput, names: Sequence[str]) -> None:
        self._model, self._task = model, _AsTask(task)
        self._names = list(names)
        self._prepared: tuple[PreparedCapture, int] | None = None
        self._refused = False

    def reset(self) -> None:
        """The model has other weights now: what no sample depended on may count again."""
        self._prepared, self._refused = None, False

    def project(
        self, batch: Sequence[Tensor], projector: AbstractProjector, model_id: int
    ) -> tuple[Tensor, Tensor] | None:
        """Projections `[B, k]` and weights `[B, 1]`; None if the layers cannot be captured."""
        if self._refused:
            return None
        try:
            with _trainable(self._model, self._names):
                return self._all(batch, projector, model_id)
        except CaptureError as error:
            _log.info("using torch.func, as layers cannot be captured: %s", error.message)
            self._refused = True
            return None

    def _all(
        self, batch: Sequence[Tensor], projector: AbstractProjector, model_id: int
    ) -> tuple[Tensor, Tensor]:
        prepared, at_once = self._ready(batch)
        projections, weights = [], []
        for start in range(0, len(batch[0]), at_once):
            some = [field[start : start + at_once] for field in batch]
            traced = prepared.tracer.run(some)
            with torch.no_grad():
                pieces = traced.pieces.values()
                projections.append(self._projected(pieces, projector, model_id, len(some[0])))
            assert traced.measured.slopes is not None
            weights.append(traced.measured.slopes)
        return torch.cat(projections), torch.cat(weights).unsqueeze(1)

    def _ready(self, batch: Sequence[Tensor]) -> tuple[PreparedCapture, int]:
        if self._prepared is None:
            # Samples with which it is found out how each layer is captured.
            rows = min(len(batch[0]), 32)
            some = [field[:rows] for field in batch]
            prepared = prepare_capture(self._model, self._task, some, CaptureSettings(of="output"))
            self._prepared = (prepared, rows_at_once(prepared, rows))
        return self._prepared

    def _projected(
        self, pieces: Any, projector: AbstractProjector, model_id: int, rows: int
    ) -> Tensor:
        if not isinstance(projector, SketchProjector):
            return projector.project(self._by_name(pieces, rows), model_id=model_id)
        made = project_layers(
            ((piece.form, piece.rows) for piece in pieces),
            projector.projection,
            rows=rows,
            device=next(self._model.parameters()).device,
            model=model_id,
        )
        return made * math.sqrt(projector.proj_dim)

    def _by_name(self, pieces: Any, rows: int) -> dict[str, Tensor]:
        """Dense gradients in the order of the parameters; zeros for those without any."""
        found: dict[str, Tensor] = {}
        for piece in pieces:
            found |= _restored(piece)
        named = dict(self._model.named_parameters())
        return {
            name: found.get(name, named[name].new_zeros(rows, *named[name].shape))
            for name in self._names
        }


class _AsTask(Task):
    """A task of the facade, as one that captures understand."""

    def __init__(self, task: AbstractModelOutput) -> None:
        self._task = task

    def losses(self, model: nn.Module, batch: Any) -> Tensor:
        """The outputs stand in: only their gradients are asked for."""
        return self.measure(model, batch).losses

    def measure(self, model: nn.Module, batch: Any) -> Measured:
        """The outputs, and their weights as slopes."""
        # A task on the released base class has no such method.
        measure = getattr(self._task, "measure", None)
        measured = None if measure is None else measure(model, batch)
        if measured is None:
            raise CaptureError("the task measures single samples only")
        outputs, weights = measured
        return Measured(losses=outputs, outputs=outputs, slopes=weights.reshape(-1))


@contextlib.contextmanager
def _trainable(model: nn.Module, names: Sequence[str]) -> Iterator[None]:
    """Only these parameters require gradients until the block ends: no work for the others."""
    wanted = set(names)
    before = {parameter: parameter.requires_grad for parameter in model.parameters()}
    try:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name in wanted)
        yield
    finally:
        for parameter, flag in before.items():
            parameter.requires_grad_(flag)


def _restored(piece: LayerGradients) -> dict[str, Tensor]:
    dense = piece.form.restore(piece.rows)
    parts = torch.split(dense, [parameter.size for parameter in piece.form.parameters], 1)
    return {
        parameter.name: part.reshape(len(dense), *parameter.shape)
        for parameter, part in zip(piece.form.parameters, parts, strict=True)
    }
