"""`memory_budget` without plans: told to, or because the steps keep changing."""

import copy

import pytest
import torch
from raises import raises
from torch import nn
from torch.nn import functional as F

import gradkeep as gk
from gradkeep.errors import BudgetError, RematError

pytestmark = pytest.mark.filterwarnings("ignore:memory budget:gradkeep.errors.BudgetWarning")


class Changing(nn.Module):
    """Another path through the layers each time."""

    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(32, 32) for _ in range(6))
        self.out = nn.Linear(32, 4)

    def forward(self, x, order):
        for at in order:
            x = F.dropout(torch.tanh(self.parts[at](x)), 0.1) + 0.01 * len(order)
        return self.out(x)


def trained(budget, *, steps=30, form="block"):
    torch.manual_seed(0)
    net = Changing()
    optimizer = torch.optim.Adam(net.parameters())
    x, y = torch.randn(64, 32), torch.arange(64) % 4
    choose = torch.Generator().manual_seed(5)

    def step():
        order = torch.randperm(6, generator=choose)[
            : 3 + int(torch.randint(4, (), generator=choose))
        ]
        optimizer.zero_grad()
        F.cross_entropy(net(x, order.tolist()), y).backward()
        optimizer.step()

    if budget is None:
        for _ in range(steps):
            step()
    elif form == "block":
        with budget:
            for _ in range(steps):
                step()
    else:
        for _ in range(steps):
            with budget.step(inputs=(x, y)):
                step()
    return [*net.parameters(), *(p.grad for p in net.parameters() if p.grad is not None)]


def same(one, other):
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("form", ["block", "steps"])
def test_online_from_the_first_step(form):
    expected = trained(None)
    for size in (0.7, "120kB"):
        budget = gk.memory_budget(size, mode="online")
        assert same(expected, trained(budget, form=form))
        report = budget.report()
        assert report.online == 30
        assert report.recorded == report.planned == 0
        assert report.evicting.budget < float("inf")
        assert "online" in str(report)


def test_auto_turns_to_it_when_plans_do_not_last():
    expected = trained(None, steps=80)
    budget = gk.memory_budget(0.7)
    assert same(expected, trained(budget, steps=80))
    report = budget.report()
    assert report.online > 0
    assert any("experimental" in reason for reason in report.reasons)


def test_planned_never_does():
    expected = trained(None, steps=40)
    budget = gk.memory_budget(0.7, mode="planned")
    assert same(expected, trained(budget, steps=40))
    assert budget.report().online == 0


def test_an_exception_leaves_nothing_behind():
    torch.manual_seed(0)
    net = Changing()
    budget = gk.memory_budget("60kB", mode="online")
    x = torch.randn(64, 32)
    seen = []

    def stop():
        with budget:
            seen.append(net(x, [0, 1, 2, 3]))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stop()
    assert torch.isfinite(seen[0]).all()
    twin = copy.deepcopy(net)
    with budget:
        net(x, [0, 1]).sum().backward()
    assert budget.report().online == 1
    twin(x, [0, 1])


def test_pinned_tensors_and_wrong_words():
    net, x = Changing(), torch.randn(64, 32)
    budget = gk.memory_budget("60kB", mode="online")
    with budget:
        hidden = budget.pin(net.parts[0](x))
        net(hidden, [1, 2, 3]).sum().backward()
        assert hidden.untyped_storage().nbytes() > 0
    with pytest.raises(BudgetError, match=r"^mode must be"):
        gk.memory_budget(0.5, mode="sometimes")
    with raises(RematError, "remat.unknown_heuristic", fix="lru"):
        gk.memory_budget(0.5, heuristic="lruu")
