"""Rows of a compressed capture: coordinates made during the backward pass, then few bits."""

from __future__ import annotations

import contextlib
import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from gradkeep.capturing._keeping import arrays_of
from gradkeep.capturing._row_making import RowMaker, measured_values, traced_fingerprints
from gradkeep.capturing._tracer import DENSE_RULES
from gradkeep.capturing.rules._layers import LayerGradients
from gradkeep.factors._bits import PACKED, BitRows, Bits, bit_scales, packed_bits
from gradkeep.factors._dense import Dense, DenseRows

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from contextlib import AbstractContextManager

    from torch import Tensor, nn

    from gradkeep.capturing._basis import CaptureBasis
    from gradkeep.capturing._first_batch import PreparedCapture
    from gradkeep.capturing._keep import Keep
    from gradkeep.capturing._keeping import LayerKeeping
    from gradkeep.capturing._row_making import Values
    from gradkeep.capturing._tracer import Traced, Tracer
    from gradkeep.capturing.rules._rules import LayerUnit
    from gradkeep.capturing.tasks._tasks import Measured
    from gradkeep.factors._bits import BitWidth
    from gradkeep.factors._form import AnyForm, GradientRows
    from gradkeep.factors._weights import LayerProjection
    from gradkeep.remat import MemoryBudget
    from gradkeep.store import Encoding

SCALE = "gradient.scale"
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


@dataclass(slots=True, eq=False, kw_only=True)
class CoordinateMaker(RowMaker):
    """Makes rows of coordinates in a basis, some bits each."""

    tracer: Tracer
    """Of the units that the basis has coordinates of."""
    basis: CaptureBasis
    bits: BitWidth
    recompute: MemoryBudget | None
    left_out: tuple[str, ...]

    @property
    def joined(self) -> int:
        """One batch: rows take long to make again."""
        return 1

    def project(self, unit: LayerUnit, dense: Tensor) -> Tensor:
        """Coordinates of a unit's dense gradients, as an audit compares them."""
        form = Dense(unit.parameters, "", dense.shape[1])
        return _values(self._soon().make(unit, LayerGradients(form, DenseRows(dense)), None))

    def _soon(self) -> CoordinatesSoon:
        assert self.tracer.proofs is not None
        units = {unit: self.basis.layers[unit.name] for unit in self.tracer.units}
        return CoordinatesSoon(units, self.tracer.proofs.forms)

    def _pass(self, batch: Any, *, alone: bool) -> Traced:
        soon = self._soon()
        within: Callable[[Any], AbstractContextManager[Any]] = contextlib.nullcontext
        light: frozenset[nn.Module] = frozenset()
        if self.recompute is not None and not alone:
            within = self.recompute.step
            light = frozenset(m for u in soon.units if u.rule not in DENSE_RULES for m in u.modules)
        return self.tracer.run(batch, soon=soon, light=light, device=self.device, within=within)

    def _measured(self, measured: Measured) -> Values:
        values = measured_values(measured)
        values.pop("token_loss", None)  # four bytes a token: often more than all coordinates
        return values

    def _keep(
        self, traced: Traced, values: Values
    ) -> tuple[dict[str, Any], dict[str, GradientRows]]:
        group = self.basis.group if self.bits == 1 else 0
        with torch.no_grad():
            parts = {unit: _values(traced.pieces[unit]) for unit in self.tracer.units}
            whole = torch.cat(list(parts.values()), 1)
            scales = bit_scales(whole, self.bits, group)
            rows: dict[str, GradientRows] = {
                unit.name: BitRows(part)
                if scales is None
                else BitRows(packed_bits(part, scales, self.bits, group), scales)
                for unit, part in parts.items()
            }
        values["norm"] = torch.linalg.vector_norm(whole, dim=1).cpu().numpy()
        gradients: dict[str, Any] = {}
        for keeping in self.kept:
            for name, tensor in keeping.form.tensors(rows[keeping.unit.name]).items():
                gradients[name] = tensor.cpu().numpy()
        return gradients, rows

    def fingerprints(self, values: Values) -> dict[str, str]:
        """Whose gradients these are, and in which basis."""
        facts = traced_fingerprints(self.tracer, values, self.left_out)
        return facts | {"basis": self.basis.fingerprint, "kept": self.basis.told(self.bits)}

    def notes(self) -> list[str]:
        """That ranks hardly agree with those of whole gradients, where that was seen."""
        agreement = self.basis.agreement
        if agreement is None or agreement >= 0.3:
            return []
        return [
            (
                f"ranks from what is kept agree only {agreement:.2f} with those of whole gradients on "
                f"{self.basis.compared} rows: keep more bytes, or find the basis with more rows "
                "(gk.Keep(..., rows=))"
            )
        ]

    def facts(self) -> list[str]:
        """What is kept, and which layers are not."""
        facts = [f"kept {self.basis.told(self.bits)}"]
        if self.left_out:
            some = ", ".join(self.left_out[:4]) + (" ..." if len(self.left_out) > 4 else "")
            facts.append(
                f"{len(self.left_out)} layers have no coordinate among the kept ones ({some}); "
                "layers= chooses layers, and more bytes keep more of them"
            )
        return facts


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
    tracer = prepared.tracer
    exact = {keeping.unit: keeping for keeping in prepared.kept}
    units = [unit for unit in tracer.units if unit.name in basis.layers]
    kept: list[LayerKeeping] = []
    packed = bits in PACKED
    group = basis.group if packed else 0
    for unit in units:
        name, size = f"{unit.name}.bits", basis.layers[unit.name].size
        scale = SCALE if packed else ""
        form = Bits(
            *(unit.parameters, name, scale, size, bits), basis.fingerprint, basis.whitened, group
        )
        rows = BitRows(torch.zeros(1, size))
        if packed:
            rows = BitRows(packed_bits(rows.codes, torch.ones(1), bits, group), torch.ones(1))
        arrays = arrays_of(unit.name, form, rows, CODES[bits])
        own = tuple(array for array in arrays if array.name != SCALE or not kept)
        kept.append(
            dataclasses.replace(
                exact[unit],
                form=form,
                storage="coordinates",
                arrays=own,
                row_bytes=sum(array.row_bytes for array in own),
                tolerance=0.0,
                places=None,
            )
        )
    return CoordinateMaker(
        tracer=dataclasses.replace(tracer, units=units),
        basis=basis,
        bits=bits,
        watched=watched,
        recompute=recompute,
        device=device,
        kept=tuple(kept),
        left_out=tuple(unit.name for unit in tracer.units if unit.name not in basis.layers),
    )


def _values(piece: LayerGradients) -> Tensor:
    assert isinstance(piece.rows, DenseRows)
    return piece.rows.values
