"""Many small models trained at once: their weights stacked, each step one batched operation."""

from __future__ import annotations

import copy
import time
from typing import TYPE_CHECKING, Any

from gradkeep.datamodels._training import TOLERANCE

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from gradkeep.datamodels._training import Training

MANY = 64
"""How many models are trained together: more gain little, and leave the cache."""
_LEAST_GAIN = 1.2


def train_many(
    training: Training,
    inputs: torch.Tensor,
    labels: torch.Tensor,
    subsets: torch.Tensor,
    seeds: Sequence[int],
) -> tuple[dict[str, torch.Tensor], Callable[[torch.Tensor], torch.Tensor]]:
    """Train K models on rows `subsets [K, S]` of the data, each as `Training` would do it alone.

    Returns the stacked weights, and a function from inputs `[N, ...]` to logits `[K, N, C]`.
    """
    import torch
    from torch.func import functional_call, stack_module_state

    models = [training.begin(seed) for seed in seeds]
    stacked, buffers = stack_module_state(models)
    skeleton = copy.deepcopy(models[0]).to("meta")
    skeleton.train()

    def forward(weights: dict[str, torch.Tensor], rest: dict[str, torch.Tensor], x: Any) -> Any:
        return functional_call(skeleton, (weights, rest), (x,))

    each = torch.vmap(forward, randomness="different")
    optimizer = training.make_optimizer(list(stacked.values()))
    size = subsets.shape[1]
    for places in zip(*(training.batches(size, seed) for seed in seeds), strict=True):
        rows = subsets.gather(1, torch.stack(places))
        flat = rows.flatten()
        optimizer.zero_grad(set_to_none=True)
        # Whole rows at a time, which indexing with a matrix would not do.
        batch = inputs.index_select(0, flat).reshape(*rows.shape, *inputs.shape[1:])
        logits = each(stacked, buffers, batch)
        # The sum over models of each one's mean: no model's gradient sees another's loss.
        loss = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), labels.index_select(0, flat), reduction="sum"
        )
        torch.autograd.backward(loss / rows.shape[1])
        optimizer.step()
    weights = {name: value.detach() for name, value in stacked.items()}

    def ask(x: torch.Tensor) -> torch.Tensor:
        skeleton.eval()
        with torch.no_grad():
            shared = torch.vmap(forward, in_dims=(0, 0, None))
            answer: torch.Tensor = shared(weights, buffers, x)
            return answer

    return weights, ask


def stacks_well(training: Training, inputs: torch.Tensor, labels: torch.Tensor, size: int) -> bool:
    """Whether stacked training of subsets of `size` gives the same logits, and is faster.

    Tried on a few batches: models with random layers, running statistics or shapes that cannot be
    stacked are trained one by one, and so are large ones, for which it does not pay.
    """
    import dataclasses

    import torch

    model = training.begin(0)
    if next(model.buffers(), None) is not None or _is_random(model):
        return False
    brief = dataclasses.replace(training, epochs=1)
    few = min(size, 16 * training.batch_size)
    seeds = list(range(16))
    generator = torch.Generator().manual_seed(0)
    subsets = torch.stack([torch.randperm(len(labels), generator=generator)[:few] for _ in seeds])
    try:
        train_many(brief, inputs, labels, subsets[:, :1], seeds)  # what is paid once
        together, (_, ask) = _timed(lambda: train_many(brief, inputs, labels, subsets, seeds))
    except (RuntimeError, ValueError, NotImplementedError, AttributeError):
        return False
    alone, models = _timed(
        lambda: [
            brief.train_one(inputs[rows], labels[rows], seed)
            for rows, seed in zip(subsets, seeds, strict=True)
        ]
    )
    asked = inputs[:few]
    with torch.no_grad():
        wanted = torch.stack([model.eval()(asked) for model in models])
    found = ask(asked)
    same = (found - wanted).abs().max() <= TOLERANCE * wanted.abs().max()
    return bool(same) and alone > _LEAST_GAIN * together


def _is_random(model: torch.nn.Module) -> bool:
    import torch

    return any(isinstance(part, torch.nn.modules.dropout._DropoutNd) for part in model.modules())


def _timed(function: Callable[[], Any]) -> tuple[float, Any]:
    began = time.perf_counter()
    result = function()
    return time.perf_counter() - began, result
