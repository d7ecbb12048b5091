"""A plan for every batch shape after three recordings, with the optimizer's state; else a warning."""

import copy
import gc
import random
import warnings
import weakref

import pytest
import torch
from raises import raises
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import gradkeep as gk
from gradkeep.errors import BudgetWarning


class Tagger(nn.Module):
    """Its first saved tensor is a weight, of the same shape whatever the batch is."""

    def __init__(self, width=32):
        super().__init__()
        self.first = nn.Linear(8, width)
        self.body = nn.Sequential(
            *(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(4))
        )
        self.out = nn.Linear(width, 3)

    def forward(self, x):
        return self.out(self.body(self.first(x)))


def batch(length, seed):
    return torch.randn(4, length, 8, generator=torch.Generator().manual_seed(seed))


def trained(net, lengths, budget=None):
    optimizer = torch.optim.AdamW(net.parameters())

    def run():
        for number, length in enumerate(lengths):
            optimizer.zero_grad()
            net(batch(length, number)).square().mean().backward()
            optimizer.step()

    if budget is None:
        run()
    else:
        with budget:
            run()
    return list(net.parameters())


def assert_same_bits(ours, theirs):
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


ORDERS = {
    "three in turn": [16, 24, 32] * 6,
    "six in turn": [16, 24, 32, 40, 48, 56] * 6,
    "shuffled": random.Random(0).sample([16, 24, 32, 40, 48] * 8, 40),
    "sorted": [16] * 5 + [24] * 5 + [32] * 5 + [40] * 5,
    "twelve in turn": [16 + 4 * k for k in range(12)] * 4,
}


@pytest.mark.parametrize("order", ORDERS)
def test_every_length_is_recorded_three_times_and_planned(order):
    lengths = ORDERS[order]
    torch.manual_seed(0)
    plain = Tagger()
    ours = copy.deepcopy(plain)
    budget = gk.memory_budget(0.9, effort=0.05)
    assert_same_bits(trained(ours, lengths, budget), trained(plain, lengths))
    report = budget.report()
    kinds = len(set(lengths))
    assert (report.recorded, report.planned) == (3 * kinds, len(lengths) - 3 * kinds)
    assert report.unplanned == report.undone == report.online == 0


def test_lengths_that_never_repeat_warn():
    budget = gk.memory_budget(0.9, effort=0.05, mode="planned")
    with pytest.warns(BudgetWarning, match="all different"):
        trained(Tagger(), range(16, 40), budget)


@pytest.mark.parametrize("mode", ["auto", "planned"])
@pytest.mark.filterwarnings("ignore::gradkeep.errors.BudgetWarning")
def test_lengths_that_never_repeat_are_not_recorded_for_ever(mode):
    torch.manual_seed(0)
    plain = Tagger()
    ours = copy.deepcopy(plain)
    budget = gk.memory_budget(0.9, effort=0.05, mode=mode)
    assert_same_bits(trained(ours, range(16, 66), budget), trained(plain, range(16, 66)))
    report = budget.report()
    assert report.recorded == 17, "recording stops where the warning is given"
    assert report.online == (33 if mode == "auto" else 0)
    assert report.unplanned == (0 if mode == "auto" else 33)


class LiveBytes(TorchDispatchMode):
    """The most bytes of storages alive at once, counted apart from the budget."""

    def __init__(self, known):
        super().__init__()
        self._references = {id(s): weakref.ref(s) for s in known}
        self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves((args, kwargs, out)):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                self._references[id(storage)] = weakref.ref(storage)
        alive = [s for ref in self._references.values() if (s := ref()) is not None]
        self.peak = max(self.peak, sum(s.nbytes() for s in alive))
        return out


