"""Stored gradients of one capture."""

from __future__ import annotations

import dataclasses
import difflib
import fnmatch
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar, overload

import numpy as np
import torch

from gradkeep import _arguments
from gradkeep._arguments import checked
from gradkeep.errors import MissingRowsError, NotSealedError, QueryError
from gradkeep.factors import form_from_fields
from gradkeep.store import CaptureKey, Store
from gradkeep.store import open as open_store

if TYPE_CHECKING:
    import builtins
    import os
    from collections.abc import Iterator, Mapping

    from gradkeep.errors import GradkeepError
    from gradkeep.factors._form import AnyForm, GradientRows
    from gradkeep.store import Batch, Block, Layer

GradientOf = Literal["loss", "output"]
"""Gradient of the loss or of the output."""
LayerChoice = str | type | Sequence[str | type] | None
"""`"fc*"`, `nn.Linear`, `"Linear"`, `"!*.bias"`, several of them, None for all."""
_EXPECTED = "a name, a glob, a type, or a list of such"


@dataclass(frozen=True, slots=True, eq=False)
class FactorBatch:
    """Factors of each layer of some rows, in memory."""

    start: int
    stop: int
    factors: Mapping[str, GradientRows]


@dataclass(frozen=True, slots=True, eq=False)
class Gradients:
    """Gradients of a capture's rows, in the order of the capture; use `gk.gradients` to open them.

    Args:
        key: Key of the capture.
        block: Its rows.
        forms: Storage form of each selected layer.
        of: `loss` or `output`.
    """

    key: CaptureKey
    block: Block
    forms: Mapping[str, AnyForm]
    of: GradientOf

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
        """Ids `[N]` of the rows."""
        return self.block.ids

    @property
    def weights(self) -> str:
        """Fingerprint of the model's weights."""
        return str(self.block.schema.fingerprints.get("weights"))

    @property
    def size(self) -> int:
        """Number P of parameters of the selected layers."""
        return sum(form.gradient_size for form in self.forms.values())

    @property
    def largest_segment(self) -> int:
        """Bytes of the largest segment, which is in memory while it is read."""
        return max((entry.bytes for entry in self.block.manifest.segments), default=0)

    @checked(QueryError)
    def named(self, capture: str) -> Gradients:
        """Open the gradients of the same split and checkpoint in another capture.

        Args:
            capture: Name of the other capture.

        Returns:
            Gradients of all its layers.

        Raises:
            QueryError: There is no such capture.
        """
        key = dataclasses.replace(self.key, capture=capture)
        store = Store(self.block.backend, durability=self.block.durability)
        return gradients_of(open_capture(store, key), key, None, self.of)

    @checked(QueryError)
    def column(self, name: str) -> Any:
        """Read a captured value of every row.

        Args:
            name: `loss`, `label`, `norm`, ...

        Returns:
            Values `[N]`.
        """
        return self.block.column(name)

    def slopes(self) -> torch.Tensor | None:
        """Return the factors `[N]` from stored to requested gradients, or None if they are equal."""
        if not self._sloped:
            return None
        return torch.from_numpy(np.array(self.block.column("slope"), np.float32))

    def slopes_at(self, positions: Sequence[int]) -> torch.Tensor | None:
        """Return `slopes` of some rows.

        Args:
            positions: Positions of the rows `[B]`.

        Returns:
            Factors `[B]`, or None.
        """
        if not self._sloped:
            return None
        slopes = self.block.read_rows(np.asarray(positions, np.int64), ["slope"])["slope"]
        return torch.from_numpy(np.array(slopes, np.float32))

    @property
    def _sloped(self) -> bool:
        return self.of != "output" and self.block.schema.fingerprints.get("of") == "output"

    @checked(QueryError)
    def norms(self, *, per_layer: bool = False) -> torch.Tensor:
        """Return the norms of the gradients, read from the capture or computed from coordinates.

        Args:
            per_layer: Return the norms of each layer.

        Returns:
            Norms `[N]`, or `[N, L]` per layer.
        """
        parts = self._stored_norms() if "norms" in self.block.names else self._computed_norms()
        slopes = self.slopes()
        if slopes is not None:
            parts = parts * slopes.abs().unsqueeze(1)
        return parts if per_layer else parts.double().square().sum(1).sqrt().float()

    def _computed_norms(self) -> torch.Tensor:
        norms = torch.empty(len(self), len(self.forms))
        for some in self.stream(4096):
            for at, (name, form) in enumerate(self.forms.items()):
                squared = form.squared_norms(some.factors[name].widened())
                norms[some.start : some.stop, at] = squared.clamp(min=0).sqrt()
        return norms

    def _stored_norms(self) -> torch.Tensor:
        all_layers = [layer.name for layer in self.block.schema.layers]
        chosen = [all_layers.index(name) for name in self.forms]
        return torch.from_numpy(np.array(self.block.column("norms"), np.float32))[:, chosen]

    @checked(QueryError)
    def rows(self, positions: Any) -> FactorBatch:
        """Read the factors of the rows at these positions, in this order.

        Args:
            positions: Positions of the rows.

        Returns:
            Factors of each layer.
        """
        row_positions = _arguments.whole_numbers(
            "positions", positions, error=QueryError, most=max(0, len(self) - 1)
        )
        batch = self.block.read_rows(row_positions, self._arrays())
        factors = {name: form.read(_BatchArrays(batch)) for name, form in self.forms.items()}
        return FactorBatch(0, len(row_positions), factors)

    @checked(QueryError)
    def stream(self, batch_rows: int, *, segments: range | None = None) -> Iterator[FactorBatch]:
        """Iterate over all rows in order.

        Args:
            batch_rows: Most rows per batch.
            segments: Read only these segments.

        Yields:
            Factors of each layer, by batch.
        """
        _arguments.count("batch_rows", batch_rows, error=QueryError, least=1)
        for batch in self.block.stream(self._arrays(), batch_rows=batch_rows, segments=segments):
            factors = {name: form.read(_BatchArrays(batch)) for name, form in self.forms.items()}
            yield FactorBatch(batch.first_row, batch.first_row + len(batch.ids), factors)

    @checked(QueryError)
    def positions(self, ids: Any) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Return the positions of the rows with these ids.

        Args:
            ids: Ids of the rows `[B]`.

        Returns:
            Positions `[B]`.

        Raises:
            QueryError: The capture does not hold one of the ids.
        """
        row_ids = _arguments.whole_numbers("ids", ids, error=QueryError, least=-_arguments.LARGEST)
        try:
            return self.block.positions(row_ids)
        except MissingRowsError as error:
            raise QueryError(
                f"{error.found} in {self.key.split}",
                code="query.unknown_ids",
                found=f"ids {self.ids[:3].tolist()} ... {self.ids[-1:].tolist()}",
            ) from error

    @checked(QueryError)
    def restore(self, ids: Any) -> dict[str, torch.Tensor]:
        """Restore the gradients of these rows.

        Args:
            ids: Ids of the rows `[B]`.

        Returns:
            One tensor `[B, *shape]` per parameter.

        Raises:
            QueryError: The capture holds projections, or does not hold one of the ids.

        Example:
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
        parameters: dict[str, torch.Tensor] = {}
        for name, form in self.forms.items():
            dense = form.restore(some.factors[name])
            if slopes is not None:
                dense = dense * slopes[at].unsqueeze(1).to(dense.dtype)
            parameters |= split_parameters(form, dense)
        return parameters

    def _arrays(self) -> list[str]:
        named = dict.fromkeys(array for form in self.forms.values() for array in form.arrays)
        return list(named)


