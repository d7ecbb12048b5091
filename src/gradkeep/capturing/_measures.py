"""What is kept of every sample beside gradients: loss, output, label, prediction, norms."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from gradkeep.store import Array, Ragged

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from gradkeep.capturing._storing import Keeping
    from gradkeep.capturing._task import Measured
    from gradkeep.capturing._units import Unit
    from gradkeep.factors import Rows

Values = dict[str, Any]


def measured_values(measured: Measured) -> Values:
    """Losses, outputs, slopes, labels, predictions and token losses, by the names of their arrays."""
    given = {
        "loss": measured.losses,
        "output": measured.outputs,
        "slope": measured.slopes,
        "label": measured.labels,
        "predicted": measured.predictions,
    }
    values: Values = {name: plain(tensor) for name, tensor in given.items() if tensor is not None}
    if measured.tokens is not None:
        tokens = plain(measured.tokens)
        values["token_loss"] = Ragged.of([row[~np.isnan(row)] for row in tokens])
    return values


def norms(kept: Sequence[Keeping], factors: Mapping[Unit, Rows]) -> torch.Tensor:
    """The length `[B, L]` of each sample's gradient in each layer."""
    squared = [keeping.form.squared_norms(factors[keeping.unit]).clamp(min=0) for keeping in kept]
    return torch.stack(squared, 1).sqrt()


def arrays_for(values: Mapping[str, Any]) -> tuple[Array, ...]:
    """The arrays that hold such values, NaN and infinity refused but in what is only told."""
    made = []
    for name, value in values.items():
        ragged = isinstance(value, Ragged)
        array = value.values if isinstance(value, Ragged) else value
        made.append(
            Array(
                name,
                dtype=str(array.dtype),
                shape=array.shape[1:],
                kind="embedding" if name.startswith("embedding.") else "scalar",
                ragged=ragged,
                nan="refuse" if name in ("loss", "norm", "norms") else "keep",
            )
        )
    return tuple(made)


def plain(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """The values as numpy has them; 16 bits become float32."""
    values = tensor.detach().cpu()
    if values.dtype in (torch.bfloat16, torch.float16):
        values = values.float()
    return values.numpy()
