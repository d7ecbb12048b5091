"""The algebra of kept gradients: one class per form that a gradient is kept in.

>>> import torch
>>> from gradkeep.factors import Outer, OuterRows, Parameter
>>> form = Outer((Parameter("w", (1, 2)),), "w.prefix", "w.suffix", d_in=2, d_out=1)
>>> form.restore(OuterRows(torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0]])))
tensor([[3., 6.]])
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gradkeep.factors._arithmetic import (
    CACHED,
    RESTORED,
    pairwise,
    squared,
    squared_lengths,
    tiles,
)
from gradkeep.factors._bits import (
    MOST_IN_GROUP,
    PACKED,
    BitRows,
    Bits,
    BitWidth,
    bit_scales,
    bits_told,
    packed_bits,
)
from gradkeep.factors._convolution import Convolution, ConvolutionRows
from gradkeep.factors._cost import VALUE, Cost, CostCounter, MachineSpeeds, ProductSize
from gradkeep.factors._dense import WHOLE, Dense, DenseRows
from gradkeep.factors._form import (
    ArraySource,
    Compute,
    Form,
    GradientRows,
    OuterProducts,
    Parameter,
    PositionProducts,
    Storage,
    form_of_kinds,
    form_to_fields,
    widened,
)
from gradkeep.factors._lookup import Lookup, LookupRows
from gradkeep.factors._outer import Outer, OuterRows
from gradkeep.factors._projection import BlockProjection, LayerProjection
from gradkeep.factors._ragged import Spans, pad, row_of, spans, sum_columns, sum_rows
from gradkeep.factors._tied import Tied, TiedRows
from gradkeep.factors._weights import WeightBlock, WeightMatrix, WeightVector

if TYPE_CHECKING:
    from collections.abc import Mapping

AnyForm = Form[Any]
"""A form, whatever its rows are."""
_FORMS: tuple[type[Any], ...] = (Outer, Convolution, Lookup, Dense, Tied, Bits)
_KINDS = {form.kind: form for form in _FORMS}


def form_from_fields(fields: Mapping[str, Any]) -> AnyForm:
    """The form from its JSON fields, as a capture's schema holds them."""
    form: AnyForm = form_of_kinds(fields, _KINDS)
    return form


__all__ = [
    "CACHED",
    "MOST_IN_GROUP",
    "PACKED",
    "RESTORED",
    "VALUE",
    "WHOLE",
    "AnyForm",
    "ArraySource",
    "BitRows",
    "BitWidth",
    "Bits",
    "BlockProjection",
    "Compute",
    "Convolution",
    "ConvolutionRows",
    "Cost",
    "CostCounter",
    "Dense",
    "DenseRows",
    "Form",
    "GradientRows",
    "LayerProjection",
    "Lookup",
    "LookupRows",
    "MachineSpeeds",
    "Outer",
    "OuterProducts",
    "OuterRows",
    "Parameter",
    "PositionProducts",
    "ProductSize",
    "Spans",
    "Storage",
    "Tied",
    "TiedRows",
    "WeightBlock",
    "WeightMatrix",
    "WeightVector",
    "bit_scales",
    "bits_told",
    "form_from_fields",
    "form_to_fields",
    "packed_bits",
    "pad",
    "pairwise",
    "row_of",
    "spans",
    "squared",
    "squared_lengths",
    "sum_columns",
    "sum_rows",
    "tiles",
    "widened",
]
