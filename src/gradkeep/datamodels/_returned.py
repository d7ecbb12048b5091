"""What a training returned, held against the spec before anything is written."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from gradkeep.errors import StudyError

if TYPE_CHECKING:
    from gradkeep.datamodels._spec import Field, Spec

AnyArray = np.ndarray[Any, np.dtype[Any]]


def checked(spec: Spec, returned: Any, *, index: int) -> dict[str, AnyArray]:
    """Every field of the spec as an array of its shape and dtype; anything else is refused.

    Values may change their precision (float32 to float16) but not their kind, and none may be lost.

    >>> from gradkeep.datamodels._spec import Spec
    >>> spec = Spec.from_fields({"num_models": 1, "schema": {"m": {"shape": [2], "dtype": "float16"}}})
    >>> checked(spec, {"m": np.array([0.5, 2.0])}, index=0)["m"].dtype
    dtype('float16')
    """
    names = [field.name for field in spec.fields]
    if not isinstance(returned, Mapping):
        raise _wrong(index, "must return a dictionary", type(returned).__name__, ", ".join(names))
    missing = [name for name in names if name not in returned]
    unknown = [str(name) for name in returned if name not in names]
    if missing or unknown:
        found = f"missing {missing}, unknown {unknown}"
        raise _wrong(index, "must return exactly the spec's keys", found, ", ".join(names))
    return {field.name: _array(field, returned[field.name], index) for field in spec.fields}


def _array(field: Field, value: Any, index: int) -> AnyArray:
    if hasattr(value, "detach"):
        value = value.detach().cpu()
        # numpy has no bfloat16; float32 holds it exactly.
        value = value.float().numpy() if str(value.dtype) == "torch.bfloat16" else value.numpy()
    try:
        given = np.asarray(value)
    except ValueError as error:
        raise _wrong(index, f"{field.name!r} is no array", str(error), str(field.shape)) from error
    if given.shape != field.shape:
        raise _wrong(index, f"{field.name!r} has another shape", given.shape, field.shape)
    what = f"{field.name!r} does not fit the spec's dtype"
    if not np.can_cast(given.dtype, field.dtype, "same_kind"):
        # Python's own numbers come as int64, also for unsigned fields.
        whole = given.dtype.kind in "iu" and field.dtype.kind in "iu"
        if not whole:
            raise _wrong(index, what, given.dtype.name, field.dtype.name)
    with np.errstate(over="ignore"):
        cast = given.astype(field.dtype)
    if field.dtype.kind in "iu":
        lost = cast.astype(given.dtype) != given
    else:
        lost = ~np.isfinite(cast) if field.dtype.kind == "f" else np.zeros(given.shape, bool)
    if lost.any():
        bad = given[lost].reshape(-1)[0]
        raise _wrong(index, what, f"{bad} among its values", f"finite values of {field.dtype.name}")
    return cast


def _wrong(index: int, what: str, found: object, expected: object) -> StudyError:
    return StudyError(
        f"model {index}: {what}",
        found=found,
        expected=expected,
        fix="change what main returns, or the spec; nothing was written",
    )
