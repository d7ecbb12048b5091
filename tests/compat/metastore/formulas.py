"""MetaStore's formulas written down plainly: mean losses, weights alone, one query after the other.

Every function gives what its program puts into `total_meta_gradient`: `[N]`.
"""

from itertools import product

import torch
from torch.nn import functional as F


def factors(network, layer, call, batch):
    """The input of a layer and the gradient of the batch's mean loss at its output."""
    seen = {}
    module = network.get_submodule(layer)

    def look(_, inputs, answer):
        seen["x"] = inputs[0].detach()
        answer.register_hook(lambda grad: seen.update(g=grad.detach()))

    hook = module.register_forward_hook(look)
    logits, labels = call(network, batch)
    network.zero_grad()
    F.cross_entropy(logits, labels).backward()
    hook.remove()
    return seen["x"], seen["g"], module.weight.grad.clone()


def ted(train, queries):
    """Products of inputs times products of output gradients, summed over positions and queries."""
    total = 0
    for x, g, _ in queries:
        total = total + (_conv_ted if x.dim() == 4 else _linear_ted)(train, (x, g))
    return total


def half(train, direction):
    """A gradient of the weight, moved through the input, times the output gradient."""
    x, g = train
    if x.dim() == 4:
        total = 0
        for (m, n), part in _taps(x, g):
            moved = torch.tensordot(part, direction[:, :, m, n], dims=([1], [1]))
            total = total + (moved.permute(0, 3, 1, 2) * g).sum((1, 2, 3))
        return total
    moved = torch.tensordot(x, direction, dims=([x.dim() - 1], [1]))
    return (moved * g).flatten(1).sum(1)


def recon(train, direction):
    """The gradients of the weight, made again, times a gradient of the weight."""
    return naive(restored(train), direction)


def naive(gradients, direction):
    return (gradients * direction).flatten(1).sum(1)


def restored(train):
    x, g = train
    if x.dim() == 2:
        return torch.einsum("bq,bp->bqp", g, x)
    if x.dim() == 3:
        return torch.einsum("blq,blp->bqp", g, x)
    taps = [torch.einsum("bxmn,bymn->byx", part, g) for _, part in _taps(x, g)]
    return torch.stack(taps, -1).unflatten(-1, (3, 3))


def _taps(x, g):
    """A 3 x 3 kernel with padding 1 and stride 1: the inputs that each of its weights sees."""
    high, wide = g.shape[-2:]
    padded = F.pad(x, (1, 1, 1, 1))
    for m, n in product(range(3), range(3)):
        yield (m, n), padded[:, :, m : m + high, n : n + wide]


def _linear_ted(train, query):
    (x, g), (a, b) = train, query
    if x.dim() == 2:
        x, g, a, b = (part.unsqueeze(1) for part in (x, g, a, b))
    inputs = torch.tensordot(x, a, dims=([2], [2]))
    outputs = torch.tensordot(g, b, dims=([2], [2]))
    return (inputs * outputs).sum((1, 2, 3))


def _conv_ted(train, query):
    (x, g), (a, b) = train, query
    total = 0
    for (_, near), (_, far) in zip(_taps(x, g), _taps(a, b), strict=True):
        inputs = torch.tensordot(near, far[0], dims=([1], [0]))
        outputs = torch.tensordot(g, b[0], dims=([1], [0]))
        total = total + (inputs * outputs).flatten(1).sum(1)
    return total
