"""Batches read as slices are the loader's own, to the byte, and nobody's data is written into."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    Sampler,
    SequentialSampler,
    TensorDataset,
)

from gradkeep.capturing._batches import _is_sliced, iter_batches


def tensors(rows: int, draw: st.DataObject) -> tuple[torch.Tensor, ...]:
    shapes = st.lists(st.integers(0, 4), max_size=3)
    dtypes = st.sampled_from(
        [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool]
    )
    parts = []
    for _ in range(draw.draw(st.integers(1, 3))):
        shape = draw.draw(shapes)
        part = (8 * torch.randn(rows, *shape)).to(draw.draw(dtypes))
        form = draw.draw(st.sampled_from(["plain", "every other", "turned"]))
        if form == "every other":
            part = torch.stack([part, part], 1)[:, 0]
        elif form == "turned" and part.ndim > 1:
            part = part.transpose(0, 1).contiguous().transpose(0, 1)
        parts.append(part)
    return tuple(parts)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 23), st.integers(1, 9), st.booleans(), st.data())
def test_slices_are_what_the_loader_delivers(rows, size, drop_last, data):
    loader = DataLoader(TensorDataset(*tensors(rows, data)), size, drop_last=drop_last)
    assert _is_sliced(loader)
    torch.manual_seed(0)
    expected, state = list(loader), torch.get_rng_state()
    torch.manual_seed(0)
    result = list(iter_batches(loader))
    assert torch.equal(torch.get_rng_state(), state)
    assert len(result) == len(expected)
    for ours, theirs in zip(result, expected, strict=True):
        assert type(ours) is type(theirs)
        assert len(ours) == len(theirs)
        for one, other in zip(ours, theirs, strict=True):
            assert one.dtype == other.dtype
            assert one.stride() == other.stride()
            assert torch.equal(one, other)


def test_a_model_that_writes_into_its_inputs_does_not_reach_the_data():
    data = torch.arange(12.0).reshape(6, 2)
    before = data.clone()
    for (batch,) in iter_batches(DataLoader(TensorDataset(data), 4)):
        batch.zero_()
    assert torch.equal(data, before)


class Own(TensorDataset):
    def __getitem__(self, index):
        return tuple(-part for part in super().__getitem__(index))


class Backwards(Sampler[int]):
    def __init__(self, data: Dataset[object]) -> None:
        self.rows = len(data)

    def __iter__(self):
        return iter(range(self.rows - 1, -1, -1))

    def __len__(self) -> int:
        return self.rows


class Doubled(DataLoader[object]):
    def __iter__(self):
        for (batch,) in super().__iter__():
            yield [2 * batch]


ROWS = torch.arange(12.0).reshape(6, 2)
PLAIN = TensorDataset(ROWS)
OTHERS = {
    "own data set": lambda: DataLoader(Own(ROWS), 4),
    "own order": lambda: DataLoader(PLAIN, 4, sampler=Backwards(PLAIN)),
    "own loader": lambda: Doubled(PLAIN, 4),
    "own collate": lambda: DataLoader(PLAIN, 4, collate_fn=lambda rows: [torch.cat(rows[0])]),
    "sampler of fewer rows": lambda: DataLoader(
        PLAIN, batch_sampler=BatchSampler(SequentialSampler(range(3)), 2, drop_last=False)
    ),
    "gradients": lambda: DataLoader(TensorDataset(ROWS.clone().requires_grad_()), 4),
    "no batches": lambda: DataLoader(PLAIN, None),
}


@pytest.mark.parametrize("name", OTHERS)
def test_anything_else_is_asked_for_its_batches(name):
    loader = OTHERS[name]()
    assert not _is_sliced(loader)
    for ours, theirs in zip(iter_batches(loader), loader, strict=True):
        assert all(map(torch.equal, ours, theirs))
