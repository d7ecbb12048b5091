"""Sequences: packed batches taken apart, and rows that a model cannot read."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self, TypeGuard

import numpy as np
import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence

from gradkeep.capturing._batches import rows_of, to_device
from gradkeep.capturing._readiness import device_of, draws_at_random, in_mode, ready
from gradkeep.capturing.tasks._language import LanguageModeling, has_decoder
from gradkeep.errors import CaptureError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from gradkeep.capturing._readiness import Mode
    from gradkeep.capturing.tasks._tasks import Task

    Ids = np.ndarray[Any, np.dtype[np.int64]]

BOUNDS = ("cu_seq_lens", "cu_seqlens", "cu_seq_len", "sequence_lengths_cumulative")
"""How the names begin that are given to the ends of documents, counted in tokens."""
NUMBERS = ("seq_idx", "sequence_ids", "segment_ids", "document_ids", "doc_ids")
"""The names that are given to the number of each token's document."""
MASK, POSITIONS = "attention_mask", "position_ids"
_FIX = (
    "say where documents begin with cu_seq_lens_q, or with an attention_mask that is 0 at padding; or "
    "pad instead of packing; if a pack is meant to be one sample, subclass the task and set "
    "packed = True"
)


@dataclass(frozen=True, slots=True)
class Document:
    """The tokens `start` to `stop` of a row of a batch `[B, T]`."""

    row: int
    start: int
    stop: int


def documents_of(batch: Any) -> tuple[Document, ...] | None:
    """The documents of a batch whose rows hold several of them; None where each row is one.

    They are found by what padding-free collators give: `cu_seq_lens_q` and the like, `seq_idx`,
    a mask that numbers documents or keeps them apart `[B, 1, T, T]`, or positions that begin anew.
    """
    if not isinstance(batch, Mapping):
        return None
    for name, value in batch.items():
        if not isinstance(name, str) or not isinstance(value, torch.Tensor):
            continue
        if name.startswith(BOUNDS) and value.numel() > 2:
            found = _between(value, batch_shape(batch), batch)
            return found if len({document.row for document in found}) < len(found) else None
        if name in NUMBERS and value.dim() == 2 and bool((value != value[:, :1]).any()):
            return _runs(value, _mask(batch, value) & (value >= 0))
    mask = batch.get(MASK)
    if _is_whole(mask) and mask.dim() == 2 and bool((mask > 1).any()):
        return _runs(mask, mask > 0)
    if isinstance(mask, torch.Tensor) and mask.dim() == 4 and mask.shape[2] == mask.shape[3]:
        found = _apart(mask)
        if len({document.row for document in found}) < len(found):
            return found
    places = batch.get(POSITIONS)
    if _is_whole(places) and places.dim() == 2:
        return _restarts(places, _mask(batch, places))
    return None


def may_pack(batch: Any) -> bool:
    """Whether batches like this one, which need not be packed itself, can hold packs."""
    if not isinstance(batch, Mapping):
        return False
    names = [name for name in batch if isinstance(name, str)]
    told = any(name.startswith(BOUNDS) or name in (*NUMBERS, POSITIONS) for name in names)
    return told or documents_of(batch) is not None


def _is_whole(value: Any) -> TypeGuard[torch.Tensor]:
    return isinstance(value, torch.Tensor) and not value.dtype.is_floating_point


def _mask(batch: Mapping[Any, Any], like: torch.Tensor) -> torch.Tensor:
    """Where tokens are, `[B, T]`; everywhere, if nothing says otherwise."""
    mask = batch.get(MASK)
    if isinstance(mask, torch.Tensor) and mask.shape == like.shape:
        return mask != 0
    return torch.ones_like(like, dtype=torch.bool)


def batch_shape(batch: Mapping[Any, Any]) -> tuple[int, int]:
    """Rows and tokens of a batch."""
    tokens = batch.get("input_ids")
    if isinstance(tokens, torch.Tensor) and tokens.dim() == 2:
        return tokens.shape[0], tokens.shape[1]
    for value in batch.values():
        if isinstance(value, torch.Tensor) and value.dim() >= 2:
            return value.shape[0], value.shape[1]
    raise CaptureError(
        "documents of a batch without tokens",
        found=f"a dict with {', '.join(map(str, batch))}",
        expected="input_ids [B, T]",
    )


