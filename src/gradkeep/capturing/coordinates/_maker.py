"""Making the rows of a compressed capture: coordinates as the backward pass comes by, then few bits."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from gradkeep.capturing._audit import RowAudit
from gradkeep.capturing._batches import batch_size
from gradkeep.capturing._keeping import LayerKeeping, arrays_of
from gradkeep.capturing._row_making import MadeRows
from gradkeep.capturing._row_values import measured_values, seeing_outputs, vectors
from gradkeep.capturing._tracer import DENSE_RULES
from gradkeep.capturing.rules._gradients import LayerGradients
from gradkeep.factors._bits import PACKED, BitRows, Bits, bit_scales, packed_bits
from gradkeep.factors._dense import Dense, DenseRows

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from contextlib import AbstractContextManager

    from torch import Tensor, nn

    from gradkeep.capturing._first_batch import PreparedCapture
    from gradkeep.capturing._tracer import Tracer
    from gradkeep.capturing.coordinates._basis import CaptureBasis
    from gradkeep.capturing.coordinates._keep import Keep
    from gradkeep.capturing.rules._units import LayerUnit
    from gradkeep.capturing.tasks._task import Measured
    from gradkeep.factors._bits import BitWidth
    from gradkeep.factors._form import AnyForm
    from gradkeep.factors._weights import LayerProjection
    from gradkeep.remat import MemoryBudget
    from gradkeep.store import Encoding

SCALE = "gradient.scale"
_POOR = 0.3
CODES: dict[BitWidth, Encoding] = {
    1: "plain",
    4: "plain",
    8: "int8-scaled",
    16: "float16-scaled",
    32: "plain",
}
"""How coordinates of so many bits are encoded."""


@dataclass(frozen=True, slots=True, eq=False)
class CoordinatesSoon:
    """Makes coordinates of factors while the backward pass goes on."""

    projections: Mapping[LayerUnit, LayerProjection]
    forms: Mapping[LayerUnit, AnyForm]
    """The forms that the projections were found with."""

    @property
    def units(self) -> list[LayerUnit]:
        """All that have coordinates."""
        return list(self.projections)

    def make(
        self, unit: LayerUnit, piece: LayerGradients, measured: Measured | None
    ) -> LayerGradients:
        """The coordinates `[B, k]` of a unit's gradients."""
        del measured
        blocks = self.forms[unit].weight_blocks()
        values = self.projections[unit].applied(piece.form, piece.rows.widened(), blocks).float()
        return LayerGradients(Dense(piece.form.parameters, "", values.shape[1]), DenseRows(values))


