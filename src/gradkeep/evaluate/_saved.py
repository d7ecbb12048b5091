"""Evaluations in a store: one block each, a single row with all that was found."""

from __future__ import annotations

import json
import warnings
from typing import TYPE_CHECKING, Any

import numpy as np

from gradkeep._annotations import checked
from gradkeep.errors import EvaluationError, NotSealed, SchemaMismatch
from gradkeep.evaluate._evaluation import Curve, Evaluation, SampleSizes
from gradkeep.store import Array, EvaluationKey, Schema, Store
from gradkeep.store import open as open_store

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping

    AnyArray = np.ndarray[Any, np.dtype[Any]]

_TEXTS = ("metric", "subject", "truth", "universe", "provenance")
_NUMBERS = ("value", "level", "ceiling", "spread_by_subsets", "spread_by_queries")
_SIZES = ("queries", "subsets", "seeds", "rows")
_BETWEEN = "\n"


class OutdatedEvaluationError(EvaluationError):
    """An evaluation of rows that the store does not hold any more."""


def save_evaluation(store: Store, name: str, found: Evaluation) -> None:
    """Write an evaluation under a name; the same again is free, another one is refused."""
    told: dict[str, Any] = {part: getattr(found, part) for part in (*_TEXTS, *_NUMBERS)}
    told |= {part: getattr(found.sizes, part) for part in _SIZES}
    told |= {"low": found.interval[0], "high": found.interval[1]}
    if found.captures:
        told["captures"] = json.dumps(dict(found.captures), sort_keys=True)
    values: dict[str, AnyArray] = {
        "draws": np.asarray(found.draws, np.float64),
        "items": np.asarray(found.items, np.float64),
        "item_ids": np.asarray(found.item_ids, np.int64),
    }
    if found.curve is not None:
        told |= {"along": found.curve.along, "lines": _BETWEEN.join(found.curve.names)}
        values |= {
            "curve_at": np.asarray(found.curve.at, np.float64),
            "curve": np.stack([found.curve.values, found.curve.low, found.curve.high]),
        }
    arrays = tuple(
        Array(part, str(value.dtype), value.shape, kind="data", nan="keep")
        if value.dtype.kind == "f"
        else Array(part, str(value.dtype), value.shape, kind="data")
        for part, value in values.items()
    )
    try:
        with store.write(EvaluationKey(name), Schema(arrays, num_rows=1, fingerprints=told)) as out:
            if out.needs(1):
                out.append(np.zeros(1, np.int64), {part: v[None] for part, v in values.items()})
            else:
                out.skip(np.zeros(1, np.int64))
    except SchemaMismatch as error:
        raise EvaluationError(
            f"another evaluation is saved as {name!r}",
            path=error.path,
            found=error.found,
            fix="use another name, or delete it: gradkeep delete STORE evaluations/NAME --yes",
        ) from None


def load_evaluation(store: Store, name: str) -> Evaluation:
    """Read an evaluation back."""
    known = [key.name for key in store.evaluations()]
    if name not in known:
        raise EvaluationError(
            f"no evaluation {name!r}",
            path=store.location,
            found=", ".join(known) or "no saved evaluations",
            fix="`gradkeep evaluate lds STORE` saves evaluations, and so does Evaluation.save",
        )
    try:
        block = store.read(EvaluationKey(name))
    except NotSealed as error:
        raise EvaluationError(
            f"the evaluation {name!r} was not written to the end", path=error.path, fix="save again"
        ) from error
    told: Mapping[str, Any] = block.schema.fingerprints
    changed = store.changed_captures(told)
    if changed:
        raise OutdatedEvaluationError(
            f"the evaluation {name!r} is of other rows than the store holds now",
            path=store.location,
            found=f"{', '.join(changed[:3])} captured again since",
            fix=f"delete it and evaluate again: gradkeep delete {store.location} "
            f"evaluations/{name} --yes, then gradkeep evaluate all {store.location}",
        )
    values = {part: np.asarray(block.column(part))[0] for part in block.names}
    curve = None
    if "curve" in values:
        middle, low, high = values["curve"]
        names = tuple(str(told["lines"]).split(_BETWEEN))
        curve = Curve(str(told["along"]), values["curve_at"], names, middle, low, high)
    texts: Any = {part: str(told[part]) for part in _TEXTS}
    numbers: Any = {part: told[part] for part in _NUMBERS}
    return Evaluation(
        **texts,
        **numbers,
        interval=(float(told["low"]), float(told["high"])),
        sizes=SampleSizes(**{part: int(told[part]) for part in _SIZES}),
        draws=values["draws"],
        items=values["items"],
        item_ids=values["item_ids"],
        curve=curve,
        captures=store.capture_identities(told),
    )


@checked(EvaluationError)
def evaluations(store: Store | str | os.PathLike[str]) -> dict[str, Evaluation]:
    """Read all evaluations saved in a store, by name.

    An evaluation of captures that were made again since is left out with a warning.
    """
    opened = open_store(store, create=False)
    found: dict[str, Evaluation] = {}
    for key in opened.evaluations():
        try:
            found[key.name] = load_evaluation(opened, key.name)
        except OutdatedEvaluationError as error:
            warnings.warn(str(error), stacklevel=2)
    return found