def _between(
    bounds: torch.Tensor, shape: tuple[int, int], batch: Mapping[Any, Any]
) -> tuple[Document, ...]:
    """The documents between bounds `[n + 1]` that count on over rows, or `[B, n + 1]` for each row."""
    count, length = shape
    whole = bounds.dim() == 1
    rows = [bounds.tolist()] if whole else bounds.tolist()
    width = count * length if whole else length
    labels: Any = batch.get("labels")
    known = isinstance(labels, torch.Tensor) and labels.numel() == count * length
    found = []
    for number, ends in enumerate(rows):
        falls = any(later < earlier for earlier, later in itertools.pairwise(ends))
        if len(rows) != (1 if whole else count) or ends[0] != 0 or falls or ends[-1] > width:
            raise _unclear(f"ends of documents {ends[:8]} in {count} rows of {length} tokens")
        first = number * length
        for start, stop in itertools.pairwise(ends):
            row, place = divmod(first + start, length)
            if place + stop - start > length:
                raise _unclear(f"a document of tokens {start} to {stop} in rows of {length}")
            if start < stop:  # ends are filled up with the last one
                found.append(Document(row, place, place + stop - start))
        behind = slice(first + ends[-1], first + width)
        if ends[-1] < width and not (known and bool((labels.reshape(-1)[behind] < 0).all())):
            raise _unclear(f"{width - ends[-1]} tokens after the last document, or labels there")
    return tuple(found)


def _runs(numbers: torch.Tensor, valid: torch.Tensor) -> tuple[Document, ...]:
    """The runs of equal numbers in each row `[B, T]`, padding left out."""
    found = []
    for row, (own, real) in enumerate(zip(numbers.tolist(), valid.tolist(), strict=True)):
        start = 0
        for at in range(1, len(own) + 1):
            if at < len(own) and own[at] == own[start] and real[at] == real[start]:
                continue
            if real[start]:
                found.append(Document(row, start, at))
            start = at
    return tuple(found)


def _apart(mask: torch.Tensor) -> tuple[Document, ...]:
    """The documents that a mask `[B, 1, T, T]` keeps apart: a token that may not see the one before."""
    seen = mask[:, 0]
    seen = seen == 0 if seen.dtype.is_floating_point and bool((seen < 0).any()) else seen != 0
    itself = seen.diagonal(dim1=1, dim2=2)
    before = seen.diagonal(offset=-1, dim1=1, dim2=2)
    begins = torch.cat([torch.ones_like(itself[:, :1]), ~before], 1)
    return _runs(begins.cumsum(1), itself)


def _restarts(places: torch.Tensor, valid: torch.Tensor) -> tuple[Document, ...] | None:
    """The documents of rows that count from their first position again; padding may say anything."""
    far = torch.iinfo(places.dtype).max
    first = places.masked_fill(~valid, far).amin(1, keepdim=True)
    lowest = (places == first) & valid
    second = torch.zeros_like(lowest)
    second[:, :-1] = lowest[:, :-1] & (places[:, 1:] == places[:, :-1] + 1) & valid[:, 1:]
    if not bool((second.sum(1) > 1).any()):
        return None
    steps = torch.ones_like(lowest)
    steps[:, 1:] = (places[:, 1:] == places[:, :-1] + 1) & valid[:, :-1]
    wrong = valid & ~second & ~steps
    wrong[:, 0] = valid[:, 0] & ~second[:, 0]
    if bool(wrong.any()):
        row, at = wrong.nonzero()[0].tolist()
        told = places[row, max(at - 2, 0) : at + 3].tolist()
        raise _unclear(
            f"positions {told} around token {at} of a row: padding, or a short document?"
        )
    return _runs((second & valid).cumsum(1), valid)


def _unclear(found: str) -> CaptureError:
    return CaptureError(
        "several documents in one row, and it is not clear where they begin",
        found=found,
        fix=_FIX,
    )


_DROPPED = ("max_length", "max_seqlen", "max_seq_len")
_LABELS = "labels"


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
        # How much the loss of a document may change by padding, which adds up in another order.
        if bool((found - wanted).abs() <= 1e-4 * wanted.abs().clamp(min=1)):
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
            is_tensor = isinstance(value, torch.Tensor)
            counts = isinstance(value, list | tuple) or (is_tensor and value.dim() > 0)
            size = len(value) if counts else None
            if name == POSITIONS:
                made[name] = places + _first_place(value, documents, shape)
            elif is_tensor and value.shape[:2] == shape:
                pieces = [value[d.row, d.start : d.stop] for d in own]
                fill = self.ignored if name.endswith(_LABELS) else 0
                made[name] = pad_sequence(pieces, batch_first=True, padding_value=fill)
            elif size == len(documents):
                made[name] = value[start:stop]
            elif size == shape[0]:
                rows = [document.row for document in own]
                made[name] = value[rows] if is_tensor else [value[row] for row in rows]
            else:
                made[name] = value
        if MASK in batch or bool((lengths < lengths.max()).any()):
            made[MASK] = (places < lengths.unsqueeze(1)).long()
        return made


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


