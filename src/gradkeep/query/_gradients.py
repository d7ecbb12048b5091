"""The kept gradients of one capture: what the questions are asked of."""

from __future__ import annotations

import difflib
import fnmatch
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch

from gradkeep.errors import MissingRows, NotSealed, QueryError, StoreError
from gradkeep.query import _operators
from gradkeep.query._forms import from_fields, size_of
from gradkeep.query._read import factors_of
from gradkeep.store import CaptureKey

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from gradkeep.query._factors import Factors
    from gradkeep.query._forms import Form
    from gradkeep.store import Block, Store

Of = Literal["loss", "output"]


@dataclass(frozen=True, slots=True, eq=False)
class Some:
    """Some rows of a capture in memory: each layer's factors."""

    start: int
    stop: int
    factors: Mapping[str, Factors]


@dataclass(frozen=True, slots=True, eq=False)
class Gradients:
    """The gradients of a capture's rows, in the order they were captured; made by `gk.gradients`."""

    key: CaptureKey
    block: Block
    forms: Mapping[str, Form]
    """How each chosen layer is kept."""
    of: Of
    """Whose gradient: the loss's or the output's."""

    def __len__(self) -> int:
        return len(self.block)

    def __repr__(self) -> str:
        size = sum(size_of(form) for form in self.forms.values())
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
        return sum(size_of(form) for form in self.forms.values())

    def column(self, name: str) -> Any:
        """A kept value of every row `[N]`: `loss`, `label`, `norm`, ..."""
        return self.block.column(name)

    def slopes(self) -> torch.Tensor | None:
        """The factors `[N]` between what is kept and what is asked for; None: they are the same."""
        if self.of == "output" or self.block.schema.fingerprints.get("of") != "output":
            return None
        return torch.from_numpy(np.array(self.block.column("slope"), np.float32))

    def norms(self, *, per_layer: bool = False) -> torch.Tensor:
        """The lengths of the gradients `[N]`, or `[N, L]` per layer; read, not computed."""
        all_layers = [layer.name for layer in self.block.schema.layers]
        chosen = [all_layers.index(name) for name in self.forms]
        parts = torch.from_numpy(np.array(self.block.column("norms"), np.float32))[:, chosen]
        slopes = self.slopes()
        if slopes is not None:
            parts = parts * slopes.abs().unsqueeze(1)
        return parts if per_layer else parts.double().square().sum(1).sqrt().float()

    def rows(self, positions: Any) -> Some:
        """The factors of the rows at these positions, in this order."""
        wanted = np.asarray(positions, np.int64)
        batch = self.block.read_rows(wanted, self._arrays())
        factors = {name: factors_of(form, batch) for name, form in self.forms.items()}
        return Some(0, len(wanted), factors)

    def stream(self, batch_rows: int) -> Iterator[Some]:
        """All rows in order, up to `batch_rows` at a time."""
        for batch in self.block.stream(self._arrays(), batch_rows=batch_rows):
            factors = {name: factors_of(form, batch) for name, form in self.forms.items()}
            yield Some(batch.first_row, batch.first_row + len(batch.ids), factors)

    def positions(self, ids: Any) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Where the rows with these ids are."""
        try:
            return self.block.positions(ids)
        except MissingRows as error:
            raise QueryError(
                f"{error.found} in {self.key.split}",
                found=f"ids {self.ids[:3].tolist()} ... {self.ids[-1:].tolist()}",
            ) from error

    def restore(self, ids: Any) -> dict[str, torch.Tensor]:
        """The gradients of these rows, one tensor `[B, *shape]` per parameter.

        >>> import gradkeep as gk, tempfile
        >>> store, model = gk.open(tempfile.mkdtemp()), torch.nn.Linear(4, 3)
        >>> data = [(torch.randn(5, 4), torch.tensor([0, 1, 2, 0, 1]))]
        >>> _ = gk.capture(store, model, data, task=gk.Classification(), split="train")
        >>> {k: v.shape for k, v in gk.gradients(store, split="train").restore([2, 0]).items()}
        {'weight': torch.Size([2, 3, 4]), 'bias': torch.Size([2, 3])}
        """
        at = self.positions(ids)
        some = self.rows(at)
        slopes = self.slopes()
        found: dict[str, torch.Tensor] = {}
        for name, form in self.forms.items():
            dense = _operators.restore(form, some.factors[name])
            if slopes is not None:
                dense = dense * slopes[at].unsqueeze(1).to(dense.dtype)
            begin = 0
            for parameter in form.parameters:
                part = dense[:, begin : begin + parameter.size]
                found[parameter.name] = part.reshape(-1, *parameter.shape)
                begin += parameter.size
        return found

    def _arrays(self) -> list[str]:
        named = dict.fromkeys(array for form in self.forms.values() for array in form.arrays)
        return list(named)


def gradients(
    store: Store,
    *,
    split: str,
    checkpoint: str | None = None,
    run: str = "main",
    name: str = "main",
    layers: str | Sequence[str] | None = None,
    of: Of = "loss",
) -> Gradients:
    """The kept gradients of a split: of all layers, or of those that globs name.

    Without a checkpoint, the only one that the split was captured at. `of="output"` asks for the
    gradients of outputs, which a capture of a task with outputs keeps beside those of the loss.
    """
    key = _key(store, split=split, checkpoint=checkpoint, run=run, name=name)
    try:
        block = store.read(key)
    except NotSealed as error:
        raise QueryError(
            f"the capture of {split} at {key.checkpoint} is not finished",
            path=error.path,
            fix="run the same gk.capture(...) again: it resumes",
        ) from error
    forms = {layer.name: from_fields(layer.form) for layer in block.schema.layers if layer.form}
    if not forms:
        raise QueryError(
            "this block holds no gradients", path=block.path, fix="capture it with gk.capture"
        )
    kept = block.schema.fingerprints.get("of")
    if of not in ("loss", "output"):
        raise QueryError(f"gradients of {of!r}", expected="'loss' or 'output'")
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
    return Gradients(key, block, _chosen(forms, layers), of)


def _key(store: Store, *, split: str, checkpoint: str | None, run: str, name: str) -> CaptureKey:
    if checkpoint is not None:
        key = CaptureKey(checkpoint, split, run, name)
        if store.has(key):
            return key
    known = store.captures()
    there = [k for k in known if (k.split, k.run, k.capture) == (split, run, name)]
    if checkpoint is None and len(there) == 1:
        return there[0]
    listed = ", ".join(f"{k.split} at {k.checkpoint}" for k in known[:6]) or "no captures"
    if checkpoint is None and there:
        raise QueryError(
            f"{split} was captured at several checkpoints",
            found=", ".join(k.checkpoint for k in there),
            fix=f"pass checkpoint={there[-1].checkpoint!r}",
        )
    at = "" if checkpoint is None else f" at {checkpoint!r}"
    raise QueryError(
        f"no capture of {split!r}{at} in run {run!r}",
        path=store.location,
        found=listed,
        fix=f"gk.capture(store, model, loader, task=task, split={split!r}"
        + (f", checkpoint={checkpoint!r})" if checkpoint else ")"),
    )


def _chosen(forms: Mapping[str, Form], layers: str | Sequence[str] | None) -> dict[str, Form]:
    if layers is None:
        return dict(forms)
    patterns = [layers] if isinstance(layers, str) else list(layers)
    chosen: dict[str, Form] = {}
    for pattern in patterns:
        found = [n for n in forms if n == pattern or fnmatch.fnmatchcase(n, pattern)]
        if not found:
            near = difflib.get_close_matches(pattern, forms, n=3, cutoff=0.4)
            raise StoreError(
                f"no captured layer matches {pattern!r}",
                found=", ".join(list(forms)[:8]),
                fix=f"did you mean {' or '.join(near)}?" if near else None,
            )
        chosen |= {n: forms[n] for n in found}
    return {n: forms[n] for n in forms if n in chosen}
