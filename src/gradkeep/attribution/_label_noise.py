"""How many labels are wrong, and which: probabilities of classes held against the labels given.

A label y is taken to be drawn from T[t, .] when t is the true class, whatever the row looks like
otherwise (class-conditional noise), and the true class from r(x), the probabilities p(x) of a model,
sharpened or softened. T and the sharpening are fitted together to the labels:

    maximise sum_n log (r(x_n) T)[y_n]        P(wrong) = 1 - r(x_n)[y_n] T[y_n, y_n] / (r(x_n) T)[y_n]

What makes wrong labels visible is that they also stand where the model gives them next to nothing.
Noise and honest doubt cannot be told apart to the last row, so each answer is made in several ways
that lean to one side or the other, and its interval spans them.
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
from gradkeep.errors import AttributionError

AnyArray = np.ndarray[Any, np.dtype[Any]]
NoisePattern = Literal["any class", "certain classes"]
"""Whether flips go to all classes alike, or from some classes to certain others."""

_CONFIDENT, _SUREST = 0.3, 0.15
"""Shares of a class's rows, the surest first, that flips are counted in: for the upper and lower end."""
_WEAK, _WEAKEST = 0.6, 0.5
"""Shares of labels that a model must agree with: below the first it is not asked where flips go, below
the second nothing is promised from below."""
_Z = 1.96


@dataclass(frozen=True, slots=True)
class SuspicionThreshold:
    """Rows that are wrong at least so probably, and how many of them are expected to be."""

    wrong: float
    """The least probability of a flagged row."""
    rows: int
    """How many rows that are."""
    precision: float
    """The expected share of wrong labels among them."""
    interval: tuple[float, float]
    """Where that share lies, at 95 %."""

    def __str__(self) -> str:
        low, high = self.interval
        return (
            f"{self.rows} rows are wrong with a probability of {self.wrong:.2f} or more: "
            f"{self.precision:.0%} of them expected [{low:.0%}, {high:.0%}]"
        )


