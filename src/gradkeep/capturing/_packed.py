"""Batches without padding: where in their rows the documents are."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch

from gradkeep.errors import CaptureError

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
            return found if _several(found) else None
        if name in NUMBERS and value.dim() == 2 and bool((value != value[:, :1]).any()):
            return _runs(value, _mask(batch, value) & (value >= 0))
    mask = batch.get(MASK)
    if _is_whole(mask) and mask.dim() == 2 and bool((mask > 1).any()):
        return _runs(mask, mask > 0)
    if isinstance(mask, torch.Tensor) and mask.dim() == 4 and mask.shape[2] == mask.shape[3]:
        found = _apart(mask)
        if _several(found):
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


def _several(found: tuple[Document, ...]) -> bool:
    return len({document.row for document in found}) < len(found)


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
    found = []
    for number, ends in enumerate(rows):
        falls = any(later < earlier for earlier, later in itertools.pairwise(ends))
        if len(rows) != (1 if whole else count) or ends[0] != 0 or falls or ends[-1] > width:
            raise _unclear(f"ends of documents {ends[:8]} in {count} rows of {length} tokens")
        first = 0 if whole else number * length
        for start, stop in itertools.pairwise(ends):
            if start == stop:
                continue  # ends are filled up with the last one
            row, place = divmod(first + start, length)
            if place + stop - start > length:
                raise _unclear(f"a document of tokens {start} to {stop} in rows of {length}")
            found.append(Document(row, place, place + stop - start))
        labels = batch.get("labels")
        left = range(first + ends[-1], first + width)
        if left and isinstance(labels, torch.Tensor) and labels.numel() == count * length:
            if bool((labels.reshape(-1)[left.start : left.stop] >= 0).any()):
                raise _unclear(f"labels after the last document, which ends at token {ends[-1]}")
        elif left:
            raise _unclear(f"{len(left)} tokens after the last document")
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
        expected="one document after the other, each with its own positions",
        fix=_FIX,
    )
