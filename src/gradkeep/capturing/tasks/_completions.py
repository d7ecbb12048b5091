"""What a model wrote itself, as a batch whose loss is that of the written tokens."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, Any

import torch

from gradkeep._arguments import count, flag, optional
from gradkeep.errors import CaptureError

if TYPE_CHECKING:
    from collections.abc import Sequence


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
    Gives `input_ids` and `labels` `[B, T]`, filled up at the end, for `gk.LanguageModelling()`: what
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
        new = _without_prompt(prompt, ids, row) if with_prompt else ids
        rows.append((_stripped(prompt, pad), _ended(new, pad, eos), row))
    for prompt, new, row in rows:
        if not new or not prompt:
            raise CaptureError(
                "a prompt without a completion" if prompt else "a completion without a prompt",
                found=f"row {row}: {len(prompt)} and {len(new)} tokens",
                fix="leave the row out; a model that writes from nothing begins with a token, such "
                "as its bos",
            )
    longest = max(len(prompt) + len(new) for prompt, new, _ in rows)
    tokens = torch.full((len(rows), longest), pad or 0)
    labels = torch.full((len(rows), longest), ignore_index)
    for prompt, new, row in rows:
        both = torch.tensor([*prompt, *new])
        tokens[row, : len(both)] = both
        labels[row, len(prompt) : len(both)] = both[len(prompt) :]
    return {"input_ids": tokens, "labels": labels}


def _rows(name: str, given: Any) -> list[list[int]]:
    """Ids as a list of rows."""
    rows = given.tolist() if isinstance(given, torch.Tensor) else given
    if not isinstance(rows, list | tuple) or not rows:
        raise _refused(name, given)
    found = [one.tolist() if isinstance(one, torch.Tensor) else one for one in rows]
    if not all(isinstance(one, list | tuple) for one in found):
        raise _refused(name, given)
    if any(type(token) is not int or token < 0 for token in chain.from_iterable(found)):
        raise _refused(name, given)
    return [list(one) for one in found]


def _refused(name: str, given: Any) -> CaptureError:
    shape = tuple(given.shape) if isinstance(given, torch.Tensor) else type(given).__name__
    return CaptureError(
        f"{name} are no token ids",
        found=str(shape),
        expected="whole numbers [B, T], or a list of them for each row",
    )


def _without_prompt(prompt: list[int], ids: list[int], row: int) -> list[int]:
    if ids[: len(prompt)] != prompt:
        raise CaptureError(
            f"what was written in row {row} does not begin with its prompt",
            found=str(ids[: min(8, len(prompt))]),
            expected=str(prompt[:8]),
            fix="pass with_prompt=False if these are the new tokens alone",
        )
    return ids[len(prompt) :]


def _stripped(prompt: list[int], pad: int | None) -> list[int]:
    while prompt and prompt[0] == pad:
        prompt = prompt[1:]
    while prompt and prompt[-1] == pad:
        prompt = prompt[:-1]
    return prompt


def _ended(new: list[int], pad: int | None, eos: int | None) -> list[int]:
    """Without what rows were filled up with behind their end."""
    if eos is not None and eos in new:
        return new[: new.index(eos) + 1]
    while new and new[-1] == pad:
        new = new[:-1]
    return new
