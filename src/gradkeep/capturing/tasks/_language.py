"""Language modeling: the sum of the losses of a sequence's tokens; and completions as batches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import nn
from torch.nn import functional as F

from gradkeep._arguments import count, flag, one_of, optional, text
from gradkeep.capturing.tasks._tasks import (
    Measured,
    Task,
    call,
    described_batch,
    holds_numbers,
    logits_of,
)
from gradkeep.errors import CaptureError

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True)
class LanguageModeling(Task):
    """One sequence per sample, from logits `[B, T, V]`; padded places count for nothing.

    Batches are dicts with `input_ids` and optionally `attention_mask` and `labels` (as in Hugging
    Face models: -100 is ignored, and labels are shifted here), or (tokens, targets) where targets
    are the next tokens already. loss = sum over its valid tokens of -log p, or their mean with
    `reduction="mean"`, which divides by that sequence's own number of tokens.

    `shift=False` predicts the token at the same place (masked language models). Of Hugging Face's
    encoder-decoders (T5, BART) `labels` are what the decoder writes: it is given them one place later,
    and they are not shifted here.

    `span=(start, stop)` asks about some tokens only, as a Python slice of the batch's labels
    `[B, T]` along T: negative ends count from the end, None is the end itself. The name of an entry
    of the batch with `[B, 2]` such ends gives each row its own. Losses of disjoint spans that cover
    all tokens add up to that of the sequence, also of `reduction="mean"`: the number of tokens that
    it divides by is that of the whole sequence. Training rows are captured without a span, queries
    with one.

    >>> model = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 9))
    >>> batch = {"input_ids": torch.randint(9, (2, 6))}
    >>> parts = [LanguageModeling(span=s).losses(model, batch) for s in ((0, 3), (3, None))]
    >>> torch.allclose(sum(parts), LanguageModeling().losses(model, batch))
    True
    """

    stored_name: ClassVar[str | None] = "LanguageModelling"
    ignore_index: int = -100
    reduction: Literal["sum", "mean"] = "sum"
    shift: bool = True
    span: tuple[int | None, int | None] | str | None = field(default=None, metadata={"later": True})

    def __post_init__(self) -> None:
        count("ignore_index", self.ignore_index, error=CaptureError, least=-(2**63))
        one_of("reduction", self.reduction, words=("sum", "mean"), error=CaptureError)
        flag("shift", self.shift, error=CaptureError)
        if self.span is None or isinstance(self.span, str):
            optional(text, "span", self.span, error=CaptureError)
            return
        ends = self.span
        whole = isinstance(ends, tuple | list) and len(ends) == 2
        if not whole or any(e is not None and type(e) is not int for e in ends):
            raise CaptureError(
                "a span is (start, stop)",
                found=repr(ends),
                expected="two whole numbers, or None for an end; or the name of an entry of batches",
            )
        object.__setattr__(self, "span", tuple(ends))

    def trained_as(self) -> str:
        """The same without a span: what training rows are captured with."""
        return self.describe() if self.span is None else replace(self, span=None).describe()

    def losses(self, model: nn.Module, batch: Any) -> torch.Tensor:
        """The loss `[B]` of each sequence"""
        return self.measure(model, batch).losses

    def measure(self, model: nn.Module, batch: Any) -> Measured:
        """Losses of sequences and of their tokens from one forward pass."""
        inputs, targets, shift = self._split(batch)
        if has_decoder(model):
            inputs, shift = _with_decoder_inputs(model, inputs, batch), False
        ends = self._ends(batch, targets)
        logits = logits_of(call(model, inputs))
        if logits.dim() != 3 or targets.shape != logits.shape[:2]:
            raise CaptureError(
                "language modeling needs logits for every token",
                found=f"logits {tuple(logits.shape)}, targets {tuple(targets.shape)}",
                expected="logits [B, T, V], targets [B, T]",
            )
        targets = targets.to(logits.device, torch.int64)
        everything = targets if ends is not None else None
        if ends is not None:
            targets = self._within(targets, ends, shift=shift)
        if shift:
            # The last token predicts nothing. Logits are not cut: a cut would be copied twice.
            targets = F.pad(targets[:, 1:], (0, 1), value=self.ignore_index)
        self._check_targets(targets, logits.shape[-1])
        flat = F.cross_entropy(
            logits.flatten(0, 1),
            targets.flatten(),
            reduction="none",
            ignore_index=self.ignore_index,
        ).view_as(targets)
        valid = targets != self.ignore_index
        losses = flat.sum(1)
        if self.reduction == "mean":
            counted = valid.sum(1)
            if everything is not None:
                all_targets = everything[:, 1:] if shift else everything
                counted = (all_targets != self.ignore_index).sum(1)
            losses = losses / counted.clamp(min=1)
        return Measured(losses, tokens=flat.detach().masked_fill(~valid, torch.nan))

    def _ends(self, batch: Any, targets: torch.Tensor) -> torch.Tensor | None:
        """Where the span of each row starts and stops, `[B, 2]`; None: it is all of them."""
        if self.span is None:
            return None
        length = targets.shape[1] if targets.dim() > 1 else 0
        if not isinstance(self.span, str):
            start, stop, _ = slice(*self.span).indices(length)
            return torch.tensor([[start, stop]]).expand(len(targets), 2)
        given = batch.get(self.span) if isinstance(batch, Mapping) else None
        if given is None or tuple(torch.as_tensor(given).shape) != (len(targets), 2):
            found = None if given is None else tuple(torch.as_tensor(given).shape)
            raise CaptureError(
                f"no spans of rows in the batch's entry {self.span!r}",
                found="no such entry" if found is None else f"shape {found}",
                expected=f"start and stop of each row, [{len(targets)}, 2]",
            )
        ends = torch.as_tensor(given).long()
        return torch.where(ends < 0, ends + length, ends).clamp(0, length)

    def _within(self, targets: torch.Tensor, ends: torch.Tensor, *, shift: bool) -> torch.Tensor:
        """The targets with all that is outside of the spans ignored."""
        places = torch.arange(targets.shape[1], device=targets.device)
        ends = ends.to(targets.device)
        inside = (places >= ends[:, :1]) & (places < ends[:, 1:])
        kept = targets.masked_fill(~inside, self.ignore_index)
        counted = (kept[:, 1:] if shift else kept) != self.ignore_index
        empty = ~counted.any(1)
        if bool(empty.any()):
            row = int(empty.nonzero()[0])
            raise CaptureError(
                "a row has no token in its span whose loss is asked for",
                found=f"row {row} of the batch, tokens {ends[row].tolist()} of {targets.shape[1]}",
                expected="at least one label that is not ignored"
                + (", after the first token, which nothing predicts" if shift else ""),
                fix="choose another span, or leave the row out",
            )
        return kept

    def _check_targets(self, targets: torch.Tensor, tokens: int) -> None:
        if not holds_numbers(targets):
            return
        wrong = (targets != self.ignore_index) & ((targets < 0) | (targets >= tokens))
        if bool(wrong.any()):
            row, place = wrong.nonzero()[0].tolist()
            raise CaptureError(
                f"row {row} of this batch has a label that is no token of the model",
                found=f"label {int(targets[row, place])}",
                expected=f"0 to {tokens - 1}, or {self.ignore_index} for what is ignored",
                fix="use the tokenizer that belongs to the model",
            )

    def targets(self, batch: Any) -> torch.Tensor:
        """The tokens `[B, T]` that are predicted, `ignore_index` where none is."""
        _, targets, shift = self._split(batch)
        return targets[:, 1:] if shift and targets.dim() == 2 else targets

    def _split(self, batch: Any) -> tuple[Any, torch.Tensor, bool]:
        if isinstance(batch, Mapping):
            aside = ("labels", self.span) if isinstance(self.span, str) else ("labels",)
            inputs = {name: value for name, value in batch.items() if name not in aside}
            targets = batch.get("labels", batch.get("input_ids"))
            if targets is None:
                raise CaptureError(
                    "no tokens in the batch",
                    found=described_batch(batch),
                    expected="input_ids, and optionally attention_mask and labels",
                )
            mask = batch.get("attention_mask")
            if "labels" not in batch and mask is not None:
                targets = targets.masked_fill(mask == 0, self.ignore_index)
            return inputs, targets, self.shift
        if isinstance(batch, tuple | list) and len(batch) == 2:
            return batch[0], batch[1], False
        whole = isinstance(batch, torch.Tensor) and not batch.dtype.is_floating_point
        if whole and batch.dim() > 1:
            return batch, batch, self.shift
        raise CaptureError(
            "a batch that is no sequence of tokens",
            found=described_batch(batch),
            expected="a dict with input_ids, (tokens, next tokens), or tokens [B, T]",
        )


def has_decoder(model: nn.Module) -> bool:
    """Whether it reads one sequence and writes another, and says so as Hugging Face models do."""
    return bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))


def _with_decoder_inputs(model: Any, inputs: Any, batch: Any) -> Any:
    """The inputs with what the decoder reads: its labels, one place later, unless they are given."""
    if isinstance(inputs, Mapping) and "decoder_input_ids" in inputs:
        return inputs
    prepare = getattr(model, "prepare_decoder_input_ids_from_labels", None)
    if not isinstance(batch, Mapping) or "labels" not in batch or prepare is None:
        raise CaptureError(
            "an encoder-decoder needs to be told what its decoder writes",
            found=described_batch(batch),
            expected="a dict with input_ids and labels, or with decoder_input_ids, too",
        )
    return {**inputs, "decoder_input_ids": prepare(labels=batch["labels"])}


def completions(
    prompts: torch.Tensor | Sequence[Any],
    generated: Any,
    *,
    with_prompt: bool = True,
    pad: int | None = None,
    eos: int | None = None,
    ignore_index: int = -100,
) -> dict[str, torch.Tensor]:
    """A model's own completions as a batch: tokens of prompts are read, those it wrote are asked about.

    `prompts` are token ids, `[B, P]` or one list per row; `generated` is what `model.generate` gives
    (ids that begin with the prompt, `[B, P + G]`, or an object with such `sequences`), or with
    `with_prompt=False` the new ids alone. `pad` names the token that rows were filled up with: it is
    taken off prompts at both ends and off the end of what was written; if it is `eos` too, one stays.
    Gives `input_ids` and `labels` `[B, T]`, filled up at the end, for `gk.LanguageModeling()`: what
    stands behind a causal model's tokens cannot change them, so there is no mask.

    >>> completions([[5, 6]], torch.tensor([[5, 6, 7, 8]]))["labels"]
    tensor([[-100, -100,    7,    8]])
    """
    flag("with_prompt", with_prompt, error=CaptureError)
    optional(count, "pad", pad, error=CaptureError)
    optional(count, "eos", eos, error=CaptureError)
    ignore_index = count("ignore_index", ignore_index, error=CaptureError, least=-(2**63))
    asked = _rows("prompts", prompts)
    written = _rows("generated", getattr(generated, "sequences", generated))
    if len(asked) != len(written):
        raise CaptureError(
            "every prompt needs what was written after it",
            found=f"{len(asked)} prompts, {len(written)} completions",
            fix="several completions of one prompt: repeat the prompt for each",
        )
    rows = []
    for row, (prompt, ids) in enumerate(zip(asked, written, strict=True)):
        if with_prompt and ids[: len(prompt)] != prompt:
            raise CaptureError(
                f"what was written in row {row} does not begin with its prompt",
                found=str(ids[: min(8, len(prompt))]),
                expected=str(prompt[:8]),
                fix="pass with_prompt=False if these are the new tokens alone",
            )
        new = ids[len(prompt) :] if with_prompt else ids
        new = new[: new.index(eos) + 1] if eos is not None and eos in new else _stripped(new, pad)
        prompt = _stripped(_stripped(prompt, pad)[::-1], pad)[::-1]
        if not new or not prompt:
            raise CaptureError(
                "a prompt without a completion" if prompt else "a completion without a prompt",
                found=f"row {row}: {len(prompt)} and {len(new)} tokens",
                fix="leave the row out; a model that writes from nothing begins with a token, such "
                "as its bos",
            )
        rows.append((prompt, new))
    longest = max(len(prompt) + len(new) for prompt, new in rows)
    tokens = torch.full((len(rows), longest), pad or 0)
    labels = torch.full((len(rows), longest), ignore_index)
    for row, (prompt, new) in enumerate(rows):
        both = torch.tensor([*prompt, *new])
        tokens[row, : len(both)] = both
        labels[row, len(prompt) : len(both)] = both[len(prompt) :]
    return {"input_ids": tokens, "labels": labels}


def _rows(name: str, given: Any) -> list[list[int]]:
    """Ids as a list of rows."""
    rows = given.tolist() if isinstance(given, torch.Tensor) else given
    rows = rows if isinstance(rows, list | tuple) else []
    found = [one.tolist() if isinstance(one, torch.Tensor) else one for one in rows]
    whole = bool(found) and all(isinstance(one, list | tuple) for one in found)
    if not whole or any(type(t) is not int or t < 0 for t in chain.from_iterable(found)):
        shape = tuple(given.shape) if isinstance(given, torch.Tensor) else type(given).__name__
        raise CaptureError(
            f"{name} are no token ids",
            found=str(shape),
            expected="whole numbers [B, T], or a list of them for each row",
        )
    return [list(one) for one in found]


def _stripped(tokens: list[int], pad: int | None) -> list[int]:
    """The tokens without padding at their end."""
    while tokens and tokens[-1] == pad:
        tokens = tokens[:-1]
    return tokens
