"""The names of the DTR prototype do what its scripts expect, on unmodified torch."""

import pytest
import torch
from raises import raises
from torch import nn

from gradkeep.compat import dtr
from gradkeep.errors import BudgetError, RematError
from gradkeep.remat import read_log, simulate


@pytest.fixture(autouse=True)
def nothing_in_force():
    yield
    dtr.set_memory_budget(None)
    dtr.toggle_log(on=False)
    dtr.toggle_sampling(on=False)
    dtr.toggle_ignore_small_tensors(on=False)
    dtr.reset_profile()


def trained(budget):
    torch.manual_seed(0)
    net = nn.Sequential(*[nn.Linear(32, 32) for _ in range(8)])
    x = dtr.checkpoint(torch.randn(64, 32))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    dtr.set_memory_budget(budget)
    for _ in range(3):
        optimizer.zero_grad()
        loss = net(x).square().mean()
        loss.backward()
        optimizer.step()
    loss = dtr.decheckpoint(loss)
    dtr.set_memory_budget(None)
    return [loss.detach(), *(p.detach() for p in net.parameters())]


@pytest.mark.parametrize("toggle", [None, dtr.toggle_sampling, dtr.toggle_ignore_small_tensors])
def test_a_script_trains_to_the_bit_in_fewer_bytes(toggle):
    expected = trained(None)
    assert dtr.base_compute_time() == 0
    if toggle is not None:
        toggle(on=True)
    outcome = trained("110kB")
    assert all(torch.equal(a, b) for a, b in zip(expected, outcome, strict=True))
    assert dtr.remat_compute_time() > 0
    assert dtr.base_compute_time() > 0
    assert dtr.search_time() > 0
    assert dtr.cost_time() > 0
    dtr.reset_profile()
    assert dtr.remat_compute_time() == dtr.search_time() == 0


def test_pinned_tensors_are_no_longer_checkpoints():
    dtr.set_memory_budget(10_000)
    one = torch.ones(8) + 1
    assert dtr.is_checkpoint(one)
    assert dtr.pin(one) is one
    assert not dtr.is_checkpoint(one)
    dtr.set_memory_budget(None)
    assert not dtr.is_checkpoint(one)
    with raises(BudgetError, "budget.not_positive"):
        dtr.set_memory_budget(0)


def test_profiles_can_be_switched_off():
    dtr.toggle_profile(on=False)
    trained("110kB")
    dtr.toggle_profile(on=True)
    assert dtr.base_compute_time() == 0


def test_a_log_begins_at_its_last_start(tmp_path):
    dtr.toggle_log(on=True, path=tmp_path / "step.log")
    torch.ones(4) * 2
    dtr.annotate_log("START")
    (torch.ones(64, requires_grad=True) * 3).sum().backward()
    dtr.annotate_log("something for people")
    dtr.toggle_log(on=False)
    program = read_log(tmp_path / "step.log")
    assert simulate(program).status == "ok"
    assert not any(op.name == "mul" and max(op.sizes) == 16 for op in program.ops)


def test_a_log_in_a_budget_is_that_of_the_step_without_one(tmp_path):
    torch.manual_seed(0)
    net, x = nn.Sequential(*[nn.Linear(32, 32) for _ in range(8)]), torch.randn(64, 32)

    def logged(budget, name):
        net.zero_grad(set_to_none=True)
        dtr.set_memory_budget(budget)
        dtr.toggle_log(True, path=tmp_path / name)
        dtr.annotate_log("START")
        net(x).square().mean().backward()
        if budget is not None:
            assert dtr.remat_compute_time() > 0
            with raises(RematError, "remat.log_active", fix="toggle_log"):
                dtr.set_memory_budget(None)
        dtr.toggle_log(False)
        dtr.set_memory_budget(None)
        ops = read_log(tmp_path / name).ops
        allocations = [(op.name, op.sizes) for op in ops if -1 in op.aliases]
        return sorted(allocations), sum(op.cost for op in ops)

    plain, _ = logged(None, "plain.log")
    within, cost = logged("110kB", "within.log")
    assert within == plain
    assert cost > 0
