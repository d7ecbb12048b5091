"""Fitted datamodels, and how a store keeps them."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

import gradkeep.store as stores
from gradkeep._arguments import checked
from gradkeep.datamodels._correlation import Correlation, correlation
from gradkeep.datamodels._counts import Counts
from gradkeep.datamodels._masks import AnyArray, Masks
from gradkeep.datamodels._options import FitOptions, checked_outputs
from gradkeep.datamodels._path import predict
from gradkeep.errors import DatamodelsError
from gradkeep.store import Array, Schema, ScoresKey

if TYPE_CHECKING:
    import os
    from typing import Literal

    from gradkeep.store import Block, Store


_KIND = "datamodels"
_ROWS = 256
_OPTIONS = ("penalty", "share", "tolerance", "max_steps", "dtype", "device", "memory_budget")
_SUMS = ("total", "squares", "offset")
_PER_TARGET = ("bias", "lam", "gap", *_SUMS, "held", "held_low", "held_high")
_HELD = ("mean", "mean_low", "mean_high", "models", "level", "kind")
_HELD_LISTS = ("constant_outputs", "constant_predictions")


@dataclass(frozen=True, slots=True, eq=False)
class Datamodels:
    """Linear models from a training subset to a model's outputs: output = mask . weights + bias.

    Created by `fit` and `load`.

    Attributes:
        weights: Weights `[n, t]`: what training on an example adds to an output.
        bias: Biases `[t]`.
        lam: Penalty of each target `[t]` in (1/2m) |y - b - Zw|^2 + lam |w|_1 with standardized columns Z; lam/2 |w|^2 for ridge, lam
            (share |w|_1 + (1 - share) / (2 sd(y)) |w|^2) for an elastic net.
        gap: Upper bound of the distance from the optimum `[t]`, in units of half the output's variance.
        num_models: Number of fitted models.
        options: Options of the fit.
        held_out: Correlation on held-out models; after `add`, on the added models before the update. None if there were none.
        held_out_rows: Rows of the held-out models.
        constant_targets: Targets whose output never changes: weights 0, gap 0.
        constant_examples: Examples in all subsets or in none: weight 0.
        repeated_masks: Models with the mask of an earlier one.
        prior_scale: Scale of the prior's scores `[t]`; 0 if they point the wrong way.
        prior: Prior scores, if any.
        counts: Pair counts of the models, for `add`.
    """

    weights: AnyArray
    bias: AnyArray
    lam: AnyArray
    """`[t]`, the penalty in (1/2m) |y - b - Zw|^2 + lam |w|_1 with standard columns Z; lam/2 |w|^2
    for ridge, lam (share |w|_1 + (1 - share) / (2 sd(y)) |w|^2) for an elastic net."""
    gap: AnyArray
    """`[t]`, at most how far the objective is from its least value, in parts of half a variance."""
    num_models: int
    options: FitOptions
    held_out: Correlation | None = None
    """Over models left out while the penalty was chosen; after `add`, over the models added, as
    predicted before. None if there were none."""
    held_out_rows: AnyArray = field(default_factory=lambda: np.zeros(0, np.int64))
    constant_targets: tuple[int, ...] = ()
    """Outputs that never changed: weights 0, bias the constant, gap 0."""
    constant_examples: tuple[int, ...] = ()
    """Examples in all subsets or in none: nothing can be learnt about them, weight 0."""
    repeated_masks: int = 0
    """Models with the mask of an earlier one; they count as further trainings of that subset."""
    prior_scale: AnyArray | None = None
    """`[t]`, what the prior's scores were multiplied by; 0 if they pointed the wrong way."""
    prior: AnyArray | None = field(default=None, repr=False)
    counts: Counts | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        for array in (self.weights, self.bias, self.lam, self.gap):
            array.flags.writeable = False

    def __repr__(self) -> str:
        examples, targets = self.weights.shape
        text = "" if self.held_out is None else f", held out: {self.held_out}"
        return (
            f"Datamodels({self.options.penalty}, {self.num_models} models, {examples} examples, "
            f"{targets} targets, gap <= {self.gap.max(initial=0.0):.1e}{text})"
        )

    @property
    def unfinished(self) -> tuple[int, ...]:
        """Targets whose gap is above the tolerance: raise max_steps, or use float64."""
        return tuple(np.flatnonzero(self.gap > self.options.tolerance).tolist())

    @checked(DatamodelsError)
    def predict(self, masks: Any) -> AnyArray:
        """Predict the outputs of models trained on these subsets.

        Args:
            masks: Training subsets `[m, n]`: booleans, zeros and ones, or `Masks`.

        Returns:
            Outputs `[m, t]`. Costs 2 m n t operations.
        """
        packed = Masks.of(masks)
        self._check_examples(packed)
        return predict(packed, self.weights, self.bias)

    @checked(DatamodelsError)
    def score(
        self, masks: Any, outputs: Any, *, kind: Literal["pearson", "spearman"] = "pearson"
    ) -> Correlation:
        """Correlate predictions with the outputs of other models.

        Args:
            masks: Training subsets `[m, n]`: booleans, zeros and ones, or `Masks`.
            outputs: Outputs `[m, t]` of models that were not fitted.
            kind: `"pearson"` or `"spearman"` (then the mean over targets is the LDS).

        Returns:
            The correlation with intervals.
        """
        packed = Masks.of(masks)
        return correlation(self.predict(packed), self._outputs(packed, outputs), kind=kind)

    @checked(DatamodelsError)
    def add(self, masks: Any, outputs: Any) -> Datamodels:
        """Add models at the same penalties, starting from these weights.

        Costs the pair counts of the new models and a few steps.

        Args:
            masks: Training subsets `[m, n]`: booleans, zeros and ones, or `Masks`.
            outputs: Their outputs `[m, t]`.

        Returns:
            The updated fit; its `held_out` is the correlation on the new models before the update.
        """
        from gradkeep.datamodels._fit import grown

        packed = Masks.of(masks)
        self._check_examples(packed)
        return grown(self, packed, self._outputs(packed, outputs))

    @checked(DatamodelsError)
    def save(self, store: Store | str | os.PathLike[str], name: str) -> None:
        """Save the fit in a store, one row per target.

        Args:
            store: The store, or its path.
            name: Name of the fit.
        """
        _save(self, open_store(store), name)

    def _outputs(self, masks: Masks, outputs: Any) -> AnyArray:
        array = checked_outputs(masks, outputs)
        if array.shape[1] != self.weights.shape[1]:
            raise DatamodelsError(
                "the outputs have other targets than the fit",
                code="datamodels.other_targets",
                found=f"{array.shape[1]} targets",
                expected=f"{self.weights.shape[1]}",
            )
        return array

    def _check_examples(self, masks: Masks) -> None:
        if masks.num_examples != len(self.weights):
            raise DatamodelsError(
                "the masks are of another data set than the fit",
                code="datamodels.other_examples",
                found=f"{masks.num_examples} examples",
                expected=f"{len(self.weights)}",
            )


