"""What an earlier run of the same capture left, and whether this run's data is the same."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from gradkeep.errors import CaptureError, NotSealed
from gradkeep.factors import form_from_fields

if TYPE_CHECKING:
    from gradkeep.factors import Storage
    from gradkeep.store import CaptureKey, Schema, Store


@dataclass(frozen=True, slots=True, eq=False)
class EarlierRun:
    """The schema and the rows of an earlier run."""

    path: str
    schema: Schema
    sealed: bool
    examples: dict[int, int]
    """The fingerprint of each sample that is in the store, by id."""

    @property
    def rows(self) -> int:
        """How many rows are there."""
        return len(self.examples)

    @property
    def storages(self) -> dict[str, Storage]:
        """How each layer was kept, so that a resumed run keeps it the same way."""
        found: dict[str, Storage] = {}
        for layer in self.schema.layers:
            found[layer.name] = form_from_fields(layer.form).storage
        return found

    def check(self, ids: np.ndarray[Any, Any], found: np.ndarray[Any, Any]) -> None:
        """Raise if a sample that is in the store has other contents now."""
        for number, digest in zip(ids.tolist(), found.tolist(), strict=True):
            if self.examples.get(number, digest) != digest:
                raise CaptureError(
                    f"sample {number} is not what it was when this capture was begun",
                    path=self.path,
                    found="a loader with other data, another order, or random augmentation",
                    fix="go through the same data in the same order, or use another name=",
                )


def earlier_run(store: Store, key: CaptureKey) -> EarlierRun | None:
    """What is in the store of this capture; None if nothing is."""
    if key not in store.captures():
        return None
    try:
        block, sealed = store.read(key), True
    except NotSealed:
        block, sealed = store.read(key, live=True), False
    names = block.names
    examples: dict[int, int] = {}
    if "example" in names:
        digests = block.column("example")
        examples = dict(zip(block.ids.tolist(), np.asarray(digests).tolist(), strict=True))
    return EarlierRun(block.path, block.schema, sealed, examples)
