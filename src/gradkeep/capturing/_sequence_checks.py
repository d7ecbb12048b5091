"""Sequences that a model cannot read, or that teach it nothing: found by row before the model runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from gradkeep.capturing.tasks._language import LanguageModelling, has_decoder
from gradkeep.errors import CaptureError

if TYPE_CHECKING:
    import numpy as np

    from gradkeep.capturing.tasks._task import Task

    Ids = np.ndarray[Any, np.dtype[np.int64]]

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
        tokens = batch.get("input_ids") if isinstance(batch, Mapping) else None
        if tokens is None and isinstance(self.task, LanguageModelling):
            tokens = batch[0] if isinstance(batch, tuple | list) and batch else batch
        if not isinstance(tokens, torch.Tensor) or tokens.dtype.is_floating_point:
            return
        if tokens.dim() == 2 and len(tokens) == len(ids):
            self._check_tokens(ids, tokens)
            self._check_length(ids, tokens, batch)
            if isinstance(self.task, LanguageModelling):
                self._check_labels(ids, batch)

    def _check_tokens(self, ids: Ids, tokens: torch.Tensor) -> None:
        if self.vocabulary is None or not tokens.numel():
            return
        low, high = (int(end) for end in tokens.aminmax())
        if 0 <= low <= high < self.vocabulary:
            return
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

    def _check_length(self, ids: Ids, tokens: torch.Tensor, batch: Any) -> None:
        if self.positions is None or tokens.shape[1] <= self.positions:
            return
        mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
        lengths = torch.full((len(ids),), tokens.shape[1])
        if isinstance(mask, torch.Tensor) and mask.shape == tokens.shape:
            lengths = torch.count_nonzero(mask, 1)
        row = int(lengths.argmax())
        raise CaptureError(
            f"sample {ids[row]} is longer than the model can read; {_KEPT}",
            found=f"{int(lengths[row])} tokens"
            + (f", padded to {tokens.shape[1]}" if int(lengths[row]) < tokens.shape[1] else ""),
            expected=f"at most {self.positions}, the positions that the model has",
            fix="truncate, or cut documents into chunks, as in training",
        )

    def _check_labels(self, ids: Ids, batch: Any) -> None:
        task = self.task
        assert isinstance(task, LanguageModelling)
        if type(task).measure is not LanguageModelling.measure:
            return  # it makes losses of something else
        targets = task.targets(batch)
        if not isinstance(targets, torch.Tensor) or targets.dim() != 2:
            return
        none = (targets == task.ignore_index).all(1)
        if bool(none.any()):
            row = int(none.nonzero()[0])
            raise CaptureError(
                f"all labels of sample {ids[row]} are ignored, so that it has no loss and no "
                f"gradient; {_KEPT}",
                found=f"{int(none.sum())} of {len(ids)} rows with nothing but {task.ignore_index}",
                expected="at least one token to predict in every row",
                fix="leave such rows out of the data set (truncation may have cut the answer off, or "
                "a document may have a single token), and give ids= to keep the others' ids",
            )
        if self.vocabulary is None:
            return
        wrong = (targets != task.ignore_index) & ((targets < 0) | (targets >= self.vocabulary))
        if bool(wrong.any()):
            row, place = wrong.nonzero()[0].tolist()
            raise CaptureError(
                f"sample {ids[row]} has a label that is no token of the model; {_KEPT}",
                found=f"label {int(targets[row, place])}",
                expected=f"0 to {self.vocabulary - 1}, or {task.ignore_index} for what is ignored",
                fix="use the tokenizer that belongs to the model",
            )


def sequence_checks(model: nn.Module, task: Task) -> SequenceChecks:
    """What can be known of a model's limits without running it."""
    if isinstance(task, LanguageModelling) and has_decoder(model):
        task = dataclasses.replace(task, shift=False)
    return SequenceChecks(_vocabulary(model), _positions(model), task)


def _vocabulary(model: Any) -> int | None:
    try:
        table = model.get_input_embeddings()
    except (AttributeError, NotImplementedError):
        return None
    return table.num_embeddings if isinstance(table, nn.Embedding) else None


def _positions(model: nn.Module) -> int | None:
    """The rows of a table of positions; what is computed, as rotations are, has no end."""
    config = getattr(model, "config", None)
    told = getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None)
    for path, module in model.named_modules():
        table = path.rpartition(".")[2] in _TABLES and isinstance(module, nn.Embedding)
        if table and isinstance(told, int) and told <= module.num_embeddings:
            return told
    return None
