"""Between factors in memory and the arrays that hold them in the store."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import torch

from gradkeep.query._factors import ConvRows, DenseRows, LookupRows, OuterRows, TiedRows
from gradkeep.query._forms import Conv, Dense, Lookup, Outer, Tied
from gradkeep.store import Array, Ragged

if TYPE_CHECKING:
    from gradkeep.query._factors import Factors
    from gradkeep.query._forms import Form
    from gradkeep.store import Encoding


def tensors_of(form: Form, rows: Factors) -> dict[str, torch.Tensor]:
    """The tensors of some rows by the names of their arrays."""
    match form, rows:
        case Outer(), OuterRows():
            return {form.prefix: rows.x, form.suffix: rows.g}
        case Conv(), ConvRows():
            return {form.wide: rows.wide, form.narrow: rows.narrow}
        case Lookup(), LookupRows():
            return {form.prefix: rows.ids, form.suffix: rows.g}
        case Dense(), DenseRows():
            return {form.gradient: rows.values}
        case Tied(), TiedRows():
            return tensors_of(form.lookup, rows.lookup) | tensors_of(form.outer, rows.outer)
    raise AssertionError("rows of another form")


def _offsets(form: Form, rows: Factors, name: str) -> torch.Tensor | None:
    match form, rows:
        case Tied(), TiedRows():
            if name in form.lookup.arrays:
                return rows.lookup.offsets
            return rows.outer.offsets
        case _, OuterRows() | LookupRows():
            return rows.offsets
    return None


def arrays_of(name: str, form: Form, rows: Factors, encoding: Encoding) -> tuple[Array, ...]:
    """The arrays that hold a layer's factors, shaped as some rows of it are."""
    made = []
    for array, values in tensors_of(form, rows).items():
        whole = not values.dtype.is_floating_point
        double = values.dtype == torch.float64
        made.append(
            Array(
                array,
                dtype="int64" if whole else "float64" if double else "float32",
                shape=tuple(values.shape[1:]),
                kind=_kind(form, array),
                encoding="plain" if whole or double else encoding,
                layer=name,
                ragged=_offsets(form, rows, array) is not None,
            )
        )
    return tuple(made)


def _kind(form: Form, array: str) -> Literal["prefix", "suffix", "gradient", "projection"]:
    if isinstance(form, Dense):
        return "projection" if form.sketch else "gradient"
    return "suffix" if array.endswith("suffix") else "prefix"


def as_stored(array: Array, values: torch.Tensor, form: Form, rows: Factors) -> Any:
    """A tensor of some rows as the writer takes it."""
    given = values.detach().cpu().numpy()
    offsets = _offsets(form, rows, array.name)
    return given if offsets is None else Ragged(given, offsets.numpy())
