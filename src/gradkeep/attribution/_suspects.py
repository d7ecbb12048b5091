"""`gk.suspects`: training rows whose labels are probably wrong, and documents that fit worst."""

from __future__ import annotations

import dataclasses
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from gradkeep import _arguments
from gradkeep._arguments import whole_numbers
from gradkeep._display import ResultTable, TableDisplay
from gradkeep.attribution._label_noise import label_noise, validate_labels, validate_probabilities
from gradkeep.attribution._question import build_question, column
from gradkeep.attribution._registry import holds_sequences
from gradkeep.errors import AttributionError
from gradkeep.store import open as open_store

if TYPE_CHECKING:
    import os
    from collections.abc import Sequence

    from gradkeep.attribution._label_noise import LabelNoise
    from gradkeep.attribution._question import CheckpointView
    from gradkeep.store import Block, Store

    AnyArray = np.ndarray[Any, np.dtype[Any]]

SuspicionMeasure = Literal["loss", "self", "noise"]
_MEASURES = {
    "loss": "mean loss",
    "self": "squared length of its gradient",
    "noise": "probability that the label is wrong",
}
_DOCUMENT_MEASURES = {
    "loss": "mean loss per token, less that of all documents at the same positions",
    "self": "squared length of the gradient of its mean loss per token",
    "noise": "probability that the label is wrong",
}


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Suspects(TableDisplay):
    """Rows in the order of suspicion, the most suspicious first.

    Attributes:
        ids: Ids of the rows `[N]`.
        values: Measure of suspicion `[N]`, decreasing.
        labels: Captured labels `[N]`.
        predicted: Most common prediction over the checkpoints `[N]`.
        by: Name of the measure.
        checkpoints: Checkpoints that were used.
        noise: Estimated label noise; None without probabilities or for too few rows.
        measure: Description of the values.
        documents: True if rows are documents of a language model, which have no labels.
    """

    ids: AnyArray
    values: AnyArray
    labels: AnyArray | None
    predicted: AnyArray | None
    by: SuspicionMeasure
    checkpoints: tuple[str, ...]
    noise: LabelNoise | None = None
    measure: str = ""
    documents: bool = False

    def __len__(self) -> int:
        return len(self.ids)

    def _table(self) -> ResultTable:
        kind = "documents" if self.documents else "labels"
        caption = f"{len(self)} rows, most suspicious {kind} first, by {self.measure or self.by}"
        if self.noise is not None:
            low, high = self.noise.rate_interval
            caption += f"; {self.noise.rate:.1%} [{low:.1%}, {high:.1%}] of the labels are wrong"
        columns, parts = ["row", self.by], [self.ids[:10], self.values[:10]]
        for name, values in (("label", self.labels), ("predicted", self.predicted)):
            if values is not None:
                columns.append(name)
                parts.append(values[:10])
        rows = [
            [f"{value:.4g}" if place == 1 else str(value) for place, value in enumerate(row)]
            for row in zip(*parts, strict=True)
        ]
        return ResultTable(caption, columns, rows, frozenset(range(len(columns))))

    def flagged(self, precision: float = 0.8) -> AnyArray:
        """Return the ids of the longest list of rows with at least this expected share of wrong labels.

        Args:
            precision: Expected share of wrong labels.

        Returns:
            Ids of the flagged rows.

        Raises:
            AttributionError: There are no probabilities, or too few rows.
        """
        noise = self._noise()
        threshold = noise.threshold(precision)
        order = np.argsort(-noise.wrong, kind="stable")
        return np.asarray(self.ids[order[: 0 if threshold is None else threshold.rows]])

    def _ordered(self) -> Suspects:
        """Sort the rows by suspicion, and describe the measure."""
        order = np.argsort(-self.values, kind="stable")
        parts: dict[str, Any] = {
            name: None if getattr(self, name) is None else getattr(self, name)[order]
            for name in ("ids", "values", "labels", "predicted")
        }
        noise = None if self.noise is None else self.noise.take(order)
        measures = _DOCUMENT_MEASURES if self.documents else _MEASURES
        return dataclasses.replace(self, **parts, noise=noise, measure=measures[self.by])

    def _noise(self) -> LabelNoise:
        if self.noise is None:
            raise AttributionError(
                "label noise needs the probabilities of at least 100 rows",
                code="attribute.no_noise",
                found=f"{len(self)} rows at {', '.join(self.checkpoints) or 'no checkpoint'}",
                fix='Capture with keep="losses", or pass probabilities= and labels= of '
                "cross-validation.",
            )
        return self.noise