@dataclass(frozen=True, slots=True, eq=False)
class CoordinateMaker:
    """Makes rows of coordinates in a basis, some bits each."""

    tracer: Tracer
    """Of the units that the basis has coordinates of."""
    basis: CaptureBasis
    bits: BitWidth
    watched: dict[str, nn.Module]
    recompute: MemoryBudget | None
    device: torch.device
    kept: tuple[LayerKeeping, ...]
    left_out: tuple[str, ...]
    joined: int = 1
    audit: RowAudit | None = None

    def audited(self) -> CoordinateMaker:
        """The same, with some of its rows checked."""

        def project(unit: LayerUnit, dense: Tensor) -> Tensor:
            form = Dense(unit.parameters, "", dense.shape[1])
            piece = LayerGradients(form, DenseRows(dense))
            return _values(self._soon().make(unit, piece, None))

        audit = RowAudit(self.tracer.model, self.tracer.task, self.device, self.tracer, project)
        return dataclasses.replace(self, audit=audit)

    def _soon(self) -> CoordinatesSoon:
        assert self.tracer.proofs is not None
        units = {unit: self.basis.layers[unit.name] for unit in self.tracer.units}
        return CoordinatesSoon(units, self.tracer.proofs.forms)

    @property
    def group(self) -> int:
        """Coordinates that share a byte."""
        return self.basis.group if self.bits == 1 else 0

    @property
    def row_bytes(self) -> float:
        """Bytes on disk of one row's coordinates."""
        return sum(keeping.row_bytes for keeping in self.kept)

    def make(self, batch: Any, *, alone: bool = False, ids: Any = None) -> MadeRows:
        """The coordinates and the other values of one batch."""
        started = time.perf_counter()
        soon = self._soon()
        within: Callable[[Any], AbstractContextManager[Any]] = contextlib.nullcontext
        light: frozenset[nn.Module] = frozenset()
        if self.recompute is not None and not alone:
            within = self.recompute.step
            light = frozenset(m for u in soon.units if u.rule not in DENSE_RULES for m in u.modules)
        with seeing_outputs(self.watched) as seen:
            traced = self.tracer.run(
                batch, soon=soon, light=light, device=self.device, within=within
            )
        if self.audit is not None and ids is not None:
            losses = traced.measured.losses.detach()
            self.audit.look(ids, batch, losses, traced, time.perf_counter() - started)
        with torch.no_grad():
            parts = {unit: _values(traced.pieces[unit]) for unit in self.tracer.units}
            whole = torch.cat(list(parts.values()), 1)
            scales = bit_scales(whole, self.bits, self.group)
            rows = {unit: self._rows(values, scales) for unit, values in parts.items()}
        values = measured_values(traced.measured)
        values.pop("token_loss", None)  # four bytes a token: often more than all coordinates
        values |= vectors(seen, batch_size(batch))
        values["norm"] = torch.linalg.vector_norm(whole, dim=1).cpu().numpy()
        gradients: dict[str, Any] = {}
        for keeping in self.kept:
            for name, tensor in keeping.form.tensors(rows[keeping.unit]).items():
                gradients[name] = tensor.cpu().numpy()
        return MadeRows(values, gradients, {unit.name: made for unit, made in rows.items()})

    def fingerprints(self, values: Mapping[str, Any]) -> dict[str, str]:
        """Whose gradients these are, and in which basis."""
        wanted = self.tracer.of
        outputs = wanted == "output" or (wanted is None and "slope" in values)
        return {
            "of": "output" if outputs else "loss",
            "unused": ", ".join(unit.name for unit in self.tracer.unused),
            "skipped": ", ".join(self.left_out),
            "basis": self.basis.fingerprint,
            "kept": self.basis.told(self.bits),
        }

    def notes(self) -> list[str]:
        """That ranks hardly agree with those of whole gradients, where that was seen."""
        agreement = self.basis.agreement
        if agreement is None or agreement >= _POOR:
            return []
        told = (
            f"ranks from what is kept agree only {agreement:.2f} with those of whole gradients on "
            f"{self.basis.compared} rows: keep more bytes, or find the basis with more rows "
            "(gk.Keep(..., rows=))"
        )
        return [told]

    def facts(self) -> list[str]:
        """What is kept, and which layers are not."""
        kept = [f"kept {self.basis.told(self.bits)}"]
        if not self.left_out:
            return kept
        some = ", ".join(self.left_out[:4]) + (" ..." if len(self.left_out) > 4 else "")
        told = f"{len(self.left_out)} layers have no coordinate among the kept ones ({some}); "
        return [*kept, told + "layers= chooses layers, and more bytes keep more of them"]

    def _rows(self, values: Tensor, scales: Tensor | None) -> BitRows:
        if scales is None:
            return BitRows(values)
        return BitRows(packed_bits(values, scales, self.bits, self.group), scales)


def coordinate_maker(
    prepared: PreparedCapture,
    basis: CaptureBasis,
    keep: Keep | None,
    watched: dict[str, nn.Module],
    *,
    recompute: MemoryBudget | None,
    device: torch.device,
) -> CoordinateMaker:
    """What makes rows in a basis, unrounded without a number of bytes; other units are not watched."""
    bits: BitWidth = 32 if keep is None else keep.bits
    tracer, whitened = prepared.tracer, basis.whitened
    exact = {keeping.unit: keeping for keeping in prepared.kept}
    units = [unit for unit in tracer.units if unit.name in basis.layers]
    kept: list[LayerKeeping] = []
    for unit in units:
        size = basis.layers[unit.name].size
        packed = bits in PACKED
        scale = SCALE if packed else ""
        form = Bits(
            unit.parameters,
            f"{unit.name}.bits",
            scale,
            size,
            bits,
            basis.fingerprint,
            whitened,
            basis.group if packed else 0,
        )
        example, one = torch.zeros(1, size), torch.ones(1)
        rows = BitRows(packed_bits(example, one, bits, form.group), one) if packed else None
        arrays = arrays_of(unit.name, form, rows or BitRows(example), CODES[bits])
        own = tuple(array for array in arrays if array.name != SCALE or not kept)
        kept.append(
            LayerKeeping(
                unit=unit,
                form=form,
                storage="coordinates",
                arrays=own,
                row_bytes=sum(array.row_bytes for array in own),
                factor_bytes=exact[unit].factor_bytes,
                positions=exact[unit].positions,
            )
        )
    left_out = tuple(unit.name for unit in tracer.units if unit.name not in basis.layers)
    return CoordinateMaker(
        dataclasses.replace(tracer, units=units),
        basis,
        bits,
        watched,
        recompute,
        device,
        tuple(kept),
        left_out,
    )


def _values(piece: LayerGradients) -> Tensor:
    assert isinstance(piece.rows, DenseRows)
    return piece.rows.values