def split_parameters(form: AnyForm, dense: torch.Tensor) -> dict[str, torch.Tensor]:
    """Split dense gradients `[B, P]` of a layer into one tensor `[B, *shape]` per parameter."""
    parts = torch.split(dense, [parameter.size for parameter in form.parameters], 1)
    return {
        parameter.name: part.reshape(len(dense), *parameter.shape)
        for parameter, part in zip(form.parameters, parts, strict=True)
    }


def check_restorable(forms: Mapping[str, AnyForm]) -> None:
    """Raise if a layer holds only projections of its gradients."""
    for name, form in forms.items():
        if form.restored_parameters != form.parameters:
            raise QueryError(
                f"the gradient of layer {name} cannot be restored",
                code="query.not_restorable",
                found=form.approximate,
                expected="complete gradients",
                fix="Capture these rows with keep='exact' under another name=.",
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
    """Open the stored gradients of a split.

    Args:
        store: The store, or its path.
        split: Name of the split.
        checkpoints: Name of the checkpoint, by default the only one; or a list of names.
        run: Name of the run.
        name: Name of the capture.
        layers: Names, globs or types of layers; all by default.
        of: `loss`, or `output` for the gradients of outputs, which captures of tasks with outputs hold too.

    Returns:
        The gradients; a list if `checkpoints` is a list.

    Raises:
        QueryError: There is no such capture, it is not finished, or it holds no such gradients.
    """
    opened = open_store(store)
    if isinstance(checkpoints, list | tuple):
        keys = [
            _key(opened, split=split, checkpoint=item, run=run, name=name) for item in checkpoints
        ]
        return [gradients_of(open_capture(opened, key), key, layers, of) for key in keys]
    key = _key(opened, split=split, checkpoint=checkpoints, run=run, name=name)
    return gradients_of(open_capture(opened, key), key, layers, of)


def open_capture(store: Store, key: CaptureKey) -> Block:
    """Open a finished capture; raise with the command that creates it otherwise."""
    if not store.has(key):
        raise _no_capture(store, key.split, key.checkpoint, key.run)
    try:
        return store.read(key)
    except NotSealedError as error:
        raise QueryError(
            f"the capture of {key.split} at {key.checkpoint} is not finished",
            code="query.unfinished_capture",
            path=error.path,
            fix="Run the same gk.capture(...) again: it resumes.",
        ) from error


def gradients_of(block: Block, key: CaptureKey, layers: LayerChoice, of: GradientOf) -> Gradients:
    """Return the gradients of an open capture."""
    captured_layers = [_CapturedLayer(layer) for layer in block.schema.layers if layer.form]
    if not captured_layers:
        raise QueryError(
            "the block holds no gradients",
            code="query.no_gradients",
            path=block.path,
            fix="Capture it with gk.capture.",
        )
    stored_of = block.schema.fingerprints.get("of")
    if of == "output" and stored_of != "output":
        raise QueryError(
            "the capture holds gradients of losses only",
            code="query.no_outputs",
            path=block.path,
            fix="Capture with a task that has outputs, such as gk.Classification, or of='output'.",
        )
    if of == "loss" and stored_of == "output" and "slope" not in block.names:
        raise QueryError(
            "the capture holds gradients of outputs, without d loss / d output",
            code="query.no_slopes",
            path=block.path,
            fix="Pass of='output', or capture with of='loss'.",
        )
    hint = f"Captured layers: {', '.join(layer.layer.name for layer in captured_layers[:8])}."
    chosen = select_layers(captured_layers, layers, error=QueryError, hint=hint)
    forms = {layer.layer.name: form_from_fields(layer.layer.form) for layer in chosen}
    return Gradients(key, block, forms, of)


@dataclass(frozen=True, slots=True)
class _CapturedLayer:
    """A captured layer that can be selected by name or type."""

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
    matches = [k for k in known if (k.split, k.run, k.capture) == (split, run, name)]
    if checkpoint is None and len(matches) == 1:
        return matches[0]
    if checkpoint is None and matches:
        raise QueryError(
            f"{split} was captured at several checkpoints",
            code="query.several_checkpoints",
            found=", ".join(k.checkpoint for k in matches),
            fix=f"Pass checkpoints={matches[-1].checkpoint!r}.",
        )
    raise _no_capture(store, split, checkpoint, run)


def _no_capture(store: Store, split: str, checkpoint: str | None, run: str) -> QueryError:
    known = store.captures()
    at = "" if checkpoint is None else f" at {checkpoint!r}"
    named = f", checkpoints={checkpoint!r}" if checkpoint else ""
    named += f", run={run!r}" if run != "main" else ""
    return QueryError(
        f"there is no capture of {split!r}{at} in run {run!r}",
        code="query.no_capture",
        path=store.location,
        found=", ".join(f"{k.split} at {k.checkpoint}" for k in known[:6]) or "no captures",
        fix=f"Run gk.capture(store, model, loader, task=task, split={split!r}{named}).",
    )


@dataclass(frozen=True, slots=True)
class _BatchArrays:
    """Arrays of a batch, in the interface that forms read."""

    batch: Batch

    def tensor(self, name: str) -> torch.Tensor:
        return self.batch.tensor(name)

    def offsets(self, name: str) -> torch.Tensor | None:
        bounds = self.batch.column(name).offsets
        if bounds is None:
            return None
        offsets = torch.from_numpy(bounds.copy())
        return offsets - offsets[0]


class NamedLayer(Protocol):
    """Interface of a layer that can be selected."""

    @property
    def names(self) -> tuple[str, ...]:
        """Its name, and aliases."""

    @property
    def type(self) -> str:
        """Name of its class."""

    def is_a(self, kind: builtins.type) -> bool:
        """Return True if it is of that class."""


L = TypeVar("L", bound=NamedLayer)


def select_layers(
    layers: Sequence[L], choice: LayerChoice, *, error: type[GradkeepError], hint: str
) -> list[L]:
    """Return the layers that a choice selects, in their own order.

    A name also selects everything inside: `"encoder"` selects `"encoder.fc1"`. A leading `!` excludes:
    `["*", "!*.bias"]`. A pattern that matches nothing raises an error with similar names; `hint` tells where
    all layers are listed.
    """
    if choice is None:
        return list(layers)
    several: Any = choice if isinstance(choice, list | tuple | set | frozenset) else [choice]
    patterns: list[str | type] = list(several)
    for item in patterns:
        _arguments.instance("layers", item, (str, type), error=error, expected=_EXPECTED)
    is_selected = [False] * len(layers)
    if patterns and all(isinstance(item, str) and item.startswith("!") for item in patterns):
        is_selected = [True] * len(layers)
    for item in patterns:
        is_excluded = isinstance(item, str) and item.startswith("!")
        pattern = item[1:] if isinstance(item, str) and is_excluded else item
        matches = [index for index, layer in enumerate(layers) if _matches(layer, pattern)]
        if not matches:
            raise _nothing(layers, pattern, error=error, hint=hint)
        for index in matches:
            is_selected[index] = not is_excluded
    chosen = [layer for layer, selected in zip(layers, is_selected, strict=True) if selected]
    if not chosen:
        raise error(
            "no layer is selected",
            code=f"{error.code.partition('.')[0]}.no_layers",
            found=f"layers={choice!r}",
            fix="Select at least one layer.",
        )
    return chosen


def _matches(layer: NamedLayer, pattern: str | type) -> bool:
    if isinstance(pattern, type):
        return layer.is_a(pattern)
    if layer.type == pattern or pattern in layer.names:
        return True
    return any(
        fnmatch.fnmatchcase(name, pattern) or name.startswith(f"{pattern}.") for name in layer.names
    )


def _nothing(
    layers: Sequence[NamedLayer], pattern: str | type, *, error: type[GradkeepError], hint: str
) -> GradkeepError:
    names = [layer.names[0] for layer in layers]
    types = sorted({layer.type for layer in layers})
    shown = pattern if isinstance(pattern, str) else pattern.__name__
    near = difflib.get_close_matches(shown[:200], [*names, *types], n=3, cutoff=0.4)
    return error(
        f"no layer matches {_arguments.short_repr(shown)}",
        code=f"{error.code.partition('.')[0]}.unknown_layer",
        found=f"{len(names)} layers: {', '.join(names[:8])}{' ...' if len(names) > 8 else ''}",
        expected=f"a name, a glob such as 'layer4.*', or a type of {', '.join(types)}",
        fix=f"Did you mean {' or '.join(near)}? {hint}" if near else hint,
    )
