"""MetaStore's formulas and its way to collect, load and query factors, implemented plainly.

One query at a time; convolutions have 3 x 3 taps, stride 1 and padding 1; biases are ignored.
"""

from __future__ import annotations

from functools import partial
from itertools import product
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Factors = tuple[Tensor, Tensor]
"""A layer's inputs and the gradients at its outputs, `[N, T, d]` or `[N, C, H, W]`."""


def ted(train: Factors, queries: Factors) -> Tensor:
    """Return products `[Q, N]` from products of inputs times products of output gradients."""
    one = _conv_ted if train[0].dim() == 4 else _linear_ted
    return torch.stack([one(train, (x, g)) for x, g in zip(*queries, strict=True)])


def half(train: Factors, queries: Factors) -> Tensor:
    """Return products `[Q, N]` by applying each query's gradient to the factors."""
    products = []
    for weight in restore_gradients(queries):
        if train[0].dim() == 4:
            inputs, grads = F.pad(train[0], (1, 1, 1, 1)), train[1]
            height, width = grads.shape[2:]
            total = grads.new_zeros(len(grads))
            for a, b in product(range(3), range(3)):
                shifted = inputs[:, :, a : a + height, b : b + width]
                moved = torch.einsum("nchw,dc->ndhw", shifted, weight[:, :, a, b])
                total += (moved * grads).sum((1, 2, 3))
            products.append(total)
        else:
            products.append(((train[0] @ weight.t()) * train[1]).sum((1, 2)))
    return torch.stack(products)


def recon(train: Factors, queries: Factors) -> Tensor:
    """Return products `[Q, N]` of gradients that are restored for every query."""
    return torch.stack(
        [
            (restore_gradients(train) * weight).flatten(1).sum(1)
            for weight in restore_gradients(queries)
        ]
    )


def naive(train: Tensor, queries: Tensor) -> Tensor:
    """Return products `[Q, N]` of gradients that are stored whole."""
    return torch.stack([(train * weight).flatten(1).sum(1) for weight in queries])


def restore_gradients(factors: Factors) -> Tensor:
    """Return the gradients of the weight, one per sample."""
    inputs, grads = factors
    if inputs.dim() == 3:
        return grads.transpose(1, 2) @ inputs
    height, width = grads.shape[2:]
    inputs = F.pad(inputs, (1, 1, 1, 1))
    taps = [
        torch.einsum("ndhw,nchw->ndc", grads, inputs[:, :, a : a + height, b : b + width])
        for a, b in product(range(3), range(3))
    ]
    return torch.stack(taps, 3).unflatten(3, (3, 3))


def bias_products(train: Factors, queries: Factors) -> Tensor:
    """Return the contribution `[Q, N]` of the bias, which MetaStore omits."""
    dims = (2, 3) if train[1].dim() == 4 else (1,)
    return queries[1].sum(dims) @ train[1].sum(dims).t()


def collect_factors(net: nn.Module, layers: list[str], batches: list, loss, folder: Path) -> None:
    """Run one forward and backward pass; write the two factors of each layer to separate files."""
    for number, batch in enumerate(batches):
        seen: dict[str, list[Tensor]] = {name: [] for name in layers}
        hooks = [
            net.get_submodule(name).register_forward_hook(partial(_record_factors, both))
            for name, both in seen.items()
        ]
        net.zero_grad()
        loss(net, batch).backward()
        for hook in hooks:
            hook.remove()
        for name, (inputs, grads) in seen.items():
            torch.save(inputs, folder / f"{name}_batch_{number}_dy_dw.pt")
            torch.save(grads, folder / f"{name}_batch_{number}_dl_dy.pt")


def load_factors(folder: Path, layer: str) -> Factors:
    """Return the factors of all samples of a layer, with one position if they have none."""
    numbers = range(len(list(folder.glob(f"{layer}_batch_*_dy_dw.pt"))))
    parts = []
    for kind in ("dy_dw", "dl_dy"):
        files = [folder / f"{layer}_batch_{number}_{kind}.pt" for number in numbers]
        whole = torch.cat([torch.load(file) for file in files])
        parts.append(whole.unsqueeze(1) if whole.dim() == 2 else whole)
    return parts[0], parts[1]


def _record_factors(
    both: list[Tensor], module: nn.Module, inputs: tuple[Tensor, ...], answer: Tensor
) -> None:
    both.append(inputs[0].detach())
    answer.register_hook(lambda grad: both.append(grad.detach()))


def _linear_ted(train: Factors, query: Factors) -> Tensor:
    inputs = torch.tensordot(train[0], query[0], dims=([2], [1]))
    grads = torch.tensordot(train[1], query[1], dims=([2], [1]))
    return (inputs * grads).sum((1, 2))


def _conv_ted(train: Factors, query: Factors) -> Tensor:
    height, width = train[1].shape[2:]
    ours, theirs = F.pad(train[0], (1, 1, 1, 1)), F.pad(query[0], (1, 1, 1, 1))
    total = train[0].new_zeros(len(ours))
    for a, b in product(range(3), range(3)):
        near = ours[:, :, a : a + height, b : b + width]
        far = theirs[:, a : a + height, b : b + width]
        pixels = torch.tensordot(near, far, dims=([1], [0]))
        grads = torch.tensordot(train[1], query[1], dims=([1], [0]))
        total += (pixels * grads).sum((1, 2, 3, 4))
    return total