@_arguments.checked(AttributionError)
def suspects(
    store: Store | str | os.PathLike[str] | None = None,
    *,
    train: str = "train",
    by: SuspicionMeasure | None = None,
    checkpoints: str | Sequence[str] | None = None,
    run: str | Sequence[str] = "main",
    name: str = "main",
    probabilities: Any = None,
    labels: Any = None,
    ids: Any = None,
) -> Suspects:
    """Rank all rows of a split by how suspicious their labels are.

    Documents of a language model have no labels, and their summed loss grows with their length. They are
    ranked by their mean loss per token minus the mean of all documents at the same positions (`loss`), or by
    the squared gradient of their mean loss per token (`self`).

    With probabilities, `.noise` estimates how many labels are wrong: `.noise.threshold(0.8)` gives the
    longest list of which 80% are wrong, with an interval, and `.noise.confusion` the confused classes. Cost:
    reading captured values, and with probabilities some seconds.

    Args:
        store: The store or its path; or None if `probabilities` are passed.
        train: Split of the rows.
        by: `loss` (default with a store): mean loss over the checkpoints, the strongest simple measure in
            the middle of training. `self`: squared norm of a row's gradient, summed over the checkpoints.
            `noise` (default with probabilities): probability that the label is wrong, from the class
            probabilities, which captures with `keep="losses"` hold.
        checkpoints: Names of checkpoints; all by default.
        run: Name of the run, or of several.
        name: Name of the captures.
        probabilities: Class probabilities `[N, C]` of models that have not seen the row.
        labels: Labels `[N]` for `probabilities`.
        ids: Ids `[N]` for `probabilities`; 0, 1, 2, ... by default.

    Returns:
        All rows, the most suspicious first.

    Raises:
        AttributionError: The captures do not hold what the measure needs.

    Example:
        >>> import gradkeep as gk, tempfile, torch
        >>> store, model = gk.open(tempfile.mkdtemp()), torch.nn.Linear(2, 2, bias=False)
        >>> model.weight.data = torch.eye(2)
        >>> data = [(torch.eye(2)[[0, 1, 0]], torch.tensor([0, 1, 1]))]
        >>> _ = gk.capture(store, model, data, task=gk.Classification(), split="train", keep="losses")
        >>> suspects(store).ids[0]
        np.int64(2)
    """
    if (store is None) == (probabilities is None):
        raise AttributionError(
            "suspects needs either a store or probabilities",
            code="attribute.store_or_probabilities",
            found="neither" if store is None else "both",
            fix="Pass a store, or probabilities= [N, C] with labels= [N].",
        )
    if store is None:
        return _by_probabilities(probabilities, labels, ids, by or "noise")
    if labels is not None or ids is not None:
        raise AttributionError(
            "labels= and ids= need probabilities=", code="attribute.labels_without_probabilities"
        )
    opened = open_store(store, create=False)
    question = build_question(
        opened, queries=train, train=train, name=name, run=run, checkpoints=checkpoints
    )
    views = question.at()
    blocks = [one.train_block for one in views]
    noise = _noise_in(blocks)
    documents = any(holds_sequences(block.schema) for block in blocks)
    if by == "noise":
        if noise is None:
            raise AttributionError(
                "suspects by noise need the class probabilities of at least 100 rows",
                code="attribute.no_noise",
                path=blocks[0].path,
                fix='Capture with keep="losses" under another name=.',
            )
        values = noise.wrong
    else:
        measure = _document_measure if documents else _measure
        total = sum(np.asarray(measure(one, by or "loss"), np.float64) for one in views)
        values = np.asarray(total) / (1 if by == "self" else len(views))
    captured_labels = blocks[0].column("label") if "label" in blocks[0].names else None
    # The most common prediction of all checkpoints; the last one if there is a tie.
    predictions = [b.column("predicted") for b in reversed(blocks) if "predicted" in b.names]
    commonest = (
        [Counter(row).most_common(1)[0][0] for row in np.stack(predictions).T.tolist()]
        if predictions
        else []
    )
    checkpoint_names = tuple(str(place) for place in question.checkpoints)
    return Suspects(
        *(blocks[0].ids, values, captured_labels, np.array(commonest) if predictions else None),
        *(by or "loss", checkpoint_names, noise),
        documents=documents,
    )._ordered()