_TABLES = ("wpe", "position_embeddings", "embed_positions", "pos_embed", "pos_emb", "positions")
_KEPT = "nothing of this batch was kept, and what was kept before stays"


@dataclass(frozen=True, slots=True, eq=False)
class SequenceChecks:
    """What a model can read, as far as it says so, and the task that makes losses of it."""

    vocabulary: int | None
    """Tokens that the model has a vector for."""
    positions: int | None
    """Places that it has a vector for; None where positions are computed, or not known."""
    task: Task

    def check(self, ids: Ids, batch: Any) -> None:
        """Raise for the first row with an unknown token, too many tokens, or no label to learn."""
        is_language = isinstance(self.task, LanguageModeling)
        tokens = batch.get("input_ids") if isinstance(batch, Mapping) else None
        if tokens is None and is_language:
            tokens = batch[0] if isinstance(batch, tuple | list) and batch else batch
        if not _is_whole(tokens) or tokens.dim() != 2 or len(tokens) != len(ids):
            return
        mask = batch.get(MASK) if isinstance(batch, Mapping) else None
        if self.vocabulary is not None and tokens.numel():
            low, high = (int(end) for end in tokens.aminmax())
            if not 0 <= low <= high < self.vocabulary:
                wrong = (tokens < 0) | (tokens >= self.vocabulary)
                row, place = wrong.nonzero()[0].tolist()
                raise CaptureError(
                    f"sample {ids[row]} has a token that the model does not know; {_KEPT}",
                    found=f"token {int(tokens[row, place])} at place {place}; "
                    f"{int(wrong.any(1).sum())} of {len(ids)} rows have such",
                    expected=f"tokens from 0 to {self.vocabulary - 1}",
                    fix="use the tokenizer that belongs to the model; if tokens were added to it, "
                    "model.resize_token_embeddings(len(tokenizer)) and train first",
                )
        if self.positions is not None and tokens.shape[1] > self.positions:
            lengths = torch.full((len(ids),), tokens.shape[1])
            if isinstance(mask, torch.Tensor) and mask.shape == tokens.shape:
                lengths = torch.count_nonzero(mask, 1)
            row = int(lengths.argmax())
            raise CaptureError(
                f"sample {ids[row]} is longer than the model can read; {_KEPT}",
                found=f"{int(lengths[row])} tokens, padded to {tokens.shape[1]}",
                expected=f"at most {self.positions}, the positions that the model has",
                fix="truncate, or cut documents into chunks, as in training",
            )
        # Other tasks make losses of something else.
        if is_language and type(self.task).measure is LanguageModeling.measure:
            self._check_labels(ids, batch)

    def _check_labels(self, ids: Ids, batch: Any) -> None:
        assert isinstance(self.task, LanguageModeling)
        targets, ignored = self.task.targets(batch), self.task.ignore_index
        if not isinstance(targets, torch.Tensor) or targets.dim() != 2:
            return
        none = (targets == ignored).all(1)
        if bool(none.any()):
            raise CaptureError(
                f"all labels of sample {ids[int(none.nonzero()[0])]} are ignored, so that it has no "
                f"loss and no gradient; {_KEPT}",
                found=f"{int(none.sum())} of {len(ids)} rows with nothing but {ignored}",
                fix="leave such rows out of the data set (truncation may have cut the answer off, or "
                "a document may have a single token), and give ids= to keep the others' ids",
            )
        if self.vocabulary is None:
            return
        wrong = (targets != ignored) & ((targets < 0) | (targets >= self.vocabulary))
        if bool(wrong.any()):
            row, place = wrong.nonzero()[0].tolist()
            raise CaptureError(
                f"sample {ids[row]} has a label that is no token of the model; {_KEPT}",
                found=f"label {int(targets[row, place])}",
                expected=f"0 to {self.vocabulary - 1}, or {ignored} for what is ignored",
                fix="use the tokenizer that belongs to the model",
            )


def sequence_checks(model: nn.Module, task: Task) -> SequenceChecks:
    """The model's limits, as far as they are known without running it."""
    if isinstance(task, LanguageModeling) and has_decoder(model):
        task = dataclasses.replace(task, shift=False)
    table: Any = None
    with contextlib.suppress(AttributeError, NotImplementedError):
        table = model.get_input_embeddings()  # type: ignore[operator]
    vocabulary = table.num_embeddings if isinstance(table, nn.Embedding) else None
    config = getattr(model, "config", None)
    most = getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None)
    for path, module in model.named_modules():
        is_table = path.rpartition(".")[2] in _TABLES and isinstance(module, nn.Embedding)
        if is_table and isinstance(most, int) and most <= module.num_embeddings:
            return SequenceChecks(vocabulary, most, task)
    # Positions that are computed, as rotations are, have no end.
    return SequenceChecks(vocabulary, None, task)
