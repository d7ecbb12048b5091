"""From rows of a block to the factors of each layer."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from gradkeep.query._factors import ConvRows, DenseRows, LookupRows, OuterRows, TiedRows
from gradkeep.query._forms import Conv, Dense, Lookup, Outer, Tied

if TYPE_CHECKING:
    from gradkeep.query._factors import Factors
    from gradkeep.query._forms import Form
    from gradkeep.store import Batch


def factors_of(form: Form, batch: Batch) -> Factors:
    """The factors of one layer for the rows of a batch; plain arrays are not copied."""
    match form:
        case Outer():
            return OuterRows(
                batch.tensor(form.prefix), batch.tensor(form.suffix), _offsets(batch, form.suffix)
            )
        case Conv():
            return ConvRows(batch.tensor(form.wide), batch.tensor(form.narrow))
        case Lookup():
            offsets = _offsets(batch, form.suffix)
            assert offsets is not None
            return LookupRows(batch.tensor(form.prefix), batch.tensor(form.suffix), offsets)
        case Dense():
            return DenseRows(batch.tensor(form.gradient))
        case Tied():
            lookup, outer = factors_of(form.lookup, batch), factors_of(form.outer, batch)
            assert isinstance(lookup, LookupRows)
            assert isinstance(outer, OuterRows)
            return TiedRows(lookup, outer)


def _offsets(batch: Batch, name: str) -> torch.Tensor | None:
    found = batch.column(name).offsets
    if found is None:
        return None
    offsets = torch.from_numpy(found.copy())
    return offsets - offsets[0]