def _by_probabilities(probabilities: Any, labels: Any, ids: Any, by: SuspicionMeasure) -> Suspects:
    p = validate_probabilities(probabilities)
    if labels is None:
        raise AttributionError(
            "probabilities= needs labels=",
            code="attribute.probabilities_without_labels",
            expected=f"[{len(p)}]",
        )
    own = validate_labels(labels, *p.shape)
    numbers: AnyArray = np.arange(len(own))
    if ids is not None:
        numbers = whole_numbers(
            "ids", ids, error=AttributionError, length=len(own), code="attribute.wrong_ids"
        )
    noise = label_noise(p, own, held_out=True)
    if by == "self" or (by == "noise" and noise is None):
        raise AttributionError(
            f"suspects by {by!r} cannot be computed from these probabilities",
            code="attribute.measure_unavailable",
            found=f"{len(own)} rows",
            expected="a store of gradients" if by == "self" else "at least 100 rows, two classes",
            fix="Pass by='loss'.",
        )
    losses = -np.log(np.clip(p[np.arange(len(own)), own], 1e-12, 1))
    values = losses if by == "loss" or noise is None else noise.wrong
    return Suspects(numbers, values, own, p.argmax(1), by, (), noise)._ordered()


def _noise_in(blocks: Sequence[Block]) -> LabelNoise | None:
    """Estimate label noise from the mean probabilities over the checkpoints."""
    if not all({"probabilities", "label"} <= set(block.names) for block in blocks):
        return None
    mean = sum(np.asarray(block.column("probabilities"), np.float64) for block in blocks)
    return label_noise(np.asarray(mean) / len(blocks), blocks[0].column("label"), held_out=False)


def _measure(at: CheckpointView, by: SuspicionMeasure) -> AnyArray:
    if by == "self":
        return np.asarray(at.train().norms().double().square())
    return column(at.train_block, "loss", method="suspects").numpy()


def _document_measure(at: CheckpointView, by: SuspicionMeasure) -> AnyArray:
    """Compute the measure of documents `[N]`; neither measure grows with their length."""
    block = at.train_block
    if "token_loss" not in block.names:
        raise AttributionError(
            "documents are ranked by their loss per token, which this capture does not hold",
            code="attribute.missing_column",
            path=block.path,
            fix='Capture the split with keep="losses" under another name=, and pass that name=.',
        )
    rows = block.column("token_loss")
    lengths = np.array([len(row) for row in rows])
    if by == "self":
        squares: AnyArray = at.train().norms().double().square().numpy()
        return np.asarray(squares / np.maximum(lengths, 1) ** 2.0)
    losses = np.concatenate([np.asarray(row, np.float64) for row in rows])
    starts = np.cumsum(lengths) - lengths
    positions = np.arange(len(losses)) - np.repeat(starts, lengths)
    counts = np.bincount(positions)
    means = np.bincount(positions, losses) / np.maximum(counts, 1)
    # Positions that fewer than 8 documents reach use the mean of the last earlier position.
    last = max(0, int((counts >= 8).sum()) - 1)
    excess = losses - means[np.minimum(positions, last)]
    summed = np.bincount(np.repeat(np.arange(len(rows)), lengths), excess, len(rows))
    return np.asarray(summed / np.maximum(lengths, 1))
