"""What is kept of every row beside its gradients, and alarms about it."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch.utils._pytree import tree_flatten

from gradkeep.errors import CaptureError
from gradkeep.store import Array, Ragged

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch import nn

    from gradkeep.capturing._keeping import LayerKeeping
    from gradkeep.capturing.rules._units import LayerUnit
    from gradkeep.capturing.tasks._task import Measured
    from gradkeep.factors._form import GradientRows

    ArrayKind = Literal["text", "embedding", "scalar"]

Values = dict[str, Any]
_TINY = 1e-18
"""Length of a gradient whose square is next to the smallest number of float32."""


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


def norms(kept: Sequence[LayerKeeping], factors: Mapping[LayerUnit, GradientRows]) -> torch.Tensor:
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
                kind=_kind(name, array, ragged=ragged),
                encoding="float16" if name == "probabilities" else "plain",
                ragged=ragged,
                nan="refuse" if name in ("loss", "norm", "norms") else "keep",
            )
        )
    return tuple(made)


def _kind(name: str, array: np.ndarray[Any, Any], *, ragged: bool) -> ArrayKind:
    if ragged and array.dtype == np.uint8:
        return "text"
    return "embedding" if name.startswith("embedding.") else "scalar"


def plain(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """The values as numpy has them; 16 bits become float32."""
    values = tensor.detach().cpu()
    if values.dtype in (torch.bfloat16, torch.float16):
        values = values.float()
    return values.numpy()


def modules_named(model: nn.Module, names: Sequence[str]) -> dict[str, nn.Module]:
    """The modules with these paths."""
    known = dict(model.named_modules())
    missing = [name for name in names if name not in known]
    if missing:
        raise CaptureError(
            f"no layer {missing[0]!r} to take embeddings from",
            found=f"{', '.join(list(known)[1:9])} ...",
            fix="give the path of a module, such as 'fc1'",
        )
    return {name: known[name] for name in names}


@contextlib.contextmanager
def seeing_outputs(modules: dict[str, nn.Module]) -> Iterator[dict[str, torch.Tensor]]:
    """The first output of each module while the block runs."""
    seen: dict[str, torch.Tensor] = {}

    def keeper(name: str) -> Any:
        def keep(module: nn.Module, args: Any, output: Any) -> None:
            tensors = [t for t in tree_flatten(output)[0] if isinstance(t, torch.Tensor)]
            if tensors:
                seen.setdefault(name, tensors[0].detach())

        return keep

    with contextlib.ExitStack() as stack:
        for name, module in modules.items():
            stack.callback(module.register_forward_hook(keeper(name)).remove)
        yield seen


def vectors(seen: dict[str, torch.Tensor], rows: int) -> dict[str, np.ndarray[Any, Any]]:
    """One vector `[B, D]` per sample: the mean over pixels `[B, D, ...]` or tokens `[B, T, D]`."""
    found = {}
    for name, output in seen.items():
        if output.dim() < 2 or len(output) != rows:
            raise CaptureError(
                f"layer {name} puts out no vector per sample",
                found=f"shape {tuple(output.shape)} for {rows} samples",
                expected="[B, D], [B, T, D] or [B, D, H, W]",
            )
        if output.dim() == 3:
            output = output.mean(1)
        elif output.dim() > 3:
            output = output.flatten(2).mean(2)
        found[f"embedding.{name}"] = output.float().cpu().numpy()
    return found


def _check_losses(ids: np.ndarray[Any, Any], losses: np.ndarray[Any, Any]) -> None:
    finite = np.isfinite(losses)
    if not finite.all():
        row = int((~finite).argmax())
        raise CaptureError(
            f"the loss of sample {ids[row]} is not a number; nothing of this batch was kept",
            found=f"loss {losses[row]}",
            fix="look at that sample, or capture an earlier checkpoint: training diverged",
        )


class RowAlarms:
    """Counts what looks wrong in the gradients that pass."""

    def __init__(self) -> None:
        self.rows = self.zero = self.tiny = 0
        self.example: int | None = None

    def look(
        self, ids: np.ndarray[Any, Any], values: dict[str, Any], kept: Sequence[LayerKeeping]
    ) -> None:
        """Stop at NaN and infinity, which would spoil every answer; count vanished gradients."""
        _check_losses(ids, values["loss"])
        if not kept:
            return
        apart = "norms" in values
        lengths = torch.from_numpy(values["norms"] if apart else values["norm"][:, None])
        finite = lengths.isfinite()
        if not finite.all():
            row, layer = (~finite).nonzero()[0].tolist()
            raise CaptureError(
                f"the gradient of sample {ids[row]} is not a number"
                + (f" in layer {kept[layer].unit.name}" if apart else "")
                + "; nothing of this batch was kept",
                found=f"loss {values['loss'][row]}",
                fix="look at that sample, or capture an earlier checkpoint: training diverged",
            )
        total = values["norm"]
        self.rows += len(total)
        zero = total == 0
        self.zero += int(zero.sum())
        self.tiny += int(((total > 0) & (total < _TINY)).sum())
        if self.example is None and zero.any():
            self.example = int(ids[zero.argmax()])

    def check_all_zero(self) -> None:
        """Raise before anything is sealed if there was not a single gradient."""
        if self.tiny and self.zero + self.tiny == self.rows:
            raise CaptureError(
                f"all gradients are shorter than {_TINY:g}: products of them are zero in float32",
                found=f"{self.rows} samples",
                expected="losses whose gradients can be multiplied with each other",
                fix="multiply the loss of the task by a constant, such as 1e20",
            )
        if self.rows and self.zero == self.rows:
            raise CaptureError(
                "all gradients are zero: there is nothing to answer questions with",
                found=f"{self.rows} samples",
                expected="a loss that depends on the chosen layers",
                fix="check the task and the labels; dead units or a detached loss do this",
            )

    def notes(self) -> list[str]:
        """What a user should know."""
        found = []
        if self.zero:
            found.append(
                f"{self.zero} of {self.rows} samples have a gradient of exactly zero, the first "
                f"is {self.example}: no method can say anything about them"
            )
        if self.tiny:
            found.append(f"{self.tiny} samples have gradients below {_TINY:g}: they may underflow")
        return found
