"""The kept gradients of one capture: what the questions are asked of."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, overload

import numpy as np
import torch

from gradkeep import _arguments
from gradkeep._arguments import checked
from gradkeep.errors import MissingRowsError, NotSealedError, QueryError
from gradkeep.factors._registry import form_from_fields
from gradkeep.query._layers import select_layers
from gradkeep.store import CaptureKey, Store
from gradkeep.store import open as open_store

if TYPE_CHECKING:
    import builtins
    import os
    from collections.abc import Iterator, Mapping, Sequence

    from gradkeep.factors._form import AnyForm, GradientRows
    from gradkeep.query._layers import LayerChoice
    from gradkeep.store import Batch, Block, Layer

GradientOf = Literal["loss", "output"]
"""Whose gradient is asked for."""


@dataclass(frozen=True, slots=True, eq=False)
class FactorBatch:
    """Some rows of a capture in memory: each layer's factors."""

    start: int
    stop: int
    factors: Mapping[str, GradientRows]


@dataclass(frozen=True, slots=True, eq=False)
class Gradients:
    """The gradients of a capture's rows, in the order they were captured; made by `gk.gradients`."""

    key: CaptureKey
    block: Block
    forms: Mapping[str, AnyForm]
    """How each chosen layer is kept."""
    of: GradientOf
    """Whose gradient: the loss's or the output's."""

    def __len__(self) -> int:
        return len(self.block)

    def __repr__(self) -> str:
        size = sum(form.gradient_size for form in self.forms.values())
        return (
            f"Gradients({self.key.split} at {self.key.checkpoint}: {len(self)} rows, "
            f"{len(self.forms)} layers, {size} parameters, of the {self.of})"
        )

    @property
    def ids(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """The ids `[N]` of the rows."""
        return self.block.ids

    @property
    def weights(self) -> str:
        """The fingerprint of the model's weights."""
        return str(self.block.schema.fingerprints.get("weights"))

    @property
    def size(self) -> int:
        """P, the number of parameters of the chosen layers."""
        return sum(form.gradient_size for form in self.forms.values())

    @property
    def largest_segment(self) -> int:
        """Bytes of the largest segment: while it is read, its pages are in memory."""
        return max((entry.bytes for entry in self.block.manifest.segments), default=0)

    @checked(QueryError)
    def named(self, capture: str) -> Gradients:
        """The gradients of the same split at the same checkpoint in the capture of another name."""
        key = dataclasses.replace(self.key, capture=capture)
        store = Store(self.block.backend, durability=self.block.durability)
        return gradients_of(open_capture(store, key), key, None, self.of)

    @checked(QueryError)
    def column(self, name: str) -> Any:
        """A kept value of every row `[N]`: `loss`, `label`, `norm`, ..."""
        return self.block.column(name)

    def slopes(self) -> torch.Tensor | None:
        """The factors `[N]` between what is kept and what is asked for; None: they are the same."""
        if not self._sloped:
            return None
        return torch.from_numpy(np.array(self.block.column("slope"), np.float32))

    def slopes_at(self, positions: Sequence[int]) -> torch.Tensor | None:
        """`slopes` of the rows at these positions alone."""
        if not self._sloped:
            return None
        found = self.block.read_rows(np.asarray(positions, np.int64), ["slope"])["slope"]
        return torch.from_numpy(np.array(found, np.float32))

    @property
    def _sloped(self) -> bool:
        return self.of != "output" and self.block.schema.fingerprints.get("of") == "output"

    @checked(QueryError)
    def norms(self, *, per_layer: bool = False) -> torch.Tensor:
        """The lengths of the gradients `[N]`, or `[N, L]` per layer; read, or of coordinates computed."""
        parts = self._kept_norms() if "norms" in self.block.names else self._decoded_norms()
        slopes = self.slopes()
        if slopes is not None:
            parts = parts * slopes.abs().unsqueeze(1)
        return parts if per_layer else parts.double().square().sum(1).sqrt().float()

    def _decoded_norms(self) -> torch.Tensor:
        found = torch.empty(len(self), len(self.forms))
        # Rows whose coordinates are decoded at a time.
        for some in self.stream(4096):
            for at, (name, form) in enumerate(self.forms.items()):
                squared = form.squared_norms(some.factors[name].widened())
                found[some.start : some.stop, at] = squared.clamp(min=0).sqrt()
        return found

    def _kept_norms(self) -> torch.Tensor:
        all_layers = [layer.name for layer in self.block.schema.layers]
        chosen = [all_layers.index(name) for name in self.forms]
        return torch.from_numpy(np.array(self.block.column("norms"), np.float32))[:, chosen]

    @checked(QueryError)
    def rows(self, positions: Any) -> FactorBatch:
        """The factors of the rows at these positions, in this order."""
        wanted = _arguments.whole_numbers(
            "positions", positions, error=QueryError, most=max(0, len(self) - 1)
        )
        batch = self.block.read_rows(wanted, self._arrays())
        factors = {name: form.read(_BatchArrays(batch)) for name, form in self.forms.items()}
        return FactorBatch(0, len(wanted), factors)

    @checked(QueryError)
    def stream(self, batch_rows: int, *, segments: range | None = None) -> Iterator[FactorBatch]:
        """All rows in order, up to `batch_rows` at a time; those of some segments alone, if they are named."""
        _arguments.count("batch_rows", batch_rows, error=QueryError, least=1)
        for batch in self.block.stream(self._arrays(), batch_rows=batch_rows, segments=segments):
            factors = {name: form.read(_BatchArrays(batch)) for name, form in self.forms.items()}
            yield FactorBatch(batch.first_row, batch.first_row + len(batch.ids), factors)

    @checked(QueryError)
    def positions(self, ids: Any) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Where the rows with these ids are."""
        wanted = _arguments.whole_numbers("ids", ids, error=QueryError, least=-_arguments.LARGEST)
        try:
            return self.block.positions(wanted)
        except MissingRowsError as error:
            raise QueryError(
                f"{error.found} in {self.key.split}",
                found=f"ids {self.ids[:3].tolist()} ... {self.ids[-1:].tolist()}",
            ) from error

    @checked(QueryError)
    def restore(self, ids: Any) -> dict[str, torch.Tensor]:
        """The gradients of these rows, one tensor `[B, *shape]` per parameter.

        >>> import gradkeep as gk, tempfile
        >>> store, model = gk.open(tempfile.mkdtemp()), torch.nn.Linear(4, 3)
        >>> data = [(torch.randn(5, 4), torch.tensor([0, 1, 2, 0, 1]))]
        >>> _ = gk.capture(store, model, data, task=gk.Classification(), split="train")
        >>> {k: v.shape for k, v in gk.gradients(store, split="train").restore([2, 0]).items()}
        {'weight': torch.Size([2, 3, 4]), 'bias': torch.Size([2, 3])}
        """
        check_restorable(self.forms)
        at = self.positions(ids)
        some = self.rows(at)
        slopes = self.slopes()
        found: dict[str, torch.Tensor] = {}
        for name, form in self.forms.items():
            dense = form.restore(some.factors[name])
            if slopes is not None:
                dense = dense * slopes[at].unsqueeze(1).to(dense.dtype)
            found |= split_parameters(form, dense)
        return found

    def _arrays(self) -> list[str]:
        named = dict.fromkeys(array for form in self.forms.values() for array in form.arrays)
        return list(named)


def split_parameters(form: AnyForm, dense: torch.Tensor) -> dict[str, torch.Tensor]:
    """Dense gradients `[B, P]` of a layer as one tensor `[B, *shape]` for each parameter."""
    parts = torch.split(dense, [parameter.size for parameter in form.parameters], 1)
    return {
        parameter.name: part.reshape(len(dense), *parameter.shape)
        for parameter, part in zip(form.parameters, parts, strict=True)
    }


def check_restorable(forms: Mapping[str, AnyForm]) -> None:
    """Raise if only some coordinates of gradients are kept: what was left out is gone."""
    for name, form in forms.items():
        if form.restored_parameters != form.parameters:
            raise QueryError(
                f"the gradient of layer {name} cannot be restored",
                found=form.approximate,
                expected="gradients that are kept whole",
                fix="capture these rows with keep='exact', under another name=",
            )


@overload
def gradients(
    store: Store | str | os.PathLike[str],
    *,
    split: str,
    checkpoints: str | None = None,
    run: str = "main",
    name: str = "main",
    layers: LayerChoice = None,
    of: GradientOf = "loss",
) -> Gradients: ...


@overload
def gradients(
    store: Store | str | os.PathLike[str],
    *,
    split: str,
    checkpoints: list[str] | tuple[str, ...],
    run: str = "main",
    name: str = "main",
    layers: LayerChoice = None,
    of: GradientOf = "loss",
) -> list[Gradients]: ...


@checked(QueryError)
def gradients(
    store: Store | str | os.PathLike[str],
    *,
    split: str,
    checkpoints: str | list[str] | tuple[str, ...] | None = None,
    run: str = "main",
    name: str = "main",
    layers: LayerChoice = None,
    of: GradientOf = "loss",
) -> Gradients | list[Gradients]:
    """The kept gradients of a split: of all layers, or of those that names, globs or types choose.

    Without a checkpoint, of the only one that the split was captured at; of several, a list. With
    `of="output"` the gradients of outputs, which a capture of a task with outputs keeps beside
    those of the loss.
    """
    opened = open_store(store)
    if isinstance(checkpoints, list | tuple):
        keys = [
            _key(opened, split=split, checkpoint=one, run=run, name=name) for one in checkpoints
        ]
        return [gradients_of(open_capture(opened, key), key, layers, of) for key in keys]
    key = _key(opened, split=split, checkpoint=checkpoints, run=run, name=name)
    return gradients_of(open_capture(opened, key), key, layers, of)


def open_capture(store: Store, key: CaptureKey) -> Block:
    """Everything that a finished capture keeps, or an error that says how to get it."""
    if not store.has(key):
        raise _no_capture(store, key.split, key.checkpoint, key.run)
    try:
        return store.read(key)
    except NotSealedError as error:
        raise QueryError(
            f"the capture of {key.split} at {key.checkpoint} is not finished",
            path=error.path,
            fix="run the same gk.capture(...) again: it resumes",
        ) from error


def gradients_of(block: Block, key: CaptureKey, layers: LayerChoice, of: GradientOf) -> Gradients:
    """The gradients that an open capture holds."""
    kept_layers = [_KeptLayer(layer) for layer in block.schema.layers if layer.form]
    if not kept_layers:
        raise QueryError(
            "this block holds no gradients", path=block.path, fix="capture it with gk.capture"
        )
    kept = block.schema.fingerprints.get("of")
    if of == "output" and kept != "output":
        raise QueryError(
            "this capture keeps the gradients of losses only",
            path=block.path,
            fix="capture with a task that has outputs, such as gk.Classification, or of='output'",
        )
    if of == "loss" and kept == "output" and "slope" not in block.names:
        raise QueryError(
            "this capture keeps the gradients of outputs, without d loss / d output",
            path=block.path,
            fix="ask with of='output', or capture of='loss'",
        )
    hint = f"captured are {', '.join(layer.layer.name for layer in kept_layers[:8])}"
    chosen = select_layers(kept_layers, layers, error=QueryError, hint=hint)
    forms = {layer.layer.name: form_from_fields(layer.layer.form) for layer in chosen}
    return Gradients(key, block, forms, of)


@dataclass(frozen=True, slots=True)
class _KeptLayer:
    """A captured layer, as it is chosen by name or type."""

    layer: Layer

    @property
    def names(self) -> tuple[str, ...]:
        return (self.layer.name,)

    @property
    def type(self) -> str:
        return self.layer.type

    def is_a(self, kind: builtins.type) -> bool:
        return self.layer.type == kind.__name__


def _key(store: Store, *, split: str, checkpoint: str | None, run: str, name: str) -> CaptureKey:
    if checkpoint is not None:
        key = CaptureKey(checkpoint, split, run, name)
        if store.has(key):
            return key
    known = store.captures()
    there = [k for k in known if (k.split, k.run, k.capture) == (split, run, name)]
    if checkpoint is None and len(there) == 1:
        return there[0]
    if checkpoint is None and there:
        raise QueryError(
            f"{split} was captured at several checkpoints",
            found=", ".join(k.checkpoint for k in there),
            fix=f"pass checkpoints={there[-1].checkpoint!r}",
        )
    raise _no_capture(store, split, checkpoint, run)


def _no_capture(store: Store, split: str, checkpoint: str | None, run: str) -> QueryError:
    known = store.captures()
    at = "" if checkpoint is None else f" at {checkpoint!r}"
    named = f", checkpoints={checkpoint!r}" if checkpoint else ""
    named += f", run={run!r}" if run != "main" else ""
    return QueryError(
        f"no capture of {split!r}{at} in run {run!r}",
        path=store.location,
        found=", ".join(f"{k.split} at {k.checkpoint}" for k in known[:6]) or "no captures",
        fix=f"gk.capture(store, model, loader, task=task, split={split!r}{named})",
    )


@dataclass(frozen=True, slots=True)
class _BatchArrays:
    """The arrays of a batch that was read, as a form asks for them."""

    batch: Batch

    def tensor(self, name: str) -> torch.Tensor:
        return self.batch.tensor(name)

    def offsets(self, name: str) -> torch.Tensor | None:
        found = self.batch.column(name).offsets
        if found is None:
            return None
        offsets = torch.from_numpy(found.copy())
        return offsets - offsets[0]
