"""The basis of compressed captures: how every kept layer's coordinates are made, and its place in the store."""

from __future__ import annotations

import contextlib
import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import xxhash

import gradkeep.store as gs
from gradkeep.errors import CaptureError, NotSealed
from gradkeep.factors._bits import bits_told
from gradkeep.factors._weights import BlockProjection, LayerProjection

if TYPE_CHECKING:
    from collections.abc import Mapping

    from gradkeep.store import BasisKey, Block, Store

_FORMAT = 1
_PARTS = ("left", "right", "weights", "chosen")


@dataclass(frozen=True, slots=True, eq=False)
class CaptureBasis:
    """The maps of all kept layers, with what they were found from."""

    layers: Mapping[str, LayerProjection]
    settings: str
    """`Keep.described()` of what it was made for."""
    weights: str
    """The fingerprint of the weights that it was found at."""
    task: str
    rows: int
    """With how many rows."""
    group: int = 0
    """Coordinates that share a byte; 0: none do."""
    agreement: float | None = None
    """The mean rank correlation of kept and full scores on some of them; None: not measured."""
    compared: int = 0
    """How many rows those were."""
    fingerprint: str = field(default="")

    def __post_init__(self) -> None:
        if not self.fingerprint:
            object.__setattr__(self, "fingerprint", self._digest())

    @property
    def whitened(self) -> bool:
        """Whether its coordinates are divided by the roots of eigenvalues."""
        return bool(json.loads(self.settings)["coordinates"] == "eigen")

    @property
    def size(self) -> int:
        """Coordinates of all layers together."""
        return sum(layer.size for layer in self.layers.values())

    @property
    def nbytes(self) -> int:
        """Bytes of all maps."""
        return sum(layer.nbytes for layer in self.layers.values())

    def told(self, bits: int) -> str:
        """What is kept of a row, and how far it can be trusted."""
        white = "whitened " if self.whitened else "random "
        kept = f"{self.size} {white}coordinates, {bits_told(bits, self.group if bits == 1 else 0)}"
        if self.agreement is None:
            return f"{kept}, not compared with whole gradients"
        return (
            f"{kept}, whose ranks agree {self.agreement:.2f} with those of the same layers' whole "
            f"gradients on {self.compared} rows"
        )

    def _digest(self) -> str:
        digest = xxhash.xxh3_128(
            f"{_FORMAT}\0{self.settings}\0{self.weights}\0{self.task}\0{self.group}".encode()
        )
        for name, values in self._arrays().items():
            digest.update(name.encode("utf-8", "surrogatepass"))
            digest.update(np.ascontiguousarray(values).data)
        return digest.hexdigest()

    def _arrays(self) -> dict[str, np.ndarray[Any, Any]]:
        found: dict[str, np.ndarray[Any, Any]] = {}
        for name, layer in self.layers.items():
            for at, block in enumerate(layer.blocks):
                for part in _PARTS if block is not None else ():
                    values = getattr(block, part)
                    if values is not None:
                        found[f"{name}.{at}.{part}"] = values.cpu().numpy()
        return found


def save_basis(store: Store, key: BasisKey, basis: CaptureBasis) -> None:
    """Put a basis into the store; what an interrupted run left of another one is replaced."""
    values = basis._arrays()
    schema = gs.Schema(
        arrays=tuple(
            gs.Array(name, dtype=str(array.dtype), shape=array.shape, kind="data")
            for name, array in values.items()
        ),
        num_rows=1,
        fingerprints={
            "format": _FORMAT,
            "basis": basis.fingerprint,
            "settings": basis.settings,
            "weights": basis.weights,
            "task": basis.task,
            "rows": basis.rows,
            "group": basis.group,
            "agreement": basis.agreement,
            "compared": basis.compared,
            **{f"blocks of {name}": len(layer.blocks) for name, layer in basis.layers.items()},
        },
    )
    if store.has(key):
        store.delete(key)
    with store.write(key, schema) as writer:
        writer.append(np.zeros(1, np.int64), {name: array[None] for name, array in values.items()})


def load_basis(store: Store, key: BasisKey) -> CaptureBasis | None:
    """The basis of that name; None if there is none, or none that was finished."""
    if not store.has(key):
        return None
    with contextlib.suppress(NotSealed):
        return _read(store.read(key))
    return None


def _read(block: Block) -> CaptureBasis:
    facts = block.schema.fingerprints
    if facts.get("format") != _FORMAT:
        raise CaptureError(
            "this basis is in a format that this version does not know",
            path=block.path,
            found=facts.get("format"),
            expected=_FORMAT,
            fix="upgrade gradkeep",
        )
    row = block.read_rows(np.zeros(1, np.int64), list(block.names))
    arrays = {name: torch.from_numpy(np.array(row[name])[0]) for name in block.names}
    prefix = "blocks of "
    counts = {
        key.removeprefix(prefix): int(number or 0)
        for key, number in facts.items()
        if key.startswith(prefix)
    }
    agreement = facts.get("agreement")
    return CaptureBasis(
        layers={
            name: LayerProjection(tuple(_block(arrays, f"{name}.{at}") for at in range(count)))
            for name, count in counts.items()
        },
        settings=str(facts.get("settings")),
        weights=str(facts.get("weights")),
        task=str(facts.get("task")),
        rows=int(facts.get("rows") or 0),
        group=int(facts.get("group") or 0),
        agreement=None if agreement is None else float(agreement),
        compared=int(facts.get("compared") or 0),
        fingerprint=str(facts.get("basis")),
    )


def _block(arrays: Mapping[str, torch.Tensor], name: str) -> BlockProjection | None:
    if f"{name}.left" not in arrays:
        return None
    chosen = arrays.get(f"{name}.chosen")
    return BlockProjection(
        arrays[f"{name}.left"], arrays[f"{name}.right"], arrays[f"{name}.weights"], chosen
    )
