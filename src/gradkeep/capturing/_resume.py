"""Identity of a capture: fingerprints of weights, function and rows, and the check that a run continues it.

Contents: the fingerprint of every delivered row must be the stored one. Model and task: some stored rows
are recomputed and compared before any row is added.
"""

from __future__ import annotations

import inspect
import re
import sys
import sysconfig
import types
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch
import xxhash
from torch import nn

from gradkeep.capturing._batches import (
    format_ids,
    rows_of,
)
from gradkeep.capturing._readiness import stored_weight
from gradkeep.capturing._storage import Adjustments, storage_of
from gradkeep.errors import CaptureError, NotSealedError
from gradkeep.factors import form_from_fields
from gradkeep.factors._bits import Bits
from gradkeep.factors._outer import Outer
from gradkeep.factors._tied import places_array
from gradkeep.query._gradients import gradients_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from torch import Tensor, nn

    from gradkeep.capturing._rows import RowArrays, RowMaker
    from gradkeep.capturing.rules._rules import LayerUnit
    from gradkeep.factors._form import AnyForm, GradientRows, Storage
    from gradkeep.store import Block, CaptureKey, Schema, Store

    Projection = Callable[[LayerUnit, Tensor], Tensor]
    Ids = np.ndarray[Any, np.dtype[np.int64]]
    Digests = np.ndarray[Any, np.dtype[np.uint64]]

_IGNORED_NAMES = re.compile(
    r"device|path|name|dtype|implementation|version|loss|cache|dropout|forward"
)
_CONFIGURATION_NAMES = re.compile(r"act|eps|norm|scal|slope|temperature")
_INSTALLED = tuple(
    {sysconfig.get_paths()[kind] for kind in ("purelib", "platlib", "stdlib", "platstdlib")}
)


@dataclass(frozen=True, slots=True, eq=False)
class RowFingerprints:
    """The fingerprint `[N]` of each known row, ordered by id.

    >>> known = RowFingerprints.of(np.array([7, 3]), np.array([70, 30], np.uint64))
    >>> known.changed(np.array([3, 7, 9]), np.array([30, 71, 90], np.uint64))
    array([7])
    """

    ids: Ids
    digests: Digests

    @classmethod
    def of(cls, ids: Any, digests: Any) -> Self:
        """Build from rows in any order."""
        order = np.argsort(ids, kind="stable")
        return cls(np.asarray(ids, np.int64)[order], np.asarray(digests, np.uint64)[order])

    def __len__(self) -> int:
        return len(self.ids)

    def known(self, ids: Ids) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """Return a mask `[B]` of the rows that are known."""
        at = np.searchsorted(self.ids, ids)
        inside = at < len(self.ids)
        mask = np.zeros(len(ids), np.bool_)
        mask[inside] = self.ids[at[inside]] == ids[inside]
        return mask

    def changed(self, ids: Ids, digests: Digests) -> Ids:
        """Return the ids of known rows with another fingerprint."""
        known = self.known(ids)
        before = self.digests[np.searchsorted(self.ids, ids[known])]
        changed: Ids = ids[known][before != digests[known]]
        return changed


def changed_rows_error(ids: Ids, *, path: str, known: int) -> CaptureError:
    """Build the error about rows whose contents have changed."""
    also = f", and so have {len(ids) - 1} others" if len(ids) > 1 else ""
    return CaptureError(
        f"the data of sample {ids[0]} has changed since this capture was started{also}",
        code="capture.rows_changed",
        path=path,
        found=f"other inputs or labels in {len(ids)} of {known} rows: {format_ids(ids)}",
        fix="Use the same data in the same order, store these rows as another capture "
        "with name=, or delete the old one with store.delete(key) first.",
    )


_VALUES = ("loss", "output", "slope", "label")
_WITHIN = {"float32": 1e-3, "float64": 1e-7}
"""Relative errors of values that are computed twice, in batches of other sizes."""


