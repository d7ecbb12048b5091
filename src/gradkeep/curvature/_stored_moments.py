"""Moments of both sides of layers that are stored dense, beside their capture in the store.

A dense gradient does not contain its prefixes and suffixes. Second moments of the first rows' factors are small,
and Kronecker products need nothing else.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch

from gradkeep.errors import NotSealedError
from gradkeep.factors._form import form_to_fields
from gradkeep.factors._registry import form_from_fields
from gradkeep.store import Array, Schema, Store

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gradkeep.factors._form import AnyForm
    from gradkeep.query._gradients import Gradients
    from gradkeep.store import Block, CaptureKey

_FORMAT = 1
_FORM = "form of "
_SIDES = {"left": "suffixes", "right": "prefixes"}
"""Array names in the store, and the fields of `SideMoments`."""
_IDS = "row ids"


@dataclass(frozen=True, slots=True, eq=False)
class SideMoments:
    """Moments of one layer, by the groups of its weight."""

    form: AnyForm
    """Form of its factors; the moments are those of its first weight block."""
    suffixes: torch.Tensor
    """sum g g^T / rows: `[G, R, R]`, or a diagonal `[G, R]`."""
    prefixes: torch.Tensor
    """sum x x^T / positions: `[G, C, C]`, or a diagonal `[G, C]`."""


@dataclass(frozen=True, slots=True, eq=False)
class StoredMoments:
    """Moments of a capture: of its first rows' loss gradients, by the layers that it stores dense."""

    layers: Mapping[str, SideMoments]
    rows: int
    """Number of rows, the first ones of the capture."""
    weights: str
    """Fingerprint of the weights."""
    ids: np.ndarray[Any, np.dtype[np.int64]] | None = None
    """Ids of those rows; None in old captures."""

    def dropped(self, gradients: Gradients) -> int | None:
        """Return how many of their rows are not among these gradients; None if unknown.

        Rows that were dropped from a capture remain in its moments, which are sums.
        """
        if self.ids is not None:
            return int((~np.isin(self.ids, gradients.ids)).sum())
        return 0 if gradients.block.version <= 0 else None

    @classmethod
    def of(cls, gradients: Gradients) -> Self | None:
        """Read the moments beside these gradients; None if there are none.

        >>> import gradkeep as gk, tempfile
        >>> store, model = gk.open(tempfile.mkdtemp()), torch.nn.Linear(4, 3)
        >>> data = [(torch.randn(5, 4), torch.tensor([0, 1, 2, 0, 1]))]
        >>> _ = gk.capture(store, model, data, task=gk.Classification(), split="train", keep="dense")
        >>> moments = StoredMoments.of(gk.gradients(store, split="train"))
        >>> moments.rows, [layer.suffixes.shape for layer in moments.layers.values()]
        (5, [torch.Size([1, 3, 3])])
        """
        if gradients.of != "loss":
            return None
        store = Store(gradients.block.backend, durability=gradients.block.durability)
        moments = cls.read(store, gradients.key)
        return moments if moments is not None and moments.weights == gradients.weights else None

    @classmethod
    def read(cls, store: Store, key: CaptureKey) -> Self | None:
        """Read the moments of a capture; None if there are none in a known format."""
        if not store.has(key.moments):
            return None
        with contextlib.suppress(NotSealedError):
            block = store.read(key.moments)
            facts = block.schema.fingerprints
            if facts.get("format") != _FORMAT:
                return None
            rows, weights = int(facts.get("rows") or 0), str(facts.get("weights"))
            ids = None
            if _IDS in block.names:
                ids = np.array(block.read_rows(np.zeros(1, np.int64), [_IDS])[_IDS])[0]
            return cls(_LayersOnDisk(block), rows, weights, ids)
        return None

    def save(self, store: Store, key: CaptureKey) -> None:
        """Write them beside a capture, replacing those of an interrupted run."""
        values = {
            f"{name}.{side}": getattr(one, field).cpu().float().numpy()
            for name, one in self.layers.items()
            for side, field in _SIDES.items()
        }
        if self.ids is not None:
            values[_IDS] = np.asarray(self.ids, np.int64)
        schema = Schema(
            arrays=tuple(
                Array(name, shape=v.shape, kind="data", dtype=str(v.dtype))
                for name, v in values.items()
            ),
            num_rows=1,
            fingerprints={
                "format": _FORMAT,
                "rows": self.rows,
                "weights": self.weights,
                "split": key.split,
                "capture": key.capture,
                **{
                    f"{_FORM}{name}": json.dumps(form_to_fields(one.form), sort_keys=True)
                    for name, one in self.layers.items()
                },
            },
        )
        if store.has(key.moments):
            store.delete(key.moments)
        with store.write(key.moments, schema) as writer:
            writer.append(np.zeros(1, np.int64), {name: v[None] for name, v in values.items()})


class _LayersOnDisk(Mapping[str, SideMoments]):
    """Layers that are read on access: together they may not fit in memory."""

    def __init__(self, block: Block) -> None:
        self._block = block
        facts = block.schema.fingerprints.items()
        self._forms = {
            name.removeprefix(_FORM): str(fields)
            for name, fields in facts
            if name.startswith(_FORM)
        }

    def __getitem__(self, name: str) -> SideMoments:
        form = form_from_fields(json.loads(self._forms[name]))
        names = [f"{name}.{side}" for side in _SIDES]
        row = self._block.read_rows(np.zeros(1, np.int64), names)
        suffixes, prefixes = (torch.from_numpy(np.array(row[array])[0]) for array in names)
        return SideMoments(form, suffixes, prefixes)

    def __iter__(self) -> Iterator[str]:
        return iter(self._forms)

    def __len__(self) -> int:
        return len(self._forms)
