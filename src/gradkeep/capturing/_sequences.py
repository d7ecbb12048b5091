"""Sequences: unpack packed batches, and check rows that a model cannot read."""

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
from gradkeep.capturing._readiness import device_of, has_active_dropout, in_mode, ready
from gradkeep.capturing.tasks._language import LanguageModeling, has_decoder
from gradkeep.errors import CaptureError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from gradkeep.capturing._readiness import Mode
    from gradkeep.capturing.tasks._tasks import Task

    Ids = np.ndarray[Any, np.dtype[np.int64]]

BOUNDS = ("cu_seq_lens", "cu_seqlens", "cu_seq_len", "sequence_lengths_cumulative")
"""Prefixes of the names of cumulative document lengths, in tokens."""
NUMBERS = ("seq_idx", "sequence_ids", "segment_ids", "document_ids", "doc_ids")
"""Names of the document number of each token."""
MASK, POSITIONS = "attention_mask", "position_ids"
_FIX = (
    "Mark documents with cu_seq_lens_q, pad instead of packing, or set packed = True in the task."
)


@dataclass(frozen=True, slots=True)
class Document:
    """The tokens `start` to `stop` of a row of a batch `[B, T]`."""

    row: int
    start: int
    stop: int


def documents_of(batch: Any) -> tuple[Document, ...] | None:
    """Return the documents of a batch whose rows hold several of them; None if each row is one.

    They are identified as padding-free collators mark them: by `cu_seq_lens_q` and the like, `seq_idx`, a
    mask that numbers documents or separates them `[B, 1, T, T]`, or positions that start again.
    """
    if not isinstance(batch, Mapping):
        return None
    for name, value in batch.items():
        if not isinstance(name, str) or not isinstance(value, torch.Tensor):
            continue
        if name.startswith(BOUNDS) and value.numel() > 2:
            documents = _between(value, batch_shape(batch), batch)
            return documents if _has_packs(documents) else None
        if name in NUMBERS and value.dim() == 2 and bool((value != value[:, :1]).any()):
            return _runs(value, _mask(batch, value) & (value >= 0))
    mask = batch.get(MASK)
    if _is_whole(mask) and mask.dim() == 2 and bool((mask > 1).any()):
        return _runs(mask, mask > 0)
    if isinstance(mask, torch.Tensor) and mask.dim() == 4 and mask.shape[2] == mask.shape[3]:
        documents = _separated_documents(mask)
        if _has_packs(documents):
            return documents
    places = batch.get(POSITIONS)
    if _is_whole(places) and places.dim() == 2:
        return _restarts(places, _mask(batch, places))
    return None


def _has_packs(documents: Sequence[Document]) -> bool:
    return len({document.row for document in documents}) < len(documents)


def may_pack(batch: Any) -> bool:
    """Return True if batches like this one can hold packs, even if this one does not."""
    if not isinstance(batch, Mapping):
        return False
    names = [name for name in batch if isinstance(name, str)]
    is_marked = any(name.startswith(BOUNDS) or name in (*NUMBERS, POSITIONS) for name in names)
    return is_marked or documents_of(batch) is not None


def _is_whole(value: Any) -> TypeGuard[torch.Tensor]:
    return isinstance(value, torch.Tensor) and not value.dtype.is_floating_point


def _mask(batch: Mapping[Any, Any], like: torch.Tensor) -> torch.Tensor:
    """Return where tokens are, `[B, T]`; everywhere without a mask."""
    mask = batch.get(MASK)
    if isinstance(mask, torch.Tensor) and mask.shape == like.shape:
        return mask != 0
    return torch.ones_like(like, dtype=torch.bool)


def batch_shape(batch: Mapping[Any, Any]) -> tuple[int, int]:
    """Return the number of rows and tokens of a batch."""
    tokens = batch.get("input_ids")
    if isinstance(tokens, torch.Tensor) and tokens.dim() == 2:
        return tokens.shape[0], tokens.shape[1]
    for value in batch.values():
        if isinstance(value, torch.Tensor) and value.dim() >= 2:
            return value.shape[0], value.shape[1]
    raise CaptureError(
        f"the batch marks documents but has no tokens: {', '.join(map(str, batch))}",
        code="capture.documents_without_tokens",
        expected="input_ids [B, T]",
    )


