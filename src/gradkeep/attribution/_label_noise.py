"""Estimate how many labels are wrong, and which, from class probabilities.

A label y is modeled as drawn from T[t, .] if t is the true class, independent of the row otherwise
(class-conditional noise), and the true class from r(x), the probabilities p(x) of a model, sharpened or
softened. T and the sharpening are fitted together to the labels:

    maximize sum_n log (r(x_n) T)[y_n]        P(wrong) = 1 - r(x_n)[y_n] T[y_n, y_n] / (r(x_n) T)[y_n]

Wrong labels are visible because they also occur where the model gives them almost no probability. Noise
and honest doubt cannot be separated for every row, so each estimate is made by several fits that are
biased to one side or the other, and its interval spans them.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch

from gradkeep import _arguments
from gradkeep._arguments import number
from gradkeep._display import TextDisplay
from gradkeep.errors import AttributionError

AnyArray = np.ndarray[Any, np.dtype[Any]]
NoisePattern = Literal["any class", "certain classes"]
"""Flips to all classes alike, or from some classes to certain others."""

_Z = 1.96


@dataclass(frozen=True, slots=True)
class SuspicionThreshold:
    """Rows that are wrong with at least some probability.

    Attributes:
        wrong: Smallest probability of a flagged row.
        rows: Number of flagged rows.
        precision: Expected share of wrong labels among them.
        interval: 95% interval of that share.
    """

    wrong: float
    rows: int
    precision: float
    interval: tuple[float, float]

    def __str__(self) -> str:
        low, high = self.interval
        return (
            f"{self.rows} rows are wrong with a probability of {self.wrong:.2f} or more: "
            f"{self.precision:.0%} of them expected [{low:.0%}, {high:.0%}]"
        )


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class LabelNoise(TextDisplay):
    """Estimated label noise of N rows of C classes.

    Attributes:
        rate: Expected share of wrong labels.
        rate_interval: Its 95% interval; without an upper bound for rows that the model was trained on.
        wrong: Probability `[N]` that a row's label is wrong, in the order of the suspects.
        confusion: Expected number of rows `[C, C]` by label (first) and true class (second).
        pattern: Kind of the noise.
        held_out: True if no model had seen the labels that it judged.
        least: `wrong` `[N]` of the fits that explain most by doubt.
        most: `wrong` `[N]` of the fits that explain most by noise.
    """

    rate: float
    rate_interval: tuple[float, float]
    wrong: AnyArray
    confusion: AnyArray
    pattern: NoisePattern
    held_out: bool
    least: AnyArray
    most: AnyArray

    def __str__(self) -> str:
        low, high = self.rate_interval
        source = "out-of-fold probabilities" if self.held_out else "a model trained on the rows"
        return (
            f"label noise {self.rate:.1%} [{low:.1%}, {high:.1%}] of {len(self.wrong)} rows, flips to "
            f"{self.pattern}; from {source}"
        )

    def threshold(self, precision: float = 0.8) -> SuspicionThreshold | None:
        """Return the longest list of most suspicious rows with at least this expected precision.

        Args:
            precision: Expected share of wrong labels.

        Returns:
            The list, or None if even the most suspicious row is too likely right.
        """
        precision = number("precision", precision, error=AttributionError, above=0, most=1)
        order = np.argsort(-self.wrong, kind="stable")
        means = np.cumsum(self.wrong[order]) / np.arange(1, len(order) + 1)
        enough = np.flatnonzero(means >= precision)
        if not len(enough):
            return None
        rows = int(enough[-1]) + 1
        chosen = order[:rows]
        low, high = self.least[chosen].mean(), self.most[chosen].mean()
        return SuspicionThreshold(
            wrong=float(self.wrong[chosen[-1]]),
            rows=rows,
            precision=float(means[rows - 1]),
            interval=(_below(low, rows), _above(high, rows) if self.held_out else 1.0),
        )

    def take(self, order: AnyArray) -> LabelNoise:
        """Return the estimates for the rows in another order."""
        parts = {name: getattr(self, name)[order] for name in ("wrong", "least", "most")}
        return dataclasses.replace(self, **parts)


def label_noise(probabilities: Any, labels: Any, *, held_out: bool) -> LabelNoise | None:
    """Estimate which labels are wrong; None for fewer than 100 rows or 2 classes.

    `probabilities [N, C]` of a model for each row, and its `labels [N]`. With `held_out` no model had seen
    the row's label (out-of-fold predictions); otherwise memorized labels look right, and the estimates are
    lower bounds. Cost: a few hundred passes over at most 20,000 rows of C x C products.
    """
    p = validate_probabilities(probabilities)
    y = validate_labels(labels, *p.shape)
    rows, classes = p.shape
    if rows < 100 or classes < 2 or len(np.unique(y)) < 2:
        return None
    sample = np.random.default_rng(0).permutation(rows)[:20_000]
    logs, targets = _logs(p), torch.from_numpy(y)
    agreed = float((p.argmax(1) == y).mean())
    even = _Fit(classes, "even").fitted(logs[sample], targets[sample])
    soft = _Fit(classes, "even", soft=True).fitted(logs[sample], targets[sample])
    fits = [even, soft]
    chosen = even
    # Classes that a weak model confuses would look like flips. Flips per class are fitted for at most
    # 50 classes.
    if agreed >= 0.6 and classes <= 50 and rows >= 2 * classes * (classes - 1):
        free = _Fit(classes, "free").fitted(logs[sample], targets[sample])
        # Akaike's criterion: each parameter must gain a unit of log-likelihood.
        if free.score - even.score > classes * (classes - 1) - 1:
            chosen = free
            # For the lower end, flips are counted in the most confident rows only.
            least = _Fit(classes, _count_flips(p, y, 0.15, bound=_Z))
            fits = [free, least.fitted(logs[sample], targets[sample])]
    flips = _count_flips(p, y, 0.3)
    unmixed = _logs(_normalize(p @ np.linalg.inv(flips)))
    upper = _Fit(classes, flips).fitted(unmixed[sample], targets[sample])
    estimates = [fit.wrong(logs, targets) for fit in fits]
    wrong = estimates[0]
    # The lower end is zero for a model that mostly disagrees with the labels.
    low = np.minimum.reduce(estimates) if agreed >= 0.5 else np.zeros_like(wrong)
    high = np.maximum(wrong, upper.wrong(unmixed, targets))
    ends = sorted(float(part.mean()) for part in (low, wrong, high))
    return LabelNoise(
        rate=float(wrong.mean()),
        rate_interval=(_below(ends[0], rows), _above(ends[-1], rows) if held_out else 1.0),
        wrong=wrong,
        confusion=chosen.confusion(logs, targets),
        pattern="any class" if chosen is even else "certain classes",
        held_out=held_out,
        least=low,
        most=high,
    )


def validate_probabilities(probabilities: Any) -> AnyArray:
    """Return probabilities as float64 `[N, C]`; raise unless rows sum to one."""
    p = _arguments.array(
        "probabilities",
        probabilities,
        error=AttributionError,
        shape=("N", "C"),
        code="attribute.wrong_probabilities",
    ).astype(np.float64)
    if not p.size:
        raise AttributionError("there are no probabilities", code="attribute.wrong_probabilities")
    if not np.isfinite(p).all() or p.min() < 0 or np.abs(p.sum(1) - 1).max() > 0.02:
        raise AttributionError(
            "the rows are not probabilities",
            code="attribute.not_probabilities",
            found=f"values from {p.min():.3g} to {p.max():.3g}, rows that sum to "
            f"{p.sum(1).min():.3g} to {p.sum(1).max():.3g}",
            fix="Apply softmax to logits, or exp to log-probabilities.",
        )
    return np.asarray(p / p.sum(1, keepdims=True))


def validate_labels(labels: Any, rows: int, classes: int) -> AnyArray:
    """Return labels as int64 `[N]`; raise unless there is one class for each row."""
    classes_of_rows = _arguments.array(
        "labels",
        labels,
        error=AttributionError,
        kinds="iu",
        expected="one class a row",
        shape=(rows,),
        code="attribute.wrong_labels",
    )
    if classes_of_rows.min() < 0 or classes_of_rows.max() >= classes:
        raise AttributionError(
            "a label is not a class",
            code="attribute.label_out_of_range",
            found=f"labels from {classes_of_rows.min()} to {classes_of_rows.max()}",
            expected=f"0 to {classes - 1}",
        )
    return classes_of_rows.astype(np.int64)


class _Fit:
    """Fit of T and of the sharpening of probabilities: `even` flips, `free` ones, or a fixed T."""

    def __init__(
        self, classes: int, flips: Literal["even", "free"] | AnyArray, *, soft: bool = False
    ) -> None:
        self.fixed = torch.from_numpy(flips) if isinstance(flips, np.ndarray) else None
        self.sharpness, self.shift = _start(), _start(classes)
        even = isinstance(flips, str) and flips == "even"
        self.flips = _start(*(() if even else (classes, classes)), value=-4.0)
        self.softness = _start(value=-3.0) if soft else None
        self.score = -math.inf

    def fitted(self, logs: torch.Tensor, labels: torch.Tensor) -> _Fit:
        """Maximize the likelihood of the labels, and return self."""
        free = [self.sharpness, self.shift]
        free += [] if self.softness is None else [self.softness]
        free += [] if self.fixed is not None else [self.flips]
        optimizer = torch.optim.LBFGS(
            free, max_iter=80, line_search_fn="strong_wolfe", tolerance_change=1e-8
        )

        def loss() -> torch.Tensor:
            optimizer.zero_grad()
            value: torch.Tensor = -self._of_labels(logs, labels)[2].log().mean()
            value.backward()  # type: ignore[no-untyped-call]
            return value

        with torch.enable_grad():
            optimizer.step(loss)  # type: ignore[no-untyped-call]
        with torch.no_grad():
            self.score = float(self._of_labels(logs, labels)[2].log().sum())
        return self

    @torch.no_grad()
    def wrong(self, logs: torch.Tensor, labels: torch.Tensor) -> AnyArray:
        """Return the probability `[N]` that a label is wrong."""
        clean, flips, likely = self._of_labels(logs, labels)
        right = clean.gather(1, labels[:, None])[:, 0] * flips.diagonal()[labels]
        return np.asarray((1 - right / likely).clamp(0, 1))

    @torch.no_grad()
    def confusion(self, logs: torch.Tensor, labels: torch.Tensor) -> AnyArray:
        """Return the expected number of rows `[C, C]` by label and true class."""
        clean, flips, likely = self._of_labels(logs, labels)
        each = clean * flips.T[labels] / likely[:, None]
        counts = torch.zeros(flips.shape, dtype=each.dtype)
        return np.asarray(counts.index_add_(0, labels, each))

    def _of_labels(
        self, logs: torch.Tensor, labels: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return r `[N, C]`, T `[C, C]`, and the likelihood `[N]` of the labels."""
        sharp = logs * self.sharpness.exp()
        clean = (sharp + self.shift).softmax(1)
        if self.softness is not None:
            # A share of overconfident rows: doubt with a longer tail.
            share = 0.5 * self.softness.sigmoid()
            clean = (1 - share) * clean + share * (0.3 * sharp).softmax(1)
        flips = self._flips(logs.shape[1])
        likely = (clean @ flips).gather(1, labels[:, None])[:, 0].clamp_min(1e-12)
        return clean, flips, likely

    def _flips(self, classes: int) -> torch.Tensor:
        if self.fixed is not None:
            return self.fixed
        same = torch.eye(classes, dtype=torch.bool)
        if self.flips.dim():
            return self.flips.masked_fill(same, 0.0).softmax(1)
        share = self.flips.sigmoid()
        return torch.where(same, 1 - share, share / (classes - 1))


