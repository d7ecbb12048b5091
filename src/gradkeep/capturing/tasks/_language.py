"""Language modeling: summed token losses of sequences, and completions as batches."""

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
    describe_batch,
    find_logits,
    holds_numbers,
)
from gradkeep.errors import CaptureError

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True)
class LanguageModeling(Task):
    """One sequence per sample, from logits `[B, T, V]`; padding is ignored.

    Batches are dicts with `input_ids` and optionally `attention_mask` and `labels` (as in Hugging Face models: -100
    is ignored, and labels are shifted here), or (tokens, targets) whose targets are the next tokens already. The
    loss is the sum of -log p over the valid tokens of a sequence, or their mean with `reduction="mean"`, which
    divides by that sequence's own number of tokens.

    For encoder-decoders of Hugging Face (T5, BART) `labels` are what the decoder writes: it reads them one place
    later, and they are not shifted here.

    Losses of disjoint spans that cover all tokens add up to that of the sequence, also with `reduction="mean"`,
    which always divides by the number of tokens of the whole sequence. Capture training rows without a span, and
    queries with one.

    Attributes:
        ignore_index: Label of tokens without a loss.
        reduction: `"sum"` or `"mean"` over the tokens of a sequence.
        shift: True predicts the next token; False the token at the same place (masked language models).
        span: `(start, stop)` restricts the loss to some tokens, as a Python slice of the labels `[B, T]` along
            T: negative ends count from the end, None is the end itself. The name of a batch entry with
            `[B, 2]` such ends gives each row its own span.

    Raises:
        CaptureError: An option has a wrong value, or `span` is not `(start, stop)`.

    Example:
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
                f"span must be (start, stop) or the name of a batch entry, not {ends!r}",
                code="capture.bad_span",
            )
        object.__setattr__(self, "span", tuple(ends))

    def trained_as(self) -> str:
        """Return the description of the task without a span, which training rows are captured with."""
        return self.describe() if self.span is None else replace(self, span=None).describe()

    def losses(self, model: nn.Module, batch: Any) -> torch.Tensor:
        """Return the loss `[B]` of each sequence.

        Args:
            model: Causal or masked language model, or encoder-decoder.
            batch: Batch of sequences.
        """
        return self.measure(model, batch).losses

    def measure(self, model: nn.Module, batch: Any) -> Measured:
        """Compute losses of sequences and of their tokens in one forward pass.

        Args:
            model: Causal or masked language model, or encoder-decoder.
            batch: Batch of sequences.

        Returns:
            Losses `[B]` and token losses `[B, T]`.

        Raises:
            CaptureError: Logits, targets or spans have a wrong shape or value.
        """
        inputs, targets, shift = self._split(batch)
        if has_decoder(model):
            inputs, shift = _with_decoder_inputs(model, inputs, batch), False
        ends = self._ends(batch, targets)
        logits = find_logits(call(model, inputs))
        if logits.dim() != 3 or targets.shape != logits.shape[:2]:
            raise CaptureError(
                "language modeling needs logits [B, T, V] and targets [B, T]",
                code="capture.token_logits",
                found=f"logits {tuple(logits.shape)}, targets {tuple(targets.shape)}",
            )
        targets = targets.to(logits.device, torch.int64)
        whole = targets
        if ends is not None:
            targets = self._within(targets, ends, shift=shift)
        if shift:
            # The last token predicts nothing. Targets are padded, since cutting logits would copy them.
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
            counted = whole[:, 1:] if shift else whole
            losses = losses / (counted != self.ignore_index).sum(1).clamp(min=1)
        return Measured(losses, tokens=flat.detach().masked_fill(~valid, torch.nan))

    def _ends(self, batch: Any, targets: torch.Tensor) -> torch.Tensor | None:
        """Return start and stop `[B, 2]` of each row's span; None without a span."""
        if self.span is None:
            return None
        length = targets.shape[1] if targets.dim() > 1 else 0
        if not isinstance(self.span, str):
            start, stop, _ = slice(*self.span).indices(length)
            return torch.tensor([[start, stop]]).expand(len(targets), 2)
        value = batch.get(self.span, ()) if isinstance(batch, Mapping) else ()
        ends = torch.as_tensor(value).long()
        if ends.shape != (len(targets), 2):
            raise CaptureError(
                f"the batch entry {self.span!r} holds no spans",
                code="capture.no_spans",
                expected=f"start and stop of each row, [{len(targets)}, 2]",
            )
        return torch.where(ends < 0, ends + length, ends).clamp(0, length)

    def _within(self, targets: torch.Tensor, ends: torch.Tensor, *, shift: bool) -> torch.Tensor:
        """Return the targets with everything outside of the spans ignored."""
        places = torch.arange(targets.shape[1], device=targets.device)
        ends = ends.to(targets.device)
        inside = (places >= ends[:, :1]) & (places < ends[:, 1:])
        targets_in_span = targets.masked_fill(~inside, self.ignore_index)
        counted = (targets_in_span[:, 1:] if shift else targets_in_span) != self.ignore_index
        empty = ~counted.any(1)
        if bool(empty.any()):
            row = int(empty.nonzero()[0])
            raise CaptureError(
                f"row {row} of the batch has no label in its span",
                code="capture.empty_span",
                found=f"tokens {ends[row].tolist()} of {targets.shape[1]}; nothing predicts the first one",
                fix="Choose another span, or leave the row out.",
            )
        return targets_in_span

    def _check_targets(self, targets: torch.Tensor, tokens: int) -> None:
        if not holds_numbers(targets):
            return
        wrong = (targets != self.ignore_index) & ((targets < 0) | (targets >= tokens))
        if bool(wrong.any()):
            row, place = wrong.nonzero()[0].tolist()
            raise CaptureError(
                f"label {int(targets[row, place])} of row {row} is not a token of the model",
                code="capture.label_not_a_token",
                expected=f"0 to {tokens - 1}, or {self.ignore_index} to ignore it",
                fix="Use the tokenizer of the model.",
            )

    def targets(self, batch: Any) -> torch.Tensor:
        """Return the tokens `[B, T]` that are predicted, `ignore_index` where there is none.

        Args:
            batch: Batch of sequences.
        """
        _, targets, shift = self._split(batch)
        return targets[:, 1:] if shift and targets.dim() == 2 else targets

    def _split(self, batch: Any) -> tuple[Any, torch.Tensor, bool]:
        if isinstance(batch, Mapping):
            excluded = ("labels", self.span) if isinstance(self.span, str) else ("labels",)
            inputs = {name: value for name, value in batch.items() if name not in excluded}
            targets = batch.get("labels", batch.get("input_ids"))
            if targets is None:
                raise CaptureError(
                    f"the batch has no input_ids: {describe_batch(batch)}",
                    code="capture.batch_without_tokens",
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
            f"the batch is not a sequence of tokens: {describe_batch(batch)}",
            code="capture.batch_not_tokens",
            expected="a dict with input_ids, (tokens, next tokens), or tokens [B, T]",
        )


