"""A budget of the prototype that cannot be kept is said, as the prototype runs out of memory there."""

import warnings

import pytest
import torch
from raises import raises
from torch import nn

from gradkeep.compat import dtr
from gradkeep.errors import BudgetError, BudgetWarning


@pytest.fixture(autouse=True)
def nothing_in_force():
    yield
    dtr.uninstall()
    dtr.reset_profile()


def perceptron():
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(6)))


def step(net, x):
    net.zero_grad()
    net(x).square().mean().backward()


@pytest.fixture
def plain_peak():
    with dtr.install():
        torch.set_memory_budget(10**9)
        net, x = perceptron(), torch.randn(512, 64)
        for _ in range(3):
            step(net, x)
        return torch.cuda.max_memory_allocated()


def test_a_budget_below_the_parameters_raises():
    net, x = perceptron(), torch.randn(512, 64)
    with dtr.install():
        torch.set_memory_budget(1e5)
        with raises(BudgetError, "budget.exhausted"):
            step(net, x)
    assert all(torch.isfinite(p).all() for p in net.parameters())


@pytest.mark.parametrize("share", [0.9, 0.8, 0.7, 0.6])
def test_a_budget_is_kept_or_said(share, plain_peak):
    budget = int(share * plain_peak)
    net, x = perceptron(), torch.randn(512, 64)
    warned = False
    with dtr.install(), warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        torch.set_memory_budget(budget)
        try:
            for _ in range(3):
                step(net, x)
        except BudgetError:
            warned = True
        peak = torch.cuda.max_memory_allocated()
    warned = warned or any(issubclass(one.category, BudgetWarning) for one in seen)
    assert peak <= budget or warned
    # Giving up must not take more than never having had a budget.
    assert peak <= 1.05 * plain_peak


def test_giving_up_warns():
    from gradkeep.compat.dtr._prototype import STATE

    net, x = perceptron(), torch.randn(512, 64)
    with dtr.install():
        torch.set_memory_budget(10**9)
        STATE.online.live.gave_up = True
        with pytest.warns(BudgetWarning, match="eviction stopped"):
            step(net, x)


def test_counting_anew_forgets_dead_tensors():
    with dtr.install():
        torch.set_memory_budget(10**9)
        small = torch.ones(8192)
        for _ in range(3):
            large = torch.ones(4_000_000) * 2
            del large
            torch.cuda.reset_max_memory_allocated()
            assert torch.cuda.max_memory_allocated() == 4 * 8192
            assert torch.cuda.memory_allocated() == 4 * 8192
        assert small.sum() == 8192
