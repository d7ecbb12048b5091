"""Batches without padding: several documents in one row, of which no row's gradient is a document's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeGuard

import torch

from gradkeep.errors import CaptureError

_BOUNDS = ("cu_seq_lens", "cu_seqlens", "cu_seq_len", "sequence_lengths_cumulative")
_NUMBERS = ("seq_idx", "sequence_ids", "segment_ids", "document_ids", "doc_ids")


def check_not_packed(batch: Any) -> None:
    """Raise if a row of the batch holds several documents, as padding-free collators make them."""
    if not isinstance(batch, Mapping):
        return
    sign = _sign(batch)
    if sign is not None:
        raise CaptureError(
            "several documents in one row: the whole row would be kept as a single sample",
            found=sign,
            expected="one document in each row of input_ids [B, T]",
            fix="pad instead of packing (a collator with padding, or one document per batch); if a "
            "pack is meant to be one sample, subclass the task and set packed = True",
        )


def _sign(batch: Mapping[Any, Any]) -> str | None:
    mask = batch.get("attention_mask")
    for name, value in batch.items():
        if not isinstance(name, str) or not isinstance(value, torch.Tensor):
            continue
        if name.startswith(_BOUNDS) and value.numel() > 2:
            return f"{name} with {value.numel() - 1} sequences"
        if name in _NUMBERS and value.dim() == 2 and bool((value != value[:, :1]).any()):
            return f"{name} with several numbers in a row"
    if _is_whole(mask) and mask.dim() == 2 and bool((mask > 1).any()):
        return "an attention_mask that numbers the documents of a row"
    places = batch.get("position_ids")
    if _is_whole(places) and places.dim() == 2 and _restarts(places, mask):
        return "position_ids that begin anew within a row"
    return None


def _is_whole(value: Any) -> TypeGuard[torch.Tensor]:
    return isinstance(value, torch.Tensor) and not value.dtype.is_floating_point


def _restarts(places: torch.Tensor, mask: Any) -> bool:
    """Whether a row counts 0, 1 again after it had counted before; padding may say anything."""
    padded = isinstance(mask, torch.Tensor) and mask.shape == places.shape
    valid = mask != 0 if padded else torch.ones_like(places, dtype=torch.bool)
    begins = (places[:, :-1] == 0) & (places[:, 1:] == 1) & valid[:, :-1] & valid[:, 1:]
    return bool((begins.sum(1) > 1).any())