def open_store(store: Store | str | os.PathLike[str], *, create: bool = True) -> Store:
    """Return the store, opening a path."""
    return store if isinstance(store, stores.Store) else stores.open(store, create=create)


def _save(fitted: Datamodels, store: Store, name: str) -> None:
    """Write a fit under `scores/<name>`, and its counts under `scores/<name>.counts`."""
    n, targets = fitted.weights.shape
    options, held, sums = fitted.options, fitted.held_out, fitted.counts
    facts: dict[str, Any] = {
        "kind": _KIND,
        **{part: getattr(options, part) for part in _OPTIONS},
        "scratch": None if options.scratch is None else str(options.scratch),
        "num_models": fitted.num_models,
        "repeated_masks": fitted.repeated_masks,
        "constant_targets": " ".join(map(str, fitted.constant_targets)),
        "constant_examples": " ".join(map(str, fitted.constant_examples)),
        "counts": sums is not None,
    }
    if held is not None:
        facts |= {f"held_{part}": getattr(held, part) for part in _HELD}
        facts |= {f"held_{part}": " ".join(map(str, getattr(held, part))) for part in _HELD_LISTS}
    absent = np.full(targets, np.nan)
    columns: dict[str, AnyArray] = {
        "weights": fitted.weights.T,
        **{part: getattr(fitted, part) for part in ("bias", "lam", "gap")},
        **{part: absent if sums is None else getattr(sums, part) for part in _SUMS},
        "held": absent if held is None else held.value,
        "held_low": absent if held is None else held.low,
        "held_high": absent if held is None else held.high,
    }
    arrays = [Array("weights", options.dtype, (n,), "data")]
    arrays += [Array(part, "float64", nan="keep") for part in _PER_TARGET]
    if fitted.prior is not None and fitted.prior_scale is not None:
        arrays += [Array("prior", "float64", (n,), "data"), Array("prior_scale", "float64")]
        columns |= {"prior": fitted.prior.T, "prior_scale": fitted.prior_scale}
    if sums is not None:
        _save_counts(sums, options, store, name)
    _write(
        store, name, Schema(tuple(arrays), num_rows=targets, fingerprints=_finite(facts)), columns
    )


@checked(DatamodelsError)
def load(store: Store | str | os.PathLike[str], name: str) -> Datamodels:
    """Load a saved fit with its counts, so that models can be added.

    Args:
        store: The store, or its path.
        name: Name of the fit.

    Returns:
        The datamodels.

    Example:
        >>> import gradkeep as gk, tempfile
        >>> from gradkeep.datamodels import fit, load
        >>> store = gk.open(tempfile.mkdtemp())
        >>> masks = np.random.default_rng(0).random((50, 8)) < 0.5
        >>> fit(masks, masks @ np.arange(8.0)).save(store, "digits")
        >>> load(store, "digits").weights.shape
        (8, 1)
    """
    store = open_store(store, create=False)
    block = store.read(ScoresKey(name))
    facts = dict(block.schema.fingerprints)
    if facts.get("kind") != _KIND:
        raise DatamodelsError(
            "not fitted datamodels",
            code="datamodels.not_a_fit",
            path=block.path,
            found=facts.get("kind", "scores"),
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
    known: Any = {part: facts[part] for part in _OPTIONS}
    scratch = facts["scratch"]
    return Datamodels(
        weights=np.ascontiguousarray(columns["weights"].T),
        bias=columns["bias"].copy(),
        lam=columns["lam"].copy(),
        gap=columns["gap"].copy(),
        num_models=int(str(facts["num_models"])),
        options=FitOptions(
            **known, scratch=None if scratch is None else Path(str(scratch)), variances=variances
        ),
        held_out=held,
        constant_targets=_numbers(facts["constant_targets"]),
        constant_examples=_numbers(facts["constant_examples"]),
        repeated_masks=int(str(facts["repeated_masks"])),
        prior_scale=columns.get("prior_scale"),
        prior=columns["prior"].T if "prior" in columns else None,
        counts=counts,
    )


def _save_counts(sums: Counts, options: FitOptions, store: Store, name: str) -> None:
    n, targets = sums.cross.shape
    arrays = [
        Array("pairs", sums.pairs.dtype.name, (n,), "data"),
        Array("cross", "float64", (targets,), "data"),
    ]
    columns = {"pairs": sums.pairs, "cross": sums.cross}
    if options.variances is not None:
        arrays.append(Array("variance", "float64"))
        columns["variance"] = options.variances
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
        *(columns[part] for part in _SUMS),
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