@pytest.mark.parametrize("passes", [1, 3, 4])
@pytest.mark.parametrize("form", ["block", "steps"])
def test_recordings_see_accumulation_and_the_state_of_the_optimizer(passes, form):
    torch.manual_seed(0)
    net = Tagger(width=96)
    optimizer = torch.optim.AdamW(net.parameters())
    budget = gk.memory_budget(0.85, effort=0.05)

    def update(around):
        optimizer.zero_grad()
        for number in range(passes):
            with around():
                net(batch(48, number)).square().mean().backward()
        optimizer.step()

    from contextlib import nullcontext

    with warnings.catch_warnings():
        warnings.simplefilter("error", BudgetWarning)
        if form == "block":
            with budget:
                for _ in range(6):
                    update(nullcontext)
        else:
            for _ in range(6):
                update(budget.step)
    gc.collect()
    known = [p.untyped_storage() for p in net.parameters()]
    known += [v.untyped_storage() for s in optimizer.state.values() for v in s.values()]
    counted = LiveBytes(known)
    if form == "block":
        with budget, counted:
            update(nullcontext)
    else:
        with counted:
            for _ in range(1):
                update(budget.step)
    report = budget.report()
    assert report.measured_peak <= report.budget
    within = report.budget if form == "block" else report.budget + optimizer_bytes(optimizer)
    assert counted.peak <= within


def optimizer_bytes(optimizer):
    return sum(p.nbytes for group in optimizer.param_groups for p in group["params"])


def test_classification_of_changing_masks_keeps_its_loss():
    """A step that differs each time inside, at one shape, is left to the online runtime."""
    torch.manual_seed(0)
    plain = Tagger()
    ours = copy.deepcopy(plain)

    def run(net):
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        losses = []
        for number in range(16):
            optimizer.zero_grad()
            x = batch(32, number)
            mask = torch.rand(4, 32, generator=torch.Generator().manual_seed(number)) > 0.4
            loss = F.cross_entropy(net(x)[mask], torch.zeros(int(mask.sum()), dtype=torch.int64))
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        return losses

    expected = run(plain)
    budget = gk.memory_budget(0.9, effort=0.05)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BudgetWarning)
        with budget:
            assert_same_bits(run(ours), expected)


def test_batches_that_are_passed_by_name_are_told_apart_and_count():
    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = Tagger()

        def forward(self, *, x):
            return self.net(x.transpose(0, 1).contiguous())

    net = Named()
    with gk.memory_budget(1.0) as budget:
        for number in range(8):
            net.zero_grad()
            x = batch(16 + 8 * (number % 2), number)
            net(x=x).square().mean().backward()
    assert (budget.report().recorded, budget.report().planned) == (6, 2)
    with gk.memory_budget(1.0) as other:
        for number in range(4):
            net.zero_grad()
            x = None
            net.net(batch(24, number).transpose(0, 1).contiguous()).square().mean().backward()
    assert budget.report().measured_peak == other.report().measured_peak + 4 * 24 * 4 * 8
    assert x is None


def test_a_step_that_is_refused_leaves_no_hooks_behind():
    from torch.nn.modules.module import _global_forward_pre_hooks
    from torch.utils._python_dispatch import _get_current_dispatch_mode

    net, budget, before = (
        Tagger(),
        gk.memory_budget(0.05, effort=0.05),
        len(_global_forward_pre_hooks),
    )

    def step():
        with budget.step():
            net.zero_grad()
            net(batch(16, 0)).square().mean().backward()

    for _ in range(3):
        step()
    with raises(gk.errors.BudgetError, "budget.below_floor"):
        step()
    assert len(_global_forward_pre_hooks) == before
    net(batch(16, 0)).sum().backward()
    assert _get_current_dispatch_mode() is None


def test_steps_of_one_shape_that_never_repeat_warn_at_the_fourth_recording():
    net, budget = Tagger(), gk.memory_budget(0.9)

    def run():
        with budget:
            for number in range(5):
                net.zero_grad()
                net(batch(32, number))[:, number:].square().mean().backward()

    with pytest.warns(BudgetWarning, match="did not repeat"):
        run()
    assert budget.report().recorded <= 5