@dataclass(frozen=True, slots=True, eq=False)
class LabelNoise:
    """What probabilities tell about the labels of N rows of C classes."""

    rate: float
    """The expected share of wrong labels."""
    rate_interval: tuple[float, float]
    """Where it lies, at 95 %; with rows that the model was trained on, nothing bounds it above."""
    wrong: AnyArray
    """`[N]`: the probability that a row's label is wrong, in the order of the suspects"""
    confusion: AnyArray
    """`[C, C]`: how many rows with a label (first) are expected to be of a class (second)"""
    pattern: NoisePattern
    held_out: bool
    """Whether no model had seen the labels that it judged."""
    least: AnyArray
    """`[N]`: `wrong` as those ways have it that take most of it for doubt"""
    most: AnyArray
    """`[N]`: `wrong` as those ways have it that take most of it for noise"""

    def threshold(self, precision: float = 0.8) -> SuspicionThreshold | None:
        """The longest list, the most suspicious first, with at least that precision expected.

        None if even the most suspicious row is not wrong that probably.
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
        """The same for the rows in another order."""
        parts = {name: getattr(self, name)[order] for name in ("wrong", "least", "most")}
        return dataclasses.replace(self, **parts)


def label_noise(probabilities: Any, labels: Any, *, held_out: bool) -> LabelNoise | None:
    """Estimate which labels are wrong; None of too few rows to tell.

    `probabilities [N, C]` of a model for each row, and its `labels [N]`. With `held_out` no model had
    seen the row's label (out-of-fold predictions); else it was trained on it, and what it learnt by
    heart is not seen to be wrong: the estimates are then lower ends. Cost: a few hundred passes over
    at most 20,000 rows of C x C products.
    """
    given = checked_probabilities(probabilities)
    y = checked_labels(labels, *given.shape)
    rows, classes = given.shape
    if rows < 100 or classes < 2 or len(np.unique(y)) < 2:
        return None
    # Rows that the fits look at.
    some = np.random.default_rng(0).permutation(rows)[:20_000]
    logs, targets = _logs(given), torch.from_numpy(y)
    agreed = float((given.argmax(1) == y).mean())
    even = _Fit(classes, "even").fitted(logs[some], targets[some])
    soft = _Fit(classes, "even", soft=True).fitted(logs[some], targets[some])
    fits = [even, soft]
    chosen = even
    # The classes that a weak model confuses would all be taken for flips.
    # Up to so many classes it is asked where each class's flips go.
    if agreed >= _WEAK and classes <= 50 and rows >= 2 * classes * (classes - 1):
        free = _Fit(classes, "free").fitted(logs[some], targets[some])
        # By Akaike's criterion: a parameter more must be worth a unit of log-likelihood.
        if free.score - even.score > classes * (classes - 1) - 1:
            chosen = free
            least = _Fit(classes, _counted(given, y, _SUREST, bound=_Z))
            fits = [free, least.fitted(logs[some], targets[some])]
    flips = _counted(given, y, _CONFIDENT)
    unmixed = _logs(_normalised(given @ np.linalg.inv(flips)))
    upper = _Fit(classes, flips).fitted(unmixed[some], targets[some])
    found = [fit.wrong(logs, targets) for fit in fits]
    wrong = found[0]
    low = np.minimum.reduce(found) if agreed >= _WEAKEST else np.zeros_like(wrong)
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


def checked_probabilities(probabilities: Any) -> AnyArray:
    """Probabilities as float64 `[N, C]`; an error for what are none."""
    given = probabilities
    if isinstance(given, torch.Tensor):
        given = given.detach().cpu().numpy()
    try:
        found = np.asarray(given, np.float64)
    except (TypeError, ValueError) as error:
        raise AttributionError(
            "probabilities must be numbers", found=type(given).__name__, expected="[N, C]"
        ) from error
    if found.ndim != 2 or not found.size:
        raise AttributionError(
            "probabilities must have one row per sample and one column per class",
            found=f"shape {found.shape}",
            expected="[N, C]",
        )
    if not np.isfinite(found).all() or found.min() < 0 or np.abs(found.sum(1) - 1).max() > 0.02:
        raise AttributionError(
            "these are no probabilities",
            found=f"values from {found.min():.3g} to {found.max():.3g}, rows that sum to "
            f"{found.sum(1).min():.3g} to {found.sum(1).max():.3g}",
            fix="apply softmax to logits, or exp to log-probabilities",
        )
    return np.asarray(found / found.sum(1, keepdims=True))


def checked_labels(labels: Any, rows: int, classes: int) -> AnyArray:
    """Labels as int64 `[N]`; an error unless there is one class for each row."""
    found = _arguments.array("labels", labels, error=AttributionError, expected="one class a row")
    if found.shape != (rows,) or found.dtype.kind not in "iu":
        raise AttributionError(
            "every row needs one label",
            found=f"{found.dtype} of shape {found.shape}",
            expected=f"whole numbers of shape ({rows},)",
        )
    if found.min() < 0 or found.max() >= classes:
        raise AttributionError(
            "a label that is no class",
            found=f"labels from {found.min()} to {found.max()}",
            expected=f"0 to {classes - 1}",
        )
    return found.astype(np.int64)


class _Fit:
    """T and the sharpening of probabilities: `even` flips, `free` ones, or a T that is given."""

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
        """This, with the largest likelihood of the labels."""
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
        """The probability `[N]` that a label is wrong."""
        clean, flips, likely = self._of_labels(logs, labels)
        right = clean.gather(1, labels[:, None])[:, 0] * flips.diagonal()[labels]
        return np.asarray((1 - right / likely).clamp(0, 1))

    @torch.no_grad()
    def confusion(self, logs: torch.Tensor, labels: torch.Tensor) -> AnyArray:
        """Expected rows `[C, C]` by the label given and the class."""
        clean, flips, likely = self._of_labels(logs, labels)
        each = clean * flips.T[labels] / likely[:, None]
        counts = torch.zeros(flips.shape, dtype=each.dtype)
        return np.asarray(counts.index_add_(0, labels, each))

    def _of_labels(
        self, logs: torch.Tensor, labels: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """r `[N, C]`, T `[C, C]`, and the likelihood `[N]` of the labels."""
        sharp = logs * self.sharpness.exp()
        clean = (sharp + self.shift).softmax(1)
        if self.softness is not None:
            # Some rows of which the model is sure without reason: doubt with a longer tail.
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


def _normalised(values: AnyArray) -> AnyArray:
    positive = np.clip(values, 1e-4, None)
    return np.asarray(positive / positive.sum(1, keepdims=True))


def _counted(
    probabilities: AnyArray, labels: AnyArray, share: float, *, bound: float = 0.0
) -> AnyArray:
    """T `[C, C]` counted where the model is surest of a class: a `share` of that class's rows.

    Noise does not depend on how sure a model is, and its doubts do. With a `bound`, the lower ends of
    Wilson's intervals.
    """
    classes = probabilities.shape[1]
    said = probabilities.argmax(1)
    flips = np.eye(classes)
    for one in range(classes):
        at = np.flatnonzero(said == one)
        if len(at) < 10:
            continue
        surest = at[np.argsort(-probabilities[at, one], kind="stable")]
        surest = surest[: max(10, int(share * len(at)))]
        found = np.bincount(labels[surest], minlength=classes) / len(surest)
        if bound:
            found = np.array([_wilson_low(part, len(surest), bound) for part in found])
        found[one] = 0
        if found.sum() < 0.5:  # else most of its labels say another class
            flips[one] = found
            flips[one, one] = 1 - found.sum()
    return flips


def _wilson_low(share: float, rows: int, z: float) -> float:
    centre = share + z * z / (2 * rows)
    half = z * math.sqrt(share * (1 - share) / rows + (z / (2 * rows)) ** 2)
    return max(0.0, (centre - half) / (1 + z * z / rows))


def _spread(share: float, rows: int) -> float:
    """Of a share that is expected: that of the rows there are, and that of the noise's estimate."""
    return _Z * math.sqrt((share * (1 - share) + share) / rows)


def _below(share: float, rows: int) -> float:
    return max(0.0, float(share) - _spread(float(share), rows))


def _above(share: float, rows: int) -> float:
    return min(1.0, float(share) + _spread(float(share), rows))