def _start(*shape: int, value: float = 0.0) -> torch.Tensor:
    return torch.full(shape, value, dtype=torch.float64, requires_grad=True)


def _logs(probabilities: AnyArray) -> torch.Tensor:
    return torch.from_numpy(np.log(np.clip(probabilities, 1e-7, 1)))


def _normalize(values: AnyArray) -> AnyArray:
    positive = np.clip(values, 1e-4, None)
    return np.asarray(positive / positive.sum(1, keepdims=True))


def _count_flips(
    probabilities: AnyArray, labels: AnyArray, share: float, *, bound: float = 0.0
) -> AnyArray:
    """Count T `[C, C]` in the most confident `share` of each predicted class.

    Noise does not depend on the confidence of a model, doubt does. With a `bound`, use the lower ends of
    Wilson intervals.
    """
    classes = probabilities.shape[1]
    predicted = probabilities.argmax(1)
    flips = np.eye(classes)
    for class_ in range(classes):
        at = np.flatnonzero(predicted == class_)
        if len(at) < 10:
            continue
        surest = at[np.argsort(-probabilities[at, class_], kind="stable")]
        surest = surest[: max(10, int(share * len(at)))]
        flip_shares = np.bincount(labels[surest], minlength=classes) / len(surest)
        if bound:
            flip_shares = np.array([_wilson_low(part, len(surest), bound) for part in flip_shares])
        flip_shares[class_] = 0
        if flip_shares.sum() < 0.5:  # otherwise most of its labels are another class
            flips[class_] = flip_shares
            flips[class_, class_] = 1 - flip_shares.sum()
    return flips


def _wilson_low(share: float, rows: int, z: float) -> float:
    centre = share + z * z / (2 * rows)
    half = z * math.sqrt(share * (1 - share) / rows + (z / (2 * rows)) ** 2)
    return max(0.0, (centre - half) / (1 + z * z / rows))


def _spread(share: float, rows: int) -> float:
    """Return the 95% half width of an expected share: sampling of rows plus error of the estimate."""
    return _Z * math.sqrt((share * (1 - share) + share) / rows)


def _below(share: float, rows: int) -> float:
    return max(0.0, float(share) - _spread(float(share), rows))


def _above(share: float, rows: int) -> float:
    return min(1.0, float(share) + _spread(float(share), rows))
