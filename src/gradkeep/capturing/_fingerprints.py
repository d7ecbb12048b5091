"""Fingerprints of rows by their ids: whether a row is what it was."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from gradkeep.errors import CaptureError

if TYPE_CHECKING:
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
    others = len(ids) - 1
    also = f", nor are {others} others" if others > 1 else ", nor is another one" if others else ""
    return CaptureError(
        f"sample {ids[0]} is not what it was when this capture was begun{also}",
        path=path,
        found=f"other inputs or labels at {named(ids)}, {len(ids)} of {known} rows",
        expected="the same contents behind every id: same data, same order, same padding, and no "
        "random augmentation",
        fix="go through the same data in the same order; or keep these rows as another capture "
        "with name=; or delete the old one with store.delete(key) first",
    )


def named(ids: Any) -> str:
    """Some ids for a message."""
    told = ", ".join(str(number) for number in np.asarray(ids)[:_NAMED].tolist())
    return told + (" ..." if len(ids) > _NAMED else "")
