"""Both sides' second moments of every layer, from one pass over some rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gradkeep.capturing._batches import batch_size
from gradkeep.capturing.rules._gradients import LayerGradients
from gradkeep.curvature._moments import VectorMoments, matrix_moments
from gradkeep.errors import CaptureError
from gradkeep.factors._dense import Dense, DenseRows
from gradkeep.factors._weights import WeightMatrix

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    import torch

    from gradkeep.capturing._tracer import Tracer
    from gradkeep.capturing.rules._units import LayerUnit
    from gradkeep.capturing.tasks._task import Measured
    from gradkeep.curvature._moments import MatrixMoments
    from gradkeep.factors._form import AnyForm

    Moments = MatrixMoments | VectorMoments


class MomentsSoon:
    """Adds up moments while the backward pass goes on, and lets the gradients go."""

    def __init__(self, tracer: Tracer) -> None:
        self.units: Collection[LayerUnit] = list(tracer.units)
        self._tracer = tracer
        self.forms: dict[LayerUnit, AnyForm] = {}
        self.moments: dict[LayerUnit, list[Moments]] = {}
        self.rows = 0

    def make(self, unit: LayerUnit, piece: LayerGradients, measured: Measured) -> LayerGradients:
        """Nothing is left of the gradients but their moments."""
        form, rows = piece.form, piece.rows.widened()
        if unit not in self.moments:
            self.forms[unit] = form
            with rows.example.device:
                self.moments[unit] = [
                    matrix_moments(block, form, lean=True)
                    if isinstance(block, WeightMatrix)
                    else VectorMoments(block, form)
                    for block in form.weight_blocks()
                ]
        slopes = self._tracer.loss_slopes(measured)
        for one in self.moments[unit]:
            one.add(rows, slopes)
        nothing = rows.example.new_empty(len(rows), 0)
        return LayerGradients(Dense(form.parameters, "", 0), DenseRows(nothing))


def measure_moments(tracer: Tracer, sample: Iterable[Any], device: torch.device) -> MomentsSoon:
    """The moments of all units' loss gradients over some batches; one pass forward and back.

    Of a weight, left = sum g g^T / rows and right = sum x x^T / positions, so that products of their
    eigenvalues have the size of the Fisher matrix.
    """
    found = MomentsSoon(tracer)
    for batch in sample:
        found.rows += batch_size(batch)
        losses = tracer.run(batch, device=device, soon=found).measured.losses
        if not bool(losses.isfinite().all()):
            raise CaptureError(
                "the loss of a row that the basis is found with is not a number",
                found=f"losses {losses.detach().tolist()[:8]}",
                fix="look at the data, or capture an earlier checkpoint: training diverged",
            )
    if not found.rows:
        raise CaptureError("there are no rows to find a basis with", fix="check the loader")
    return found
