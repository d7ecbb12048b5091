"""Moments of both sides of layers that are kept dense, beside their capture in the store.

A dense gradient does not tell the prefixes and suffixes that it was the product of. The first rows'
second moments of them are few bytes, and are all that Kronecker products need.
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
_SIDES = ("left", "right")
_IDS = "row ids"


@dataclass(frozen=True, slots=True, eq=False)
class SideMoments:
    """Of one layer, by the groups of its weight."""

    form: AnyForm
    """The form that its factors had; its first weight block is what these are of."""
    left: torch.Tensor
    """Of suffixes, sum g g^T / rows: `[G, R, R]`, or a diagonal `[G, R]`."""
    right: torch.Tensor
    """Of prefixes, sum x x^T / positions: `[G, C, C]`, or a diagonal `[G, C]`."""


@dataclass(frozen=True, slots=True, eq=False)
class StoredMoments:
    """Those of a capture: of its first rows' loss gradients, by the layers that it keeps dense."""

    layers: Mapping[str, SideMoments]
    rows: int
    """Of how many rows, the first ones."""
    weights: str
    """The fingerprint of the weights that they were made at."""
    ids: np.ndarray[Any, np.dtype[np.int64]] | None = None
    """The ids of those rows; None of captures that were made before they were kept."""

    def dropped(self, gradients: Gradients) -> int | None:
        """How many of their rows are no longer among these gradients; None: nobody knows.

        Sums over rows cannot be taken apart: what was dropped from a capture stays in its moments.
        """
        if self.ids is not None:
            return int((~np.isin(self.ids, gradients.ids)).sum())
        return 0 if gradients.block.version <= 0 else None

    @classmethod
    def of(cls, gradients: Gradients) -> Self | None:
        """Those that are kept beside these gradients; None if there are none.

        >>> import gradkeep as gk, tempfile
        >>> store, model = gk.open(tempfile.mkdtemp()), torch.nn.Linear(4, 3)
        >>> data = [(torch.randn(5, 4), torch.tensor([0, 1, 2, 0, 1]))]
        >>> _ = gk.capture(store, model, data, task=gk.Classification(), split="train", keep="dense")
        >>> found = StoredMoments.of(gk.gradients(store, split="train"))
        >>> found.rows, [one.left.shape for one in found.layers.values()]
        (5, [torch.Size([1, 3, 3])])
        """
        if gradients.of != "loss":
            return None
        store = Store(gradients.block.backend, durability=gradients.block.durability)
        found = cls.read(store, gradients.key)
        return found if found is not None and found.weights == gradients.weights else None

    @classmethod
    def read(cls, store: Store, key: CaptureKey) -> Self | None:
        """Those of a capture; None if there are none, or none that this version knows."""
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
        """Put them beside a capture; what an interrupted run left of others is replaced."""
        values = {
            f"{name}.{side}": getattr(one, side).cpu().float().numpy()
            for name, one in self.layers.items()
            for side in _SIDES
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
    """Layers that are read when they are asked for: together they may not fit."""

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
        left, right = (torch.from_numpy(np.array(row[array])[0]) for array in names)
        return SideMoments(form, left, right)

    def __iter__(self) -> Iterator[str]:
        return iter(self._forms)

    def __len__(self) -> int:
        return len(self._forms)