@dataclass(frozen=True, slots=True, eq=False)
class EarlierRun:
    """Rows of an earlier run."""

    key: CaptureKey
    block: Block
    sealed: bool
    contents: RowFingerprints
    """Fingerprint of each stored sample."""

    @property
    def path(self) -> str:
        """Folder of the capture."""
        return self.block.path

    @property
    def schema(self) -> Schema:
        """Arrays and layers of the capture."""
        return self.block.schema

    @property
    def rows(self) -> int:
        """Number of stored rows."""
        return len(self.block)

    @property
    def storages(self) -> dict[str, Storage]:
        """Storage of each layer, which a resumed run must use too."""
        layers = self.schema.layers
        return {layer.name: storage_of(form_from_fields(layer.form)) for layer in layers}

    @property
    def adjustments(self) -> Adjustments:
        """Adjustments that later batches of the earlier run needed."""
        return Adjustments.from_text(str(self.schema.fingerprints.get("adjustments", "")))

    @property
    def placed(self) -> bool:
        """True if layers store which tokens their positions are."""
        forms = (form_from_fields(layer.form) for layer in self.schema.layers if layer.form)
        return any(places_array(form) in self.block.names for form in forms)

    def check(self, ids: np.ndarray[Any, Any], digests: np.ndarray[Any, Any]) -> None:
        """Raise if a stored sample has other contents now."""
        changed = self.contents.changed(ids, digests)
        if len(changed):
            raise changed_rows_error(changed, path=self.path, known=self.rows)

    def check_all(self, delivered: Iterable[tuple[Any, Any, Any]], maker: RowMaker | None) -> None:
        """Raise unless ids, fingerprints and batches of a whole pass are those of the store.

        All rows are compared before the error is raised, so that it can name them.
        """
        changed, new = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
        seen = 0
        proof = None if maker is None else RecomputeCheck(self, maker)
        for ids, digests, batch in delivered:
            changed.append(self.contents.changed(ids, digests))
            new.append(ids[~self.contents.known(ids)])
            seen += len(ids)
            if proof is not None and not len(changed[-1]):
                proof.check_batch(ids, batch)
        other, added = np.concatenate(changed), np.concatenate(new)
        if len(other):
            raise changed_rows_error(other, path=self.path, known=self.rows)
        left_out = self.block.manifest.next_row - self.rows
        if len(added) > left_out or seen - len(added) < self.rows:
            raise CaptureError(
                "these are not the rows of the finished capture",
                code="capture.other_rows",
                path=self.path,
                found=(
                    f"{seen} rows, of which {len(added)} are new"
                    + (f": {format_ids(added)}" if len(added) else "")
                ),
                expected=f"the {self.rows} stored rows",
                fix="Use the same data, store these rows as another capture with name=, "
                "or delete the old one with store.delete(key) first.",
            )


def find_earlier_run(store: Store, key: CaptureKey) -> EarlierRun | None:
    """Find the stored rows of this capture; None if there are none."""
    if not store.has(key):
        return None
    try:
        block, sealed = store.read(key), True
    except NotSealedError:
        block, sealed = store.read(key, live=True), False
    known = "example" in block.names
    contents = RowFingerprints.of(*(block.ids, block.column("example")) if known else ([], []))
    return EarlierRun(key, block, sealed, contents)


class RecomputeCheck:
    """Recompute some stored rows as they are delivered, and compare them with the store."""

    def __init__(self, earlier: EarlierRun, maker: RowMaker) -> None:
        self._earlier, self._maker = earlier, maker
        ids = earlier.block.ids
        # Eight rows, from the first to the last.
        places = np.linspace(0, len(ids) - 1, min(len(ids), 8)).round().astype(int)
        self._places = {int(ids[place]): int(place) for place in places}

    def check_batch(self, ids: np.ndarray[Any, Any], batch: Any) -> None:
        """Recompute the chosen rows of the batch; raise if they differ from the store."""
        for row in np.flatnonzero(np.isin(ids, list(self._places))).tolist():
            number = int(ids[row])
            arrays = self._maker.make(rows_of(batch, row, row + 1), alone=True)
            other = self._differences(self._places.pop(number), arrays)
            if other:
                raise CaptureError(
                    f"sample {number} differs from the stored row when it is "
                    "recomputed: the model or the task has changed, though "
                    "weights and data have not",
                    code="capture.function_changed",
                    path=self._earlier.path,
                    found="; ".join(other[:6]),
                    fix="Use the code of the model and the task of the earlier run, "
                    "store these rows as another capture with name=, or delete the "
                    "old one with store.delete(key) first.",
                )

    def _differences(self, place: int, arrays_now: RowArrays) -> list[str]:
        block = self._earlier.block
        differences = []
        names = [name for name in _VALUES if name in block.names and name in arrays_now.values]
        stored = block.read_rows(np.array([place]), names)
        for name in names:
            was, now = np.asarray(stored[name])[0], np.asarray(arrays_now.values[name])[0]
            near = _WITHIN.get(str(now.dtype), 0.0)
            if not np.allclose(now, was, rtol=near, atol=near / 10, equal_nan=True):
                differences.append(f"{name} {now:.6g}, stored {was:.6g}")
        if not arrays_now.layers:
            return differences
        of: Any = "output" if block.schema.fingerprints.get("of") == "output" else "loss"
        gradients = gradients_of(block, self._earlier.key, None, of)
        before = gradients.rows([place]).factors
        for name, form in gradients.forms.items():
            arrays = [block.schema.array(array) for array in form.arrays]
            encoded = any(array.encoding != "plain" for array in arrays)
            was, now = _gradient(form, before[name]), _gradient(form, arrays_now.layers[name])
            near = 10 * _WITHIN.get(arrays[0].dtype, 1e-3)
            near = max(near, 3e-2 if encoded else 0.0, _recompute_error(form))
            error, scale = float((now - was).norm()), float(was.norm())
            if not error <= near * scale:
                differences.append(f"gradient of {name} off by {error / max(scale, 1e-300):.1%}")
        return differences


