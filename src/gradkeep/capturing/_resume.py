"""Rows of an earlier run of the same capture, and the proof that this run goes on with the same.

Contents: the fingerprint of every delivered row must be the stored one. Model and task: some stored rows
are made again and compared before anything is added to them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch

from gradkeep.capturing._batches import rows_of
from gradkeep.capturing._keeping import Adjustments
from gradkeep.errors import CaptureError, NotSealedError
from gradkeep.factors._registry import form_from_fields
from gradkeep.query._gradients import gradients_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from gradkeep.capturing._rows import MadeRows, RowMaker
    from gradkeep.factors._form import AnyForm, GradientRows, Storage
    from gradkeep.store import Block, CaptureKey, Schema, Store

    Ids = np.ndarray[Any, np.dtype[np.int64]]
    Digests = np.ndarray[Any, np.dtype[np.uint64]]

_NAMED = 8


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
        """Those of rows in any order."""
        order = np.argsort(ids, kind="stable")
        return cls(np.asarray(ids, np.int64)[order], np.asarray(digests, np.uint64)[order])

    def __len__(self) -> int:
        return len(self.ids)

    def known(self, ids: Ids) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """Which of the rows are known `[B]`."""
        at = np.searchsorted(self.ids, ids)
        inside = at < len(self.ids)
        found = np.zeros(len(ids), np.bool_)
        found[inside] = self.ids[at[inside]] == ids[inside]
        return found

    def changed(self, ids: Ids, digests: Digests) -> Ids:
        """The ids of those rows that are known with another fingerprint."""
        known = self.known(ids)
        before = self.digests[np.searchsorted(self.ids, ids[known])]
        found: Ids = ids[known][before != digests[known]]
        return found


def changed_rows(ids: Ids, *, path: str, known: int) -> CaptureError:
    """The error that names rows whose contents are not what they were."""
    also = f", nor are {len(ids) - 1} others" if len(ids) > 1 else ""
    return CaptureError(
        f"sample {ids[0]} is not what it was when this capture was begun{also}",
        path=path,
        found=f"other inputs or labels at {named(ids)}, {len(ids)} of {known} rows",
        fix="go through the same data in the same order; or keep these rows as another capture "
        "with name=; or delete the old one with store.delete(key) first",
    )


def named(ids: Any) -> str:
    """Some ids for a message."""
    told = ", ".join(str(number) for number in np.asarray(ids)[:_NAMED].tolist())
    return told + (" ..." if len(ids) > _NAMED else "")


_VALUES = ("loss", "output", "slope", "label")
_WITHIN = {"float32": 1e-3, "float64": 1e-7}
"""Relative errors of numbers that were made twice, in batches of other sizes."""


@dataclass(frozen=True, slots=True, eq=False)
class EarlierRun:
    """The rows of an earlier run."""

    key: CaptureKey
    block: Block
    sealed: bool
    contents: RowFingerprints
    """The fingerprint of each sample that is in the store."""

    @property
    def path(self) -> str:
        """Its folder."""
        return self.block.path

    @property
    def schema(self) -> Schema:
        """Its arrays and layers."""
        return self.block.schema

    @property
    def rows(self) -> int:
        """Rows that are there."""
        return len(self.block)

    @property
    def storages(self) -> dict[str, Storage]:
        """How each layer was kept, so that a resumed run keeps it the same way."""
        layers = self.schema.layers
        return {layer.name: form_from_fields(layer.form).storage for layer in layers}

    @property
    def adjustments(self) -> Adjustments:
        """What its later batches needed beyond the first one."""
        return Adjustments.from_text(str(self.schema.fingerprints.get("adjustments", "")))

    @property
    def placed(self) -> bool:
        """Whether it keeps which tokens the positions of its layers are."""
        forms = (form_from_fields(layer.form) for layer in self.schema.layers if layer.form)
        return any(form.places_array in self.block.names for form in forms)

    def check(self, ids: np.ndarray[Any, Any], found: np.ndarray[Any, Any]) -> None:
        """Raise if a sample that is in the store has other contents now."""
        changed = self.contents.changed(ids, found)
        if len(changed):
            raise changed_rows(changed, path=self.path, known=self.rows)

    def check_all(self, delivered: Iterable[tuple[Any, Any, Any]], maker: RowMaker | None) -> None:
        """Raise unless ids, fingerprints and batches of a whole pass are those of the store.

        All rows are compared before the error is raised, so that it can name them.
        """
        changed, new = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
        seen = 0
        proof = None if maker is None else RowsMadeAgain(self, maker)
        for ids, found, batch in delivered:
            changed.append(self.contents.changed(ids, found))
            new.append(ids[~self.contents.known(ids)])
            seen += len(ids)
            if proof is not None and not len(changed[-1]):
                proof.look(ids, batch)
        other, added = np.concatenate(changed), np.concatenate(new)
        if len(other):
            raise changed_rows(other, path=self.path, known=self.rows)
        left_out = self.block.manifest.next_row - self.rows
        if len(added) > left_out or seen - len(added) < self.rows:
            raise CaptureError(
                "these are not the rows of the finished capture",
                path=self.path,
                found=f"{seen} rows, of which {len(added)} are new"
                + (f": {named(added)}" if len(added) else ""),
                expected=f"the {self.rows} rows that are there",
                fix="go through the same data; or keep these rows as another capture with name=; or "
                "delete the old one with store.delete(key) first",
            )


def earlier_run(store: Store, key: CaptureKey) -> EarlierRun | None:
    """What is in the store of this capture; None if nothing is."""
    if not store.has(key):
        return None
    try:
        block, sealed = store.read(key), True
    except NotSealedError:
        block, sealed = store.read(key, live=True), False
    known = "example" in block.names
    contents = RowFingerprints.of(*(block.ids, block.column("example")) if known else ([], []))
    return EarlierRun(key, block, sealed, contents)


class RowsMadeAgain:
    """Some kept rows, made again as they come by and compared with what is kept."""

    def __init__(self, earlier: EarlierRun, maker: RowMaker) -> None:
        self._earlier, self._maker = earlier, maker
        ids = earlier.block.ids
        # Rows that are made again, from the first to the last.
        places = np.linspace(0, len(ids) - 1, min(len(ids), 8)).round().astype(int)
        self._wanted = {int(ids[place]): int(place) for place in places}

    def look(self, ids: np.ndarray[Any, Any], batch: Any) -> None:
        """Make those of the batch's rows again that were chosen; raise if they come out otherwise."""
        for row in np.flatnonzero(np.isin(ids, list(self._wanted))).tolist():
            number = int(ids[row])
            made = self._maker.make(rows_of(batch, row, row + 1), alone=True)
            other = self._differences(self._wanted.pop(number), made)
            if other:
                raise CaptureError(
                    f"sample {number} was made again and came out otherwise than it is kept: the "
                    "model or the task is not what it was, though weights and data are",
                    path=self._earlier.path,
                    found="; ".join(other[:6]),
                    fix="run the model's and the task's code of then; or keep these rows as another "
                    "capture with name=; or delete the old one with store.delete(key) first",
                )

    def _differences(self, place: int, made: MadeRows) -> list[str]:
        block = self._earlier.block
        found = []
        names = [name for name in _VALUES if name in block.names and name in made.values]
        kept = block.read_rows(np.array([place]), names)
        for name in names:
            was, now = np.asarray(kept[name])[0], np.asarray(made.values[name])[0]
            near = _WITHIN.get(str(now.dtype), 0.0)
            if not np.allclose(now, was, rtol=near, atol=near / 10, equal_nan=True):
                found.append(f"{name} {now:.6g}, kept is {was:.6g}")
        if not made.layers:
            return found
        of: Any = "output" if block.schema.fingerprints.get("of") == "output" else "loss"
        gradients = gradients_of(block, self._earlier.key, None, of)
        before = gradients.rows([place]).factors
        for name, form in gradients.forms.items():
            arrays = [block.schema.array(array) for array in form.arrays]
            encoded = any(array.encoding != "plain" for array in arrays)
            was, now = _gradient(form, before[name]), _gradient(form, made.layers[name])
            near = 10 * _WITHIN.get(arrays[0].dtype, 1e-3)
            near = max(near, 3e-2 if encoded else 0.0, form.repeated_error)
            error, scale = float((now - was).norm()), float(was.norm())
            if not error <= near * scale:
                found.append(f"gradient of {name} off by {error / max(scale, 1e-300):.1%}")
        return found


@torch.no_grad()
def _gradient(form: AnyForm, rows: GradientRows) -> torch.Tensor:
    """The whole gradient `[P]` of a single row."""
    wide = rows.widened()
    return form.weighted_sum(wide, wide.example.new_ones(1, 1))[0].double().cpu()
