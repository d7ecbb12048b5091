"""Training rows whose labels are most likely wrong."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from gradkeep.attribution._question import checkpoints_asked, make_question
from gradkeep.attribution._row_features import column
from gradkeep.errors import AttributionError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gradkeep.attribution._question import CheckpointView
    from gradkeep.store import Store

    AnyArray = np.ndarray[Any, np.dtype[Any]]

SuspicionMeasure = Literal["loss", "self"]


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

    def __len__(self) -> int:
        return len(self.ids)


def suspects(
    store: Store,
    *,
    train: str = "train",
    by: SuspicionMeasure = "loss",
    checkpoints: str | Sequence[str] | None = None,
    run: str | Sequence[str] = "main",
    name: str = "main",
) -> Suspects:
    """All rows of a split, those with the most suspicious labels first.

    `loss`: the mean loss over the checkpoints; from the middle of training it is the measure that
    every other one has to beat. `self`: the squared length of a row's own gradient, summed over
    the checkpoints. Both are read, not computed.

    >>> import gradkeep as gk, tempfile, torch
    >>> store, model = gk.open(tempfile.mkdtemp()), torch.nn.Linear(2, 2, bias=False)
    >>> model.weight.data = torch.eye(2)
    >>> data = [(torch.eye(2)[[0, 1, 0]], torch.tensor([0, 1, 1]))]
    >>> _ = gk.capture(store, model, data, task=gk.Classification(), split="train")
    >>> suspects(store).ids[0]
    np.int64(2)
    """
    if by not in ("loss", "self"):
        raise AttributionError(f"suspects by {by!r}", expected="'loss' or 'self'")
    at = checkpoints_asked(store, run=run, checkpoints=checkpoints, splits=(train,), name=name)
    question = make_question(
        store,
        queries=train,
        train=train,
        name=name,
        checkpoints=at,
        ids=None,
        layers=None,
        compute=None,
        memory_budget=None,
        per_layer=False,
    )
    every = question.at()
    blocks = [one.train_block for one in every]
    total = sum(np.asarray(_measure(one, by), np.float64) for one in every)
    values = np.asarray(total) / (len(every) if by == "loss" else 1)
    order = np.argsort(-values, kind="stable")
    labels = blocks[0].column("label") if "label" in blocks[0].names else None
    said = [b.column("predicted") for b in blocks if "predicted" in b.names]
    return Suspects(
        ids=blocks[0].ids[order],
        values=values[order],
        labels=None if labels is None else labels[order],
        predicted=_most_often(np.stack(said))[order] if said else None,
        by=by,
        checkpoints=tuple(str(place) for place in at),
    )


def _measure(at: CheckpointView, by: SuspicionMeasure) -> AnyArray:
    if by == "self":
        return np.asarray(at.train().norms().double().square())
    return column(at.train_block, "loss", method="suspects").numpy()


def _most_often(said: AnyArray) -> AnyArray:
    """The commonest value of each column `[C, N]`; of equals, the one said last."""
    return np.array([Counter(column[::-1].tolist()).most_common(1)[0][0] for column in said.T])