def _recompute_error(form: AnyForm) -> float:
    """Return the relative error of a row that is computed a second time."""
    if isinstance(form, Outer):
        return 3 * form.error  # another cut of the rank may err in the other direction
    if isinstance(form, Bits):  # coordinates near a bound between levels may cross it
        return 0.2 if form.group else {1: 0.2, 4: 0.1, 8: 0.03}.get(form.bits, 0.01)
    return 0.0


@torch.no_grad()
def _gradient(form: AnyForm, rows: GradientRows) -> torch.Tensor:
    """Return the whole gradient `[P]` of a single row."""
    wide = rows.widened()
    return form.weighted_sum(wide, wide.example.new_ones(1, 1))[0].double().cpu()


def fingerprint_weights(model: nn.Module) -> str:
    """Return a digest of all parameters and buffers with their names, shapes and dtypes."""
    digest = xxhash.xxh3_128()
    for name, tensor in sorted(model.state_dict(keep_vars=True).items()):
        if not isinstance(tensor, torch.Tensor):
            continue
        value = stored_weight(tensor)
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}\n".encode())
        plain = value.detach().cpu().contiguous().reshape(-1)
        digest.update(plain.view(torch.uint8).numpy().data if plain.numel() else b"")
    return digest.hexdigest()


def fingerprint_function(model: nn.Module) -> str:
    """Return a digest that changes when a model with the same weights computes another function.

    It begins with the version of Python, whose compiler decides which names code refers to.
    """
    digest = xxhash.xxh3_128()
    for path, module in model.named_modules():
        digest.update(f"{path} {type(module).__qualname__}\n".encode())
        for line in _describe_module(module):
            digest.update(f"  {line}\n".encode())
    return f"{sys.version_info.major}.{sys.version_info.minor} {digest.hexdigest()}"


def _describe_module(module: nn.Module) -> Iterator[str]:
    for name, value in sorted(vars(module).items()):
        if name.startswith("_") or _IGNORED_NAMES.search(name.lower()):
            continue
        text = _value(value)
        if text is not None:
            yield f"{name} {text}"
        elif hasattr(value, "__dict__") and not isinstance(value, type) and not callable(value):
            yield from _configuration(name, value)
    for function in _own_functions(type(module)):
        yield f"{function.__name__} {' '.join(_names(function.__code__))}"


def _value(value: Any) -> str | None:
    """Describe a setting; None for flags, counters, sizes, tensors and modules."""
    if isinstance(value, float | str):
        return repr(value)
    if isinstance(value, types.FunctionType):
        own = " ".join(_names(value.__code__)) if _is_own(value) else ""
        return f"{value.__qualname__} {own}"
    if isinstance(value, types.BuiltinFunctionType):
        return str(value.__qualname__)
    return None


def _configuration(name: str, value: Any) -> Iterator[str]:
    for key, inner in sorted(vars(value).items(), key=lambda item: str(item[0])):
        key = str(key).lower()
        if _CONFIGURATION_NAMES.search(key) and not _IGNORED_NAMES.search(key):
            text = _value(inner)
            if text is not None:
                yield f"{name}.{key} {text}"


def _own_functions(kind: type) -> Iterator[types.FunctionType]:
    """Yield the functions of a class and its bases that no installed package defines."""
    for base in kind.__mro__:
        for name, function in sorted(vars(base).items()):
            is_function = isinstance(function, types.FunctionType) and name != "__init__"
            if is_function and _is_own(function):
                yield function


def _is_own(function: types.FunctionType) -> bool:
    return not inspect.getfile(function).startswith(_INSTALLED)


def _names(code: types.CodeType) -> list[str]:
    """Return the names and float constants that code refers to, inner functions included."""
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= set(_names(constant))
        elif isinstance(constant, float):
            names.add(repr(constant))
    return sorted(names)