def _between(
    bounds: torch.Tensor, shape: tuple[int, int], batch: Mapping[Any, Any]
) -> tuple[Document, ...]:
    """Return the documents between bounds `[n + 1]` over all rows, or `[B, n + 1]` per row."""
    count, length = shape
    whole = bounds.dim() == 1
    rows = [bounds.tolist()] if whole else bounds.tolist()
    width = count * length if whole else length
    labels: Any = batch.get("labels")
    known = isinstance(labels, torch.Tensor) and labels.numel() == count * length
    documents = []
    for number, ends in enumerate(rows):
        falls = any(later < earlier for earlier, later in itertools.pairwise(ends))
        if len(rows) != (1 if whole else count) or ends[0] != 0 or falls or ends[-1] > width:
            raise _unclear_documents_error(f"ends {ends[:8]} in {count} rows of {length} tokens")
        first = number * length
        for start, stop in itertools.pairwise(ends):
            row, place = divmod(first + start, length)
            if place + stop - start > length:
                raise _unclear_documents_error(f"tokens {start} to {stop} in rows of {length}")
            if start < stop:  # bounds are padded with the last one
                documents.append(Document(row, place, place + stop - start))
        behind = slice(first + ends[-1], first + width)
        if ends[-1] < width and not (known and bool((labels.reshape(-1)[behind] < 0).all())):
            raise _unclear_documents_error(f"{width - ends[-1]} tokens after the last document")
    return tuple(documents)


def _runs(numbers: torch.Tensor, valid: torch.Tensor) -> tuple[Document, ...]:
    """Return the runs of equal numbers in each row `[B, T]`, without padding."""
    documents = []
    for row, (own, real) in enumerate(zip(numbers.tolist(), valid.tolist(), strict=True)):
        start = 0
        for at in range(1, len(own) + 1):
            if at < len(own) and own[at] == own[start] and real[at] == real[start]:
                continue
            if real[start]:
                documents.append(Document(row, start, at))
            start = at
    return tuple(documents)


def _separated_documents(mask: torch.Tensor) -> tuple[Document, ...]:
    """Return the documents that a mask `[B, 1, T, T]` separates: their first token cannot see the one before."""
    seen = mask[:, 0]
    seen = seen == 0 if seen.dtype.is_floating_point and bool((seen < 0).any()) else seen != 0
    itself = seen.diagonal(dim1=1, dim2=2)
    before = seen.diagonal(offset=-1, dim1=1, dim2=2)
    begins = torch.cat([torch.ones_like(itself[:, :1]), ~before], 1)
    return _runs(begins.cumsum(1), itself)


def _restarts(places: torch.Tensor, valid: torch.Tensor) -> tuple[Document, ...] | None:
    """Return the documents of rows whose positions start again; positions of padding are ignored."""
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
        nearby = places[row, max(at - 2, 0) : at + 3].tolist()
        raise _unclear_documents_error(f"positions {nearby} around token {at} of a row")
    return _runs((second & valid).cumsum(1), valid)


def _unclear_documents_error(reason: str) -> CaptureError:
    return CaptureError(
        f"a row holds several documents, but not where they begin: {reason}",
        code="capture.unclear_documents",
        fix=_FIX,
    )


_DROPPED = ("max_length", "max_seqlen", "max_seq_len")
_LABELS = "labels"


@dataclass(frozen=True, slots=True)
class Unpacking:
    """Split packed batches into documents.

    If the model takes a mask, the documents of a pack become rows of one batch, padded at the end to the
    longest; else consecutive documents of equal length do.
    """

    padded: bool
    ignored: int = -100
    """Label of padding."""
    measure: Callable[[Any], torch.Tensor] | None = None
    """Computes the losses `[B]` of a batch, to test whether padding changes them."""

    def settled(self, first: Any) -> Self:
        """Return the same, without padding if that changes the loss of the shortest document of a pack."""
        documents = documents_of(first)
        if documents is None or not self.padded or self.measure is None:
            return self
        lengths = [document.stop - document.start for document in documents]
        if min(lengths) == max(lengths):
            return self
        (padded,) = self.parts(first)
        short = lengths.index(min(lengths))
        alone = self._build_batch(first, documents, short, short + 1)
        try:
            with torch.no_grad():
                unpadded_loss = self.measure(alone)[0]
                padded_loss = self.measure(rows_of(padded, short, short + 1))[0]
        except Exception:  # reported when the batch is captured
            return self
        # Padding may change the loss by 1e-4, as sums are rounded differently.
        if bool((padded_loss - unpadded_loss).abs() <= 1e-4 * unpadded_loss.abs().clamp(min=1)):
            return self
        return dataclasses.replace(self, padded=False)

    def parts(self, batch: Any) -> list[Any]:
        """Split a batch into batches `[documents, T]`; one that is not packed stays."""
        documents = documents_of(batch)
        if documents is None:
            return [batch]
        lengths = [document.stop - document.start for document in documents]
        runs = [(0, len(documents))]
        if not self.padded:
            changes = [at for at in range(1, len(lengths)) if lengths[at] != lengths[at - 1]]
            runs = list(itertools.pairwise([0, *changes, len(lengths)]))
        return [self._build_batch(batch, documents, start, stop) for start, stop in runs]

    def _build_batch(
        self, batch: Mapping[str, Any], documents: Sequence[Document], start: int, stop: int
    ) -> dict[str, Any]:
        own = documents[start:stop]
        lengths = torch.tensor([document.stop - document.start for document in own])
        places = torch.arange(int(lengths.max())).expand(len(own), -1)
        shape = batch_shape(batch)
        entries: dict[str, Any] = {}
        for name, entry in batch.items():
            value = torch.from_numpy(entry) if isinstance(entry, np.ndarray) else entry
            if name == MASK or name in NUMBERS or str(name).startswith((*BOUNDS, *_DROPPED)):
                continue
            is_tensor = isinstance(value, torch.Tensor)
            counts = isinstance(value, list | tuple) or (is_tensor and value.dim() > 0)
            size = len(value) if counts else None
            if name == POSITIONS:
                entries[name] = places + _first_place(value, documents, shape)
            elif is_tensor and value.shape[:2] == shape:
                pieces = [value[d.row, d.start : d.stop] for d in own]
                fill = self.ignored if name.endswith(_LABELS) else 0
                entries[name] = pad_sequence(pieces, batch_first=True, padding_value=fill)
            elif size == len(documents):
                entries[name] = value[start:stop]
            elif size == shape[0]:
                rows = [document.row for document in own]
                entries[name] = value[rows] if is_tensor else [value[row] for row in rows]
            else:
                entries[name] = value
        if MASK in batch or bool((lengths < lengths.max()).any()):
            entries[MASK] = (places < lengths.unsqueeze(1)).long()
        return entries


