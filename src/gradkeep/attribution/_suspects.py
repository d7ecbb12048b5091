"""Training rows whose labels are most likely wrong, and documents that fit worst."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from gradkeep import _arguments
from gradkeep._arguments import whole_numbers
from gradkeep.attribution._label_noise import checked_labels, checked_probabilities, label_noise
from gradkeep.attribution._question import make_question
from gradkeep.attribution._registry import holds_sequences
from gradkeep.attribution._row_features import column
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


@dataclass(frozen=True, slots=True, eq=False)
class Suspects:
    """Rows by how suspicious their labels are, the worst first."""

    ids: AnyArray
    """`[N]`"""
    values: AnyArray
    """`[N]`, falling"""
    labels: AnyArray | None
    """`[N]`: the labels that were kept"""
    predicted: AnyArray | None
    """`[N]`: what the model says most often over the checkpoints"""
    by: SuspicionMeasure
    checkpoints: tuple[str, ...]
    noise: LabelNoise | None = None
    """How many labels are wrong, and which; None without probabilities, or of too few rows."""
    measure: str = ""
    """What the values are, in words."""
    documents: bool = False
    """Whether rows are documents of a language model, which have no labels to suspect."""

    def __len__(self) -> int:
        return len(self.ids)

    def flagged(self, precision: float = 0.8) -> AnyArray:
        """The ids of the longest list of rows of which that share is expected to be wrong."""
        noise = self._noise()
        threshold = noise.threshold(precision)
        order = np.argsort(-noise.wrong, kind="stable")
        return np.asarray(self.ids[order[: 0 if threshold is None else threshold.rows]])

    def _noise(self) -> LabelNoise:
        if self.noise is None:
            raise AttributionError(
                "how many labels are wrong needs probabilities of at least 100 rows",
                found=f"{len(self)} rows at {', '.join(self.checkpoints) or 'no checkpoint'}",
                fix='capture with keep="losses", which keeps them, or pass probabilities= and '
                "labels= of cross-validation",
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
    """All rows of a split, those with the most suspicious labels first.

    `loss`: the mean loss over the checkpoints; from the middle of training it is the measure that
    every other one has to beat. `self`: the squared length of a row's own gradient, summed over
    the checkpoints. Both are read, not computed. `noise`: the probability that the label is wrong,
    from the probabilities of all classes, which captures with `keep="losses"` have.

    Documents of a language model have no labels, and their summed loss grows with their length. They
    are ranked by their mean loss per token, less the mean of all documents at the same positions
    (`loss`), or by the squared gradient of their mean loss per token (`self`).

    Without a store: `probabilities [N, C]` and `labels [N]` from anywhere, best out of fold, by models
    that had not seen the row. With probabilities, `.noise` says how many labels are wrong,
    `.noise.threshold(0.8)` how long a list can be of which 80 % are, with an interval, and
    `.noise.confusion` what was taken for what. Cost: reading, and with probabilities some seconds.

    >>> import gradkeep as gk, tempfile, torch
    >>> store, model = gk.open(tempfile.mkdtemp()), torch.nn.Linear(2, 2, bias=False)
    >>> model.weight.data = torch.eye(2)
    >>> data = [(torch.eye(2)[[0, 1, 0]], torch.tensor([0, 1, 1]))]
    >>> _ = gk.capture(store, model, data, task=gk.Classification(), split="train", keep="losses")
    >>> suspects(store).ids[0]
    np.int64(2)
    """
    if by not in (None, "loss", "self", "noise"):
        raise AttributionError(f"suspects by {by!r}", expected="'loss', 'self' or 'noise'")
    if (store is None) == (probabilities is None):
        raise AttributionError(
            "suspects are found in a store, or in probabilities",
            found="neither" if store is None else "both",
            fix="pass a store, or probabilities= [N, C] with labels= [N]",
        )
    if store is None:
        return _by_probabilities(probabilities, labels, ids, by or "noise")
    if labels is not None or ids is not None:
        raise AttributionError("labels= and ids= go with probabilities=; a store has its own")
    opened = open_store(store, create=False)
    question = make_question(
        opened, queries=train, train=train, name=name, run=run, checkpoints=checkpoints
    )
    every = question.at()
    blocks = [one.train_block for one in every]
    noise = _noise_in(blocks)
    documents = any(holds_sequences(block.schema) for block in blocks)
    if by == "noise":
        if noise is None:
            raise AttributionError(
                "suspects by noise need the probabilities of all classes of at least 100 rows",
                path=blocks[0].path,
                fix='capture with keep="losses", under another name=',
            )
        values = noise.wrong
    else:
        measure = _document_measure if documents else _measure
        total = sum(np.asarray(measure(one, by or "loss"), np.float64) for one in every)
        values = np.asarray(total) / (1 if by == "self" else len(every))
    kept = blocks[0].column("label") if "label" in blocks[0].names else None
    # The commonest prediction of all checkpoints; of equals, the last.
    said = [b.column("predicted") for b in reversed(blocks) if "predicted" in b.names]
    commonest = (
        [Counter(row).most_common(1)[0][0] for row in np.stack(said).T.tolist()] if said else []
    )
    return _ordered(
        ids=blocks[0].ids,
        values=values,
        labels=kept,
        predicted=np.array(commonest) if said else None,
        by=by or "loss",
        checkpoints=tuple(str(place) for place in question.checkpoints),
        noise=noise,
        documents=documents,
    )


def _by_probabilities(probabilities: Any, labels: Any, ids: Any, by: SuspicionMeasure) -> Suspects:
    given = checked_probabilities(probabilities)
    if labels is None:
        raise AttributionError("probabilities= need labels=", expected=f"[{len(given)}]")
    own = checked_labels(labels, *given.shape)
    numbers = np.arange(len(own))
    if ids is not None:
        numbers = whole_numbers("ids", ids, error=AttributionError)
    if len(numbers) != len(own):
        raise AttributionError("every row needs one id", found=f"{len(numbers)} for {len(own)}")
    noise = label_noise(given, own, held_out=True)
    if by == "self" or (by == "noise" and noise is None):
        raise AttributionError(
            f"suspects by {by!r} cannot be found in these probabilities",
            found=f"{len(own)} rows",
            expected="a store of gradients" if by == "self" else "at least 100 rows, two classes",
            fix="pass by='loss'",
        )
    losses = -np.log(np.clip(given[np.arange(len(own)), own], 1e-12, 1))
    return _ordered(
        ids=numbers,
        values=losses if by == "loss" or noise is None else noise.wrong,
        labels=own,
        predicted=given.argmax(1),
        by=by,
        checkpoints=(),
        noise=noise,
    )


def _ordered(
    *,
    ids: AnyArray,
    values: AnyArray,
    labels: AnyArray | None,
    predicted: AnyArray | None,
    by: SuspicionMeasure,
    checkpoints: tuple[str, ...],
    noise: LabelNoise | None,
    documents: bool = False,
) -> Suspects:
    order = np.argsort(-values, kind="stable")
    return Suspects(
        ids=ids[order],
        values=values[order],
        labels=None if labels is None else labels[order],
        predicted=None if predicted is None else predicted[order],
        by=by,
        checkpoints=checkpoints,
        noise=None if noise is None else noise.take(order),
        measure=_DOCUMENT_MEASURES[by] if documents else _MEASURES[by],
        documents=documents,
    )


def _noise_in(blocks: Sequence[Block]) -> LabelNoise | None:
    """What the mean probabilities over the checkpoints tell."""
    if not all({"probabilities", "label"} <= set(block.names) for block in blocks):
        return None
    mean = sum(np.asarray(block.column("probabilities"), np.float64) for block in blocks)
    return label_noise(np.asarray(mean) / len(blocks), blocks[0].column("label"), held_out=False)


def _measure(at: CheckpointView, by: SuspicionMeasure) -> AnyArray:
    if by == "self":
        return np.asarray(at.train().norms().double().square())
    return column(at.train_block, "loss", method="suspects").numpy()


def _document_measure(at: CheckpointView, by: SuspicionMeasure) -> AnyArray:
    """What documents `[N]` are ranked by; neither measure grows with their length."""
    block = at.train_block
    if "token_loss" not in block.names:
        raise AttributionError(
            "documents are ranked by their loss per token, which this capture does not keep",
            path=block.path,
            fix='capture the split with keep="losses" under another name=, and pass that name=',
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
    # Documents that must reach a position for its mean; later positions take that of the last
    # one.
    last = max(0, int((counts >= 8).sum()) - 1)
    excess = losses - means[np.minimum(positions, last)]
    summed = np.bincount(np.repeat(np.arange(len(rows)), lengths), excess, len(rows))
    return np.asarray(summed / np.maximum(lengths, 1))
