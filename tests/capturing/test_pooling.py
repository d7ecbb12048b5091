"""Max pooling while a model is replayed: what torch gives, to the last pixel of those that are equal."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from gradkeep.capturing._tracer import fast_pooling


def both(pool, x, weights):
    x = x.clone(memory_format=torch.preserve_format).requires_grad_()
    found = pool(x)
    return found, torch.autograd.grad(found, x, weights)[0]


@given(
    rows=st.integers(0, 5),
    channels=st.integers(1, 4),
    high=st.integers(1, 4),
    wide=st.integers(1, 4),
    levels=st.integers(1, 5),
)
def test_values_and_gradients_are_those_of_torch(rows, channels, high, wide, levels):
    torch.manual_seed(0)
    x = torch.randint(0, levels, (rows, channels, 2 * high, 2 * wide)).float()  # many are equal
    weights, pool = torch.randn(rows, channels, high, wide), nn.MaxPool2d(2)
    truth = both(pool, x, weights)
    with fast_pooling(pool):
        assert "forward" in vars(pool)
        found = both(pool, x, weights)
    assert "forward" not in vars(pool)
    for one, other in zip(found, truth, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    "pool",
    [
        nn.MaxPool2d(3, 2, 1),
        nn.MaxPool2d(2, 1),
        nn.MaxPool2d((2, 1)),
        nn.MaxPool2d(2, return_indices=True),
        nn.MaxPool1d(2),
    ],
)
def test_other_pools_stay_as_they_are(pool):
    with fast_pooling(nn.Sequential(pool)):
        assert "forward" not in vars(pool)


def test_what_is_no_plain_batch_of_images_goes_to_torch():
    pool, x = nn.MaxPool2d(2), torch.randn(2, 3, 6, 8)
    for given_ in (
        x.double(),
        x[0],
        x[:, :, :5],
        x[..., :7].contiguous(),
        x.contiguous(memory_format=torch.channels_last),
    ):
        given_ = given_.requires_grad_()
        truth = pool(given_)
        with fast_pooling(pool):
            found = pool(given_)
        assert torch.equal(found, truth)
        assert "MaxPool2D" in type(found.grad_fn).__name__ or given_.dim() == 3


def test_a_forward_of_ones_own_stays_and_errors_leave_nothing_behind():
    own, pool = nn.MaxPool2d(2), nn.MaxPool2d(2)
    own.forward = kept = lambda x: x
    net = nn.Sequential(own, pool)

    def fail():
        with fast_pooling(net):
            assert own.forward is kept
            assert "forward" in vars(pool)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert own.forward is kept
    assert "forward" not in vars(pool)
