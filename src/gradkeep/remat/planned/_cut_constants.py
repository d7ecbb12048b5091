"""Tensors cut from memory that was there before the step, such as batches that are slices of a data set.

In each step they begin elsewhere, but play the same part. So each of them is a value of its own, and
geometries count from where it begins.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from gradkeep.remat.planned._trace import TracedValue
from gradkeep.remat.tracing._rerun import TensorRef
from gradkeep.remat.tracing._tensors import Geometry

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from gradkeep.remat.planned._trace import SavedSlot, TracedOperation


class _Cut(NamedTuple):
    value: int
    start: int
    """Bytes from the beginning of the storage."""
    stop: int

    def shows(self, geometry: Geometry) -> bool:
        start, stop = geometry.span
        return self.start <= start and stop <= self.stop

    def seen(self, geometry: Geometry) -> Geometry:
        """The geometry, counted from where this begins."""
        return geometry._replace(offset=geometry.offset - self.start // geometry.dtype.itemsize)


class CutConstants:
    """The tensors of one step that were cut from constants; new values are added to `values`."""

    def __init__(self, values: list[TracedValue]) -> None:
        self._values = values
        self._cuts: dict[int, list[_Cut]] = {}

    def cut(self, constant: int, tensor: Tensor) -> tuple[int, Geometry]:
        """The value that a tensor is, on the storage of a constant, and its geometry there."""
        geometry = Geometry.of(tensor)
        cuts = self._cuts.setdefault(constant, [])
        known = next((cut for cut in cuts if cut.shows(geometry)), None)
        if known is None:
            value = constant
            if cuts:
                value = len(self._values)
                self._values.append(TracedValue(self._values[constant].storage, None))
            known = _Cut(value, *geometry.span)
            cuts.append(known)
        return known.value, known.seen(geometry)

    def anchors(self, slots: Sequence[SavedSlot]) -> dict[int, int]:
        """Where the tensor begins that stands for each value: the first that is saved, or what was given."""
        found: dict[int, int] = {cut.value: 0 for cuts in self._cuts.values() for cut in cuts}
        for slot in reversed(slots):
            if slot.value in found:
                found[slot.value] = slot.geometry.offset * slot.geometry.dtype.itemsize
        return found

    def resolved(self, operation: TracedOperation) -> TracedOperation:
        """The operator, reading what was cut; one that reads other parts is not run again."""
        if operation.run is None or not operation.reads & self._cuts.keys():
            return operation
        found: list[int] = []
        try:
            args = self._of(operation.args, found)
            kwargs = tuple((name, self._of(value, found)) for name, value in operation.kwargs)
        except LookupError:
            return replace(operation, run=None, args=(), kwargs=(), reads=frozenset())
        return replace(operation, args=args, kwargs=kwargs, reads=frozenset(found))

    def _of(self, value: Any, found: list[int]) -> Any:
        if isinstance(value, TensorRef):
            ref = value
            if value.value in self._cuts:
                cut = next((c for c in self._cuts[value.value] if c.shows(value.geometry)), None)
                if cut is None:
                    raise LookupError
                ref = TensorRef(cut.value, cut.seen(value.geometry))
            found.append(ref.value)
            return ref
        if isinstance(value, tuple):
            return tuple(self._of(item, found) for item in value)
        return value