def _first_place(value: Any, documents: Sequence[Document], shape: tuple[int, int]) -> int:
    """Return the first position of all documents; 0 if positions continue over documents."""
    if not isinstance(value, torch.Tensor) or value.shape != shape:
        return 0
    first = {int(value[document.row, document.start]) for document in documents}
    return first.pop() if len(first) == 1 else 0


def unpacking_for(model: nn.Module, task: Task, mode: Mode | None) -> Unpacking | None:
    """Return how packs are split for a model; None if the task treats a pack as one sample."""
    if task.packed:
        return None

    def measure(batch: Any) -> torch.Tensor:
        with ready(model), in_mode(model, mode):
            if has_active_dropout(model):
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
_NOT_STORED = "nothing of this batch was stored"


@dataclass(frozen=True, slots=True, eq=False)
class SequenceChecks:
    """Limits of a model, as far as known, and the task that computes losses."""

    vocabulary: int | None
    """Number of tokens that the model has a vector for."""
    positions: int | None
    """Number of positions that it has a vector for; None if computed or unknown."""
    task: Task

    def check(self, ids: Ids, batch: Any) -> None:
        """Raise for the first row with an unknown token, too many tokens, or no label."""
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
                    f"sample {ids[row]} has a token that the model does not know",
                    code="capture.unknown_token",
                    found=f"token {int(tokens[row, place])} at place {place}",
                    expected=f"tokens from 0 to {self.vocabulary - 1}",
                    fix="Use the tokenizer of the model; for added tokens, call resize_token_embeddings.",
                )
        if self.positions is not None and tokens.shape[1] > self.positions:
            lengths = torch.full((len(ids),), tokens.shape[1])
            if isinstance(mask, torch.Tensor) and mask.shape == tokens.shape:
                lengths = torch.count_nonzero(mask, 1)
            row = int(lengths.argmax())
            raise CaptureError(
                f"sample {ids[row]} is longer than the {self.positions} positions of the model",
                code="capture.too_long",
                found=f"{int(lengths[row])} tokens, padded to {tokens.shape[1]}",
                fix="Truncate, or cut documents into chunks, as in training.",
            )
        # Other tasks compute losses from something else.
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
                f"all labels of sample {ids[int(none.nonzero()[0])]} are ignored, so it has no loss",
                code="capture.no_labels_left",
                found=f"{int(none.sum())} of {len(ids)} rows with nothing but {ignored}",
                fix="Leave such rows out of the data set, and pass ids= to keep the others' ids.",
            )
        if self.vocabulary is None:
            return
        wrong = (targets != ignored) & ((targets < 0) | (targets >= self.vocabulary))
        if bool(wrong.any()):
            row, place = wrong.nonzero()[0].tolist()
            raise CaptureError(
                f"label {int(targets[row, place])} of sample {ids[row]} is not a token of the model",
                code="capture.unknown_label",
                expected=f"0 to {self.vocabulary - 1}, or {ignored} for what is ignored",
                fix="Use the tokenizer of the model.",
            )


def sequence_checks(model: nn.Module, task: Task) -> SequenceChecks:
    """Return the model's limits, as far as they are known without running it."""
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
    # Computed positions, such as rotary ones, have no limit.
    return SequenceChecks(vocabulary, None, task)
