"""Temporaries of every way stay inside the bytes they were given."""

import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gradkeep.factors._convolution import Convolution, ConvolutionRows
from gradkeep.factors._form import Parameter, dot, dot_directions
from gradkeep.factors._lookup import Lookup, LookupRows
from gradkeep.factors._outer import Outer, OuterRows
from gradkeep.factors._tied import Tied, TiedRows


class Watch(TorchDispatchMode):
    """Counts the bytes of tensors that operators made and that are still alive."""

    def __init__(self):
        super().__init__()
        self.live = self.peak = 0
        self.known = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        for tensor in tree_leaves((args, kwargs)):
            if isinstance(tensor, torch.Tensor):
                self._know(tensor.untyped_storage(), ours=False)
        results = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(results):
            if isinstance(tensor, torch.Tensor):
                self._know(tensor.untyped_storage(), ours=True)
        return results

    def _know(self, storage, *, ours):
        key, size = storage._cdata, storage.nbytes()
        if key in self.known:
            return
        self.known.add(key)
        size = size if ours else 0
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._forget, key, size)

    def _forget(self, key, size):
        self.known.discard(key)
        self.live -= size


def outer_rows(count, length, d_in, d_out):
    lengths = torch.randint(0, 2 * length, (count,))
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    total = int(offsets[-1])
    return OuterRows(torch.randn(total, d_in), torch.randn(total, d_out), offsets)


def lookup_rows(count, length, rows, width):
    ids = torch.randint(rows, (count * length,)) * (torch.rand(count * length) < 0.7)
    offsets = torch.arange(count + 1) * length
    return LookupRows(ids, torch.randn(count * length, width), offsets)


OUTER = Outer((Parameter("w", (64, 48)), Parameter("b", (64,))), "x", "g", 48, 64, bias=True)
CONV = Convolution(
    (Parameter("w", (32, 8, 3, 3)),), "x", "g", 16, 32, (8, 8), (4, 4), (3, 3), (2, 2), (1, 1),
    (1, 1), 2
)  # fmt: skip
LOOKUP = Lookup((Parameter("w", (200, 24)),), "i", "g", 200, 24)
HEAD = Outer((Parameter("w", (200, 24)),), "x", "h", 24, 200)
CASES = {
    "outer": (OUTER, lambda count: outer_rows(count, 6, 48, 64)),
    "conv": (CONV, lambda n: ConvolutionRows(torch.randn(n, 16, 8, 8), torch.randn(n, 32, 4, 4))),
    "lookup": (LOOKUP, lambda count: lookup_rows(count, 12, 200, 24)),
    "tied": (
        Tied(LOOKUP.parameters, LOOKUP, HEAD),
        lambda count: TiedRows(lookup_rows(count, 12, 200, 24), outer_rows(count, 6, 24, 200)),
    ),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("scratch", [1 << 19, 1 << 20])
def test_temporaries_stay_inside_the_scratch(name, scratch):
    torch.manual_seed(0)
    form, rows = CASES[name]
    queries, train = rows(40), rows(220)
    for compute in form.computes:
        with Watch() as watch:
            result = dot(form, queries, train, compute=compute, scratch=scratch)
        # Beside tiles: the result, once more where parts of it are added, and for tokens a few
        # integers each.
        beside = 2 * result.nbytes + (0 if name in ("outer", "conv") else 64 * 12 * 260)
        assert watch.peak <= 1.1 * scratch + beside, (compute, watch.peak, scratch, beside)


@pytest.mark.parametrize("scratch", [8 << 20, 16 << 20])
def test_large_tiles_of_images_stay_inside_it_too(scratch):
    torch.manual_seed(0)
    rows = CASES["conv"][1](4000)  # 37 MB of gradients
    directions = torch.randn(3, CONV.restored_size)
    with Watch() as watch:
        result = dot_directions(CONV, rows, directions, scratch=scratch, compute="restored")
    assert watch.peak <= 1.1 * scratch + 2 * result.nbytes
    parts = [CONV.restore(rows.take(at, at + 100)) for at in range(0, 4000, 100)]
    assert torch.allclose(result, directions @ torch.cat(parts).T, rtol=1e-4, atol=1e-4)
