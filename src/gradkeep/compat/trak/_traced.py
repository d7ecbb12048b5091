"""Projected gradients of a batch from one forward and backward pass, without `torch.func`.

The factors of every layer are sketched directly; a projector of dense gradients gets them restored.
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
    """Capture of a model's selected parameters, layer by layer."""

    def __init__(self, model: nn.Module, task: AbstractModelOutput, names: Sequence[str]) -> None:
        self._model, self._task = model, _CaptureTask(task)
        self._names = list(names)
        self._prepared: tuple[PreparedCapture, int] | None = None
        self._unsupported = False

    def reset(self) -> None:
        """Prepare again, because the model has other weights."""
        self._prepared, self._unsupported = None, False

    def project(
        self, batch: Sequence[Tensor], projector: AbstractProjector, model_id: int
    ) -> tuple[Tensor, Tensor] | None:
        """Return projections `[B, k]` and weights `[B, 1]`; None if the layers cannot be captured."""
        if self._unsupported:
            return None
        try:
            with _trainable(self._model, self._names):
                return self._project_batch(batch, projector, model_id)
        except CaptureError as error:
            _log.info("using torch.func, as layers cannot be captured: %s", error.message)
            self._unsupported = True
            return None

    def _project_batch(
        self, batch: Sequence[Tensor], projector: AbstractProjector, model_id: int
    ) -> tuple[Tensor, Tensor]:
        prepared, at_once = self._prepare(batch)
        projections, weights = [], []
        for start in range(0, len(batch[0]), at_once):
            some = [field[start : start + at_once] for field in batch]
            traced = prepared.tracer.run(some)
            with torch.no_grad():
                pieces = traced.pieces.values()
                projections.append(self._project_pieces(pieces, projector, model_id, len(some[0])))
            assert traced.measured.slopes is not None
            weights.append(traced.measured.slopes)
        return torch.cat(projections), torch.cat(weights).unsqueeze(1)

    def _prepare(self, batch: Sequence[Tensor]) -> tuple[PreparedCapture, int]:
        if self._prepared is None:
            # Probe batch.
            rows = min(len(batch[0]), 32)
            some = [field[:rows] for field in batch]
            prepared = prepare_capture(self._model, self._task, some, CaptureSettings(of="output"))
            self._prepared = (prepared, rows_at_once(prepared, rows))
        return self._prepared

    def _project_pieces(
        self, pieces: Any, projector: AbstractProjector, model_id: int, rows: int
    ) -> Tensor:
        if not isinstance(projector, SketchProjector):
            return projector.project(self._by_name(pieces, rows), model_id=model_id)
        projections = project_layers(
            ((piece.form, piece.rows) for piece in pieces),
            projector.projection,
            rows=rows,
            device=next(self._model.parameters()).device,
            model=model_id,
        )
        return projections * math.sqrt(projector.proj_dim)

    def _by_name(self, pieces: Any, rows: int) -> dict[str, Tensor]:
        """Return dense gradients in the order of the parameters; zeros for those without any."""
        gradients: dict[str, Tensor] = {}
        for piece in pieces:
            gradients |= _restore_gradients(piece)
        named = dict(self._model.named_parameters())
        return {
            name: gradients.get(name, named[name].new_zeros(rows, *named[name].shape))
            for name in self._names
        }


class _CaptureTask(Task):
    """A TRAK task as a task of `gk.capture`."""

    def __init__(self, task: AbstractModelOutput) -> None:
        self._task = task

    def losses(self, model: nn.Module, batch: Any) -> Tensor:
        """Return the outputs, because only their gradients are used."""
        return self.measure(model, batch).losses

    def measure(self, model: nn.Module, batch: Any) -> Measured:
        """Return the outputs, with their weights as slopes."""
        # Tasks of the released base class have no such method.
        measure = getattr(self._task, "measure", None)
        measured = None if measure is None else measure(model, batch)
        if measured is None:
            raise CaptureError(
                "the task measures single samples only", code="capture.single_samples"
            )
        outputs, weights = measured
        return Measured(losses=outputs, outputs=outputs, slopes=weights.reshape(-1))


@contextlib.contextmanager
def _trainable(model: nn.Module, names: Sequence[str]) -> Iterator[None]:
    """Enable gradients for these parameters only, inside the block."""
    chosen = set(names)
    before = {parameter: parameter.requires_grad for parameter in model.parameters()}
    try:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name in chosen)
        yield
    finally:
        for parameter, flag in before.items():
            parameter.requires_grad_(flag)


def _restore_gradients(piece: LayerGradients) -> dict[str, Tensor]:
    dense = piece.form.restore(piece.rows)
    parts = torch.split(dense, [parameter.size for parameter in piece.form.parameters], 1)
    return {
        parameter.name: part.reshape(len(dense), *parameter.shape)
        for parameter, part in zip(piece.form.parameters, parts, strict=True)
    }
