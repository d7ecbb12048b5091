"""Max pooling during a capture: the values and gradients of torch, equal pixels included."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import gradkeep as gk
from gradkeep.capturing._pooling import fast_pooling


def values_and_gradients(pool, x, weights):
    x = x.clone().requires_grad_()
    values = pool(x)
    return values, torch.autograd.grad(values, x, weights)[0]


@given(
    rows=st.integers(0, 5),
    channels=st.integers(1, 4),
    height=st.integers(1, 4),
    width=st.integers(1, 4),
    levels=st.integers(1, 5),
    infinite=st.booleans(),
)
def test_values_and_gradients_are_those_of_torch(rows, channels, height, width, levels, infinite):
    torch.manual_seed(0)
    x = torch.randint(0, levels, (rows, channels, 2 * height, 2 * width)).float()  # many are equal
    weights, pool = torch.randn(rows, channels, height, width), nn.MaxPool2d(2)
    if infinite:
        x[x == 0] = -torch.inf
    expected = values_and_gradients(pool, x, weights)
    with fast_pooling(pool):
        assert "forward" in vars(pool)
        results = values_and_gradients(pool, x, weights)
    assert "forward" not in vars(pool)
    for result, value in zip(results, expected, strict=True):
        assert torch.equal(result, value)


@pytest.mark.parametrize(
    "pool",
    [
        nn.MaxPool2d(3, 2, 1),
        nn.MaxPool2d(2, 1),
        nn.MaxPool2d((2, 1)),
        nn.MaxPool2d(2, return_indices=True),
        nn.MaxPool2d(2, dilation=2),
        nn.MaxPool1d(2),
    ],
)
def test_other_windows_are_pooled_by_torch(pool):
    with fast_pooling(nn.Sequential(pool)):
        assert "forward" not in vars(pool)


def test_other_inputs_are_pooled_by_torch():
    pool, x = nn.MaxPool2d(2), torch.randn(2, 3, 6, 8)
    others = [
        x.double(),
        x[0],
        x[:, :, :5],
        x[..., :7].contiguous(),
        x.contiguous(memory_format=torch.channels_last),
        x.requires_grad_(False),
    ]
    for other in others:
        expected = pool(other)
        with fast_pooling(pool):
            result = pool(other)
        assert torch.equal(result, expected)
        assert "Halving" not in type(result.grad_fn).__name__


def test_a_replaced_forward_and_errors_leave_no_trace():
    replaced, pool = nn.MaxPool2d(2), nn.MaxPool2d(2)
    replaced.forward = own = lambda x: x

    def fail():
        with fast_pooling(nn.Sequential(replaced, pool)):
            assert replaced.forward is own
            assert "forward" in vars(pool)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert replaced.forward is own
    assert "forward" not in vars(pool)


@pytest.mark.parametrize("memory_budget", [None, 0.8])
def test_captured_gradients_are_those_of_autograd(tmp_path, memory_budget):
    torch.manual_seed(0)
    net = nn.Sequential(
        *(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(4, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
        nn.Linear(16, 3),
    )
    x, y = torch.randn(12, 1, 8, 8), torch.arange(12) % 3
    store = gk.open(tmp_path)
    for split in ("train", "test"):
        gk.capture(
            store,
            net,
            [(x, y)],
            task=gk.Classification(),
            split=split,
            memory_budget=memory_budget,
            progress=False,
        )
    losses = nn.functional.cross_entropy(net(x), y, reduction="none")
    gradients = torch.stack(
        [
            torch.cat(
                [
                    part.flatten()
                    for part in torch.autograd.grad(loss, net.parameters(), retain_graph=True)
                ]
            )
            for loss in losses
        ]
    )
    products = torch.as_tensor(gk.attribute(store, method="dot").values)
    assert torch.allclose(products, gradients @ gradients.T, rtol=1e-4, atol=1e-6)
