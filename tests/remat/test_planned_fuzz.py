"""Steps that change at random under a plan: never a wrong gradient, never a crash."""

import contextlib
import copy
import functools
import random

import pytest
import torch
from torch import nn
from torch.nn import functional

import gradkeep as gk
from gradkeep.errors import StepChangedError

pytestmark = pytest.mark.filterwarnings("ignore:memory budget:gradkeep.errors.BudgetWarning")

STEPS = 120

memory_budget = functools.partial(gk.memory_budget, effort=0.05)


class Changing(nn.Module):
    """A network whose every part can be changed between steps."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(12, 24)
        self.layers = nn.ModuleList(nn.Linear(24, 24) for _ in range(4))
        self.norms = nn.ModuleList(nn.BatchNorm1d(24) for _ in range(4))
        self.last = nn.Linear(24, 4)
        self.change()

    def change(self, rng=None):
        """Back to the beginning, or with one thing changed."""
        self.order = [0, 1, 2, 3]
        self.skipped = set()
        self.scale, self.shift, self.slope, self.rate = 1.5, 0.25, 0.1, 0.2
        self.fill, self.hidden = 0.5, 0.75
        self.act = torch.tanh
        if rng is None:
            return
        numbers = ["scale", "shift", "slope", "rate", "fill", "hidden"]
        what = rng.choice([*numbers, "act", "skip", "swap"])
        if what in numbers:
            setattr(self, what, rng.choice([0.05, 0.35, 0.6, 0.9]))
        elif what == "act":
            self.act = rng.choice([torch.sigmoid, torch.sin, functional.silu])
        elif what == "skip":
            self.skipped = {rng.randrange(4)}
        else:
            rng.shuffle(self.order)

    def forward(self, x):
        x = self.act(self.first(x)) * self.scale
        for number in self.order:
            if number in self.skipped:
                continue
            h = self.norms[number](self.layers[number](x)) + self.shift
            h = functional.leaky_relu(h, self.slope)
            h = functional.dropout(h, self.rate, self.training)
            with torch.no_grad():
                gate = torch.sigmoid(h * self.hidden)
            mask = gate > 0.55
            x = x + self.act(h.masked_fill(mask, self.fill) * gate)
        return self.last(torch.exp(x * 0.1))


def step(model, number, batch):
    generator = torch.Generator().manual_seed(number)
    x = torch.randn(batch, 12, generator=generator)
    y = torch.randint(4, (batch,), generator=generator)
    loss = functional.cross_entropy(model(x), y)
    loss.backward()
    return loss.detach()


def steps(model, seed):
    """Batch sizes of the steps; before some of them the model is changed."""
    rng = random.Random(seed)
    for number in range(STEPS):
        model.zero_grad()
        torch.manual_seed(number)
        # Long enough without a change that a plan is there when one comes.
        changed = number > 5 and number % 4 == 3
        model.change(rng if changed else None)
        yield number, rng.choice([24, 24, 24, 24, 17]) if changed else 24


def outcome(model, loss):
    """Copies of all that a step leaves behind."""
    gradients = [parameter.grad for parameter in model.parameters()]
    tensors = [loss, *gradients, *model.buffers(), torch.get_rng_state()]
    return [None if value is None else value.clone() for value in tensors]


def check(first, right):
    for a, b in zip(first, right, strict=True):
        assert (a is None) == (b is None)
        assert a is None or torch.equal(a, b)


@pytest.mark.parametrize("form", ["decorator", "steps", "epoch"])
def test_random_changes_between_steps_never_give_a_wrong_gradient(form):
    torch.manual_seed(0)
    plain = Changing()
    ours = copy.deepcopy(plain)
    expected = [outcome(plain, step(plain, *inputs)) for inputs in steps(plain, form)]
    budget = memory_budget(0.77 if form == "epoch" else 0.75, min_size=1)
    decorated = budget(step)
    refused = 0
    with budget if form == "epoch" else contextlib.nullcontext():
        for inputs in steps(ours, form):
            before = torch.get_rng_state()
            buffers = [buffer.clone() for buffer in ours.buffers()]
            try:
                if form == "decorator":
                    loss = decorated(ours, *inputs)
                elif form == "steps":
                    with budget.step():
                        loss = step(ours, *inputs)
                else:
                    loss = step(ours, *inputs)
            except StepChangedError:
                # As if the step had not run; then it is run again.
                refused += 1
                assert all(parameter.grad is None for parameter in ours.parameters())
                assert all(map(torch.equal, buffers, ours.buffers()))
                assert torch.equal(torch.get_rng_state(), before)
                loss = step(ours, *inputs)
            check(outcome(ours, loss), expected[inputs[0]])
    done = budget.report()
    assert done.planned > STEPS // 3, done
    assert done.unplanned > 5, done
    assert done.undone > 0, done
    assert refused == (0 if form == "decorator" else done.undone)
