"""Packed batches taken apart: a row for each document, as if it had come alone."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch

from gradkeep.capturing._batches import rows_of, to_device
from gradkeep.capturing._mode import device_of, draws_at_random, in_mode
from gradkeep.capturing._packed import (
    BOUNDS,
    MASK,
    NUMBERS,
    POSITIONS,
    batch_shape,
    documents_of,
)
from gradkeep.capturing._readiness import ready

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import nn

    from gradkeep.capturing._mode import Mode
    from gradkeep.capturing._packed import Document
    from gradkeep.capturing.tasks._task import Task

_DROPPED = ("max_length", "max_seqlen", "max_seq_len")
_LABELS = "labels"
_SAME = 1e-4
"""How much the loss of a document may change by padding, which adds up in another order."""


@dataclass(frozen=True, slots=True)
class Unpacking:
    """How packed batches are taken apart.

    The documents of a pack become rows of one batch, padded at the end to the longest, where the
    model has a mask to tell padding by; else documents of one length that follow each other do.
    """

    padded: bool
    ignored: int = -100
    """The label of padding."""
    measure: Callable[[Any], torch.Tensor] | None = None
    """The losses `[B]` of a batch, by which it shows whether padding changes anything."""

    def settled(self, first: Any) -> Self:
        """The same, without padding if that changes the loss of the shortest document of a pack."""
        documents = documents_of(first)
        if documents is None or not self.padded or self.measure is None:
            return self
        lengths = [document.stop - document.start for document in documents]
        if min(lengths) == max(lengths):
            return self
        (padded,) = self.parts(first)
        short = lengths.index(min(lengths))
        alone = self._made(first, documents, short, short + 1)
        try:
            with torch.no_grad():
                wanted = self.measure(alone)[0]
                found = self.measure(rows_of(padded, short, short + 1))[0]
        except Exception:  # what is wrong with the model or the batch is told where it is captured
            return self
        if bool((found - wanted).abs() <= _SAME * wanted.abs().clamp(min=1)):
            return self
        return dataclasses.replace(self, padded=False)

    def parts(self, batch: Any) -> list[Any]:
        """The batches `[documents, T]` that a batch is made into; one that is not packed stays."""
        documents = documents_of(batch)
        if documents is None:
            return [batch]
        lengths = [document.stop - document.start for document in documents]
        runs = [(0, len(documents))]
        if not self.padded:
            changes = [at for at in range(1, len(lengths)) if lengths[at] != lengths[at - 1]]
            runs = list(itertools.pairwise([0, *changes, len(lengths)]))
        return [self._made(batch, documents, start, stop) for start, stop in runs]

    def _made(
        self, batch: Mapping[str, Any], documents: Sequence[Document], start: int, stop: int
    ) -> dict[str, Any]:
        own = documents[start:stop]
        lengths = torch.tensor([document.stop - document.start for document in own])
        places = torch.arange(int(lengths.max())).expand(len(own), -1)
        shape = batch_shape(batch)
        made: dict[str, Any] = {}
        for name, given in batch.items():
            value = torch.from_numpy(given) if isinstance(given, np.ndarray) else given
            if name == MASK or name in NUMBERS or str(name).startswith((*BOUNDS, *_DROPPED)):
                continue
            size = len(value) if isinstance(value, list | tuple) or _counts(value) else None
            if name == POSITIONS:
                made[name] = places + _first_place(value, documents, shape)
            elif isinstance(value, torch.Tensor) and value.shape[:2] == shape:
                made[name] = self._cut(name, value, own)
            elif size == len(documents):
                made[name] = value[start:stop]
            elif size == shape[0]:
                made[name] = _repeated(value, [document.row for document in own])
            else:
                made[name] = value
        if MASK in batch or bool((lengths < lengths.max()).any()):
            made[MASK] = (places < lengths.unsqueeze(1)).long()
        return made

    def _cut(self, name: str, value: torch.Tensor, documents: Sequence[Document]) -> torch.Tensor:
        pieces = [value[d.row, d.start : d.stop] for d in documents]
        fill = self.ignored if name.endswith(_LABELS) else 0
        return torch.nn.utils.rnn.pad_sequence(pieces, batch_first=True, padding_value=fill)


def _counts(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 0


def _repeated(value: Any, rows: list[int]) -> Any:
    """What is said of whole packs, for each of their documents."""
    return value[rows] if isinstance(value, torch.Tensor) else [value[row] for row in rows]


def _first_place(value: Any, documents: Sequence[Document], shape: tuple[int, int]) -> int:
    """The position that all documents begin with; 0 where positions count on."""
    if not isinstance(value, torch.Tensor) or value.shape != shape:
        return 0
    first = {int(value[document.row, document.start]) for document in documents}
    return first.pop() if len(first) == 1 else 0


def unpacking_for(model: nn.Module, task: Task, mode: Mode | None) -> Unpacking | None:
    """How packs are taken apart for a model; None if the task takes a pack for one sample."""
    if task.packed:
        return None

    def measure(batch: Any) -> torch.Tensor:
        with ready(model), in_mode(model, mode):
            if draws_at_random(model):
                return torch.zeros(1)  # two passes differ anyway
            return task.measure_losses(model, to_device(batch, device_of(model))).losses

    ignored = getattr(task, "ignore_index", -100)
    return Unpacking(_takes_mask(model), ignored if isinstance(ignored, int) else -100, measure)


def _takes_mask(model: nn.Module) -> bool:
    try:
        parameters = inspect.signature(model.forward).parameters
    except (TypeError, ValueError):
        return True
    every = inspect.Parameter.VAR_KEYWORD
    return MASK in parameters or any(p.kind is every for p in parameters.values())
