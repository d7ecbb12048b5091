"""Running operators again, outside of autograd, and leaving no trace of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gradkeep.remat._planned._programs import Instruction


def replay(
    instructions: Sequence[Instruction],
    values: list[Tensor | None],
    random_states: dict[tuple[int, str], Tensor],
) -> None:
    """Run instructions on `values`, which they read, fill and free."""
    before = torch.is_grad_enabled()
    grad_mode = before
    with torch._C._AutoDispatchBelowAutograd(), torch._C._DisableAutocast():
        try:
            for (
                run, args, tensors, lists, kwargs, named, alone, makes, renames, frees, mode, slot, device,
            ) in instructions:  # fmt: skip
                if mode is not grad_mode:
                    # Some kernels return a workspace only if gradients are wanted.
                    torch._C._set_grad_enabled(mode)
                    grad_mode = mode
                given: Any = list(args)
                for position, value, view in tensors:
                    base: Any = values[value]
                    given[position] = base if view is None else view.of(base)
                for position, items in lists:
                    several: Any = list(given[position])
                    for at, value, view in items:
                        base = values[value]
                        several[at] = base if view is None else view.of(base)
                    given[position] = several
                if named:
                    kwargs = dict(kwargs)
                    for name, (_, value, view) in named:
                        base = values[value]
                        kwargs[name] = base if view is None else view.of(base)
                if slot < 0:
                    out: Any = run(*given, **kwargs)
                else:
                    out = _as_then(run, given, kwargs, device, random_states[slot, device])
                if alone >= 0:
                    values[alone] = out
                elif makes:
                    results: Any = out if isinstance(out, tuple | list) else (out,)
                    shown: Any = [item for item in results if isinstance(item, Tensor)]
                    for position, value in makes:
                        values[value] = shown[position]
                    results = shown = None
                for old, new in renames:
                    values[new], values[old] = values[old], None
                # Nothing may be held by a name here while the next operator asks for memory.
                given = several = base = out = None
                for value in frees:
                    values[value] = None
        finally:
            torch._C._set_grad_enabled(before)


def generator(device: str) -> torch.Generator:
    """The generator that random operators on a device draw from."""
    if device == "cuda":
        return torch.cuda.default_generators[torch.cuda.current_device()]
    return torch.default_generator


def _as_then(run: Any, args: Any, kwargs: Any, device: str, state: Tensor) -> Any:
    """Run with an earlier random state; the present one is put back."""
    source = generator(device)
    now = source.get_state()
    source.set_state(state)
    try:
        return run(*args, **kwargs)
    finally:
        source.set_state(now)
