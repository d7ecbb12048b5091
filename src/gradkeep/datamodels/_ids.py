"""Ids of examples and targets, as people pass them, checked."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from gradkeep.errors import DatamodelsError

if TYPE_CHECKING:
    from gradkeep.datamodels._masks import AnyArray


def checked_ids(what: str, ids: Any, count: int) -> AnyArray:
    """Distinct ids below `count`, from ids or a boolean array; sorted."""
    array = np.atleast_1d(np.asarray(ids))
    if array.dtype == np.bool_ and array.shape == (count,):
        return np.flatnonzero(array)
    array = array.astype(np.int64) if array.size == 0 else array
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise DatamodelsError(
            f"{what} must be ids, or one boolean each",
            found=f"{array.dtype} {list(array.shape)}",
            expected=f"ids 0 to {count - 1}, or bool [{count}]",
        )
    if array.size and (array.min() < 0 or array.max() >= count):
        raise DatamodelsError(
            f"there is no such id among the {what}",
            found=int(array.max() if array.max() >= count else array.min()),
            expected=f"0 to {count - 1}",
        )
    return np.unique(array)


def checked_base(base: Any, count: int) -> AnyArray:
    """The training set that something is taken from: all examples, or a mask of some, bool `[n]`."""
    if base is None:
        return np.ones(count, np.bool_)
    array = np.asarray(base)
    if array.shape != (count,) or array.dtype != np.bool_:
        raise DatamodelsError(
            "a base must be the mask of one training set",
            found=f"{array.dtype} {list(array.shape)}",
            expected=f"bool [{count}]",
        )
    return array