def has_decoder(model: nn.Module) -> bool:
    """Return True for encoder-decoders with a Hugging Face config."""
    return bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))


def _with_decoder_inputs(model: Any, inputs: Any, batch: Any) -> Any:
    """Add the decoder's input: its labels, one place later, unless the batch has it."""
    if isinstance(inputs, Mapping) and "decoder_input_ids" in inputs:
        return inputs
    prepare = getattr(model, "prepare_decoder_input_ids_from_labels", None)
    if not isinstance(batch, Mapping) or "labels" not in batch or prepare is None:
        raise CaptureError(
            f"an encoder-decoder needs labels: {describe_batch(batch)}",
            code="capture.decoder_without_labels",
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
    """Build a batch of a model's own completions, whose losses cover only the tokens that it wrote.

    Batches have no mask, since later tokens do not change a causal model's earlier ones.

    Args:
        prompts: Token ids, `[B, P]` or one list per row.
        generated: Result of `model.generate` (ids that begin with the prompt, `[B, P + G]`, or an object with such
            `sequences`), or with `with_prompt=False` the new ids alone.
        with_prompt: True if `generated` begins with the prompts.
        pad: Padding token, removed from both ends of prompts and from the end of completions; if it equals
            `eos`, one stays.
        eos: Token that ends a completion; later tokens are removed.
        ignore_index: Label of tokens without a loss.

    Returns:
        `input_ids` and `labels` `[B, T]`, padded at the end, for `gk.LanguageModeling()`.

    Raises:
        CaptureError: Prompts and completions do not match, or one is empty.

    Example:
        >>> completions([[5, 6]], torch.tensor([[5, 6, 7, 8]]))["labels"]
        tensor([[-100, -100,    7,    8]])
    """
    flag("with_prompt", with_prompt, error=CaptureError)
    optional(count, "pad", pad, error=CaptureError)
    optional(count, "eos", eos, error=CaptureError)
    ignore_index = count("ignore_index", ignore_index, error=CaptureError, least=-(2**63))
    prompt_rows = _rows("prompts", prompts)
    written = _rows("generated", getattr(generated, "sequences", generated))
    if len(prompt_rows) != len(written):
        raise CaptureError(
            f"{len(prompt_rows)} prompts, but {len(written)} completions",
            code="capture.completion_count",
            fix="Repeat a prompt for each of its completions.",
        )
    rows = []
    for row, (prompt, ids) in enumerate(zip(prompt_rows, written, strict=True)):
        if with_prompt and ids[: len(prompt)] != prompt:
            raise CaptureError(
                f"row {row} of generated does not begin with its prompt",
                code="capture.completion_prompt",
                found=ids[: min(8, len(prompt))],
                expected=prompt[:8],
                fix="Pass with_prompt=False if these are the new tokens alone.",
            )
        new = ids[len(prompt) :] if with_prompt else ids
        new = new[: new.index(eos) + 1] if eos is not None and eos in new else _stripped(new, pad)
        prompt = _stripped(_stripped(prompt, pad)[::-1], pad)[::-1]
        if not new or not prompt:
            raise CaptureError(
                "a completion is empty" if prompt else "a prompt is empty",
                code="capture.empty_completion" if prompt else "capture.empty_prompt",
                found=f"row {row}: a prompt of {len(prompt)} and a completion of {len(new)} tokens",
                fix="Leave the row out. A model that writes without a prompt begins "
                "with a token, such as bos.",
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


def _rows(name: str, ids: Any) -> list[list[int]]:
    """Convert ids to a list of rows."""
    rows = ids.tolist() if isinstance(ids, torch.Tensor) else ids
    rows = rows if isinstance(rows, list | tuple) else []
    lists = [one.tolist() if isinstance(one, torch.Tensor) else one for one in rows]
    whole = bool(lists) and all(isinstance(one, list | tuple) for one in lists)
    if not whole or any(type(t) is not int or t < 0 for t in chain.from_iterable(lists)):
        raise CaptureError(
            f"{name} must be token ids, [B, T] or a list for each row", code="capture.not_token_ids"
        )
    return [list(one) for one in lists]


def _stripped(tokens: list[int], pad: int | None) -> list[int]:
    """Return the tokens without padding at their end."""
    while tokens and tokens[-1] == pad:
        tokens = tokens[:-1]
    return tokens
