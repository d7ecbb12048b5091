"""Fits in a store: a row per target, and the counts, a row per example, so that they may grow."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from gradkeep.datamodels._correlation import Correlation
from gradkeep.datamodels._counts import Counts
from gradkeep.datamodels._request import Recipe
from gradkeep.datamodels._result import Datamodels
from gradkeep.errors import DatamodelsError
from gradkeep.store import Array, Schema, ScoresKey

if TYPE_CHECKING:
    from gradkeep.datamodels._masks import AnyArray
    from gradkeep.store import Block, Store

_KIND = "datamodels"
_ROWS = 256
_PER_TARGET = ("bias", "lam", "gap", "total", "squares", "offset", "held", "held_low", "held_high")
_HELD = ("mean", "mean_low", "mean_high", "models", "level", "kind")
_HELD_LISTS = ("constant_outputs", "constant_predictions")


def save(found: Datamodels, store: Store, name: str, *, counts: bool = True) -> None:
    """Write a fit under `scores/<name>`, and its counts under `scores/<name>.counts`."""
    n, targets = found.weights.shape
    made, held, sums = found.recipe, found.held_out, found.counts if counts else None
    facts: dict[str, Any] = {
        "kind": _KIND,
        "penalty": made.penalty,
        "share": made.share,
        "tolerance": made.tolerance,
        "max_steps": made.max_steps,
        "dtype": made.dtype,
        "device": made.device,
        "memory_budget": made.memory_budget,
        "scratch": None if made.scratch is None else str(made.scratch),
        "num_models": found.num_models,
        "repeated_masks": found.repeated_masks,
        "constant_targets": " ".join(map(str, found.constant_targets)),
        "constant_examples": " ".join(map(str, found.constant_examples)),
        "counts": sums is not None,
    }
    if held is not None:
        facts |= {f"held_{part}": getattr(held, part) for part in _HELD}
        facts |= {f"held_{part}": " ".join(map(str, getattr(held, part))) for part in _HELD_LISTS}
    absent = np.full(targets, np.nan)
    columns: dict[str, AnyArray] = {
        "weights": found.weights.T,
        "bias": found.bias,
        "lam": found.lam,
        "gap": found.gap,
        "total": absent if sums is None else sums.total,
        "squares": absent if sums is None else sums.squares,
        "offset": absent if sums is None else sums.offset,
        "held": absent if held is None else held.value,
        "held_low": absent if held is None else held.low,
        "held_high": absent if held is None else held.high,
    }
    arrays = [Array("weights", made.dtype, (n,), "data")]
    arrays += [Array(part, "float64", nan="keep") for part in _PER_TARGET]
    if found.prior is not None and found.prior_scale is not None:
        arrays += [Array("prior", "float64", (n,), "data"), Array("prior_scale", "float64")]
        columns |= {"prior": found.prior.T, "prior_scale": found.prior_scale}
    if sums is not None:
        _save_counts(sums, made, store, name)
    _write(
        store, name, Schema(tuple(arrays), num_rows=targets, fingerprints=_finite(facts)), columns
    )


def load(store: Store, name: str) -> Datamodels:
    """The datamodels saved under a name.

    >>> import gradkeep as gk, tempfile
    >>> from gradkeep.datamodels import fit, load
    >>> store = gk.open(tempfile.mkdtemp())
    >>> masks = np.random.default_rng(0).random((50, 8)) < 0.5
    >>> fit(masks, masks @ np.arange(8.0)).save(store, "digits")
    >>> load(store, "digits").weights.shape
    (8, 1)
    """
    block = store.read(ScoresKey(name))
    facts = dict(block.schema.fingerprints)
    if facts.get("kind") != _KIND:
        raise DatamodelsError(
            "these are not fitted datamodels", path=block.path, found=facts.get("kind", "scores")
        )
    read = {part.name: block.column(part.name) for part in block.schema.arrays}
    columns: dict[str, AnyArray] = {part: np.asarray(read[part]) for part in read}
    counts, variances = None, None
    if facts["counts"]:
        counts, variances = _load_counts(store, name, columns, int(str(facts["num_models"])))
    held = None
    if "held_models" in facts:
        rest: dict[str, Any] = {part: facts.get(f"held_{part}", math.nan) for part in _HELD}
        rest |= {part: _numbers(facts.get(f"held_{part}", "")) for part in _HELD_LISTS}
        held = Correlation(columns["held"], columns["held_low"], columns["held_high"], **rest)
    made: Any = {part: facts[part] for part in _RECIPE}
    scratch = facts["scratch"]
    return Datamodels(
        weights=np.ascontiguousarray(columns["weights"].T),
        bias=columns["bias"].copy(),
        lam=columns["lam"].copy(),
        gap=columns["gap"].copy(),
        num_models=int(str(facts["num_models"])),
        recipe=Recipe(
            **made, scratch=None if scratch is None else Path(str(scratch)), variances=variances
        ),
        held_out=held,
        constant_targets=_numbers(facts["constant_targets"]),
        constant_examples=_numbers(facts["constant_examples"]),
        repeated_masks=int(str(facts["repeated_masks"])),
        prior_scale=columns.get("prior_scale"),
        prior=columns["prior"].T if "prior" in columns else None,
        counts=counts,
    )


_RECIPE = ("penalty", "share", "tolerance", "max_steps", "dtype", "device", "memory_budget")


def _save_counts(sums: Counts, made: Recipe, store: Store, name: str) -> None:
    n, targets = sums.cross.shape
    arrays = [
        Array("pairs", sums.pairs.dtype.name, (n,), "data"),
        Array("cross", "float64", (targets,), "data"),
    ]
    columns = {"pairs": sums.pairs, "cross": sums.cross}
    if made.variances is not None:
        arrays.append(Array("variance", "float64"))
        columns["variance"] = made.variances
    facts: dict[str, str | int] = {"kind": f"{_KIND}-counts", "num_models": sums.models}
    _write(store, f"{name}.counts", Schema(tuple(arrays), num_rows=n, fingerprints=facts), columns)


def _load_counts(
    store: Store, name: str, columns: dict[str, AnyArray], models: int
) -> tuple[Counts, AnyArray | None]:
    block: Block = store.read(ScoresKey(f"{name}.counts"))
    variances = np.asarray(block.column("variance")) if "variance" in block.names else None
    counts = Counts(
        models,
        np.asarray(block.column("pairs")),
        np.asarray(block.column("cross")),
        *(columns[part] for part in ("total", "squares", "offset")),
    )
    return counts, variances


def _write(store: Store, name: str, schema: Schema, columns: dict[str, AnyArray]) -> None:
    count = schema.num_rows or 0
    with store.write(ScoresKey(name), schema) as writer:
        for start in range(0, count, _ROWS):
            rows = slice(start, start + _ROWS)
            part = {key: np.ascontiguousarray(value[rows]) for key, value in columns.items()}
            writer.append(np.arange(start, min(count, start + _ROWS)), part)


def _finite(facts: dict[str, Any]) -> dict[str, Any]:
    """Facts without NaN, which a JSON file cannot hold."""
    return {
        key: value
        for key, value in facts.items()
        if not (isinstance(value, float) and math.isnan(value))
    }


def _numbers(text: Any) -> tuple[int, ...]:
    return tuple(int(part) for part in str(text).split())
