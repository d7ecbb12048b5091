"""Between factors in memory and the arrays that hold them in the store."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from gradkeep.store import Array, Ragged

if TYPE_CHECKING:
    from gradkeep.factors import AnyForm, Rows
    from gradkeep.store import Encoding


def arrays_of(name: str, form: AnyForm, rows: Rows, encoding: Encoding) -> tuple[Array, ...]:
    """The arrays that hold a layer's factors, shaped as some rows of it are."""
    made = []
    for array, values in form.tensors(rows).items():
        whole = not values.dtype.is_floating_point
        double = values.dtype == torch.float64
        made.append(
            Array(
                array,
                dtype="int64" if whole else "float64" if double else "float32",
                shape=tuple(values.shape[1:]),
                kind=form.role(array),
                encoding="plain" if whole or double else encoding,
                layer=name,
                ragged=form.offsets(rows, array) is not None,
            )
        )
    return tuple(made)


def as_stored(array: Array, values: torch.Tensor, form: AnyForm, rows: Rows) -> Any:
    """A tensor of some rows as the writer takes it."""
    given = values.detach().cpu().numpy()
    offsets = form.offsets(rows, array.name)
    return given if offsets is None else Ragged(given, offsets.numpy())
